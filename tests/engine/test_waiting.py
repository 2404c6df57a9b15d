"""Who waits asks nobody, but to keep what he holds and to hear what others want."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic.aio.platforms import Platform
from kinetic.testing import carry_out, memory_platform

VIRTUAL = pytest.mark.looptime(noop_cycles=300)
"""Virtual time that gives the threads which pickle a moment before it jumps."""

LONG_S = 600.0
RHYTHM_S = 10.0


class World:
    def __init__(self) -> None:
        self.started = 0
        self.gate = asyncio.Event()
        plain = memory_platform(self._work)
        self.platform: Platform = replace(plain, clock=asyncio.get_running_loop().time)
        self._counts: list[Counter[str]] = [
            plain.store.requests,  # type: ignore[attr-defined]
            plain.cluster.requests,  # type: ignore[attr-defined]
        ]

    async def _work(self, run: Any) -> int | None:
        self.started += 1
        await self.gate.wait()
        return await carry_out(run)

    async def asked_within(self, seconds: float) -> Counter[str]:
        """What is asked of the store and of the cluster while nothing happens."""
        for counts in self._counts:
            counts.clear()
        await asyncio.sleep(seconds)
        return sum(self._counts, Counter())


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def client(world: World) -> AsyncIterator[aio.Client]:
    async with aio.Client(platform=world.platform) as client:
        yield client


def same(x: int) -> int:
    return x


async def until(what: Any) -> None:
    async with asyncio.timeout(1000):
        while not what():
            await asyncio.sleep(0.2)
    # Virtual: what belongs to the beginning is over, and no beat falls on the ends of what follows.
    await asyncio.sleep(2.5 * RHYTHM_S)


@VIRTUAL
async def test_a_single_job_that_runs_for_long_costs_nothing(
    client: aio.Client, world: World
) -> None:
    job = await client.submit(same, 3)
    waiting = asyncio.create_task(job.result())
    await until(lambda: world.started == 1)
    assert await world.asked_within(LONG_S) == {}
    world.gate.set()
    assert await waiting == 3


@VIRTUAL
async def test_a_batch_costs_two_requests_in_ten_seconds(client: aio.Client, world: World) -> None:
    """The renewal of its lease, and a look whether anybody wants something of it."""
    batch = await client.run_async_map(same, range(50), max_concurrent=None)
    waiting = asyncio.create_task(batch.results())
    await until(lambda: world.started == 50)
    asked = await world.asked_within(LONG_S)
    beats = LONG_S / RHYTHM_S
    assert asked == {"replace": beats, "look": beats}
    world.gate.set()
    assert await waiting == [*range(50)]


@VIRTUAL
async def test_waiting_for_an_attached_batch_ends_after_its_poll_timeout(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, [1, 2])
    loop = asyncio.get_running_loop()
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id, poll_timeout=30)
        for waiting in (found.wait, found.results, lambda: anext(found.as_completed())):
            since = loop.time()
            with pytest.raises(errors.ResultTimeout, match="not ended after 30 s; it goes on"):
                await waiting()
            assert 30 <= loop.time() - since < 35
        with pytest.raises(errors.ResultTimeout, match="after 5 s"):
            await found.results(timeout=5)
        world.gate.set()
        assert await found.results() == [1, 2]
