"""An application that uses kinetic is tested without processes and files."""

from __future__ import annotations

import asyncio

import pytest

from kinetic import aio, errors
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, Run, carry_out, memory_platform


def square(x: int) -> int:
    return x * x


async def later(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


def odd_fails(x: int) -> int:
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


async def hang(_: int) -> None:
    await asyncio.Event().wait()


async def test_functions_and_coroutine_functions_are_called() -> None:
    async with aio.Client(platform=memory_platform()) as client:
        assert await client.run(square, 3) == 9
        assert await client.run(later, 3) == 4


async def test_an_exception_arrives_as_itself() -> None:
    async with aio.Client(platform=memory_platform()) as client:
        with pytest.raises(ValueError, match="1 is odd") as caught:
            await client.run(odd_fails, 1)
        assert "odd_fails" in caught.value.__notes__[0]


async def test_a_batch_brings_its_values_and_failures() -> None:
    async with aio.Client(platform=memory_platform()) as client:
        batch = await client.run_async_map(odd_fails, range(4), retries=1)
        mixed = await batch.results(return_exceptions=True)
        assert [mixed[0], mixed[2]] == [0, 2]
        assert [str(mixed[1]), str(mixed[3])] == ["1 is odd", "3 is odd"]
        await batch.cleanup()
        assert await client.list_jobs() == []


async def test_a_job_that_is_cancelled_says_so() -> None:
    async with aio.Client(platform=memory_platform()) as client:
        job = await client.submit(hang, 0)
        await job.cancel()
        with pytest.raises(errors.JobCancelled):
            await job.result()


async def test_leaving_the_block_of_a_batch_ends_it() -> None:
    async with aio.Client(platform=memory_platform(slots=2)) as client:
        async with await client.run_async_map(hang, range(4)) as batch:
            await batch.submitted()
        assert {status for _, status in await batch.statuses()} == {JobStatus.NOT_FOUND}


async def test_a_platform_that_loses_a_job_can_be_acted_out() -> None:
    platform = memory_platform(work := Losing())
    assert isinstance(platform.cluster, MemoryCluster)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, [2], retries=1)
        await work.reached.wait()
        platform.cluster.end(work.run.spec.name, exit_code=-9)
        assert await batch.results() == [4]


class Losing:
    """The first attempt never ends by itself."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def __call__(self, run: Run) -> int:
        if not self.reached.is_set():
            self.run = run
            self.reached.set()
            await asyncio.Event().wait()
        return await carry_out(run)


async def test_the_next_client_attaches_to_what_the_last_one_left() -> None:
    platform = memory_platform()
    async with aio.Client(platform=platform) as client:
        job = await client.submit(later, 1)
        batch = await client.run_async_map(square, range(3))
        await batch.wait()
    async with aio.Client(platform=platform) as client:
        assert await (await client.attach(job.job_id)).result(cleanup=False) == 2
        again = await client.attach_batch(batch.group_id)
        assert await again.results(cleanup=False) == [0, 1, 4]


async def test_requests_are_counted() -> None:
    platform = memory_platform()
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(5))
        await batch.wait()
    assert isinstance(platform.cluster, MemoryCluster)
    assert platform.cluster.requests["launch"] == 5
    assert platform.cluster.requests["watch"] == 1
