"""The engine's cost per item doesn't grow with their number; calls are counted, not timed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kinetic import aio
from kinetic._runner.protocol import frames, wire
from kinetic.aio._reading.iteration import ITEMS_PER_TURN
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, Run, memory_platform
from kinetic.testing.attempts import commit
from tests.engine.counting import CountingLoop, counted

FEW, MANY = 1_000, 4_000
NONE = frames.pack([b"\x80\x05N."])
ENDED = wire.Outcome(kind=wire.Kind.VALUE, phase="execute")


def nop(_: int) -> None: ...


async def end_at_once(run: Run) -> int:
    """Commit an outcome at once, without even a claim."""
    return await commit(run, run.spec.order, ENDED, NONE)


def measured(items: int, consume: Callable[[Any], Awaitable[None]]) -> dict[str, float]:
    """Return the costs per item of a batch with *items* items."""
    counts: Counter[str] = Counter()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        platform = memory_platform(end_at_once)
        store, cluster = platform.store, platform.cluster
        assert isinstance(store, MemoryStore) and isinstance(cluster, MemoryCluster)
        async with aio.Client(platform=platform) as client:
            await (await client.run_async_map(nop, [0])).wait()  # import everything
            before = [loop.counts.copy(), store.requests.copy(), cluster.requests.copy()]
            with counted(counts):
                await consume(await client.run_async_map(nop, list(range(items)), max_concurrent=8))
            after = [loop.counts, store.requests, cluster.requests]
            for now, then in zip(after, before, strict=True):
                counts.update(now - then)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())
    return {kind: count / items for kind, count in counts.items()}


async def wait(batch: Any) -> None:
    await batch.wait()


async def collect(batch: Any) -> None:
    assert len(await batch.results()) == batch._batch.known


async def iterate(batch: Any) -> None:
    async for _ in batch.outcomes():
        pass


async def iterate_in_order(batch: Any) -> None:
    async for _ in batch.outcomes(ordered=True):
        pass


async def iterate_twice_and_watch(batch: Any) -> None:
    async def watch() -> None:
        async for _ in batch.progress():
            pass

    work: list[Coroutine[Any, Any, None]] = [iterate(batch), iterate(batch), watch()]
    await asyncio.gather(*work)


@pytest.mark.full
@pytest.mark.parametrize(
    "consume",
    [
        wait,
        iterate_twice_and_watch,
        *(pytest.param(read, marks=pytest.mark.slow) for read in (collect, iterate_in_order)),
    ],
)
def test_an_item_costs_the_same_in_a_small_batch_and_in_a_large_one(
    consume: Callable[[Any], Awaitable[None]],
) -> None:
    few, many = measured(FEW, consume), measured(MANY, consume)
    # Fixed costs of a batch are shared by more items. The number of loop iterations varies
    # a little between runs because worker threads wake the loop.
    grown = {
        kind: (few.get(kind, 0), many[kind])
        for kind in many
        if many[kind] > few.get(kind, 0) * 1.1 + 0.02
    }
    assert not grown, f"per item, of {FEW} and of {MANY}: {grown}"


def test_an_item_takes_few_requests_and_next_to_no_tasks() -> None:
    cost = measured(FEW, wait)
    assert cost["scale"] <= 0.01
    # The client reads the outcome; the worker reads requests, input, and what its item has stored.
    assert cost["get"] <= 4.05
    # The worker creates claim and outcome; what carries the item out tries the claim, too.
    assert cost["create"] <= 3.03
    assert cost.get("list", 0) <= 0.05
    assert cost["tasks"] <= 1.2, "the worker waits for news"
    assert cost["callbacks"] <= 8


async def print_many(run: Run) -> int:
    """Print lines, then commit an outcome."""
    run.print("\n".join(["line"] * FEW))
    return await end_at_once(run)


def test_the_lines_of_an_ended_job_set_no_timers() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        async with aio.Client(platform=memory_platform(print_many)) as client:
            job = await client.submit(nop, 0)
            await job.wait()
            before, lines = loop.counts["timers"], 0
            async for _ in job.logs(follow=True):
                lines += 1
                await asyncio.sleep(0)  # another task may look whether the job has ended
            assert lines == FEW
            assert loop.counts["timers"] - before <= 10

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())


async def never(_: Run) -> int:
    """Run until the job is deleted, before it claims its attempt."""
    await asyncio.Event().wait()
    return 0


@pytest.mark.full
@pytest.mark.parametrize("iteration", ["outcomes", "as_completed"])
async def test_other_tasks_run_while_ended_items_are_iterated(iteration: str) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with aio.Client(platform=memory_platform(end_at_once)) as client:
        batch = await client.run_async_map(nop, range(2 * ITEMS_PER_TURN), max_concurrent=100)
        await batch.wait()
        counting = asyncio.create_task(count_turns())
        items = getattr(batch, iteration)()
        await anext(items)
        before = turns
        async for _ in items:
            pass
        counting.cancel()
    assert turns - before >= 2


async def test_what_never_began_is_listed_when_a_batch_is_left() -> None:
    platform = memory_platform(never)
    store = platform.store
    assert isinstance(store, MemoryStore)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(nop, range(FEW), max_concurrent=8, progress=False)
        async with batch:
            await batch.submitted()
            before = store.requests.total()
        requests = store.requests.total() - before
        assert {status for _, status in await batch.statuses()} == {JobStatus.NOT_FOUND}
        assert requests < FEW / 4
