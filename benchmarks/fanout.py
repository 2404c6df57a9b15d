"""How much does an item of a batch cost, apart from its function?

1. The engine over a platform that takes no time (`nothing.py`): processor
   microseconds and bytes an item, without the platform's share.
   A regression: more than 60 us, more than 0.5 KiB of an item that waits, more
   than 12 times as much for 100,000 items as for 10,000.
2. From the moment an outcome exists to the moment ``async for`` has it.
3. The local platform: a batch, and the same jobs launched without the engine.
4. A batch of 1,000 items that do nothing, side by side with what else there is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import figures, nothing, setting
from benchmarks.contenders import CONTENDERS, KINETIC

ITEMS, QUICK_ITEMS = (10_000, 100_000), (1_000, 10_000)
LOCAL_ITEMS, QUICK_LOCAL_ITEMS = 1000, 120
SLOTS = 2
IN_FLIGHT = 64
LIMIT_S = 600.0
"""For everybody who takes part side by side."""


def nop(_: int) -> None:
    """Do nothing: the function of each item."""


# --- the engine ---


async def waited(batch: Any) -> None:
    """Consume nothing: the engine alone."""
    await batch.wait()


async def iterated(batch: Any) -> None:
    """Consume every outcome with its value."""
    async for _ in batch.outcomes():
        pass


async def collected(batch: Any) -> None:
    """Consume all values at once."""
    await batch.results()


async def engine_seconds(items: int, consume: Callable[[Any], Awaitable[None]]) -> float:
    """Processor time of this process for one batch, from the call to the last outcome."""
    from kinetic import aio

    made, _, _ = nothing.platform()
    async with aio.Client(platform=made) as client:
        await (await client.run_async_map(nop, [0])).wait()
        inputs = list(range(items))
        gc.collect()
        before = time.process_time()
        await consume(await client.run_async_map(nop, inputs))
        return time.process_time() - before


def engine(sizes: tuple[int, ...], rounds: int) -> None:
    """Microseconds an item, and how they grow."""
    ways = {"wait()": waited, "results()": collected, "outcomes()": iterated}
    seen: dict[tuple[str, int], list[float]] = {}
    bare: dict[int, list[float]] = {}
    for _ in range(rounds):
        for items in sizes:
            before = time.process_time()
            asyncio.run(nothing.bare(items))
            bare.setdefault(items, []).append(time.process_time() - before)
            for name, consume in ways.items():
                total = asyncio.run(engine_seconds(items, consume))
                seen.setdefault((name, items), []).append(total - bare[items][-1])
    figures.head("cpu us an item", *(f"{items:,}" for items in sizes), "x in all")
    platform = [statistics.median(bare[items]) / items * 1e6 for items in sizes]
    figures.row("the platform itself", *(f"{cost:.1f}" for cost in platform))
    for name in ways:
        costs = [statistics.median(seen[name, items]) / items * 1e6 for items in sizes]
        grown = figures.ratio(seen[name, sizes[-1]], seen[name, sizes[0]])
        figures.row(f"engine, {name}", *(f"{cost:.1f}" for cost in costs), f"{grown:.1f}")


# --- its memory ---


async def bytes_held(items: int) -> tuple[float, float]:
    """Bytes of an item that waits, and of one that is finished, without what the store holds."""
    from kinetic import aio

    made, store, cluster = nothing.platform()
    async with aio.Client(platform=made) as client:
        await (await client.run_async_map(nop, [0])).wait()
        cluster.held = True
        inputs = list(range(items))
        store.all_stored.clear()
        stored = store.input_bytes
        before = traced()
        batch = await client.run_async_map(nop, inputs, max_concurrent=IN_FLIGHT)
        await store.all_stored.wait()
        await cluster.launched(IN_FLIGHT)
        stored = store.input_bytes - stored
        waiting = (traced() - before - stored) / items
        await cluster.let_go()
        await batch.wait()
        finished = (traced() - before - stored) / items
    before = traced()
    outcomes = await nothing.bare(items)
    finished -= (traced() - before) / items
    assert outcomes.requests["create"] == items
    return waiting, finished


def traced() -> int:
    """Bytes that Python holds now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def memory(sizes: tuple[int, ...]) -> None:
    """Bytes an item."""
    tracemalloc.start()
    held = [asyncio.run(bytes_held(items)) for items in sizes]
    tracemalloc.stop()
    figures.head("bytes an item", *(f"{items:,}" for items in sizes))
    figures.row("waiting", *(f"{waiting:.0f}" for waiting, _ in held))
    figures.row("finished", *(f"{finished:.0f}" for _, finished in held))


# --- from the outcome to its consumer ---


async def delays(items: int, *, one_by_one: bool) -> list[float]:
    """Seconds from each commit to its consumer."""
    from kinetic import aio

    made, _, cluster = nothing.platform(held=one_by_one)
    found: list[float] = []
    async with aio.Client(platform=made) as client:
        cluster.committed = {}
        batch = await client.run_async_map(nop, list(range(items)), max_concurrent=IN_FLIGHT)
        outcomes = batch.outcomes()
        for _ in range(items):
            if one_by_one:
                waiting = asyncio.ensure_future(anext(outcomes))
                await cluster.launched(1)
                await cluster.end_next()
                done = await waiting
            else:
                done = await anext(outcomes)
            found.append(time.perf_counter() - cluster.committed[done.index])
        await outcomes.aclose()
    return found


def latency(items: int) -> None:
    """Percentiles."""
    figures.head("outcome to async for, us", "p50", "p99", "max")
    for name, one_by_one in (("one at a time", True), ("all at once", False)):
        found = sorted(asyncio.run(delays(items, one_by_one=one_by_one)))
        cells = (found[len(found) // 2], found[int(len(found) * 0.99)], found[-1])
        figures.row(name, *(f"{cell * 1e6:.0f}" for cell in cells))


# --- the local platform ---


class Listening:
    """A cluster that notes what is launched."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.jobs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    async def launch(self, job: Any) -> None:
        """See the port."""
        self.jobs.append(job)
        await self._cluster.launch(job)


async def launched_bare(cluster: Any, jobs: list[Any]) -> None:
    """Launch *jobs* through the port alone, as many at once as a batch does, until all ended."""
    from kinetic.aio.ports import Phase

    left = {job.name for job in jobs}
    room, over = asyncio.Semaphore(IN_FLIGHT), asyncio.Event()

    async def watch() -> None:
        async for seen in cluster.watch({"bare": "yes"}):
            if seen.phase is Phase.ENDED and seen.name in left:
                left.discard(seen.name)
                room.release()
                if not left:
                    over.set()

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        for job in jobs:
            await room.acquire()
            group.create_task(cluster.launch(job))
        await over.wait()
        watching.cancel()


def apart(jobs: list[Any], number: int) -> list[Any]:
    """The same jobs under other names, with their claims and outcomes in another place."""
    scope, labels = f"batches/bare-{number}/", {"bare": "yes"}
    return [
        dataclasses.replace(
            job,
            name=f"bare-{number}-{place}",
            labels=labels,
            order=dataclasses.replace(job.order, scope=scope),
        )
        for place, job in enumerate(jobs)
    ]


async def local_round(items: int, number: int) -> tuple[float, float]:
    """Jobs a second: of a batch, and of the same jobs without the engine."""
    from kinetic import aio, configuration
    from kinetic.aio.platforms import open_platform

    made = await open_platform(configuration.resolve(backend="local"))
    cluster = Listening(made.cluster)
    async with aio.Client(
        backend="local", platform=dataclasses.replace(made, cluster=cluster)
    ) as client:
        await (await client.run_async_map(nop, range(20))).wait()
        cluster.jobs.clear()
        started = time.perf_counter()
        batch = await client.run_async_map(nop, range(items), max_concurrent=IN_FLIGHT)
        await batch.wait()
        engine = items / (time.perf_counter() - started)
        jobs = apart(cluster.jobs, number)
        started = time.perf_counter()
        await launched_bare(made.cluster, jobs)
        return engine, items / (time.perf_counter() - started)


def local(items: int, rounds: int) -> None:
    """Jobs a second, and the ratio."""
    with setting.scratch() as scratch, setting.project(scratch), setting.home(scratch, SLOTS):
        seen = [asyncio.run(local_round(items, number)) for number in range(rounds)]
    figures.head(f"local, {items} jobs", "median/s", "best/s", "x bare")
    engine, bare = [one for one, _ in seen], [one for _, one in seen]
    for name, rates in (("the jobs alone", bare), ("a batch", engine)):
        median, best = statistics.median(rates), max(rates)
        figures.row(name, f"{median:.1f}", f"{best:.1f}", f"{figures.ratio(rates, bare):.2f}")


# --- side by side ---


def side_by_side(items: int) -> None:
    """Seconds for a batch of everybody that is installed, warm."""
    taken: dict[str, float] = {}
    with setting.scratch() as base, setting.project(base):  # one: `work` is imported once
        for contender in CONTENDERS:
            if not contender.installed:
                continue
            some = max(5, int(items * contender.share))
            try:
                with (
                    figures.limited(LIMIT_S),
                    setting.scratch() as scratch,
                    contender.open(SLOTS, scratch) as crew,
                ):
                    started = time.perf_counter()
                    crew.run(range(some))
                    taken[contender.name] = (time.perf_counter() - started) / some * items
            except TimeoutError as late:
                print(f"{contender.name}, {some} items: {late}, so left out", flush=True)
    figures.head(f"{items} items, {SLOTS} slots", "seconds", "x kinetic", "isolated", "durable")
    for contender in CONTENDERS:
        if (seconds := taken.get(contender.name)) is not None:
            ratio = f"{seconds / taken[KINETIC]:.2f}"
            cells = (f"{seconds:.2f}", ratio, contender.isolated, contender.durable)
            figures.row(contender.name, *cells)


def main() -> None:
    """Print the tables."""
    effort = figures.effort(__doc__, full=3, quick=1)
    sizes = QUICK_ITEMS if effort.quick else ITEMS
    local_items = QUICK_LOCAL_ITEMS if effort.quick else LOCAL_ITEMS
    with setting.scratch() as scratch, setting.project(scratch), setting.home(scratch, SLOTS):
        engine(sizes, effort.rounds)
        print()
        memory(sizes[:1])
        print()
        latency(sizes[0])
        print()
    local(local_items, effort.rounds)
    print()
    side_by_side(local_items)


if __name__ == "__main__":
    main()
