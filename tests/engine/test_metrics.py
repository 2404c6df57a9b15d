"""Test how a client reads reports, and prunes attempts, on a platform in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kinetic import Metric, aio, errors
from kinetic._runner.protocol import metrics, outcomes, wire
from kinetic.testing import Run, carry_out
from tests.engine.reports import store_slot, succeed
from tests.engine.world import VIRTUAL, Passing, World, claim


def same(x: int) -> int:
    return x


async def read(world: World, count: int = 1, **options: Any) -> list[Metric]:
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, range(count), **options)
        world.gate.set()
        return [metric async for metric in batch.metrics()]


def steps(found: list[Metric]) -> list[tuple[int, int]]:
    return [(metric.attempt, metric.step) for metric in found]


@VIRTUAL
async def test_each_report_is_yielded_once_whatever_was_sent_twice() -> None:
    async def work(run: Run) -> int:
        await store_slot(run, 0, [(0, 0.5), (1, 0.4)])
        await store_slot(run, 1, [(0, 0.5), (1, 0.4), (2, 0.3)])  # the first reply was lost
        await store_slot(run, 2, [(7, 0.1)], writer="a fork")
        return await succeed(run, [(2, 0.3), (3, 0.2)], first=2)

    assert steps(await read(World(work))) == [(1, 0), (1, 1), (1, 2), (1, 7), (1, 3)]


@VIRTUAL
async def test_reports_with_a_wrong_signature_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    async def work(run: Run) -> int:
        await store_slot(run, 0, [(0, 0.5)], key=b"another key".ljust(32))
        await store_slot(run, 1, [(1, 0.4)])
        return await succeed(run, [])

    assert steps(await read(World(work))) == [(1, 1)]
    assert "is forged or damaged" in caplog.text


@VIRTUAL
async def test_the_reports_of_an_attempt_that_died_come_before_those_of_the_next() -> None:
    async def work(run: Run) -> int:
        if run.spec.order.attempt == 1:
            await claim(run)
            await store_slot(run, 0, [(5, 0.5)])
            return 9
        return await succeed(run, [(1, 0.1)])

    assert steps(await read(World(work), retries=1)) == [(1, 5), (2, 1)]


@VIRTUAL
async def test_an_outage_ends_the_loop_and_another_loop_has_everything() -> None:
    class Failing(Passing):
        async def get(self, name: str, **options: Any) -> Any:
            if "/metrics/" in name and self.fails:
                raise errors.Unavailable("the store is away")
            return await self.port.get(name, **options)

        fails = True

    async def work(run: Run) -> int:
        await store_slot(run, 0, [(0, 0.5)])
        return await succeed(run, [])

    world = World(work)
    store = Failing(world.platform.store)
    async with aio.Client(platform=replace(world.platform, store=store)) as client:
        batch = await client.run_async_map(same, [1])
        world.gate.set()
        with pytest.raises(errors.Unavailable):
            _ = [metric async for metric in batch.metrics()]
        store.fails = False
        assert steps([metric async for metric in batch.metrics()]) == [(1, 0)]


@pytest.mark.full
@VIRTUAL
async def test_another_client_reads_a_running_batch_with_few_requests() -> None:
    reports: asyncio.Queue[int] = asyncio.Queue()

    async def work(run: Run) -> int:
        await claim(run)
        if run.spec.order.index:
            return await forever()
        for slot in range(3):
            await store_slot(run, slot, [(await reports.get(), 0.5)], first=slot)
        return await forever()

    async def forever() -> int:
        await asyncio.Event().wait()
        return 0

    world = World(work)
    world.gate.set()
    async with (
        aio.Client(platform=world.platform) as client,
        aio.Client(platform=world.platform) as other,
    ):
        batch = await client.run_async_map(same, range(4))
        await world.until_started(4)
        found: asyncio.Queue[Metric] = asyncio.Queue()

        async def follow() -> None:
            async for metric in (await other.attach_batch(batch.group_id)).metrics():
                found.put_nowait(metric)

        following = asyncio.create_task(follow())
        for step in range(3):
            reports.put_nowait(step)
            assert await found.get() == (0, 1, step, 0.5)
        world.store.requests.clear()
        await asyncio.sleep(600.0)
        gets = world.store.requests["get"]
        # One running attempt has reported, and three haven't. Both clients also read requests, and
        # so does each of the four workers.
        assert 600 <= gets <= 600 * (1 + 3 / 5) + 200 + 4 * 60
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@VIRTUAL
async def test_only_the_open_attempt_is_pruned_and_only_by_one_object() -> None:
    world = World(carry_out)
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, [1, 2], prunable=True)
        await world.until_started(2)
        await batch.prune(0)
        await batch.prune(0, 1)
        await batch.prune(1, 2)  # there is no second attempt
        folder = f"batches/{batch.group_id}/metrics/"
        names = [info.name.removeprefix(folder) for info in await world.store.list(folder)]
        assert names == ["00000000.0001.prune"]
        with pytest.raises(errors.NotFound):
            await batch.prune(2)
        with pytest.raises(errors.NotFound):
            await batch.prune(-1)
        world.gate.set()
        assert await batch.results(cleanup=False) == [1, 2]
        await batch.prune(1)
        assert len(await world.store.list(folder)) == 1, "an ended item isn't pruned"
        await batch.cleanup()
        assert await world.store.list(f"batches/{batch.group_id}/") == []


@VIRTUAL
async def test_an_attempt_that_the_platform_has_replaced_can_be_pruned() -> None:
    """This process learns of the second attempt only from the store."""
    world = World(carry_out)
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, [1], prunable=True, retries=1)
        await world.until_started(1)
        await batch.statuses()
        run = world.cluster._jobs[f"{batch.group_id}-0-1"].run
        order = run.spec.order
        dead = wire.Outcome(kind=wire.Kind.LOST, reason="preempted", body=outcomes.digest(b""))
        name = wire.attempt_key(order.scope, 0, 1, "outcome")
        await world.store.create(name, b"", dead.signed(run.spec.key, order.scope, 0, 1))
        await batch.prune(0, 2)
        assert await world.store.look(metrics.prune_key(order.scope, 0, 2)) is not None


@VIRTUAL
async def test_a_function_on_the_memory_platform_may_prune_itself() -> None:
    def gives_up(step: int) -> None:
        raise errors.Pruned(step, 0.5)

    world = World(carry_out)
    world.gate.set()
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(gives_up, [3])
        (result,) = await batch.results()
        assert isinstance(result, errors.Pruned)
        assert (result.step, result.value) == (3, 0.5)
