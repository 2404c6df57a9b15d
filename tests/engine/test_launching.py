"""A launch that the platform can't take yet is repeated, up to the start timeout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio.ports import JobSpec, Observation
from kinetic.testing import MemoryCluster
from tests.engine.world import VIRTUAL, platform_with


class Full(MemoryCluster):
    """A cluster whose quota has no room for item 1 before the time ``until``."""

    until = 0.0
    finds = 0

    async def launch(self, job: JobSpec) -> None:
        if job.name.endswith("-1-1") and asyncio.get_running_loop().time() < self.until:
            raise errors.Throttled("quota 'few' is used up", retryable=True)
        await super().launch(job)

    async def find(self, **selection: Any) -> list[Observation]:
        self.finds += 1
        return await super().find(**selection)


def same(x: int) -> int:
    return x


@VIRTUAL
@pytest.mark.parametrize("start_timeout", [None, 300])
async def test_a_used_up_quota_is_waited_for_until_the_start_timeout(
    start_timeout: int | None,
) -> None:
    platform, cluster = platform_with(Full)
    loop = asyncio.get_running_loop()
    began = loop.time()
    cluster.until = began + 2000
    async with aio.Client(platform=platform) as client:
        function = same if start_timeout is None else kinetic.run(start_timeout=start_timeout)(same)
        batch = await client.run_async_map(function, range(6), max_concurrent=2)
        values = await batch.results(timeout=3000, cleanup=False, return_exceptions=True)
        refused = values.pop(1)
        assert values == [0, 2, 3, 4, 5]
        if start_timeout is None:
            assert refused == 1 and cluster.finds == 0, "a refused launch needs no find"
        else:
            assert "quota 'few' is used up" in str(refused)
            assert start_timeout <= loop.time() - began < 2000
