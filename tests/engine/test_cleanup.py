"""Jobs that are no longer wanted are deleted from the platform, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import signing, wire
from kinetic.aio._engine.control_log import ControlLog
from kinetic.aio._engine.submission import LABEL_INDEX, LABEL_SUBMISSION
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.job_status import JobStatus
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


async def unended(platform: Platform, group_id: str) -> list[str]:
    """Return item and attempt of each job that hasn't ended."""
    found = await platform.cluster.find(labels={LABEL_SUBMISSION: group_id})
    over = (Phase.ENDED, Phase.GONE)
    return sorted(job.name.removeprefix(f"{group_id}-") for job in found if job.phase not in over)


async def until_gone(platform: Platform, group_id: str, left: int) -> None:
    async with asyncio.timeout(1000):
        while len(await unended(platform, group_id)) > left:
            await asyncio.sleep(0.2)


def first_fails(number: int) -> None:
    if number == 0:
        raise ValueError(number)


@VIRTUAL
async def test_fail_fast_deletes_jobs_that_have_not_started(world: World) -> None:
    waiting = asyncio.Event()

    async def work(run: Any) -> int | None:
        if run.spec.labels[LABEL_INDEX] != "0":
            await waiting.wait()  # like a job that no machine has room for
        return await carry_out(run)

    platform = on_loop_time(memory_platform(work))
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(first_fails, range(5), max_concurrent=4, fail_fast=True)
        await batch.wait()
        assert await batch.status_counts() == {"FAILED": 1, "NOT_FOUND": 4}
        await until_gone(platform, batch.group_id, 0)
    assert platform.cluster.requests["delete"] == 1  # type: ignore[attr-defined]


@VIRTUAL
async def test_fail_fast_leaves_running_jobs_alone(world: World) -> None:
    async def work(run: Any) -> int | None:
        while run.spec.labels[LABEL_INDEX] == "0" and not await claims(run.store):
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


class SlowToLaunch(MemoryCluster):
    """A cluster that launches a job half a minute after the request."""

    asked = 0

    async def launch(self, job: JobSpec) -> None:
        self.asked += 1
        await asyncio.sleep(30)
        await super().launch(job)


@VIRTUAL
@pytest.mark.parametrize("single", [False, True])
async def test_a_job_that_comes_after_the_stop_is_taken_back(world: World, single: bool) -> None:
    platform, cluster = platform_with(SlowToLaunch, world._work)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(3), max_concurrent=2)
        await until(lambda: cluster.asked == 2)
        if single:
            await asyncio.gather(*[(await batch.job(number)).cancel() for number in range(3)])
        else:
            await batch.cancel()
        await until(lambda: cluster.requests["launch"] == 2)
        await until_gone(platform, batch.group_id, 0)
        assert await batch.status_counts() == {"NOT_FOUND": 3}


@VIRTUAL
async def test_a_job_that_was_stopped_before_its_launch_is_deleted(
    world: World, client: aio.Client
) -> None:
    """The stopping process finds no job yet; the submitter sees the stop at its next poll."""
    batch = await client.run_async_map(same, range(3), max_concurrent=1)
    await until(lambda: world.started == 1)
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        requests = await requests_of(world, batch.group_id)
        await requests.append(wire.Request(kind="stop", items=(0,), cause="cancel"))
        assert await (await found.job(0)).status() is JobStatus.NOT_FOUND
    await until(lambda: world.started == 2)  # the next one has its slot
    live = await world.platform.cluster.find(labels={LABEL_SUBMISSION: batch.group_id})
    assert [job.labels[LABEL_INDEX] for job in live] == ["1"]
    world.gate.set()
    assert (await batch.results(return_exceptions=True))[1:] == [1, 2]


@VIRTUAL
async def test_resuming_deletes_the_jobs_of_stopped_items(world: World, client: aio.Client) -> None:
    batch = await client.run_async_map(same, range(4), max_concurrent=3)
    await until(lambda: world.started == 3)
    await client.aclose()
    requests = await requests_of(world, batch.group_id)
    await requests.append(wire.Request(kind="stop", items=(0, 2), cause="cancel"))
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        await found.resume()
        await until(lambda: world.started == 4)
        live = await world.platform.cluster.find(labels={LABEL_SUBMISSION: batch.group_id})
        assert sorted(job.labels[LABEL_INDEX] for job in live) == ["1", "3"]
        world.gate.set()
        assert (await found.results(return_exceptions=True))[1::2] == [1, 3]


@VIRTUAL
async def test_resuming_deletes_every_job_of_a_stopped_item(
    world: World, client: aio.Client
) -> None:
    """This includes the job of an earlier attempt that a retry has superseded."""
    batch = await client.run_async_map(same, range(2), max_concurrent=2)
    await until(lambda: world.started == 2)
    requests = await requests_of(world, batch.group_id)
    await requests.append(wire.Request(kind="stop", items=(0,), keep_running=True))
    assert await (await batch.job(0)).status() is JobStatus.NOT_FOUND
    assert await batch.retry_failed([0]) == 1
    await until(lambda: world.started == 3)
    assert await unended(world.platform, batch.group_id) == ["0-1", "0-2", "1-1"]
    await client.aclose()
    await requests.append(wire.Request(kind="stop", items=(0,), cause="cancel"))
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        await found.resume()
        await until_gone(world.platform, batch.group_id, 1)
        assert await unended(world.platform, batch.group_id) == ["1-1"]
        world.gate.set()
        assert (await found.results(return_exceptions=True))[1] == 1


@VIRTUAL
async def test_a_job_that_comes_after_its_item_was_stopped_and_tried_again_is_taken_back(
    world: World,
) -> None:
    platform, cluster = platform_with(SlowToLaunch, world._work)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(1))
        await until(lambda: cluster.asked == 1)
        await (await batch.job(0)).cancel()
        assert await batch.retry_failed() == 1
        await until(lambda: cluster.requests["launch"] == 2)
        await until_gone(platform, batch.group_id, 1)
        assert await unended(platform, batch.group_id) == ["0-2"]
        world.gate.set()
        assert await batch.results() == [0]


class SlowToDelete(MemoryCluster):
    """A cluster that deletes nothing before its gate opens."""

    def __init__(self, store: Any, work: Any) -> None:
        super().__init__(store, work)
        self.gate = asyncio.Event()
        self.asked = 0

    async def delete(self, **selection: Any) -> None:
        self.asked += 1
        await self.gate.wait()
        await super().delete(**selection)


@VIRTUAL
@pytest.mark.parametrize("canceller", ["holder", "observer"])
async def test_a_retry_survives_the_late_deletion_of_stopped_jobs(
    world: World, canceller: str
) -> None:
    platform, cluster = platform_with(SlowToDelete, world._work)
    async with aio.Client(platform=platform) as client, aio.Client(platform=platform) as other:
        batch = await client.run_async_map(same, range(2), max_concurrent=2)
        await until(lambda: world.started == 2)
        found = await other.attach_batch(batch.group_id)
        cancelling = asyncio.create_task((batch if canceller == "holder" else found).cancel())
        await until(lambda: cluster.asked)
        assert await found.retry_failed() == 2
        await until(lambda: world.started == 4)
        cluster.gate.set()
        await until_gone(platform, batch.group_id, 2)
        assert await unended(platform, batch.group_id) == ["0-2", "1-2"]
        world.gate.set()
        assert await found.results(cleanup=False) == [0, 1]
        await cancelling


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
    assert await unended(world.platform, batch.group_id) == ["1-2"]
    world.gate.set()
    assert (await batch.results(return_exceptions=True))[1] == 1
    assert await unended(world.platform, batch.group_id) == []


class Mute(SlowToLaunch):
    """A cluster that launches late, loses the reply, and doesn't answer requests by name."""

    async def launch(self, job: JobSpec) -> None:
        await super().launch(job)
        raise errors.Unavailable("the reply was lost")

    async def find(self, **selection: Any) -> list[Observation]:
        if "names" in selection:
            raise errors.Unavailable("no answer")
        return await super().find(**selection)


@VIRTUAL
async def test_a_job_whose_launch_was_never_confirmed_is_deleted_at_the_end(world: World) -> None:
    platform, cluster = platform_with(Mute, world._work)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(1))
        await until(lambda: cluster.asked == 1)
        await batch.cancel()
        assert cluster.requests["launch"] == 1
        await until_gone(platform, batch.group_id, 0)


class Refusing(MemoryCluster):
    """A cluster that doesn't answer launches of item 0's first attempt while ``refuses`` is set."""

    asked = 0
    refuses = True

    async def launch(self, job: JobSpec) -> None:
        if self.refuses and job.name.endswith("-0-1"):
            self.asked += 1
            raise errors.Unavailable("nobody answers")
        await super().launch(job)


@VIRTUAL
async def test_giving_up_an_attempt_does_not_free_the_slot_of_the_next(world: World) -> None:
    async def work(run: Any) -> int | None:
        if run.spec.labels[LABEL_INDEX] == "1":
            return await carry_out(run)
        return await world._work(run)

    platform, cluster = platform_with(Refusing, work)
    async with aio.Client(platform=platform, max_concurrent=1) as client:
        batch = await client.run_async_map(same, range(2))
        await until(lambda: cluster.asked == 8)  # the next request comes ten seconds later
        await (await batch.job(0)).cancel()
        assert await batch.retry_failed() == 1
        await until(lambda: world.started == 1)
        cluster.refuses = False
        after = await client.run_async_map(same, range(1))
        await asyncio.sleep(30)
        assert world.started == 1, "the only slot is taken"
        world.gate.set()
        assert [await each.results() for each in (batch, after)] == [[0, 1], [0]]


class Undeletable(MemoryCluster):
    """A cluster that doesn't answer requests to delete jobs."""

    async def delete(self, **selection: Any) -> None:
        raise errors.Unavailable("nobody answers")


@VIRTUAL
async def test_a_platform_that_deletes_nothing_does_not_keep_a_batch_from_its_end(
    world: World,
) -> None:
    async def work(run: Any) -> int | None:
        if run.spec.labels[LABEL_INDEX] == "1":
            await asyncio.Event().wait()
        return await carry_out(run)

    platform, _ = platform_with(Undeletable, work)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(first_fails, range(2), fail_fast=True)
        await batch.wait()
        async with asyncio.timeout(300):
            assert await batch.retry_failed() == 2


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
