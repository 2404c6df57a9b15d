"""Each job on this machine has its own folder for temporary files, which goes with the job."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from kinetic._runner.job import temporary
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import Phase
from tests.jobs import eventually, until

from .conftest import run_job, signal_supervisor, spec


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the user's folder for temporary files, whose path is short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def leave(files: int) -> tuple[str, list[str]]:
    """Return the folder for temporary files, and what is in it; leave files in it."""
    folder = tempfile.gettempdir()
    found = os.listdir(folder)
    assert folder == os.environ["TMPDIR"]
    for _ in range(files):
        os.close(tempfile.mkstemp()[0])
    closed = tempfile.mkdtemp()
    Path(closed, "file").touch()
    os.chmod(closed, 0)
    return folder, found


def remove_own() -> None:
    os.rmdir(os.environ["TMPDIR"])


def bind() -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tempfile.mkdtemp()}/a-name-as-long-as-those-of-multiprocessing")
        return os.stat(os.environ["TMPDIR"]).st_mode & 0o777


@pytest.mark.parametrize("files", [1, 200], ids=["few", "many"])
async def test_a_job_has_its_own_folder_in_that_of_the_user(scratch: Path, files: int) -> None:
    async with aio.Client(backend="local") as client:
        folder, found = await client.run(leave, files)
        assert (Path(folder).parent, found) == (scratch, [])
        await eventually(lambda: [*scratch.iterdir()] == [])
        await client.run(remove_own)


async def test_without_a_choice_the_path_is_short_enough_for_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    async with aio.Client(backend="local") as client:
        assert await client.run(bind) == 0o700


async def test_a_folder_that_does_not_exist_is_replaced(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(scratch / "gone"))
    async with aio.Client(backend="local") as client:
        folder, _ = await client.run(leave, 0)
    assert Path(folder).parent == Path("/tmp")


async def test_each_item_finds_its_folder_empty(scratch: Path) -> None:
    async with aio.Client(backend="local") as client:
        batch = await client.run_async_map(leave, [1, 0, 100, 1], max_concurrent=1)
        results = await batch.results()
        assert [found for _, found in results] == [[]] * 4
        assert {Path(folder).parent for folder, _ in results} == {scratch}
        await eventually(lambda: [*scratch.iterdir()] == [])
        removed = await client.run_async_map(remove_own_at, range(2), max_concurrent=1)
        assert await removed.results() == [None, None]


def remove_own_at(_: int) -> None:
    remove_own()


def use_a_manager(_: int) -> tuple[int, str]:
    """Use a process of `multiprocessing`, whose socket is in a folder that it makes only once."""
    with multiprocessing.get_context("fork").Manager() as manager:
        manager.list([1])
    return os.getpid(), os.environ["TMPDIR"]


async def test_an_interpreter_keeps_its_temporary_files(scratch: Path) -> None:
    use = kinetic.run("cpu", backend="local", isolation="worker")(use_a_manager)
    async with aio.Client() as client:
        batch = await client.run_async_map(use, range(3), max_concurrent=1)
        assert len({*await batch.results()}) == 1
    await eventually(lambda: [*scratch.iterdir()] == [])


async def test_a_new_interpreter_begins_with_an_empty_folder(scratch: Path) -> None:
    leave_files = kinetic.run("cpu", backend="local", isolation="worker", recycle=2)(leave)
    async with aio.Client() as client:
        batch = await client.run_async_map(leave_files, [1] * 4, max_concurrent=1)
        assert [len(found) for _, found in await batch.results()] == [0, 2, 0, 2]
    await eventually(lambda: [*scratch.iterdir()] == [])


async def test_a_captured_variable_counts_as_it_is(scratch: Path) -> None:
    leave_files = kinetic.run("cpu", backend="local", capture_env_vars=["TMPDIR"])(leave)
    async with aio.Client() as client:
        assert await client.run(leave_files, 0) == (str(scratch), [])
        batch = await client.run_async_map(leave_files, [0, 0], max_concurrent=1)
        found = [(folder, len(names)) for folder, names in await batch.results()]
    assert found == [(str(scratch), 1), (str(scratch), 2)]
    assert len([*scratch.iterdir()]) == 3


LEAVE_AND_WAIT = """
import tempfile, time
tempfile.mkdtemp()
print("ready", flush=True)
time.sleep(600)
"""


async def test_a_killed_supervisor_s_successor_removes_the_folders(
    cluster: LocalCluster, home: Path, scratch: Path
) -> None:
    environment = {"PATH": os.environ["PATH"], "KINETIC_TMPDIR": str(scratch)}
    await cluster.launch(spec("killed", LEAVE_AND_WAIT, environment=environment))
    await until(cluster, "killed", Phase.RUNNING)
    await eventually(lambda: len([*scratch.glob("kinetic-*/*")]) == 1)
    signal_supervisor(home, signal.SIGKILL)
    assert (await run_job(cluster, spec("next"))).exit_code == 0
    await eventually(lambda: [*scratch.iterdir()] == [])


def test_a_link_to_another_folder_is_no_reason_to_remove_it(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "kinetic-important"
    work.mkdir()
    other.mkdir()
    (work / temporary.LINK).symlink_to(other)
    temporary.remove_all([str(work)])
    assert (work.exists(), other.exists()) == (False, True)
