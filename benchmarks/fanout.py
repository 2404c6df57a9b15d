"""How much does an item of a batch cost, apart from its function?

1. The engine over a platform that takes no time (`nothing.py`): processor
   microseconds and bytes an item, without the platform's share.
   A regression: more than 60 us, more than 0.5 KiB of an item that waits, more
   than 12 times as much for 100,000 items as for 10,000.
2. From the moment an outcome exists to the moment ``async for`` has it.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import figures, nothing, setting

ITEMS, QUICK_ITEMS = (10_000, 100_000), (1_000, 10_000)
SLOTS = 2
IN_FLIGHT = 64


def nop(_: int) -> None:
    """Do nothing: the function of each item."""


# --- the engine ---


async def wait_only(batch: Any) -> None:
    """Wait for the batch, without its outcomes: this measures the engine alone."""
    await batch.wait()


async def iterate_outcomes(batch: Any) -> None:
    """Consume every outcome with its value."""
    async for _ in batch.outcomes():
        pass


async def collect_results(batch: Any) -> None:
    """Consume all values at once."""
    await batch.results()


async def engine_seconds(items: int, consume: Callable[[Any], Awaitable[None]]) -> float:
    """Return the processor time of this process for one batch, up to the last outcome."""
    from kinetic import aio

    platform, _, _ = nothing.make_platform()
    async with aio.Client(platform=platform) as client:
        await (await client.run_async_map(nop, [0])).wait()
        inputs = list(range(items))
        gc.collect()
        before = time.process_time()
        await consume(await client.run_async_map(nop, inputs))
        return time.process_time() - before


def engine(sizes: tuple[int, ...], rounds: int) -> None:
    """Print microseconds per item, and how they grow with the batch."""
    consumers = {"wait()": wait_only, "results()": collect_results, "outcomes()": iterate_outcomes}
    engine_costs: dict[tuple[str, int], list[float]] = {}
    platform_costs: dict[int, list[float]] = {}
    for _ in range(rounds):
        for items in sizes:
            started = time.process_time()
            asyncio.run(nothing.run_bare(items))
            platform_costs.setdefault(items, []).append(time.process_time() - started)
            for name, consume in consumers.items():
                total = asyncio.run(engine_seconds(items, consume))
                engine_costs.setdefault((name, items), []).append(total - platform_costs[items][-1])
    figures.head("cpu us an item", *(f"{items:,}" for items in sizes), "x in all")
    platform = [statistics.median(platform_costs[items]) / items * 1e6 for items in sizes]
    figures.row("the platform itself", *(f"{cost:.1f}" for cost in platform))
    for name in consumers:
        costs = [statistics.median(engine_costs[name, items]) / items * 1e6 for items in sizes]
        grown = figures.ratio(engine_costs[name, sizes[-1]], engine_costs[name, sizes[0]])
        figures.row(f"engine, {name}", *(f"{cost:.1f}" for cost in costs), f"{grown:.1f}")


# --- the engine's memory ---


async def measure_memory(items: int) -> tuple[float, float]:
    """Return the bytes of a waiting item and of a finished one, without what the store holds."""
    from kinetic import aio

    platform, store, cluster = nothing.make_platform()
    async with aio.Client(platform=platform) as client:
        await (await client.run_async_map(nop, [0])).wait()
        cluster.holding = True
        inputs = list(range(items))
        store.all_stored.clear()
        input_bytes = store.input_bytes
        baseline = traced_bytes()
        batch = await client.run_async_map(nop, inputs, max_concurrent=IN_FLIGHT)
        await store.all_stored.wait()
        await cluster.wait_until_launched(IN_FLIGHT)
        input_bytes = store.input_bytes - input_bytes
        waiting = (traced_bytes() - baseline - input_bytes) / items
        await cluster.release_all()
        await batch.wait()
        finished = (traced_bytes() - baseline - input_bytes) / items
    baseline = traced_bytes()
    outcomes = await nothing.run_bare(items)
    finished -= (traced_bytes() - baseline) / items
    assert outcomes.requests["create"] == items
    return waiting, finished


def traced_bytes() -> int:
    """Return the bytes that Python holds now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def memory(sizes: tuple[int, ...]) -> None:
    """Print bytes per item."""
    tracemalloc.start()
    held = [asyncio.run(measure_memory(items)) for items in sizes]
    tracemalloc.stop()
    figures.head("bytes an item", *(f"{items:,}" for items in sizes))
    figures.row("waiting", *(f"{waiting:.0f}" for waiting, _ in held))
    figures.row("finished", *(f"{finished:.0f}" for _, finished in held))


# --- from the outcome to its consumer ---


async def delays(items: int, *, one_by_one: bool) -> list[float]:
    """Return the seconds from the commit of each outcome to its consumer."""
    from kinetic import aio

    platform, _, cluster = nothing.make_platform(holding=one_by_one)
    measured: list[float] = []
    async with aio.Client(platform=platform) as client:
        cluster.committed = {}
        batch = await client.run_async_map(nop, list(range(items)), max_concurrent=IN_FLIGHT)
        outcomes = batch.outcomes()
        for _ in range(items):
            if one_by_one:
                next_outcome = asyncio.ensure_future(anext(outcomes))
                await cluster.wait_until_launched(1)
                await cluster.end_next()
                completion = await next_outcome
            else:
                completion = await anext(outcomes)
            measured.append(time.perf_counter() - cluster.committed[completion.index])
        await outcomes.aclose()
    return measured


def latency(items: int) -> None:
    """Print percentiles of `delays`."""
    figures.head("outcome to async for, us", "p50", "p99", "max")
    for name, one_by_one in (("one at a time", True), ("all at once", False)):
        measured = sorted(asyncio.run(delays(items, one_by_one=one_by_one)))
        cells = (measured[len(measured) // 2], measured[int(len(measured) * 0.99)], measured[-1])
        figures.row(name, *(f"{cell * 1e6:.0f}" for cell in cells))


def main() -> None:
    """Print the tables."""
    effort = figures.effort(__doc__, full=3, quick=1)
    sizes = QUICK_ITEMS if effort.quick else ITEMS
    with setting.scratch() as scratch, setting.project(scratch), setting.home(scratch, SLOTS):
        engine(sizes, effort.rounds)
        print()
        memory(sizes[:1])
        print()
        latency(sizes[0])


if __name__ == "__main__":
    main()
