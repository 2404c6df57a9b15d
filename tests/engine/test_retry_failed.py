"""Any process can retry failed items, and no other items run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._labels import INDEX
from kinetic.aio import _lease
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus
from kinetic.testing import carry_out, memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, Passing, until

BROKEN = set[int]()
RUNS = Counter[int]()
HELD = dict[int, asyncio.Event]()  # the item of this index runs once its event is set


@pytest.fixture(autouse=True)
def clean() -> None:
    BROKEN.clear()
    RUNS.clear()
    HELD.clear()


async def work(run: Any) -> int | None:
    index = run.spec.order.index
    RUNS[index] += 1
    if index in HELD:
        await HELD[index].wait()
    return await carry_out(run)


def fragile(number: int) -> int:
    from tests_shared_state import BROKEN  # type: ignore[import-not-found]

    if number in BROKEN:
        raise ValueError(number)
    return number


@pytest.fixture
async def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    import sys
    import types

    shared: Any = types.ModuleType("tests_shared_state")
    shared.BROKEN = BROKEN
    monkeypatch.setitem(sys.modules, "tests_shared_state", shared)
    return on_loop_time(memory_platform(work))


async def failed(client: aio.Client, **terms: Any) -> aio.BatchHandle[int]:
    BROKEN.update({1, 3})
    batch = await client.run_async_map(fragile, range(5), **terms)
    with pytest.raises(errors.BatchError):
        await batch.results(cleanup=False)
    BROKEN.clear()
    return batch


@VIRTUAL
async def test_only_what_failed_runs_again(client: aio.Client) -> None:
    batch = await failed(client)
    may_run = HELD[1] = asyncio.Event()
    assert await batch.retry_failed() == 2
    assert not batch.finished
    may_run.set()
    assert await batch.results() == [0, 1, 2, 3, 4]
    assert RUNS == {0: 1, 1: 2, 2: 1, 3: 2, 4: 1}
    assert await batch.retry_failed() == 0


@VIRTUAL
async def test_a_retried_job_exists_until_it_is_cleaned_up(client: aio.Client) -> None:
    batch = await failed(client)
    job = await batch.job(1)
    await batch.results(return_exceptions=True)
    assert await job.status() is JobStatus.NOT_FOUND
    await batch.retry_failed()
    await batch.wait()
    assert await job.status() is JobStatus.SUCCEEDED
    await batch.results()
    assert await job.status() is JobStatus.NOT_FOUND and await job.result() == 1


@VIRTUAL
async def test_only_those_that_are_named(client: aio.Client) -> None:
    batch = await failed(client)
    assert await batch.retry_failed([3, 4]) == 1
    values = await batch.results(return_exceptions=True)
    assert isinstance(values[1], ValueError)
    assert values[3] == 3
    with pytest.raises(errors.NotFound, match="no item 9"):
        await batch.retry_failed([9])


@VIRTUAL
async def test_the_budget_is_whole_again(client: aio.Client) -> None:
    batch = await failed(client, retries=1)
    assert RUNS[1] == 2
    BROKEN.add(1)
    assert await batch.retry_failed() == 2
    with pytest.raises(errors.BatchError):
        await batch.results()
    assert RUNS[1] == 4


@VIRTUAL
async def test_the_submitter_serves_another_process_s_retry(
    client: aio.Client, other: aio.Client, platform: Platform
) -> None:
    """One process requests the retry; another, which holds the lease, starts it."""
    gate = asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await gate.wait()

    BROKEN.add(1)
    batch = await client.run_async_map(fragile, inputs())
    await until(lambda: batch._batch.submission.ended == 3)
    BROKEN.clear()
    found = await other.attach_batch(batch.group_id)
    assert await found.retry_failed() == 1
    assert not found._batch.submits
    gate.set()
    assert await batch.results(cleanup=False) == [0, 1, 2]
    assert await found.results(cleanup=False) == [0, 1, 2]
    assert RUNS[1] == 2


@VIRTUAL
async def test_two_that_ask_at_once_grant_one_retry(client: aio.Client, other: aio.Client) -> None:
    group = (await failed(client)).group_id
    first, second = await client.attach_batch(group), await other.attach_batch(group)
    counts = await asyncio.gather(first.retry_failed(), second.retry_failed())
    assert sorted(counts) == [0, 2]
    for batch in (first, second):
        assert await batch.results(cleanup=False) == [0, 1, 2, 3, 4]
    assert RUNS[1] == RUNS[3] == 2


@VIRTUAL
async def test_what_was_cancelled_may_run_after_all(client: aio.Client, other: aio.Client) -> None:
    batch = await client.run_async_map(fragile, range(4), max_concurrent=1)
    await batch.cancel()
    cancelled = [index for index, status in await batch.statuses() if status.value == "NOT_FOUND"]
    assert cancelled
    found = await other.attach_batch(batch.group_id)
    assert await found.retry_failed() == len(cancelled)
    assert await found.results() == [0, 1, 2, 3]


@VIRTUAL
async def test_the_ends_of_all_items_are_read_with_few_listings(
    client: aio.Client, platform: Platform
) -> None:
    batch = await failed(client)
    await batch._batch.coordinator.over.wait()  # type: ignore[union-attr]
    async with aio.Client(platform=platform) as reader:
        platform.store.requests.clear()  # type: ignore[attr-defined]
        found = await reader.attach_batch(batch.group_id)
        assert found.finished
        assert platform.store.requests["list"] <= 3  # type: ignore[attr-defined]
        values = await found.results(cleanup=False, return_exceptions=True)
        assert [repr(value) for value in values] == [
            "0", "ValueError(1)", "2", "ValueError(3)", "4",
        ]  # fmt: skip


@VIRTUAL
async def test_a_client_can_retry_items_that_failed_again_in_another_process(
    client: aio.Client, other: aio.Client
) -> None:
    batch = await failed(client)
    found = await other.attach_batch(batch.group_id)
    BROKEN.update({1, 3})
    assert await found.retry_failed() == 2
    with pytest.raises(errors.BatchError):
        await found.results(cleanup=False)
    BROKEN.clear()
    assert await batch.retry_failed() == 2
    assert await batch.results() == [*range(5)]


@VIRTUAL
async def test_a_client_continues_what_it_retried_if_the_submitter_vanishes(
    client: aio.Client, other: aio.Client, platform: Platform
) -> None:
    """All items had ended, so this client did not watch the lease any more."""
    batch = await failed(client)
    found = await other.attach_batch(batch.group_id)
    scope = found._batch.submission.identity.scope
    held = await _lease.acquire(platform.store, scope, None, platform.clock)
    holder = asyncio.create_task(held.keep())
    assert await found.retry_failed() == 2
    holder.cancel()
    assert await found.results(timeout=300) == [0, 1, 2, 3, 4]


class SlowRelease(Passing):
    """A store that releases a lease only after ``gate`` is set."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.gate, self.reached = asyncio.Event(), asyncio.Event()

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        if b'"held": false' in body:
            self.reached.set()
            await self.gate.wait()
        replaced: int = await self.port.replace(name, body, generation=generation)
        return replaced


@VIRTUAL
async def test_a_retry_and_a_stop_during_the_release_of_the_lease_end_the_batch(
    other: aio.Client, platform: Platform
) -> None:
    store: Any = SlowRelease(platform.store)
    async with aio.Client(platform=replace(platform, store=store)) as client:
        batch = await failed(client)
        await store.reached.wait()
        submission = batch._batch.submission
        retrying = asyncio.create_task(batch.retry_failed([1]))
        await until(lambda: not submission.is_final(1))
        await asyncio.sleep(1)  # virtual: the coordinator has read the item
        found = await other.attach_batch(batch.group_id)
        stopping = asyncio.create_task(found.cancel())
        await until(lambda: found._batch.submission.requests.all_stopped)
        await submission.requests.read()
        await asyncio.sleep(1)  # virtual: the coordinator has read what was stopped
        store.gate.set()
        assert await retrying == 1
        await asyncio.wait_for(batch.wait(), 300)
        await stopping


@VIRTUAL
async def test_nothing_is_tried_again_that_another_process_has_cleaned_up(
    client: aio.Client, other: aio.Client, platform: Platform
) -> None:
    BROKEN.add(1)
    batch = await client.run_async_map(fragile, range(3))
    await batch.wait()
    found = await other.attach_batch(batch.group_id)
    await batch.cleanup()
    with pytest.raises(errors.NotFound, match="was cleaned up"):
        await found.retry_failed()
    assert await platform.store.list("batches/") == []


@VIRTUAL
async def test_inputs_that_raise_end_what_is_tried_again_as_well() -> None:
    again, enough = asyncio.Event(), asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        yield 0
        await enough.wait()
        raise LookupError("no more")

    async def fail_first(run: Any) -> int | None:
        if run.spec.order.attempt == 1:
            return 1
        again.set()
        await asyncio.Event().wait()
        return None

    platform = on_loop_time(memory_platform(fail_first))
    async with aio.Client(platform=platform) as client:
        with pytest.raises(LookupError, match="no more"):
            async with await client.run_async_map(fragile, inputs()) as batch:
                async for job in batch.as_completed():
                    assert job.group_index == 0
                    break
                assert await batch.retry_failed() == 1
                await again.wait()
                enough.set()
                await batch.results()
        attempts = [seen for seen in await platform.cluster.find() if INDEX in seen.labels]
        assert {seen.phase for seen in attempts} == {Phase.ENDED}
