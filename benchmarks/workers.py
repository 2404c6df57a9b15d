"""How fast do workers run the items of a batch, and what else do they cost?

1. Items that do nothing, per second, at 1 and at 2 slots, in memory and on the disk of the default
   home. With a process each: against the bare fork server, with projects of 5 and of 150 files.
   With ``isolation="worker"``: against Ray's tasks and ``ProcessPoolExecutor``. A regression: less
   than 0.5 of the bare fork server.
2. 40 fits of scikit-learn with a process each, against ``ProcessPoolExecutor``, at 2 slots.
3. From the end of an item to the start of the next, if its lazy input depends on the result.

All contenders of a row have a turn in each round; ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any

from benchmarks import contenders, figures, setting

ITEMS, QUICK_ITEMS = 1000, 200
SHORT = 10
"""How many times as many items contenders without a process each run."""

FITS, LAZY = 40, 100

Opener = Callable[..., Any]

NOOPS: tuple[tuple[str, int, int, Opener], ...] = (
    ("bare", 5, 1, contenders.fork_server),
    ("process", 5, 1, contenders.kinetic),
    ("process, 150 files", 150, 1, contenders.kinetic),
    ("worker", 5, SHORT, functools.partial(contenders.kinetic, isolation="worker")),
    ("ProcessPoolExecutor", 5, SHORT, contenders.process_pool),
    ("Ray", 5, SHORT, contenders.ray),
)
"""Contenders: their names, the files of the project, their share of items, how to open them."""


def rate(opener: Opener, slots: int, files: int, items: int, *, disk: bool) -> float:
    """Return the items per second of one turn."""
    with (
        setting.scratch(disk=disk) as scratch,
        setting.project(scratch, files),
        opener(slots, scratch) as session,
    ):
        started = time.perf_counter()
        values = session.run(range(items))
        seconds = time.perf_counter() - started
        assert values == [number * number for number in range(items)]
        return items / seconds


def noops(items: int, rounds: int) -> None:
    """Print the ratios of items that do nothing."""
    known = [it for it in NOOPS if it[0] != "Ray" or find_spec("ray")]
    figures.caption(f"{items} items, or {items * SHORT} without a process each, {rounds} rounds")
    figures.caption("process: x bare, and 150 files x 5 files; worker: x pool, x Ray, and items/s")
    figures.head("items that do nothing", "x bare", "150 files", "x pool", "x Ray", "items/s")
    for disk in (False, True):
        for slots in (1, 2):
            rates: dict[str, list[float]] = {name: [] for name, *_ in known}
            for _ in range(rounds):
                for name, files, share, opener in known:
                    found = rate(opener, slots, files, items * share, disk=disk)
                    rates[name].append(found)
            ratios = [
                f"{figures.ratio(rates[one], rates[other]):.2f}" if other in rates else ""
                for one, other in (
                    ("process", "bare"),
                    ("process, 150 files", "process"),
                    ("worker", "ProcessPoolExecutor"),
                    ("worker", "Ray"),
                )
            ]
            name = f"{'disk' if disk else 'memory'}, {slots} slots"
            figures.row(name, *ratios, f"{statistics.median(rates['worker']):.0f}")


def fit(seed: int) -> float:
    """Fit a small model."""
    from sklearn.datasets import make_classification
    from sklearn.linear_model import LogisticRegression

    inputs, classes = make_classification(200, 10, random_state=seed)
    score: float = LogisticRegression().fit(inputs, classes).score(inputs, classes)
    return score


async def kinetic_fits(client: Any) -> list[float]:
    """Return the scores of all fits, each in a process of its own."""
    results: list[float] = await (await client.run_async_map(fit, range(FITS))).results()
    return results


def fits(rounds: int) -> None:
    """Print how long the fits take, as batches of cold workers and as a new pool."""
    from kinetic import aio

    times: dict[str, list[float]] = {"kinetic": [], "ProcessPoolExecutor": []}
    with setting.scratch() as scratch, setting.project(scratch), setting.home(scratch, 2):
        spawn = multiprocessing.get_context("spawn")
        with asyncio.Runner() as loop:
            client = aio.Client(backend="local")
            for _ in range(rounds):
                started = time.perf_counter()
                ours = loop.run(kinetic_fits(client))
                times["kinetic"].append(time.perf_counter() - started)
                started = time.perf_counter()
                with ProcessPoolExecutor(2, mp_context=spawn) as pool:
                    assert [*pool.map(fit, range(FITS))] == ours
                times["ProcessPoolExecutor"].append(time.perf_counter() - started)
            loop.run(client.aclose())
    figures.head(f"{FITS} fits, 2 slots, {rounds} rounds", "median s", "min s", "x pool")
    for name, runs in times.items():
        ratio = figures.ratio(runs, times["ProcessPoolExecutor"])
        figures.row(name, *figures.median_and_min(runs), f"{ratio:.2f}")


def note_time(_: float) -> tuple[float, float]:
    """Return when this began and ended, by a clock that all processes share."""
    started = time.monotonic()
    return started, time.monotonic()


async def gaps(items: int) -> list[float]:
    """Return the seconds from the end of each item to the start of the next."""
    import kinetic
    from kinetic import aio

    results: asyncio.Queue[tuple[float, float]] = asyncio.Queue()

    async def inputs() -> AsyncIterator[float]:
        yield 0.0
        for _ in range(items):
            yield (await results.get())[1]

    found: list[tuple[float, float]] = []
    async with aio.Client(backend="local") as client:
        batch = await client.run_async_map(note_time, inputs())
        async for completion in batch.outcomes():
            match completion.outcome:
                case kinetic.Succeeded(value):
                    found.append(value)
                    results.put_nowait(value)
                case failed:
                    raise AssertionError(failed)
    found.sort()
    return [after[0] - before[1] for before, after in itertools.pairwise(found)]


def lazy(items: int) -> None:
    """Print percentiles of `gaps`."""
    with setting.scratch() as scratch, setting.project(scratch), setting.home(scratch, 2):
        measured = sorted(asyncio.run(gaps(items))[5:])
    figures.head("end to the next start, ms", "min", "p50", "p95")
    cells = measured[0], measured[len(measured) // 2], measured[int(len(measured) * 0.95)]
    figures.row("a lazy input", *(f"{cell * 1e3:.1f}" for cell in cells))


def main() -> None:
    """Print the tables."""
    effort = figures.effort(__doc__, full=5, quick=1)
    noops(QUICK_ITEMS if effort.quick else ITEMS, effort.rounds)
    print()
    if find_spec("sklearn"):
        fits(effort.rounds)
        print()
    lazy(LAZY // 4 if effort.quick else LAZY)


if __name__ == "__main__":
    main()
