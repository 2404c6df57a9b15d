"""Waiting costs a watch, the renewals of a batch's lease, and one reading per minute."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from tests.engine.world import VIRTUAL, Passing, World

LONG_S = 600.0
RHYTHM_S = 10.0
RECONCILE_S = 60.0


def same(x: int) -> int:
    return x


async def settled(world: World, count: int) -> None:
    """Wait until *count* attempts have started and no request is due."""
    await world.until_started(count)
    await asyncio.sleep(2.5 * RHYTHM_S)


class Counted(Passing):
    """Count the requests of a client, but not those of workers."""

    def __init__(self, port: Any) -> None:
        super().__init__(port)
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        self.requests[name] += callable(found)
        return found


async def requests_within(seconds: float, *ports: Any) -> Counter[str]:
    """Count the requests to *ports* within *seconds*."""
    counts: list[Counter[str]] = [port.requests for port in ports]
    for count in counts:
        count.clear()
    await asyncio.sleep(seconds)
    return sum(counts, Counter())


def is_one_reading_a_minute(requests: Counter[str]) -> bool:
    """Return whether store and cluster were read about once per minute."""
    readings = LONG_S / RECONCILE_S
    each = {requests["find"], requests["list"], requests["get"]}  # get looks for control requests
    return each < {*range(int(readings), int(readings * 1.5))} and len(requests) == 3


@VIRTUAL
async def test_a_single_job_that_runs_for_long_is_read_once_a_minute(
    client: aio.Client, world: World
) -> None:
    job = await client.submit(same, 3)
    waiting = asyncio.create_task(job.result())
    await settled(world, 1)
    await asyncio.sleep(2 * RECONCILE_S)
    assert is_one_reading_a_minute(await requests_within(LONG_S, world.store, world.cluster))
    world.gate.set()
    assert await waiting == 3


@VIRTUAL
async def test_nobody_reads_a_job_that_nobody_waits_for(client: aio.Client, world: World) -> None:
    job = await client.submit(same, 3)
    await settled(world, 1)
    assert await requests_within(LONG_S, world.store, world.cluster) == {}
    world.gate.set()
    assert await job.result() == 3


@VIRTUAL
async def test_a_batch_costs_two_requests_in_ten_seconds_and_one_reading_a_minute(
    world: World,
) -> None:
    """The two requests renew its lease and look for control requests."""
    store: Any = Counted(world.store)
    cluster: Any = Counted(world.cluster)
    async with aio.Client(platform=replace(world.platform, store=store, cluster=cluster)) as client:
        batch = await client.run_async_map(same, range(50), max_concurrent=None)
        waiting = asyncio.create_task(batch.results())
        await settled(world, 50)
        await asyncio.sleep(2 * RECONCILE_S)
        requests = await requests_within(LONG_S, store, cluster)
        beats = LONG_S / RHYTHM_S
        assert requests.pop("replace") == beats
        looks = beats + requests["list"]
        assert requests.pop("look") == looks, "each list also looks for a collection"
        requests["find"] -= requests["list"]  # each reading also asks for the workers
        assert requests.pop("scale") == requests["list"], "and the launcher, for the round"
        assert is_one_reading_a_minute(requests), "one list for all its items"
        world.gate.set()
        assert await waiting == [*range(50)]


@pytest.mark.full
@VIRTUAL
async def test_a_poll_timeout_ends_no_wait_for_a_batch_whose_items_are_all_known(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, [1, 2])
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id, poll_timeout=1)
        with pytest.raises(errors.ResultTimeout, match="after 300 s"):
            await found.results(timeout=300)
        world.gate.set()
        assert await found.results() == [1, 2]


@VIRTUAL
async def test_a_poll_timeout_limits_the_search_for_items_that_are_still_submitted(
    world: World, client: aio.Client
) -> None:
    second_input, loop = asyncio.Event(), asyncio.get_running_loop()

    async def inputs() -> AsyncIterator[int]:
        yield 1
        await second_input.wait()
        yield 2

    batch = await client.run_async_map(same, inputs(), max_concurrent=1)
    await world.until_started(1)
    world.gate.set()
    async with aio.Client(platform=world.platform) as other:
        since = loop.time()
        found = await other.attach_batch(batch.group_id, poll_timeout=30)
        for waiting in (found.wait, found.results, lambda: all_completed(found)):
            with pytest.raises(errors.ResultTimeout, match="1 of its items"):
                await waiting()
            assert 30 <= loop.time() - since < 40, "measured from the attach"
        patient = await other.attach_batch(batch.group_id, poll_timeout=1000)
        waiting_for_all = asyncio.create_task(patient.results(cleanup=False))
        await asyncio.sleep(100)
        second_input.set()
        assert await waiting_for_all == [1, 2]


async def all_completed(batch: aio.BatchHandle[int]) -> int:
    return len([job async for job in batch.as_completed()])
