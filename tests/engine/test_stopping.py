"""Stopping a batch in any way hangs and loses nothing, and takes few requests."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic.aio.ports import ObjectInfo
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, World, until


def same(x: int) -> int:
    return x


@VIRTUAL
async def test_many_live_items_end_by_a_few_requests(client: aio.Client, world: World) -> None:
    batch = await client.run_async_map(same, range(100), max_concurrent=None)
    await until(lambda: world.started == 100)
    world.cluster.requests.clear()
    await batch.cancel()
    assert world.cluster.requests["tell"] <= 2 and not world.cluster.requests["delete"]
    assert await batch.status_counts() == {"NOT_FOUND": 100}


@VIRTUAL
@pytest.mark.parametrize("ends", [False, True])
async def test_a_stop_before_the_end_of_lazy_inputs_cuts_the_batch(
    client: aio.Client, world: World, ends: bool
) -> None:
    async def inputs() -> AsyncIterator[int]:
        yield 1
        await (asyncio.sleep(1) if ends else asyncio.Event().wait())

    world.gate.set()
    batch = await client.run_async_map(same, inputs(), max_concurrent=1)
    await until(lambda: batch.stored)
    assert await (await batch.job(0)).result(cleanup=False) == 1
    if ends:
        await batch.wait()
    await batch.cancel()
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        for handle in (batch, found):
            assert await handle.status_counts() == {"SUCCEEDED": 1}
            assert (handle.finished, handle.is_cut) == (True, not ends)


@VIRTUAL
@pytest.mark.parametrize("ends", [False, True])
async def test_a_block_that_ends_lazy_inputs_early_says_how_many_it_has_taken(
    client: aio.Client, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    async def inputs() -> AsyncIterator[int]:
        yield 1
        yield 2
        if not ends:
            await asyncio.Event().wait()

    batch = await client.run_async_map(same, inputs())
    with pytest.raises(KeyboardInterrupt):
        async with batch:
            await until(lambda: batch.sealed if ends else batch.stored == 2)
            raise KeyboardInterrupt
    assert ("has taken 2 inputs from their iterator" in caplog.text) is not ends


@VIRTUAL
async def test_a_block_whose_inputs_raise_cancels_a_batch_that_then_takes_no_more(
    client: aio.Client, world: World
) -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise OSError("nfs")

    world.gate.set()
    batch = await client.run_async_map(same, broken())
    with pytest.raises(OSError, match="nfs"):
        async with batch:
            await batch.results()
    assert "resume" not in await batch.reason()
    async with aio.Client(platform=world.platform) as other:
        for handle in (batch, await other.attach_batch(batch.group_id)):
            with pytest.raises(errors.ConfigurationError, match=r"was cancelled.* new batch"):
                await handle.resume(inputs=[2])
            assert await handle.status_counts() == {"SUCCEEDED": 1}


@VIRTUAL
async def test_the_error_of_a_cancelled_item_names_the_cause(
    client: aio.Client, world: World
) -> None:
    batch = await client.run_async_map(same, range(2), max_concurrent=1)
    await until(lambda: world.started == 1)
    await (await batch.job(1)).cancel()
    await batch.cancel()
    errors_of = await batch.results(return_exceptions=True)
    causes = "its batch was cancelled", "cancel() was called"
    for index, (error, cause) in enumerate(zip(errors_of, causes, strict=True)):
        assert str(error).endswith(f"was cancelled ({cause})")
        assert await (await batch.job(index)).reason() == f"cancelled ({cause})"


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
    assert {type(result) for result in results[:50]} == {errors.JobCancelled}
    assert str(results[0]).endswith("was cancelled (cancel() was called)")
    assert await jobs[0].reason() == "cancelled (cancel() was called)"
    assert results[50:] == [*range(50, 60)]


async def last_long(number: int) -> int:
    await asyncio.sleep(700)  # longer than any time limit of the engine
    return number


async def linger(number: int) -> int:
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(60)
    return number


async def exists(world: World, name: str) -> bool:
    listed = await world.platform.store.list("batches/")
    return any(stored.name.endswith(name) for stored in listed)


@VIRTUAL
async def test_the_submitter_notices_the_end_of_another_process_s_retry(
    client: aio.Client, world: World
) -> None:
    world.gate.set()
    batch = await client.run_async_map(last_long, range(1))
    while not await exists(world, ".0001.claim"):
        await asyncio.sleep(1)
    await batch.cancel()
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        assert await found.retry_failed() == 1
        while not await exists(world, ".0003.claim"):
            await asyncio.sleep(1)
        async with asyncio.timeout(300):
            await batch.cancel()
        assert await batch.status_counts() == {"NOT_FOUND": 1}


@pytest.mark.looptime(noop_cycles=10)  # time jumps 3,500 times: it polls every 0.2 s
@pytest.mark.parametrize("cancels", [False, True])
async def test_the_submitter_can_wait_for_another_process_s_retry(
    client: aio.Client, world: World, cancels: bool
) -> None:
    batch = await client.run_async_map(last_long, range(1))
    await batch.cancel()
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        assert await found.retry_failed() == 1
        world.gate.set()
        while not (await exists(world, ".0002.claim") or await exists(world, ".0003.claim")):
            await asyncio.sleep(1)
        job = await batch.job(0)
        assert "NOT_FOUND" not in await batch.status_counts()
        async with asyncio.timeout(1000):
            if cancels:
                await job.cancel()
            else:
                assert await job.result(cleanup=False) == 0


@VIRTUAL
async def test_a_replaced_submitter_notices_the_next_one_s_retry() -> None:
    dies, started = asyncio.Event(), asyncio.Event()

    async def work(run: Any) -> int | None:
        if not run.spec.name.endswith("-1"):
            return await carry_out(run)
        started.set()
        await dies.wait()
        return 9

    platform = on_loop_time(memory_platform(work))
    async with aio.Client(platform=platform) as client, aio.Client(platform=platform) as other:
        batch = await client.run_async_map(same, range(1), retries=1)
        await started.wait()
        waiting = asyncio.create_task((await batch.job(0)).result(cleanup=False))
        found = await other.attach_batch(batch.group_id)
        await found.resume(force=True)
        with pytest.raises(errors.SubmitterLost):
            await batch.wait()
        dies.set()
        async with asyncio.timeout(300):
            assert await waiting == 0


@VIRTUAL
async def test_a_cancel_during_a_takeover_notices_the_end(client: aio.Client, world: World) -> None:
    world.gate.set()
    batch = await client.run_async_map(linger, range(2), max_concurrent=1)
    while not await exists(world, ".0001.claim"):
        await asyncio.sleep(1)
    async with aio.Client(platform=world.platform) as other:
        await (await other.attach_batch(batch.group_id)).resume(force=True)
        async with asyncio.timeout(300):
            await batch.cancel()
        assert await exists(world, ".0001.outcome")
    assert await batch.status_counts() == {"NOT_FOUND": 2}


@VIRTUAL
async def test_a_timeout_of_the_batch_outlives_its_submitter(world: World) -> None:
    async with aio.Client(platform=world.platform) as first:
        batch = await first.run_async_map(same, range(3), max_concurrent=1, batch_timeout=60)
        await until(lambda: world.started == 1)
    async with aio.Client(platform=world.platform) as second:
        found = await second.attach_batch(batch.group_id)
        await found.resume()
        results = await found.results(return_exceptions=True)
        reason = await (await found.job(0)).reason()
    assert {type(result) for result in results} == {errors.JobCancelled}
    assert "batch_timeout=60 s was over" in str(results[0])
    assert reason == "cancelled (timeout of its batch)"


@VIRTUAL
async def test_unfinished_items_of_a_closed_client_run_without_it(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, range(10), max_concurrent=4)
    await until(lambda: world.started == 4)
    await client.aclose()
    world.gate.set()
    async with aio.Client(platform=world.platform) as watching:
        observed = await watching.attach_batch(batch.group_id)
        assert await observed.results(cleanup=False) == [*range(10)]
        async with aio.Client(platform=world.platform) as other:
            found = await other.attach_batch(batch.group_id)
            began = asyncio.get_running_loop().time()
            await found.resume()
            assert asyncio.get_running_loop().time() - began < 40, "its lease was released"
            assert await found.results() == [*range(10)]


@VIRTUAL
async def test_a_job_that_another_process_has_removed_is_not_closed_as_lost(
    world: World, client: aio.Client
) -> None:
    """The end may be reported here after another process read the value and removed the job."""
    job = await client.submit(same, 1)
    await until(lambda: world.started == 1)
    store, cluster = world.platform.store, world.platform.cluster
    assert isinstance(cluster, MemoryCluster)
    scope = f"jobs/{job.job_id}/"
    await store.delete([stored.name for stored in await store.list(scope)])
    [seen] = await cluster.find()
    cluster.end(seen.name, exit_code=0, reason=None)
    with pytest.raises(errors.NotFound):
        await job.result()
    assert await job.status() is JobStatus.NOT_FOUND
    assert await store.list(scope) == []


class Fleeting(MemoryStore):
    """A store that removes all jobs and calls ``then`` after a client lists a job's record."""

    then: Callable[[], None] | None = None

    async def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        found = await super().list(prefix)
        if self.then is not None and prefix.endswith("handle.json"):
            await self.delete([stored.name for stored in await super().list("jobs/")])
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
        [seen] = await cluster.find()
        store.then = lambda: cluster.end(seen.name, exit_code=0, reason=None)
        assert await job.status() is JobStatus.NOT_FOUND


class SlowToRelease(MemoryStore):
    """A store whose replies to changes of a lease take a second."""

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
    assert loop.time() - since < 4, "checking another client's lease takes 5 s"


@VIRTUAL
async def test_nothing_is_asked_of_a_batch_that_another_process_has_cleaned_up(
    world: World, client: aio.Client
) -> None:
    batch = await client.run_async_map(same, range(2))
    await until(lambda: world.started == 2)
    async with aio.Client(platform=world.platform) as other:
        [found] = await other.list_batches()  # it looks the batch up when used
        await batch.cleanup()
        async with asyncio.timeout(300):
            await found.cancel()
        assert await world.platform.store.list("batches/") == []
        with pytest.raises(errors.NotFound, match="was cleaned up"):
            await found.statuses()
