"""Jobs that are no longer wanted are deleted from the platform, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kinetic import aio
from kinetic._labels import INDEX, SUBMISSION
from kinetic._runner.protocol import signing, wire
from kinetic.aio._submissions.control_log import ControlLog
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, World, platform_with, until


def same(x: int) -> int:
    return x


async def requests_of(world: World, group_id: str) -> ControlLog:
    """Open the log of requests like another process."""
    scope = f"batches/{group_id}/"
    key = signing.submission_key(await world.platform.cluster.root_key(), scope)
    return ControlLog(world.platform.store, scope, key)


async def unended(platform: Platform, group_id: str) -> list[Observation]:
    """Return each item and each worker that hasn't ended."""
    found = await platform.cluster.find(labels={SUBMISSION: group_id})
    return [seen for seen in found if seen.phase not in (Phase.ENDED, Phase.GONE)]


async def items_of(platform: Platform, group_id: str) -> list[str]:
    """Return the indexes of the items that run."""
    found = [seen.labels.get(INDEX) for seen in await unended(platform, group_id)]
    return sorted(index for index in found if index is not None)


async def until_gone(platform: Platform, group_id: str, left: int) -> None:
    async with asyncio.timeout(1000):
        while len(await unended(platform, group_id)) > left:
            await asyncio.sleep(0.2)


@VIRTUAL
async def test_fail_fast_leaves_running_jobs_alone(world: World) -> None:
    async def work(run: Any) -> int | None:
        while run.spec.labels[INDEX] == "0" and not await claims(run.store):
            await asyncio.sleep(0.2)
        return await carry_out(run)

    async def lasts(number: int) -> int:
        if number == 0:
            raise ValueError(number)
        await asyncio.sleep(30)
        return number

    platform = on_loop_time(memory_platform(work))
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(lasts, range(2), max_concurrent=2, fail_fast=True)
        results = await batch.results(return_exceptions=True)
    assert (type(results[0]), results[1]) == (ValueError, 1)


async def claims(store: Any) -> bool:
    return any(stored.name.endswith(".claim") for stored in await store.list("batches/"))


class SlowToScale(MemoryCluster):
    """A cluster that starts workers half a minute after the request."""

    asked = 0

    async def scale(self, *args: Any, **options: Any) -> int:
        self.asked += 1
        await asyncio.sleep(30)
        return await super().scale(*args, **options)


@VIRTUAL
@pytest.mark.parametrize("single", [False, True])
async def test_workers_that_come_after_the_stop_start_nothing(world: World, single: bool) -> None:
    platform, cluster = platform_with(SlowToScale, world._work)
    async with aio.Client(platform=platform) as client, aio.Client(platform=platform) as other:
        submitting = asyncio.create_task(client.run_async_map(same, range(3), max_concurrent=2))
        await until(lambda: cluster.asked)
        [found] = await other.list_batches()
        if single:
            await asyncio.gather(*[(await found.job(number)).cancel() for number in range(3)])
        else:
            await found.cancel()
        assert not submitting.done()
        batch = await submitting
        await until_gone(platform, batch.group_id, 0)
        assert await batch.status_counts() == {"NOT_FOUND": 3}
        assert cluster.requests["scale"] and world.started == 0


@VIRTUAL
async def test_items_that_were_stopped_without_a_client_end(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, range(4), max_concurrent=3)
    await until(lambda: world.started == 3)
    await client.aclose()
    requests = await requests_of(world, batch.group_id)
    await requests.append(wire.Request(kind="stop", items=(0, 2), cause="cancel"))
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        await found.resume()
        await until(lambda: world.started == 4)
        assert await items_of(world.platform, batch.group_id) == ["1", "3"]
        world.gate.set()
        assert (await found.results(return_exceptions=True))[1::2] == [1, 3]


@VIRTUAL
async def test_nothing_is_deleted_together_with_what_is_tried_again(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, range(2), max_concurrent=2)
    await until(lambda: world.started == 2)
    await batch.cancel()
    assert await batch.retry_failed([1]) == 1
    await until(lambda: world.started == 3)
    await batch._batch.delete_jobs()
    assert await items_of(world.platform, batch.group_id) == ["1"]
    world.gate.set()
    assert (await batch.results(return_exceptions=True))[1] == 1
    await until_gone(world.platform, batch.group_id, 0)


async def test_retried_items_are_wanted_again() -> None:
    requests = ControlLog(MemoryStore(), "batches/b/", b"key")
    await requests.append(wire.Request(kind="stop", cause="cancel"))
    assert [requests.standing(index).unwanted for index in (0, 1)] == [True, True]
    await requests.append(wire.Request(kind="retry", bases={0: 1}))
    assert [requests.standing(index).unwanted for index in (0, 1)] == [False, True]
    await requests.append(wire.Request(kind="stop", cause="fail_fast", keep_running=True))
    assert [requests.standing(index).unwanted for index in (0, 1)] == [False, True]
    assert requests.standing(0).stopped
    await requests.append(wire.Request(kind="stop", items=(0, 2), cause="cancel"))
    await requests.append(wire.Request(kind="retry", bases={2: 3, 3: 1}))
    await requests.append(wire.Request(kind="stop", cause=wire.CLEANUP))
    await requests.append(wire.Request(kind="retry", bases={0: 2}))
    for index in range(5):
        assert requests.standing(index) == wire.standing(index, requests.entries)
    assert requests.standing(0).stopped, "a cleaned-up batch retries nothing"
    assert requests.reopened == [0, 2, 3]


@VIRTUAL
async def test_items_that_are_cancelled_one_by_one_count_as_cancelled(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, range(3), max_concurrent=2)
    await until(lambda: world.started == 2)
    await asyncio.gather(*[(await batch.job(number)).cancel() for number in range(3)])
    await until_gone(world.platform, batch.group_id, 0)
    assert await batch.status_counts() == {"NOT_FOUND": 3}
    assert world.started == 2
