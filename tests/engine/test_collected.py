"""results() removes what it has collected, and clients still know how each item ended."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._labels import SUBMISSION
from kinetic._runner.protocol import outcomes, wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic.aio._submissions.ids import BatchIdentity
from kinetic.aio._submissions.item_states import ItemStates
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import RECORD_BYTES, Object, ObjectInfo, Observation
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.engine.world import VIRTUAL, World, dies, platform_with

KEPT = {"manifest", "collected", "lease"}
CLOSED = "attempts/000000/00000001.0001.outcome"
"""Outcome that stays: it keeps a lost process that still lives from committing."""


class Weak(MemoryStore):
    """A store whose connection breaks after ``changes`` further changes; -1 means never.

    ``listed`` has the names that listings have returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = -1
        self.deleted: list[str] = []
        self.listed: list[str] = []

    async def list(self, prefix: str) -> list[ObjectInfo]:
        found = await super().list(prefix)
        self.listed += [info.name for info in found]
        return found

    async def create(self, name: str, *args: Any, **options: Any) -> bool:
        self._count_change(name)
        return await super().create(name, *args, **options)

    async def delete(self, names: Collection[str]) -> None:
        for name in names:
            await asyncio.sleep(0)
            self._count_change(name)
            self.deleted.append(name)
            await super().delete([name])

    async def get(self, name: str, **options: Any) -> Object:
        await asyncio.sleep(0)
        return await super().get(name, **options)

    def _count_change(self, name: str) -> None:
        if name.startswith("batches/") and self.changes >= 0:
            self.changes -= 1
            if self.changes < 0:
                raise errors.BackendError("the connection breaks")


@pytest.fixture
async def store() -> Weak:
    return Weak()


@pytest.fixture
async def platform(store: Weak) -> Platform:
    clock, cluster = asyncio.get_running_loop().time, MemoryCluster(store, dies_once)
    return replace(memory_platform(), store=store, cluster=cluster, clock=clock)


async def dies_once(run: Any) -> int | None:
    """Let the first attempt of item 1 end without an outcome."""
    order = run.spec.order
    if (order.index, order.attempt) == (1, 1):
        return await dies(run)
    return await carry_out(run)


def double(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return 2 * number


async def names(store: Weak, batch: aio.BatchHandle[Any]) -> set[str]:
    scope = f"batches/{batch.group_id}/"
    return {stored.name.removeprefix(scope) for stored in await store.list(scope)}


def without_workers(found: set[str]) -> set[str]:
    """Leave out what stays until the cleanup: registrations of workers, and requests."""
    return {name for name in found if not name.startswith(("workers/", "control/"))}


async def submitted(client: aio.Client, inputs: Any = (0, 1, 2)) -> aio.BatchHandle[int]:
    return await client.run_async_map(double, inputs, retries=1)


async def seen_by_another(platform: Platform, group_id: str) -> dict[str, Any]:
    """Return what a new client finds out about the batch."""
    async with aio.Client(platform=platform) as other:
        [listed] = await other.list_batches()
        batch = await other.attach_batch(group_id)
        assert listed.group_id == group_id
        seen = {
            "finished": (listed.finished, batch.finished),
            "total": len(batch.jobs),
            "counts": (await listed.status_counts(), await batch.status_counts()),
            "failures": [job.job_id for job in await batch.failures()],
            "retried": await batch.retry_failed(),
        }
        await batch.resume(force=True)
        await batch.wait()
        return seen | {"at the end": await batch.status_counts()}


KNOWN = {
    "finished": (True, True),
    "total": 3,
    "counts": ({"SUCCEEDED": 3}, {"SUCCEEDED": 3}),
    "failures": [],
    "retried": 0,
    "at the end": {"SUCCEEDED": 3},
}


@VIRTUAL
@pytest.mark.parametrize("lazy", [False, True])
async def test_what_was_collected_is_removed_and_stays_known(
    platform: Platform, store: Weak, lazy: bool
) -> None:
    async def inputs() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async with aio.Client(platform=platform) as client:
        batch = await submitted(client, inputs() if lazy else range(3))
        assert await batch.results() == [0, 2, 4]
        assert without_workers(await names(store, batch)) == {*KEPT, CLOSED}
        assert await platform.cluster.find() == []
        with pytest.raises(errors.NotFound):
            await platform.cluster.secret(batch.group_id)
        assert await batch.status_counts() == {"SUCCEEDED": 3}
        assert await batch.results() == [0, 2, 4]
        assert [item.outcome.unwrap() async for item in batch.outcomes()] == [0, 2, 4]
        job = await batch.job(2)
        assert (await job.status(), await job.result()) == (JobStatus.NOT_FOUND, 4)
    rounds = platform.cluster.requests["scale"]  # type: ignore[attr-defined]
    assert await seen_by_another(platform, batch.group_id) == KNOWN
    assert platform.cluster.requests["scale"] == rounds  # type: ignore[attr-defined]


@VIRTUAL
async def test_collecting_takes_few_listings_and_deletes_only_objects_that_exist(
    platform: Platform, store: Weak
) -> None:
    """It lists an item that was tried twice, the inputs, and what has no known name."""
    async with aio.Client(platform=platform) as client:
        batch = await submitted(client)
        await batch.wait()
        await batch._batch.coordinator.over.wait()  # type: ignore[union-attr]
        present, listings = await names(store, batch), store.requests["list"]
        assert await batch.results() == [0, 2, 4]
        assert store.requests["list"] == listings + 3
    scope = f"batches/{batch.group_id}/"
    removed = without_workers(present) - {*KEPT, CLOSED}
    assert Counter(name.removeprefix(scope) for name in store.deleted) == Counter(removed)


@VIRTUAL
async def test_collecting_lists_no_attempt_that_returned_a_value(
    platform: Platform, store: Weak
) -> None:
    """To list an object, the store of a directory opens its file."""
    async with aio.Client(platform=platform) as client:
        batch = await submitted(client, range(4))
        await batch.wait()
        store.listed.clear()
        await batch.results()
        listed = [name.partition("/attempts/")[2] for name in store.listed if "/attempts/" in name]
        # The history needs both attempts of item 1, and the first one's objects may stay.
        first = ["000000/00000001.0001.claim", "000000/00000001.0001.outcome"]
        second = ["000000/00000001.0002.claim", "000000/00000001.0002.outcome"]
        assert listed == [*first, *second, *first]


@VIRTUAL
async def test_a_batch_in_which_something_failed_keeps_what_retry_failed_needs(
    platform: Platform, store: Weak
) -> None:
    async with aio.Client(platform=platform) as client:
        batch = await submitted(client, [0, -1])
        with pytest.raises(errors.BatchError):
            await batch.results()
        assert "collected" not in await names(store, batch)
        assert await batch.retry_failed() == 1


@VIRTUAL
async def test_failures_are_remembered_after_cleanup(platform: Platform) -> None:
    async with aio.Client(platform=platform) as client:
        batch = await submitted(client, [0, -1, -2])
        await batch.results(return_exceptions=True)
        await batch.cleanup()
        failed = await batch.failures()
        assert [job.group_index for job in failed] == [1, 2]
        assert [await job.status() for job in failed] == [JobStatus.NOT_FOUND] * 2


@VIRTUAL
async def test_cleanup_after_collecting_leaves_nothing(platform: Platform, store: Weak) -> None:
    async with aio.Client(platform=platform) as client:
        batch = await submitted(client)
        await batch.results()
        await batch.cleanup()
        assert await batch.failures() == []
        left = [stored.name for stored in await store.list("")]
    assert [name for name in left if batch.group_id in name] == []


@VIRTUAL
async def test_a_reader_gets_an_error_once_the_results_are_collected(
    platform: Platform, store: Weak
) -> None:
    async with aio.Client(platform=platform) as first, aio.Client(platform=platform) as second:
        batch = await submitted(first)
        await batch.wait()
        found = await second.attach_batch(batch.group_id)
        stream = found.outcomes(ordered=True)
        assert (await anext(stream)).outcome.unwrap() == 0
        assert await batch.results() == [0, 2, 4]
        with pytest.raises((errors.NotFound, StopAsyncIteration)):
            while True:  # the stream may have read some outcomes ahead
                await anext(stream)
        for read in (found.results, (await found.job(2)).estimate):
            with pytest.raises(errors.NotFound, match="collected"):
                await read()
        assert await (await found.job(2)).status() is JobStatus.SUCCEEDED


@VIRTUAL
async def test_an_outcome_that_arrives_after_the_removal_changes_nothing(
    platform: Platform, store: Weak
) -> None:
    """A slow request of the submitter, which had closed the attempt as lost."""
    async with aio.Client(platform=platform) as client:
        batch = await submitted(client)
        await batch.results()
        identity = batch._batch.submission.identity
    lost = wire.Outcome(
        wire.Kind.LOST, reason="node lost", executor=wire.VOID, body=outcomes.digest(b"")
    )
    name = wire.attempt_key(identity.scope, 2, 1, "outcome")
    await store.create(name, b"", lost.signed(identity.key, identity.scope, 2, 1))
    assert await seen_by_another(platform, batch.group_id) == KNOWN
    async with aio.Client(platform=platform) as other:
        found = await other.attach_batch(batch.group_id)
        job = await found.job(2)
        assert await job.status() is JobStatus.SUCCEEDED
        for read in (job.result, found.results):
            with pytest.raises(errors.NotFound, match="collected"):
                await read()


@VIRTUAL
async def test_of_two_that_collect_at_once_each_that_has_everything_returns_it(
    platform: Platform, store: Weak
) -> None:
    async with aio.Client(platform=platform) as first, aio.Client(platform=platform) as second:
        batch = await submitted(first)
        await batch.wait()
        found = await second.attach_batch(batch.group_id)
        results = await asyncio.gather(batch.results(), found.results(), return_exceptions=True)
        assert [0, 2, 4] in results
        assert all(isinstance(result, errors.NotFound) or result == [0, 2, 4] for result in results)
        assert {"manifest", "collected"} <= await names(store, batch)
    assert await seen_by_another(platform, batch.group_id) == KNOWN


@VIRTUAL
async def test_a_process_that_dies_while_it_removes_them_loses_and_repeats_nothing(
    platform: Platform, store: Weak, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    broke, changes = True, -1
    while broke:
        changes += 1
        async with aio.Client(platform=platform) as client:
            batch = await submitted(client)
            await batch.wait()
            await batch._batch.coordinator.over.wait()  # type: ignore[union-attr]
            store.changes = changes
            assert await batch.results() == [0, 2, 4], "a failed removal loses no result"
            broke, store.changes = store.changes < 0, -1
            assert await batch.results() == [0, 2, 4]
            assert without_workers(await names(store, batch)) == {*KEPT, CLOSED}, (
                "the removal continues"
            )
        rounds = platform.cluster.requests["scale"]  # type: ignore[attr-defined]
        assert await seen_by_another(platform, batch.group_id) == KNOWN
        assert platform.cluster.requests["scale"] == rounds  # type: ignore[attr-defined]
        async with aio.Client(platform=platform) as client:
            await client.cleanup(batch.group_id)
        assert await names(store, batch) == set()
    assert changes > 9


class Late(MemoryCluster):
    """Show the workers of `shown` also after their end."""

    shown: Sequence[Observation] = ()

    async def find(self, **selection: Any) -> list[Observation]:
        return [*self.shown] or await super().find(**selection)


@VIRTUAL
async def test_workers_that_the_platform_still_shows_are_not_listed_as_idle(world: World) -> None:
    platform, cluster = platform_with(Late, world._work)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(double, range(2))
        await world.until_started(2)
        shown = await cluster.find(labels={SUBMISSION: batch.group_id})
        assert len(await batch.workers()) == 2
        world.gate.set()
        assert await batch.results() == [0, 2]
        cluster.shown = shown
        assert await batch.workers() == []


@VIRTUAL
async def test_results_that_are_cancelled_amid_the_removal_are_not_lost(
    platform: Platform, store: Weak
) -> None:
    async with aio.Client(platform=platform) as client:
        batch = await submitted(client)
        await batch.wait()
        collecting = asyncio.create_task(batch.results())
        while "collected" not in await names(store, batch):
            await asyncio.sleep(0)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert await batch.results() == [0, 2, 4]
        assert not [name for name in await names(store, batch) if name.startswith("values/")]


async def test_the_record_of_a_batch_with_very_many_items_is_read() -> None:
    identity = BatchIdentity(
        id="grp-0123456789ab", key=b"k" * 32, budgets=RetryBudgets(), created=0.0
    )
    store = MemoryStore()
    history = [((), {}, {"loss": "x" * RECORD_BYTES})]  # a large note instead of many
    await ItemStates(identity, store).write_collected(1, history)
    states = ItemStates(identity, store)
    assert await states.read_collected()
    assert len(await states.read_history()) == 1


async def test_a_job_that_waited_long_for_its_place_renews_its_content(store: Weak) -> None:
    """A collection may remove it meanwhile, because no manifest names it yet."""
    now, reads = 0.0, Counter[str]()

    def clock() -> float:
        reads["clock"] += 1
        return now

    cluster = MemoryCluster(store, carry_out)
    platform = replace(memory_platform(), store=store, cluster=cluster, clock=clock)
    async with aio.Client(platform=platform, max_concurrent=1) as client:
        assert await (await client.submit(double, 1)).result() == 2
        assert not store.requests["renew"]
        await client.limit.acquire()
        reads.clear()
        waiting = asyncio.create_task(client.submit(double, 2))
        while not reads:
            await asyncio.sleep(0)
        now += 3600.0
        client.limit.release()
        assert await (await waiting).result() == 4
    assert store.requests["renew"] == 1
