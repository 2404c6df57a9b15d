"""However a batch is left: nothing hangs, nothing is lost, and few requests end much."""

from __future__ import annotations

import asyncio
import builtins
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner import wire
from kinetic.aio._requests import Requests
from kinetic.aio._session import LABEL_INDEX, LABEL_SUBMISSION
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec, ObjectInfo, Phase
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform

VIRTUAL = pytest.mark.looptime(noop_cycles=300)
"""Virtual time that gives the threads which pickle a moment before it jumps."""


class World:
    def __init__(self) -> None:
        self.started = 0
        self.gate = asyncio.Event()
        plain = memory_platform(self._work)
        self.platform: Platform = replace(plain, clock=asyncio.get_running_loop().time)
        self.requests: Counter[str] = plain.cluster.requests  # type: ignore[attr-defined]

    async def _work(self, run: Any) -> int | None:
        self.started += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            return 42
        return await carry_out(run)


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


@VIRTUAL
async def test_a_thousand_live_items_end_by_one_request(client: aio.Client, world: World) -> None:
    batch = await client.run_async_map(same, range(1000), max_concurrent=None)
    await until(lambda: world.started == 1000)
    world.requests.clear()
    began = time.process_time()
    await batch.cancel()
    assert time.process_time() - began < 10
    assert world.requests["delete"] == 1
    assert await batch.status_counts() == {"NOT_FOUND": 1000}


@VIRTUAL
async def test_many_single_cancels_are_merged(client: aio.Client, world: World) -> None:
    batch = await client.run_async_map(same, range(60), max_concurrent=None)
    await until(lambda: world.started == 60)
    jobs = [await batch.job(number) for number in range(50)]
    await asyncio.gather(*(job.cancel() for job in jobs))
    listed = await world.platform.store.list(f"batches/{batch.group_id}/control/")
    assert len(listed) <= 2
    world.gate.set()
    results = await batch.results(return_exceptions=True)
    assert {type(one) for one in results[:50]} == {errors.JobCancelled}
    assert results[50:] == [*range(50, 60)]


@VIRTUAL
async def test_an_item_that_was_cancelled_before_its_turn_does_not_start(
    client: aio.Client, world: World
) -> None:
    batch = await client.run_async_map(same, range(3), max_concurrent=1)
    await until(lambda: world.started == 1)
    await (await batch.job(1)).cancel()
    world.gate.set()
    results = await batch.results(return_exceptions=True)
    assert (results[0], type(results[1]), results[2]) == (0, errors.JobCancelled, 2)
    assert world.started == 2


@VIRTUAL
async def test_a_timeout_of_the_batch_outlives_its_submitter(world: World) -> None:
    async with aio.Client(platform=world.platform) as first:
        batch = await first.run_async_map(same, range(3), max_concurrent=1, batch_timeout=60)
        await until(lambda: world.started == 1)
    async with aio.Client(platform=world.platform) as second:
        found = await second.attach_batch(batch.group_id)
        await found.resume()
        results = await found.results(return_exceptions=True)
    assert {type(one) for one in results} == {errors.JobCancelled}


@VIRTUAL
async def test_letting_go_says_what_waits(world: World, client: aio.Client) -> None:
    batch = await client.run_async_map(same, range(10), max_concurrent=4)
    await until(lambda: world.started == 4)
    assert await batch._batch.let_go() == 6
    world.gate.set()
    with pytest.raises(errors.SubmitterLost, match="resume"):
        await batch.wait()
    assert world.started == 4
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        await found.resume()
        assert await found.results(cleanup=False) == [*range(10)]
    again = await client.attach_batch(batch.group_id)
    assert await again.results() == [*range(10)]


@VIRTUAL
async def test_lazy_inputs_are_not_let_go_of_by_accident(world: World, client: aio.Client) -> None:
    batch = await client.run_async_map(same, iter(range(10**9)), max_concurrent=2)
    await until(lambda: world.started == 2)
    with pytest.raises(errors.ConfigurationError, match="seal"):
        await batch._batch.let_go()
    waiting = await batch._batch.let_go(seal=True)
    assert waiting == batch.stored - 2
    world.gate.set()


@VIRTUAL
async def test_a_client_that_closes_says_how_to_go_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with aio.Client(platform=world.platform) as first:
            batch = await first.run_async_map(same, range(10), max_concurrent=2)
            await until(lambda: world.started == 2)
    assert f"attach_batch('{batch.group_id}').resume()" in caplog.text
    world.gate.set()
    async with aio.Client(platform=world.platform) as second:
        found = await second.attach_batch(batch.group_id)
        began = asyncio.get_running_loop().time()
        await found.resume()
        assert asyncio.get_running_loop().time() - began < 40, "its lease was released"
        assert await found.results() == [*range(10)]


@VIRTUAL
async def test_a_stop_by_fail_fast_is_seen_by_all(world: World, client: aio.Client) -> None:
    def fail(number: int) -> None:
        raise ValueError(number)

    world.gate.set()
    batch = await client.run_async_map(fail, range(20), max_concurrent=2, fail_fast=True)
    await batch.wait()
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        counts = await found.status_counts()
        assert counts == await batch.status_counts()
        assert counts["NOT_FOUND"] >= 16
    assert all(status is not JobStatus.PENDING for _, status in await batch.statuses())


def one_fails(number: int) -> None:
    if number == 0:
        raise ValueError(number)


@VIRTUAL
async def test_what_has_not_begun_is_taken_off_the_platform_when_another_fails(
    world: World,
) -> None:
    waiting = asyncio.Event()

    async def work(run: Any) -> int | None:
        if run.spec.labels[LABEL_INDEX] != "0":
            await waiting.wait()  # as one does for which there is no machine
        return await carry_out(run)

    platform = replace(memory_platform(work), clock=asyncio.get_running_loop().time)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(one_fails, range(5), max_concurrent=4, fail_fast=True)
        await batch.wait()
        assert await batch.status_counts() == {"FAILED": 1, "NOT_FOUND": 4}
        await until_nothing_lives(platform, batch.group_id)
    assert platform.cluster.requests["delete"] == 1  # type: ignore[attr-defined]


@VIRTUAL
async def test_what_goes_on_after_a_failure_is_left_alone(world: World) -> None:
    async def work(run: Any) -> int | None:
        while run.spec.labels[LABEL_INDEX] == "0" and not await claims(run.store):
            await asyncio.sleep(0.2)
        return await carry_out(run)

    async def lasts(number: int) -> int:
        if number == 0:
            raise ValueError(number)
        await asyncio.sleep(30)
        return number

    platform = replace(memory_platform(work), clock=asyncio.get_running_loop().time)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(lasts, range(2), max_concurrent=2, fail_fast=True)
        results = await batch.results(return_exceptions=True)
    assert (type(results[0]), results[1]) == (ValueError, 1)


async def claims(store: Any) -> bool:
    return any(one.name.endswith(".claim") for one in await store.list("batches/"))


async def until_nothing_lives(platform: Platform, group_id: str) -> None:
    async with asyncio.timeout(1000):
        while any(
            one.phase not in (Phase.ENDED, Phase.GONE)
            for one in await platform.cluster.find(labels={LABEL_SUBMISSION: group_id})
        ):
            await asyncio.sleep(0.2)


class SlowToLaunch(MemoryCluster):
    """Takes a job half a minute after it was asked to."""

    asked = 0

    async def launch(self, job: JobSpec) -> None:
        self.asked += 1
        await asyncio.sleep(30)
        await super().launch(job)


@VIRTUAL
@pytest.mark.parametrize("single", [False, True])
async def test_a_job_that_comes_after_the_stop_is_taken_back(world: World, single: bool) -> None:
    cluster = SlowToLaunch(world.platform.store, world._work)
    platform = replace(world.platform, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(3), max_concurrent=2)
        await until(lambda: cluster.asked == 2)
        if single:
            await asyncio.gather(*[(await batch.job(number)).cancel() for number in range(3)])
        else:
            await batch.cancel()
        await until(lambda: cluster.requests["launch"] == 2)
        await until_nothing_lives(platform, batch.group_id)
        assert await batch.status_counts() == {"NOT_FOUND": 3}


@VIRTUAL
async def test_a_job_that_another_process_had_stopped_before_it_came_is_taken_off(
    world: World, client: aio.Client
) -> None:
    """Its submitter hears of the stop at its next look, and who asked for it found no job."""
    batch = await client.run_async_map(same, range(3), max_concurrent=1)
    await until(lambda: world.started == 1)
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        requests = Requests(world.platform.store, f"batches/{batch.group_id}/")
        await requests.append(wire.Request(kind="stop", items=(0,), cause="cancel"))
        assert await (await found.job(0)).status() is JobStatus.NOT_FOUND
    await until(lambda: world.started == 2)  # the next one has its slot
    live = await world.platform.cluster.find(labels={LABEL_SUBMISSION: batch.group_id})
    assert [one.labels[LABEL_INDEX] for one in live] == ["1"]
    world.gate.set()
    assert (await batch.results(return_exceptions=True))[1:] == [1, 2]


@VIRTUAL
async def test_who_goes_on_with_a_batch_takes_off_what_was_stopped_before_it_began(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, range(4), max_concurrent=3)
    await until(lambda: world.started == 3)
    await batch._batch.let_go()
    requests = Requests(world.platform.store, f"batches/{batch.group_id}/")
    await requests.append(wire.Request(kind="stop", items=(0, 2), cause="cancel"))
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        await found.resume()
        await until(lambda: world.started == 4)
        live = await world.platform.cluster.find(labels={LABEL_SUBMISSION: batch.group_id})
        assert sorted(one.labels[LABEL_INDEX] for one in live) == ["1", "3"]
        world.gate.set()
        assert (await found.results(return_exceptions=True))[1::2] == [1, 3]


class Undeletable(MemoryCluster):
    """Its platform does not answer who wants a job deleted."""

    async def delete(
        self, *, names: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        raise errors.Unavailable("nobody answers")


@VIRTUAL
async def test_a_platform_that_deletes_nothing_does_not_keep_a_batch_from_its_end(
    world: World,
) -> None:
    async def work(run: Any) -> int | None:
        if run.spec.labels[LABEL_INDEX] == "1":
            await asyncio.Event().wait()
        return await carry_out(run)

    cluster = Undeletable(world.platform.store, work)
    async with aio.Client(platform=replace(world.platform, cluster=cluster)) as client:
        batch = await client.run_async_map(one_fails, range(2), fail_fast=True)
        await batch.wait()
        async with asyncio.timeout(300):
            assert await batch.retry_failed() == 2


async def test_what_was_tried_again_is_wanted() -> None:
    requests = Requests(MemoryStore(), "batches/b/")
    await requests.append(wire.Request(kind="stop", cause="cancel"))
    assert [requests.unwanted(index) for index in (0, 1)] == [True, True]
    await requests.append(wire.Request(kind="retry", bases={0: 1}))
    assert [requests.unwanted(index) for index in (0, 1)] == [False, True]
    await requests.append(wire.Request(kind="stop", cause="fail_fast", keep_running=True))
    assert [requests.unwanted(index) for index in (0, 1)] == [False, True]
    assert requests.stopped(0)


@VIRTUAL
async def test_a_job_that_another_process_has_removed_is_not_closed_as_lost(
    world: World, client: aio.Client
) -> None:
    """Its end may be told here after its value was taken elsewhere, and all of it removed."""
    job = await client.submit(same, 1)
    await until(lambda: world.started == 1)
    store, cluster = world.platform.store, world.platform.cluster
    assert isinstance(cluster, MemoryCluster)
    scope = f"jobs/{job.job_id}/"
    await store.delete([one.name for one in await store.list(scope)])
    [there] = await cluster.find()
    cluster.end(there.name, exit_code=0, reason=None)
    with pytest.raises(errors.NotFound):
        await job.result()
    assert await job.status() is JobStatus.NOT_FOUND
    assert await store.list(scope) == []


class Fleeting(MemoryStore):
    """``then`` happens right after somebody has looked for the record of a job."""

    then: Callable[[], None] | None = None

    async def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        found = await super().list(prefix)
        if self.then is not None and prefix.endswith("handle.json"):
            await self.delete([one.name for one in await super().list("jobs/")])
            self.then()
        return found


@VIRTUAL
async def test_the_status_of_what_is_removed_while_it_is_asked_for(world: World) -> None:
    store = Fleeting()
    cluster = MemoryCluster(store, world._work)
    platform = replace(world.platform, store=store, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(same, 1)
        await until(lambda: world.started == 1)
        [there] = await cluster.find()
        store.then = lambda: cluster.end(there.name, exit_code=0, reason=None)
        assert await job.status() is JobStatus.NOT_FOUND


class SlowToRelease(MemoryStore):
    """Its answers to a changed lease take a second."""

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        if name.endswith("/lease"):
            await asyncio.sleep(1)
        return await super().replace(name, body, generation=generation)


@VIRTUAL
async def test_cleanup_does_not_wait_long_for_its_own_lease(world: World) -> None:
    loop, store = asyncio.get_running_loop(), SlowToRelease()
    cluster = MemoryCluster(store, carry_out, slots=None)
    async with aio.Client(platform=replace(world.platform, store=store, cluster=cluster)) as client:
        batch = await client.run_async_map(same, range(2))
        assert await batch.results(cleanup=False) == [0, 1]
        since = loop.time()
        await batch.cleanup()
    assert loop.time() - since < 4, "to look at a lease of somebody else takes 5 s"


@VIRTUAL
async def test_cleanup_leaves_nothing(world: World, client: aio.Client) -> None:
    world.gate.set()
    batch = await client.run_async_map(same, range(5))
    await batch.results()
    await batch.cleanup()
    left = [one.name for one in await world.platform.store.list("")]
    assert not [name for name in left if batch.group_id in name]
    with pytest.raises(errors.NotFound):
        await world.platform.cluster.secret(batch.group_id)
