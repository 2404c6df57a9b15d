"""Bounds on what jobs leave on this machine's disk and in its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio.local.cluster import LocalCluster
from tests.jobs import eventually
from tests.scripts import Program

from .conftest import supervisors


def write_nothing() -> str:
    assert os.path.isdir(os.environ["KINETIC_OUTPUT_DIR"]), "it exists already"
    return os.environ["KINETIC_OUTPUT_DIR"]


def write_if_odd(x: int) -> None:
    if x % 2:
        with open(os.path.join(os.environ["KINETIC_OUTPUT_DIR"], "x"), "w"):
            pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def outputs(home: Path) -> set[str]:
    root = home / "store" / "outputs"
    return {str(path.relative_to(root)) for path in root.rglob("*")}


async def test_a_job_without_output_leaves_no_output_directory(home: Path) -> None:
    async with aio.Client(backend="local") as client:
        job = await client.submit(write_nothing)
        assert await job.result(cleanup=False) == job.output_dir
        await eventually(lambda: outputs(home) == set())
        assert await job.outputs() == []


async def test_of_a_batch_only_output_directories_with_content_are_left(home: Path) -> None:
    async with aio.Client(backend="local") as client:
        batch = await client.run_async_map(write_if_odd, range(4))
        await batch.results()
        group_id = batch.group_id
        left = {group_id, f"{group_id}/1", f"{group_id}/1/x", f"{group_id}/3", f"{group_id}/3/x"}
        await eventually(lambda: outputs(home) == left)
        empty = await client.run_async_map(write_if_odd, [0, 2])
        await empty.results()
        await eventually(lambda: outputs(home) == left)


@pytest.mark.parametrize("fresh", ["0", "1"])
async def test_a_killed_job_leaves_no_empty_output_directory(
    home: Path, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_FRESH", fresh)
    async with aio.Client(backend="local") as client:
        job = await client.submit(die)
        with pytest.raises(errors.JobLost):
            await job.result()
        await eventually(lambda: outputs(home) == set())


async def test_an_output_directory_that_the_user_named_stays(home: Path, tmp_path: Path) -> None:
    named = kinetic.run(backend="local", output_dir=str(tmp_path / "mine"))(write_if_odd)
    async with aio.Client(backend="local") as client:
        await (await client.run_async_map(named, [0])).results()
        await eventually(lambda: not [*(home / "local/v1/work").glob("grp-*")])
    assert (tmp_path / "mine" / "0").is_dir()


# --- jobs that ended long ago ---


def say() -> int:
    print("said")
    return 1


@pytest.mark.full
async def test_what_the_supervisor_has_forgotten_keeps_its_value_log_and_outputs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_JOB_TTL_S", "0")
    async with aio.Client(backend="local") as client:
        job = await client.submit(say)
        batch = await client.run_async_map(write_if_odd, [1])
        await job.result(cleanup=False)
        await batch.results(cleanup=False)
        cluster = LocalCluster(home)
        while await cluster.find():
            await asyncio.sleep(0.01)
        await cluster.aclose()
    async with aio.Client(backend="local") as client:
        listed = await client.list_jobs()
        assert [(found.job_id, found.created_at) for found in listed] == [
            (f"{batch.group_id}-0", batch.created_at),  # its store has it, until a cleanup
            (job.job_id, job.created_at),
        ]
        assert await listed[1].tail() == "said"
        assert await listed[1].status() is kinetic.JobStatus.SUCCEEDED
        assert await listed[1].result(cleanup=False) == 1
        attached = await client.attach_batch(batch.group_id)
        assert await attached.results(cleanup=False) == [None]
        assert len([*(home / "local/v1/logs").iterdir()]) == 2
        await listed[1].cleanup()
        await attached.cleanup()
        assert [*(home / "local/v1/logs").iterdir()] == []
        assert await client.list_jobs() == []


async def test_the_supervisor_s_own_log_begins_anew_when_it_is_long(home: Path) -> None:
    log = home / "local/v1/supervisor.log"
    log.parent.mkdir(parents=True)
    log.write_text("an old line\n" * 100_000)
    async with aio.Client(backend="local") as client:
        await client.list_jobs()
    await eventually(lambda: " slots, " in log.read_text())
    assert "an old line" not in log.read_text()


@pytest.mark.full
async def test_the_documented_command_ends_the_supervisor_of_one_home_and_no_other(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = home / "other"
    for folder in (other, home):
        monkeypatch.setenv("KINETIC_HOME", str(folder))
        async with aio.Client(backend="local") as client:
            await client.list_jobs()
    guide = Path(__file__).parents[2] / "docs/guides/local.md"
    assert "kinetic local stop" in guide.read_text()
    assert len(supervisors(other)) == 1
    command = (sys.executable, "-m", "kinetic", "local", "stop")
    ending = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    assert await ending.wait() == 0
    await eventually(lambda: not supervisors(home))
    assert len(supervisors(other)) == 1


# --- temporary files ---

READING = """
import asyncio, sys
from kinetic import aio

async def main():
    async with aio.Client(backend="local") as client:
        await (await client.attach(sys.argv[1])).result()

asyncio.run(main())
"""


class SlowToRead:
    """Unpickling it takes longer than the test needs to kill the process."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import time; print('reading', flush=True); time.sleep(600)",)


def large() -> list[object]:
    return [os.urandom(3_000_000), SlowToRead()]


async def test_what_a_killed_client_left_half_read_is_removed_a_day_later(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    scratch = home / "cache" / "scratch"
    async with aio.Client(backend="local") as client:
        assert await client.run(say) == 1
        assert not scratch.exists(), "only large content needs files"
        assert await client.run(len, bytes(2_000_000)) == 2_000_000
        assert [*scratch.iterdir()] == [], "each client removes its own files"
        job = await client.submit(large)
        with Program("-c", READING, job.job_id) as other:
            await asyncio.to_thread(other.expect, "reading")
            left = [*scratch.iterdir()]
            assert len(left) == 1 and [*tmp_path.iterdir()] == []
    async with aio.Client(backend="local") as client:
        await client.list_jobs()
        assert [*scratch.iterdir()] == left, "the process may still live"
    os.utime(left[0], (0, 0))
    async with aio.Client(backend="local") as client:
        await client.list_jobs()
        assert [*scratch.iterdir()] == []


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


async def test_a_submission_that_waits_for_days_keeps_its_arguments(
    home: Path, tmp_path: Path
) -> None:
    async with aio.Client(backend="local", max_concurrent=1) as client:
        first = await client.submit(wait_for, str(tmp_path / "go"))
        waiting = asyncio.create_task(client.submit(len, os.urandom(2_000_000)))
        [spool] = await eventually(lambda: [*home.glob("cache/scratch/*")])
        await eventually(lambda: [*(home / "store" / "functions").iterdir()][1:])
        os.utime(spool, (0, 0))
        async with aio.Client(backend="local") as other:
            await other.list_jobs()
        (tmp_path / "go").touch()
        await first
        assert await (await waiting) == 2_000_000


async def test_a_client_remembers_no_single_job_that_is_gone() -> None:
    async with aio.Client(backend="local") as client:
        assert await asyncio.gather(*(client.run(len, "ab") for _ in range(3))) == [2, 2, 2]
        [opening] = client._sessions.values()
        cluster: Any = (await opening).platform.cluster
        await eventually(lambda: not cluster._launched)
