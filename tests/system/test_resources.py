"""Too little disk space, rights, slots, or memory; too many clients or jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import kinetic
from kinetic import aio, errors
from kinetic.job_status import JobStatus
from tests.conftest import end_processes, processes_of
from tests.engine.privileges import without_privileges
from tests.scripts import ROOT, Script

from .conftest import DEADLINE_S, Scene, ended, report_on, soon
from .disks import Disk, left_in, small_disk

VICTIM = Path(__file__).with_name("victim.py")
NOBODY = 65534
MANY_S = 200.0
"""Seconds to wait for a thousand jobs before calling them hung."""


@pytest.fixture(autouse=True)
def project(empty_project: Path) -> Path:
    return empty_project


# --- the disk is full ---------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Mount a disk of two megabytes, and leave the project, so that builtins need no packing."""
    monkeypatch.chdir("/")
    path = Path(tempfile.mkdtemp(prefix="kn-", dir="/tmp"))
    try:
        with small_disk(path, "2m"):
            yield Disk(path)
            assert end_processes(path) == []
    finally:
        path.rmdir()


@pytest.fixture
def this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack this folder without the rest of the tree, which a small disk can't hold."""
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(Path(__file__).parent))


def contents(path: Path) -> str:
    """Return the text of *path*, or an empty string before it exists."""
    return path.read_text() if path.exists() else ""


async def test_arguments_that_do_not_fit_into_the_store(disk: Disk) -> None:
    store = disk.path / "store"
    async with aio.Client(backend="local", store=str(store)) as client:
        with pytest.raises(errors.BackendError, match=r"No space left.*KINETIC_STORE") as caught:
            await client.submit(len, os.urandom(3_000_000))
        assert str(store) in str(caught.value)
        assert left_in(store) == []
        assert await client.list_jobs() == []
        assert await client.run(len, b"fits") == 4
        assert left_in(store) == []


@pytest.fixture
def store_elsewhere(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the home on the small disk, and the store on another one."""
    monkeypatch.setenv("KINETIC_HOME", str(disk.path))
    monkeypatch.setenv("KINETIC_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


async def test_a_home_without_space_is_named(disk: Disk, store_elsewhere: Path) -> None:
    disk.fill()
    async with aio.Client(backend="local") as client:
        with pytest.raises(errors.KineticError, match=r"(?i)no space") as caught:
            await client.submit(abs, -1)
        assert str(disk.path) in str(caught.value) and "KINETIC_HOME" in str(caught.value)
        assert left_in(store_elsewhere) == []
        disk.free()
        assert await client.run(abs, -1) == 1


async def test_a_supervisor_without_space_goes_on(disk: Disk, store_elsewhere: Path) -> None:
    async with aio.Client(backend="local") as client:
        assert await client.run(abs, -1) == 1
        disk.fill()
        for number in range(10):  # the store is on another disk, so a job may still run
            report = await report_on(await client.submit(abs, -number))
            if report.end != number:
                assert "No space left" in report.reason and str(disk.path) in report.reason
        disk.free()
        assert await client.run(abs, -3) == 3


@pytest.mark.usefixtures("store_elsewhere")
async def test_a_project_that_does_not_fit_into_the_home(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".kineticignore").write_text("store")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zeros").write_bytes(bytes(4_000_000))  # small when packed, too large unpacked
    async with aio.Client(backend="local") as client:
        job = await client.submit(abs, -1)
        with pytest.raises(
            errors.JobFailed, match=f"{disk.path}/cache is full: free some space"
        ) as caught:
            await job
        assert caught.value.code == errors.StoreFull.code
        (tmp_path / "zeros").unlink()
        assert await client.run(abs, -1) == 1


@pytest.mark.usefixtures("store_elsewhere")
async def test_arguments_that_do_not_fit_into_the_home_name_the_full_folder(disk: Disk) -> None:
    async with aio.Client(backend="local") as client:
        with pytest.raises(errors.PackError, match=r"No space left.*KINETIC_HOME") as caught:
            await client.submit(len, os.urandom(8_000_000))
        assert f"{disk.path}/cache/scratch" in str(caught.value)
        assert caught.value.code == errors.StoreFull.code


@pytest.mark.usefixtures("store_elsewhere")
async def test_a_result_that_does_not_fit_into_the_home_names_the_full_disk(disk: Disk) -> None:
    async with aio.Client(backend="local") as client:
        with pytest.raises(errors.JobFailed, match=f"{disk.path}/cache is full: free") as caught:
            await client.run(os.urandom, 3_000_000)
    assert "cannot be written" in str(caught.value) and "pickled" not in str(caught.value)
    assert "The result was" not in str(caught.value)
    assert caught.value.code == errors.StoreFull.code


async def test_a_result_that_does_not_fit_into_the_store(disk: Disk) -> None:
    async with aio.Client(backend="local", store=str(disk.path / "store")) as client:
        job = await client.submit(os.urandom, 3_000_000)
        with pytest.raises(errors.JobFailed, match=r"can't be stored.*No space left") as caught:
            await job
        assert "free some space" in str(caught.value)
        assert caught.value.code == errors.StoreFull.code
        assert await job.status() is JobStatus.FAILED
        assert not [*(disk.path / "store" / ".tmp").glob("[0-9]*")]


@pytest.fixture
def ending(disk: Disk, scene: Scene) -> Callable[[aio.Client], Awaitable[aio.JobHandle]]:
    """Return a function that submits a job, fills the disk, and lets the job end.

    It returns the job after the first failed attempt to write the outcome.
    """
    marks = scene.marks

    def wait_for_go() -> str:
        (marks / "started").write_text(str(os.getpid()))
        while not (marks / "go").exists():
            time.sleep(0.005)
        return "written at last"

    async def submit(client: aio.Client) -> aio.JobHandle:
        job = await client.submit(wait_for_go)
        await soon(lambda: contents(marks / "started"))
        disk.fill()
        (marks / "go").touch()
        async with asyncio.timeout(DEADLINE_S):
            async for line in job.logs(follow=True):
                if "can't be written" in line:
                    assert "No space left" in line and str(disk.path) in line
                    return job
        raise AssertionError("the job didn't log that it can't write its outcome")

    return submit


@pytest.mark.usefixtures("this_folder")
async def test_an_outcome_on_a_full_disk_is_written_once_there_is_space(
    disk: Disk, ending: Callable[[aio.Client], Awaitable[aio.JobHandle]]
) -> None:
    async with aio.Client(backend="local", store=str(disk.path / "store")) as client:
        job = await ending(client)
        disk.free()
        async with asyncio.timeout(DEADLINE_S):
            assert await job == "written at last"


@pytest.mark.full
@pytest.mark.usefixtures("this_folder")
async def test_a_job_that_cannot_write_its_outcome_is_lost_with_the_store_and_the_reason(
    disk: Disk,
    scene: Scene,
    ending: Callable[[aio.Client], Awaitable[aio.JobHandle]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = disk.path / "store"
    async with aio.Client(backend="local", store=str(store)) as client:
        job = await ending(client)
        async with asyncio.timeout(DEADLINE_S):
            waiting = asyncio.ensure_future(job.result())
            os.kill(int((scene.marks / "started").read_text()), signal.SIGTERM)  # stop retrying
            await soon(lambda: f"the store {store} failed" in caplog.text)
            assert "No space left" in caplog.text
            assert not waiting.done()
            disk.free()
            with pytest.raises(errors.JobLost, match="exit code 75") as caught:
                await waiting
        assert caught.value.code == errors.StoreFull.code
        assert f"write to the store file://{store}" in str(caught.value)
        assert "No space left" in str(caught.value)
        assert await job.status() is JobStatus.FAILED


@pytest.mark.usefixtures("this_folder")
async def test_a_call_that_is_cancelled_on_a_full_disk_ends_its_job_and_leaves_nothing(
    disk: Disk, scene: Scene
) -> None:
    marks, store = scene.marks, disk.path / "store"

    def wait_for_ever() -> None:
        (marks / "started").write_text(str(os.getpid()))
        time.sleep(1000)

    async with aio.Client(backend="local", store=str(store)) as client:
        call = asyncio.ensure_future(client.run(wait_for_ever))
        await soon(lambda: contents(marks / "started"))
        disk.fill()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not psutil.pid_exists(int((marks / "started").read_text()))
        assert left_in(store) == []


@pytest.mark.usefixtures("this_folder")
async def test_a_batch_that_waits_for_space_says_so(disk: Disk, scene: Scene) -> None:
    marks, store = scene.marks, str(disk.path / "store")

    def wait_for_go(size: int) -> bytes:
        (marks / "started").touch()
        while not (marks / "go").exists():
            time.sleep(0.005)
        return bytes(size)  # a small outcome fits into the last block of the batch's file

    async with (
        aio.Client(backend="local", store=store) as client,
        aio.Client(backend="local", store=store) as other,
    ):
        batch = await client.run_async_map(wait_for_go, [20_000])
        found = await other.attach_batch(batch.group_id)
        await soon((marks / "started").exists)
        assert await found.reason() == ""
        disk.fill()
        (marks / "go").touch()
        async with asyncio.timeout(DEADLINE_S):
            for handle in (batch, found):
                while f"waiting for space on the disk of {store}" not in await handle.reason():
                    await asyncio.sleep(0.05)
            disk.free()
            assert await batch.results() == [bytes(20_000)]
        assert await batch.reason() == await found.reason() == ""


# --- no slot is free ---------------------------------------------------------------------------


@pytest.mark.full
async def test_waiting_for_a_slot_is_shown_in_the_reason_the_log_and_the_progress(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "1")
    marks = scene.marks

    def wait_for_go() -> None:
        (marks / "started").touch()
        while not (marks / "go").exists():
            time.sleep(0.005)

    async with aio.Client(backend="local") as client:
        busy = await client.submit(wait_for_go)
        await soon((marks / "started").exists)
        message = f"waiting for a slot: 1 of 1 busy with {busy.job_id}"
        job = await client.submit(abs, -1)
        batch = await client.run_async_map(abs, [-2])
        async with asyncio.timeout(DEADLINE_S):
            async for progress in batch.progress():
                if progress.step.startswith(message):
                    break
            while not (await job.reason()).startswith(message):
                await asyncio.sleep(0.05)
        logged = [record for record in caplog.messages if message in record]
        assert len(logged) == 1, "once, because this client's own job is busy"
        async with aio.Client(backend="local") as other:
            behind = [await other.submit(abs, -3) for _ in range(3)]
            ids = tuple(waiting.job_id for waiting in behind)
            async with asyncio.timeout(DEADLINE_S):
                while not any(record.startswith(ids) for record in caplog.messages):
                    await asyncio.sleep(0.05)
                for waiting in behind:
                    while not (await waiting.reason()).startswith("waiting for a slot"):
                        await asyncio.sleep(0.05)
            assert sum(record.startswith(ids) for record in caplog.messages) == 1
            for waiting in behind:
                await waiting.cancel()
        (marks / "go").touch()
        assert await job == 1
        assert await batch.results() == [2]


# --- nothing may be written ---------------------------------------------------------------------

ASK = """
import asyncio, sys
from kinetic import aio, errors

async def main():
    async with aio.Client(backend="local") as client:
        try:
            print("value", await client.run(abs, -1))
        except errors.KineticError as error:
            print(type(error).__name__, error)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may do anything")
@pytest.mark.parametrize("kind", ["home", "local", "store", "somebody else's home"])
def test_a_folder_that_cannot_be_written_to_is_named(kind: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kn-", dir="/tmp") as folder:
        home = Path(folder, "home")
        closed = {"local": home / "local", "store": home / "store"}.get(kind, home)
        closed.mkdir(parents=True)
        if kind == "somebody else's home":
            if os.geteuid() != 0:
                pytest.skip("only root can make files of another user")
            os.chown(home, NOBODY, NOBODY)
        else:
            closed.chmod(0o555)
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", ASK],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "KINETIC_HOME": str(home)},
            cwd="/",
            preexec_fn=without_privileges,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert run.returncode == 0, run.stderr
        error, _, message = run.stdout.partition(" ")
        assert error in ("AuthError", "Unavailable", "ConfigurationError"), run.stdout
        cause = "belongs to another user" if "else" in kind else "ermission denied"
        assert str(closed) in message and cause in message and "KINETIC_HOME" in message
        assert end_processes(home) == []
        closed.chmod(0o755)
        assert left_in(home / "store") == []
        assert not [path for path in (home / "local").rglob("*") if path.is_file()]


# --- count at once -------------------------------------------------------------------------------


@pytest.mark.full
async def test_two_clients_at_once_in_a_new_home(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        clients = []
        for name in ("one", "two"):
            (scene.folder / name).mkdir()
            client = Script(VICTIM, "jobs", scene.marks, 50, 0, folder=scene.folder / name)
            clients.append(stack.enter_context(client))
        for client in clients:
            client.hear("over")
            assert sorted(ended(client).values()) == sorted(str(n * n) for n in range(50))
        commands = [process.cmdline() for process in processes_of(scene.home)]
        assert sum("kinetic._supervisor" in command for command in commands) == 1
    async with aio.Client(backend="local") as client:
        jobs = await client.list_jobs()
        assert len({job.job_id for job in jobs}) == 100
        statuses = await asyncio.gather(*(job.status() for job in jobs))
        assert {*statuses} == {JobStatus.SUCCEEDED}
        values = await asyncio.gather(*(job.result() for job in jobs))
        assert sorted(values) == sorted([n * n for n in range(50)] * 2)
        assert await client.list_jobs() == []
    assert scene.started_twice() == []
    scene.assert_only_supervisor_left()


@pytest.mark.full
@pytest.mark.timeout(2 * MANY_S)
async def test_a_thousand_jobs_in_the_queue_are_listed_and_cancelled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "1")
    count = 1000
    with scene.client(VICTIM, "gated", scene.marks, 1, 0) as first:
        first.hear("submitted")
        await soon(lambda: len(scene.started()) == 1)  # the only slot is taken
        async with aio.Client(backend="local") as client, asyncio.timeout(MANY_S):
            batch = await client.run_async_map(abs, range(-count, 0), max_concurrent=None)
            await batch.submitted()
            assert await batch.status_counts() == {"PENDING": count}
            assert len([job for job in batch.jobs if job is not None]) == count
            async with aio.Client() as other:
                listed = await other.list_jobs()
                assert [await job.status() for job in listed] == [JobStatus.RUNNING]
            assert (supervisor := scene.supervisor()) is not None
            assert supervisor.memory_info().rss < 80 << 20
            await batch.cancel()
            assert await batch.status_counts() == {"NOT_FOUND": count}
            assert len(await client.list_jobs()) == 1
            results = await batch.results(return_exceptions=True)
            assert {type(result) for result in results} == {errors.JobCancelled}
            (scene.marks / "go").touch()
            assert await client.run(abs, -1) == 1
            await batch.cleanup()
            assert not [*(scene.home / "store" / "batches" / batch.group_id).rglob("*")]
    scene.assert_only_supervisor_left()


# --- memory -------------------------------------------------------------------------------------

MEMORY = "256Mi"


def at_once() -> Any:
    return bytes(1 << 30)


def piece_by_piece() -> Any:
    """Take all memory in ever smaller pieces, and keep them while the error is reported."""
    kept: list[Any] = []
    for size in (1 << 20, 1 << 16, 4096, 64):
        with contextlib.suppress(MemoryError):
            while True:
                kept.append(bytearray(size))
    return [kept, bytes(1 << 20)]


def nearly_all() -> Any:
    """Exhaust every size class of Python's allocator, but keep enough memory to raise."""
    kept: list[Any] = [None] * 500_000
    reserve, index = bytes(8192), 0
    for size in (1 << 20, 1 << 16, 4096, 1024, *range(512, 0, -16)):
        try:
            while True:
                kept[index] = bytes(size - 1)
                index += 1
        except MemoryError:
            pass
    del reserve
    return [kept, bytes(1 << 20)]


def in_pickling() -> Any:
    class Swelling:
        def __reduce__(self) -> Any:
            return (bytes, (bytearray(1 << 30),))

    return Swelling()


def for_the_result() -> Any:
    """Return a result that holds all the memory, so that none is left to report it."""
    kept: list[Any] = []
    for size in (1 << 20, 1 << 16, 4096):
        with contextlib.suppress(MemoryError):
            while True:
                kept.append(bytes(size))
    return lambda: kept


@pytest.mark.full
async def test_a_job_that_takes_all_its_memory_says_so() -> None:
    async with aio.Client(backend="local") as client:
        for function in (at_once, piece_by_piece, nearly_all, in_pickling, for_the_result):
            async with asyncio.timeout(DEADLINE_S):
                job = await client.submit(kinetic.run(backend="local", memory=MEMORY)(function))
                with pytest.raises((MemoryError, errors.JobFailed)) as caught:
                    await job
                assert "MemoryError" in (str(caught.value) + repr(caught.value)), caught.value
                assert (await job.reason()).startswith("out of memory: ")
                assert await job.status() is JobStatus.FAILED


@pytest.mark.full
async def test_a_result_that_takes_most_of_the_memory_arrives() -> None:
    def large() -> Any:
        return [bytes(50 << 20) for _ in range(3)]

    async with aio.Client(backend="local") as client, asyncio.timeout(DEADLINE_S):
        value = await client.run(kinetic.run(backend="local", memory=MEMORY)(large))
        assert [len(part) for part in value] == [50 << 20] * 3
