"""What does a sweep cost beyond its sampler and its batch, and what does pruning save?

1. Trials: processor time of this process for a sweep over a platform that takes no time
   (`nothing.py`), less the sampler's, less that of a batch with the same inputs. A regression: more
   than 1 ms a trial.
2. Reports: one call of `kinetic.report`, and a job that reports 1,000 times a second. A regression:
   more than 5 us.
3. Pruning: from the report that decides to the end of the trial. A regression: a median of more
   than 0.2 s.
4. Work: how many epochs of recorded learning curves (`curves.py`) pruning saves. A regression: less
   than 60 %.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import kinetic
from benchmarks import curves, figures, nothing, setting
from kinetic.sweeps import ASHA, Domain, Float, GridSearch, Int, Proposal, RandomSearch, State

TRIALS, QUICK_TRIALS = 10_000, 500
OPEN, QUICK_OPEN = 1000, 50
SLOTS = 2
SPACE: dict[str, Domain] = {"rate": Float(1e-5, 1e-1, log=True), "layers": Int(1, 8)}
CALLS = 100_000
PRUNED, QUICK_PRUNED = 100, 10
ORDERS, QUICK_ORDERS = 100, 5
WORKERS = 8


def value(rate: float, layers: int) -> float:
    """Return the value of a trial."""
    return rate * layers


# --- trials ---


def make_optuna() -> tuple[Any, Any]:
    """Return a study of Optuna in memory, and its space."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    floats, ints = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
    return study, {"rate": floats(1e-5, 1e-1, log=True), "layers": ints(1, 8)}


SAMPLERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "RandomSearch": lambda: (RandomSearch(SPACE, seed=1), None),
    "Optuna": make_optuna,
}


def sampler_seconds(optimizer: Any, space: Any, trials: int) -> float:
    """Return the processor time of the optimizer alone, with as many open trials."""
    before = time.process_time()
    for _ in range(trials):
        if space is None:
            proposal = optimizer.ask()
            optimizer.tell(proposal.number, value(**proposal.params))
        else:
            trial = optimizer.ask(space)
            optimizer.tell(trial, value(**trial.params))
    return time.process_time() - before


async def end_jobs(cluster: nothing.InstantCluster, trials: int, limit: int) -> None:
    """End a tenth of the open jobs whenever as many run as may, and then all."""
    for _ in range(0, trials - limit, limit // 10):
        await cluster.wait_until_launched(limit)
        for _ in range(limit // 10):
            await cluster.end_next()
    await cluster.release_all()


async def batch_seconds(trials: int, limit: int) -> float:
    """Return the processor time of a batch with the same inputs, and its outcomes."""
    from kinetic import aio

    search, inputs = RandomSearch(SPACE, seed=1), list[Any]()
    for _ in range(trials):
        proposal = search.ask()
        assert proposal is not None
        inputs.append(proposal.params)
    platform, _, cluster = nothing.make_platform()
    async with aio.Client(platform=platform) as client:
        await (await client.run_async_map(abs, [0])).wait()
        cluster.holding = True
        before = time.process_time()
        batch = await client.run_async_map(
            value, iter(inputs), input_mode="kwargs", max_concurrent=limit
        )
        ending = asyncio.create_task(end_jobs(cluster, trials, limit))
        async for completion in batch.outcomes():
            assert completion.outcome.ok
        seconds = time.process_time() - before
        await ending
        return seconds


async def sweep_seconds(optimizer: Any, space: Any, trials: int, limit: int) -> float:
    """Return the processor time of a sweep."""
    from kinetic import aio

    platform, _, cluster = nothing.make_platform()
    async with aio.Client(platform=platform) as client:
        await (await client.run_async_map(abs, [0])).wait()
        cluster.holding = True
        before = time.process_time()
        async with await client.sweep(
            value, optimizer, space, trials=trials, max_concurrent=limit
        ) as sweep:
            ending = asyncio.create_task(end_jobs(cluster, trials, limit))
            ended = [trial async for trial in sweep]
        seconds = time.process_time() - before
        assert all(trial.state is State.COMPLETE for trial in ended) and len(ended) == trials
        await ending
        return seconds


def trials(count: int, limit: int, rounds: int) -> None:
    """Print what a trial costs beyond the sampler and beyond the batch."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in SAMPLERS}
    asyncio.run(batch_seconds(QUICK_TRIALS, QUICK_OPEN))  # imports what the others use
    batches: list[float] = []
    for _ in range(rounds):
        batches.append(asyncio.run(batch_seconds(count, limit)) / count * 1000)
        for name, make in SAMPLERS.items():
            sampler = sampler_seconds(*make(), count) / count * 1000
            sweep = asyncio.run(sweep_seconds(*make(), count, limit)) / count * 1000
            costs[name].append((sampler, sweep - batches[-1] - sampler))
    figures.head(f"{count:,} trials, {limit:,} open", "batch", "sampler", "overhead")
    for name, measured in costs.items():
        samplers, overheads = zip(*measured, strict=True)
        cells = map(statistics.median, (batches, samplers, overheads))
        figures.row(f"{name}, cpu ms", *(f"{cell:.2f}" for cell in cells))


# --- reports ---


def report_costs() -> dict[str, float]:
    """In a job: return the processor time of one call for each kind of value."""
    values: dict[str, Any] = {"a float": 0.5, "two floats by name": {"loss": 0.5, "rate": 0.1}}
    costs: dict[str, float] = {}
    step = 0
    for name, reported in values.items():
        kinetic.report(step, reported)
        started = time.process_time()
        for _ in range(CALLS):
            kinetic.report(step, reported)
        costs[name] = (time.process_time() - started) / CALLS
    return costs


def work(per_second: int) -> float:
    """In a job: return the processor time of 2 s of work, with this many reports a second."""
    before, total = time.process_time(), 0.0
    for step in range(2000):
        for number in range(10_000):
            total += number
        if per_second:
            kinetic.report(step, total)
    return time.process_time() - before


async def reports(rounds: int) -> None:
    """Print the cost of a call, and how much slower a job is that calls it in its loop."""
    from kinetic import aio

    calls: dict[str, list[float]] = {}
    quiet, reporting = list[float](), list[float]()
    async with aio.Client(backend="local") as client:
        for _ in range(rounds):
            for name, cost in (await client.run(report_costs)).items():
                calls.setdefault(name, []).append(cost)
            quiet.append(await client.run(work, 0))
            reporting.append(await client.run(work, 1000))
    figures.head("kinetic.report()", "median us", "min us")
    for name, seconds in calls.items():
        figures.row(name, *figures.median_and_min(seconds, 1e6))
    rate = 2000 / statistics.median(reporting)
    slower = figures.ratio(reporting, quiet)
    figures.head("a job's loop", "reports/s", "x without")
    figures.row("with a report each time", f"{rate:,.0f}", f"{slower:.3f}")


# --- pruning ---


def hopeless(number: int) -> None:
    """Report the time until the trial is pruned."""
    for step in range(1_000_000):
        kinetic.report(step, time.time())
        time.sleep(0.01)


class Impatient(GridSearch):
    """Prune each trial at step 20, and keep when it was reported."""

    prunes = True

    def __init__(self, count: int) -> None:
        super().__init__({"number": Int(1, count)})
        self.prunes = True
        self.reported: dict[int, float] = {}

    def report(self, number: int, step: int, value: float) -> bool:
        """Implement `Optimizer`."""
        if step < 20:
            return False
        self.reported.setdefault(number, value)
        return True


async def pruning(count: int) -> None:
    """Print how long after the decisive report the trial has ended."""
    from kinetic import aio

    optimizer, delays = Impatient(count), list[float]()
    async with (
        aio.Client(backend="local") as client,
        await client.sweep(hopeless, optimizer, trials=None, max_concurrent=2) as sweep,
    ):
        async for trial in sweep:
            assert trial.state is State.PRUNED
            delays.append(time.time() - optimizer.reported[trial.number])
    delays.sort()
    figures.head("report to pruned, ms", "p50", "p95", "max")
    cells = (delays[len(delays) // 2], delays[int(len(delays) * 0.95)], delays[-1])
    figures.row(f"{count} trials", *(f"{cell * 1000:.0f}" for cell in cells))


# --- work ---


class Pruning:
    """The calls of a study with this pruner of Optuna as those of an optimizer, without a space."""

    def __init__(self, pruner: str) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._pruned = optuna.trial.TrialState.PRUNED
        self._study = optuna.create_study(pruner=getattr(optuna.pruners, pruner)())
        self._open: dict[int, Any] = {}

    def ask(self) -> Proposal:
        """Implement `Optimizer`."""
        trial = self._study.ask()
        self._open[trial.number] = trial
        return Proposal(trial.number, {})

    def tell(self, number: int, result: float | State) -> None:
        """Implement `Optimizer`."""
        trial = self._open.pop(number)
        if isinstance(result, State):
            self._study.tell(trial, state=self._pruned)
        else:
            self._study.tell(trial, result)

    def report(self, number: int, step: int, value: float) -> bool:
        """Implement `Optimizer`."""
        self._open[number].report(value, step)
        return bool(self._open[number].should_prune())


def replay(optimizer: Any, recorded: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Return how many epochs a sweep over these curves runs, and the best value it finds.

    Eight trials run at a time, an epoch each in turn.
    """
    waiting, running = [*recorded], dict[int, tuple[Sequence[float], int]]()
    epochs, best = 0, math.inf
    while waiting or running:
        while waiting and len(running) < WORKERS:
            running[optimizer.ask().number] = (waiting.pop(0), 0)
        for number, (curve, done) in [*running.items()]:
            epochs += 1
            running[number] = (curve, done + 1)
            if done + 1 == len(curve):
                best = min(best, curve[-1])
                optimizer.tell(number, curve[-1])
                del running[number]
            elif optimizer.report(number, done + 1, curve[done]):
                optimizer.tell(number, State.PRUNED)
                del running[number]
    return epochs, best


PRUNERS: dict[str, Callable[[], Any]] = {
    "ASHA(first=1)": lambda: RandomSearch(SPACE, pruner=ASHA(first=1)),
    "ASHA(first=3)": lambda: RandomSearch(SPACE, pruner=ASHA(first=3)),
    "ASHA(first=9)": lambda: RandomSearch(SPACE, pruner=ASHA(first=9)),
    "Optuna, SuccessiveHalving": lambda: Pruning("SuccessiveHalvingPruner"),
    "Optuna, Median": lambda: Pruning("MedianPruner"),
}


def work_saved(orders: int) -> None:
    """Print the epochs saved in replays with random orders of the models."""
    for data, recorded in curves.load().items():
        all_epochs, best_value = replay(RandomSearch(SPACE), recorded)
        figures.head(f"{data}, {orders} orders", "saved %", "has best %", "best error")
        figures.row("without pruning", 0, 100, f"{best_value:.3f}")
        for name, make in PRUNERS.items():
            saved, found = list[float](), list[float]()
            for order in range(orders):
                shuffled = random.Random(order).sample(recorded, len(recorded))
                epochs, best = replay(make(), shuffled)
                saved.append(100 * (1 - epochs / all_epochs))
                found.append(best)
            share = 100 * found.count(best_value) / orders
            error = statistics.median_low(found)
            figures.row(name, f"{statistics.median(saved):.0f}", f"{share:.0f}", f"{error:.3f}")
        print()


def main() -> None:
    """Print the tables."""
    effort = figures.effort(__doc__, full=3, quick=1)
    with setting.scratch() as scratch, setting.project(scratch), setting.home(scratch, SLOTS):
        if effort.quick:
            trials(QUICK_TRIALS, QUICK_OPEN, effort.rounds)
        else:
            trials(TRIALS, OPEN, effort.rounds)
        print()
        asyncio.run(reports(effort.rounds))
        print()
        asyncio.run(pruning(QUICK_PRUNED if effort.quick else PRUNED))
        print()
    work_saved(QUICK_ORDERS if effort.quick else ORDERS)


if __name__ == "__main__":
    main()
