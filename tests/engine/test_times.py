"""Running time counts from the claim, and the time before it counts as waiting."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from kinetic import aio
from kinetic.aio.ports import Observation
from kinetic.testing import MemoryCluster, MemoryStore, Run, carry_out, memory_platform

BEFORE_S = 1000.0


class Old(MemoryCluster):
    """Report that each job was created long ago, as after a long wait for a node."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.created_at = datetime.fromtimestamp(time.time() - BEFORE_S, UTC).isoformat()

    async def watch(self, labels):
        async for seen in super().watch(labels):
            yield replace(seen, created_at=self.created_at)

    async def find(self, **options) -> list[Observation]:
        return [replace(seen, created_at=self.created_at) for seen in await super().find(**options)]


def work(x: int) -> int:
    return x


class ClaimedEarly(MemoryStore):
    """Date each claim back, between the creation of its job and now."""

    async def create(self, name, body, metadata=None, **options):
        if name.endswith(".claim"):
            metadata = {**metadata, "at": str(time.time() - BEFORE_S / 2)}
        return await super().create(name, body, metadata, **options)


async def test_an_item_has_run_since_its_claim_and_waited_before() -> None:
    let_go = asyncio.Event()

    async def job(run: Run) -> int:
        await let_go.wait()
        return await carry_out(run)

    store = ClaimedEarly()
    cluster = Old(store, job, slots=1)
    platform = replace(memory_platform(), store=store, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(work, [1, 2])
        while not batch.running_times(9):  # the watch reports it
            await asyncio.sleep(0)
        ((index, ran, _),) = batch.running_times(9)
        assert (index, ran) == (0, pytest.approx(0, abs=100))  # nothing has read the claim
        async with aio.Client(platform=platform) as other:
            attached = await other.attach_batch(batch.group_id)
            while not attached.running_times(9):
                await asyncio.sleep(0)
            ((index, ran, waited),) = attached.running_times(9)
            assert (index, ran) == (0, pytest.approx(BEFORE_S / 2, abs=100))
            assert waited == pytest.approx(BEFORE_S / 2, abs=100)
            for index in range(2):
                item = await attached.job(index)
                await item.status()
                _, waited, ran = await item.account()
                half = pytest.approx(BEFORE_S / 2, abs=100)
                assert (waited, ran) == ((None, None) if index else (half, half))
        let_go.set()
        await batch.wait()
        assert batch.running_times(9) == []
        _, waited, ran = await (await batch.job(0)).account()
        assert waited is None and ran == pytest.approx(0, abs=100)


async def test_a_single_job_that_has_ended_waited_since_its_submission() -> None:
    async with aio.Client(platform=memory_platform()) as client:
        job = await client.submit(work, 1)
        await job.wait()
        _, waited, ran = await job.account()
        assert waited is not None and ran is not None
        assert 0 <= waited < 100 and 0 <= ran < 100
