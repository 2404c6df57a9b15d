"""Following a log continues with the next attempt and ends with the job."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from kinetic.errors import JobLost, NotFound

DEADLINE_S = 60.0


@pytest.fixture
async def client() -> AsyncIterator[aio.Client]:
    async with aio.Client(backend="local") as client:
        yield client


def fail_twice(x: int, followed: str) -> int:
    """Fail twice; each attempt ends once the test follows, so that it sees the first one."""
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    print(f"attempt {attempt}", flush=True)
    print("same", flush=True)
    while not os.path.exists(followed):
        time.sleep(0.01)
    if attempt < 3:
        raise ValueError(x)
    return x


async def lines_of(job: aio.JobHandle[int], followed: Path) -> list[str]:
    lines: list[str] = []
    async for line in job.logs(follow=True):
        lines.append(line)
        followed.touch()
    return lines


@pytest.mark.parametrize("attached", [False, True])
async def test_every_attempt_is_followed_once_and_in_order(
    client: aio.Client, tmp_path: Path, attached: bool
) -> None:
    followed = tmp_path / "followed"
    async with asyncio.timeout(DEADLINE_S), aio.Client(backend="local") as other:
        batch = await client.run_async_map(fail_twice, [(7, str(followed))], retries=2)
        await batch.submitted()
        job = await (other.attach(f"{batch.group_id}-0") if attached else batch.job(0))
        lines = await lines_of(job, followed)
        printed = [line for line in lines if line == "same" or line.startswith("attempt")]
        assert printed == ["attempt 1", "same", "attempt 2", "same", "attempt 3", "same"]
        assert await job.result(cleanup=False) == 7
        assert [line async for line in job.logs()] == ["attempt 3", "same"], "the last attempt"
        assert [line async for line in job.logs(follow=True)] == ["attempt 3", "same"]
        await batch.cleanup()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_worker_once(x: int) -> int:
    """In the first attempt of the second item, kill the process that commits outcomes."""
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    print(f"item {x}, attempt {attempt}", flush=True)
    if x == 1 and attempt == 1:
        os.kill(parent_of(os.getppid()), signal.SIGKILL)
        time.sleep(DEADLINE_S)
    return x


@pytest.mark.skipif(sys.platform != "linux", reason="the test finds the worker in /proc")
@pytest.mark.parametrize("retries", [0, 1])
async def test_the_lines_of_an_item_whose_worker_died_are_found(
    client: aio.Client, retries: int
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        batch = await client.run_async_map(
            kill_worker_once, range(3), retries=retries, max_concurrent=1
        )
        results = await batch.results(return_exceptions=True, cleanup=False)
        assert results[::2] == [0, 2]
        assert results[1] == 1 if retries else isinstance(results[1], JobLost)
        job = await batch.job(1)
        assert [line async for line in job.logs(attempt=1)] == ["item 1, attempt 1"]
        assert await job.tail() == f"item 1, attempt {1 + retries}"
        assert await (await batch.job(0)).tail() == "item 0, attempt 1"
        await batch.cleanup()


@kinetic.run(backend="local")
def wait_long() -> None:
    print("here", flush=True)
    asyncio.run(asyncio.sleep(600))


async def test_it_ends_with_a_job_that_is_cancelled(client: aio.Client) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(wait_long)
        lines: list[str] = []
        async for line in job.logs(follow=True):
            lines.append(line)
            await job.cancel()
        assert lines[0] == "here"
        await job.cleanup()
        with pytest.raises(NotFound):
            await anext(job.logs(follow=True))
