"""What a platform does not take now is asked for again, and given up for a reason only."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio.ports import JobSpec, Observation
from kinetic.testing import MemoryCluster, carry_out, memory_platform


class Full(MemoryCluster):
    """A quota is used up for item 1, as long as others come to run."""

    until = 0.0
    finds = 0

    async def launch(self, job: JobSpec) -> None:
        if job.name.endswith("-1-1") and asyncio.get_running_loop().time() < self.until:
            raise errors.Throttled("quota 'few' is used up", retryable=True)
        await super().launch(job)

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        self.finds += 1
        return await super().find(names=names, labels=labels, explained=explained)


def same(x: int) -> int:
    return x


@pytest.mark.looptime(noop_cycles=300)
async def test_a_quota_that_is_used_up_by_others_is_waited_for() -> None:
    plain = memory_platform(carry_out)
    cluster = Full(plain.store, carry_out)
    loop = asyncio.get_running_loop()
    cluster.until = loop.time() + 2000
    platform = replace(plain, cluster=cluster, clock=loop.time)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(6), max_concurrent=2)
        assert await batch.results(timeout=3000, cleanup=False) == [*range(6)]
        assert cluster.finds == 0  # a refusal is not followed by further questions


@pytest.mark.looptime(noop_cycles=300)
async def test_a_quota_is_waited_for_as_long_as_the_start_timeout_allows() -> None:
    plain = memory_platform(carry_out)
    cluster = Full(plain.store, carry_out)
    loop = asyncio.get_running_loop()
    cluster.until = loop.time() + 2000
    platform = replace(plain, cluster=cluster, clock=loop.time)
    async with aio.Client(platform=platform) as client:
        patient = kinetic.run(start_timeout=300)(same)
        batch = await client.run_async_map(patient, range(3), max_concurrent=2)
        begun = loop.time()
        first, failed, last = await batch.results(timeout=1000, return_exceptions=True)
        assert (first, last) == (0, 2) and "quota 'few' is used up" in str(failed)
        assert loop.time() - begun >= 300
