"""Who waits asks nobody, but to keep what he holds and to hear what others want."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kinetic import aio, errors
from tests.engine.world import VIRTUAL, World

LONG_S = 600.0
RHYTHM_S = 10.0


def same(x: int) -> int:
    return x


async def settled(world: World, count: int) -> None:
    """So many have begun; what belongs to that is over, and no beat is due at this moment."""
    await world.begun(count)
    await asyncio.sleep(2.5 * RHYTHM_S)


async def asked_within(world: World, seconds: float) -> Counter[str]:
    """What is asked of the store and of the cluster while nothing happens."""
    counts = (world.store.requests, world.cluster.requests)
    for count in counts:
        count.clear()
    await asyncio.sleep(seconds)
    return sum(counts, Counter())


@VIRTUAL
async def test_a_single_job_that_runs_for_long_costs_nothing(
    client: aio.Client, world: World
) -> None:
    job = await client.submit(same, 3)
    waiting = asyncio.create_task(job.result())
    await settled(world, 1)
    assert await asked_within(world, LONG_S) == {}
    world.gate.set()
    assert await waiting == 3


@VIRTUAL
async def test_a_batch_costs_two_requests_in_ten_seconds(client: aio.Client, world: World) -> None:
    """The renewal of its lease, and a look whether anybody wants something of it."""
    batch = await client.run_async_map(same, range(50), max_concurrent=None)
    waiting = asyncio.create_task(batch.results())
    await settled(world, 50)
    asked = await asked_within(world, LONG_S)
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
