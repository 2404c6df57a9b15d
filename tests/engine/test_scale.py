"""What an item costs the engine does not grow with the number of items: counted, not timed."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kinetic import aio
from kinetic._runner.protocol import frames, wire
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, Run, memory_platform
from kinetic.testing.attempts import commit

FEW, MANY = 1_000, 4_000
NONE = frames.pack([b"\x80\x05N."])
ENDED = wire.Outcome(kind=wire.Kind.VALUE, phase="execute")


def nop(_: int) -> None: ...


async def end_at_once(run: Run) -> int:
    """A job that takes no time; not even its claim."""
    return await commit(run, run.spec.order, ENDED, NONE)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the callbacks and the tasks that are not the platform's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def call_soon(self, callback: Any, *args: Any, **more: Any) -> asyncio.Handle:
        self.seen["callbacks"] += 1
        return super().call_soon(callback, *args, **more)

    def call_at(self, when: float, callback: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
        self.seen["timers"] += 1
        return super().call_at(when, callback, *args, **more)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> asyncio.Task[Any]:
        if not (name or "").startswith("job "):
            self.seen["tasks"] += 1
        return super().create_task(coro, name=name, context=context, **more)


def measured(items: int, consume: Callable[[Any], Awaitable[None]]) -> dict[str, float]:
    """What one item of a batch of so many takes."""
    seen: Counter[str] = Counter()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        platform = memory_platform(end_at_once)
        store, cluster = platform.store, platform.cluster
        assert isinstance(store, MemoryStore) and isinstance(cluster, MemoryCluster)
        async with aio.Client(platform=platform) as client:
            await (await client.run_async_map(nop, [0])).wait()  # everything is loaded
            before = [loop.seen.copy(), store.requests.copy(), cluster.requests.copy()]
            with counted(seen):
                await consume(await client.run_async_map(nop, list(range(items))))
            after = [loop.seen, store.requests, cluster.requests]
            for now, then in zip(after, before, strict=True):
                seen.update(now - then)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())
    return {what: count / items for what, count in seen.items()}


class counted:
    """Count the calls of this thread's Python functions, and of builtins, within ``with``."""

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def __enter__(self) -> None:
        calls = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1

        self._calls: Callable[[], int] = lambda: calls
        self._before = sys.getprofile()
        sys.setprofile(note)

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(self._before)
        self._seen["calls"] += self._calls()


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
        *(pytest.param(one, marks=pytest.mark.slow) for one in (collect, iterate_in_order)),
    ],
)
def test_an_item_costs_the_same_in_a_small_batch_and_in_a_large_one(
    consume: Callable[[Any], Awaitable[None]],
) -> None:
    few, many = measured(FEW, consume), measured(MANY, consume)
    # What a batch costs once is shared by more items, so that each takes less. Turns of the
    # loop differ a little from run to run: worker threads wake it when they please.
    grown = {
        what: (few.get(what, 0), many[what])
        for what in many
        if many[what] > few.get(what, 0) * 1.1 + 0.02
    }
    assert not grown, f"per item, of {FEW} and of {MANY}: {grown}"


def test_an_item_takes_two_requests_and_next_to_no_tasks() -> None:
    spent = measured(FEW, wait)
    assert spent["launch"] == 1
    assert spent["get"] <= 1.02, "the outcome, once"
    assert spent["create"] <= 1.03, "the outcome, by the job; chunks of inputs"
    assert spent.get("list", 0) <= 0.01
    assert spent["tasks"] <= 0.2
    assert spent["callbacks"] <= 8


async def never(_: Run) -> int:
    """A job that has not begun when it is deleted."""
    await asyncio.Event().wait()
    return 0


async def test_what_never_began_is_listed_when_a_batch_is_left() -> None:
    platform = memory_platform(never)
    store = platform.store
    assert isinstance(store, MemoryStore)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(nop, range(FEW), max_concurrent=None, progress=False)
        async with batch:
            await batch.submitted()
            before = store.requests.total()
        asked = store.requests.total() - before
        assert {status for _, status in await batch.statuses()} == {JobStatus.NOT_FOUND}
        assert asked < FEW / 4
