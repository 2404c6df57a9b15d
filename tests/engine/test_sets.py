"""If the platform replaces no workers, each takes one item, and the submitter starts others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Phase
from kinetic.job_status import Reason
from kinetic.testing import MemoryCluster, Run, carry_out, memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, until

pytestmark = VIRTUAL


def sets(work: Any = carry_out) -> tuple[Platform, MemoryCluster]:
    """Return a platform whose workers take one item each, and its cluster."""
    plain = on_loop_time(memory_platform())
    cluster = MemoryCluster(plain.store, work, replaces=False)
    return replace(plain, cluster=cluster), cluster


async def started(cluster: MemoryCluster) -> list[str]:
    """Return the ranks of the workers that the cluster has had."""
    names = [it.name for it in await cluster.find() if "kinetic.dev/index" not in it.labels]
    return sorted(name.split(".")[2] for name in names)


async def dies_once(run: Run) -> int:
    """Run an item; the first attempt at item 1 ends without an outcome."""
    order = run.spec.order
    return 9 if (order.index, order.attempt) == (1, 1) else await carry_out(run)


async def test_another_worker_takes_each_further_item_and_each_retry() -> None:
    platform, cluster = sets(dies_once)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(
            kinetic.run()(abs), range(4), max_concurrent=2, retries=1, progress=False
        )
        assert await batch.results(cleanup=False) == [0, 1, 2, 3]
        ranks = await started(cluster)
    assert len(ranks) >= 5, "one for each attempt"
    assert len(ranks) == len({*ranks}), "each under a rank of its own"


async def test_workers_that_die_before_they_take_an_item_end_the_batch() -> None:
    platform, cluster = sets()
    cluster._slots = 0

    async def end_all() -> None:
        while True:
            for it in await cluster.find():
                if it.phase is Phase.PENDING:
                    cluster.end(it.name, exit_code=None, reason=Reason.SETUP, message="no image")
            await asyncio.sleep(0.1)

    ending = asyncio.create_task(end_all())
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(kinetic.run()(abs), [1, 2], progress=False)
        with pytest.raises(errors.BatchError, match="no image"):
            await batch.results()
    ending.cancel()


async def test_a_smaller_scale_lets_waiting_workers_leave_and_a_larger_one_starts_more() -> None:
    release = asyncio.Event()

    async def held(run: Run) -> int:
        await release.wait()
        return await carry_out(run)

    platform, cluster = sets(held)

    def running() -> int:
        jobs = cluster._jobs.values()
        return sum(job.death is not None and not job.ended for job in jobs)

    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(
            kinetic.run()(abs), range(6), max_concurrent=1, progress=False
        )
        await until(lambda: running() == 1)
        await batch.scale(3)
        await until(lambda: running() == 3)
        await batch.scale(1)
        release.set()
        assert await batch.results(cleanup=False) == [*range(6)]
