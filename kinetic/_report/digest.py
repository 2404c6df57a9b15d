"""Compute the statistics that a batch's report shows, without any I/O."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kinetic._progress.standing import Goal, Standing
from kinetic._progress.tally import State
from kinetic._report.facts import BatchReport, Item

POINTS = 160
"""How many points a line over time has; a chart can't show more."""

BINS = 24
"""Maximum number of bars that show the durations."""

SLOWEST = 20
"""How many of the slowest items the report lists."""

LOG_SCALE_RATIO = 50.0
"""From this ratio of the longest to the shortest duration on, bars cover logarithmic ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """The durations, in seconds, of attempts that returned a value.

    Each quantile is a duration that occurred. A bin has two numbers of seconds, and how many
    durations are at least the first number and less than the second.
    """

    count: int
    least: float
    p50: float
    p95: float
    most: float
    total: float
    bins: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Items whose messages differ in numbers only; ``example`` is one of the items."""

    message: str
    reason: str
    items: tuple[int, ...]
    example: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of all items. Seconds count from ``begun``, the start of the batch.

    ``states`` has moments, and how many items were in each `State` then. ``concurrency`` is how
    many attempts ran from a time on: at least, on average, and at most, until the next such time.
    ``peak`` is its maximum, and ``mean`` its average. ``best`` is the best trial of a sweep, and
    its value. ``rungs`` has each rung of a sweep, how many trials were pruned there, and how many
    trials went on. ``retries`` has each reason for retries, how many retries it caused, and of how
    many items.
    """

    begun: float
    seconds: float
    counts: Mapping[State, int]
    states: tuple[tuple[float, tuple[int, ...]], ...]
    concurrency: tuple[tuple[float, int, float, int], ...]
    peak: int
    mean: float
    durations: Durations | None
    best: tuple[int, float] | None
    rungs: tuple[tuple[int, int, int], ...]
    retries: tuple[tuple[str, int, int], ...]
    failures: tuple[FailureGroup, ...]
    slowest: tuple[int, ...]


def compute_statistics(report: BatchReport) -> Statistics:
    """Compute the statistics of *report*."""
    items, moments = report.items, _moments(report)
    start = begin_of(report)
    finished = report.total is not None and all(item.state > State.RUNNING for item in items)
    end = max(moments, default=start) if finished else max([report.read_at, *moments])
    seconds = max(0.0, end - start)
    changes = _concurrency(items, start, end)
    durations = sorted(
        ((duration, item.index) for item in items if (duration := item.seconds(report.read_at))),
        key=lambda pair: (-pair[0], pair[1]),
    )
    busy_seconds = sum(
        count * (after - before) for (before, count), (after, _) in pairwise(changes)
    )
    best, rungs = _standing(report)
    return Statistics(
        begun=start,
        seconds=seconds,
        counts=Counter(item.state for item in items),
        states=_states(items, start, end),
        concurrency=_in_intervals(changes, seconds),
        peak=max((count for _, count in changes), default=0),
        mean=busy_seconds / seconds if seconds else 0.0,
        durations=_durations(items, report.read_at),
        best=best,
        rungs=rungs,
        retries=_retries(items),
        failures=tuple(group_failures(items)),
        slowest=tuple(index for _, index in durations[:SLOWEST]),
    )


def begin_of(report: BatchReport) -> float:
    """Return when the batch began: its submission, or its first attempt by an earlier clock."""
    return min([report.created or report.read_at, *_moments(report)])


def _moments(report: BatchReport) -> list[float]:
    return [
        moment
        for item in report.items
        for attempt in item.attempts
        for moment in (attempt.begun, attempt.ended)
        if moment is not None
    ]


# --- over time -----------------------------------------------------------------------------


def _concurrency(items: Iterable[Item], start: float, end: float) -> list[tuple[float, int]]:
    """Return (seconds since *start*, running attempts) at 0 s, at each change, and at *end*."""
    deltas: Counter[float] = Counter()
    for item in items:
        for attempt in item.attempts:
            if attempt.begun is None:
                continue
            if attempt.ended is not None:
                deltas[attempt.begun - start] += 1
                deltas[max(attempt.begun, attempt.ended) - start] -= 1
            elif attempt is item.last and item.state is State.RUNNING:
                deltas[attempt.begun - start] += 1
    changes, count = [(0.0, 0)], 0
    for seconds, delta in sorted(deltas.items()):
        if delta:
            count += delta
            changes.append((seconds, count))
    if changes[-1][0] < end - start:
        changes.append((end - start, count))
    return changes


def _in_intervals(
    changes: Sequence[tuple[float, int]], length: float
) -> tuple[tuple[float, int, float, int], ...]:
    """Return the least, the mean, and the greatest count of each interval between changes."""
    if len(changes) <= POINTS or length <= 0:
        return tuple((seconds, count, count, count) for seconds, count in changes)
    # A line through thousands of changes can't be read, so these intervals have the same length.
    step = length / POINTS
    found: list[tuple[float, int, float, int]] = []
    position, count = 0, changes[0][1]
    for number in range(POINTS):
        at, end = number * step, (number + 1) * step
        low = high = count
        total, since = 0.0, at
        while position < len(changes) and changes[position][0] < end:
            total += count * (changes[position][0] - since)
            since, count = changes[position]
            low, high = min(low, count), max(high, count)
            position += 1
        found.append((at, low, (total + count * (end - since)) / step, high))
    last = changes[-1][1]
    return (*found, (length, last, last, last))


def _states(
    items: Sequence[Item], start: float, end: float
) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """Return how many items were in each state, at evenly spaced times."""
    length = end - start
    if length <= 0:
        return ()
    # For each state and each point: by how much the number of items in this state changes there.
    steps = [[0] * (POINTS + 2) for _ in State]
    for item in items:
        state, since, has_begun = State.WAITING, 0, False
        for attempt in item.attempts:
            for moment, next_state in (
                (attempt.begun, State.RUNNING),
                (attempt.ended, State.WAITING),
            ):
                if moment is not None:
                    has_begun = True
                    steps[state][since] += 1
                    # The first point at or after the moment.
                    point = math.ceil((moment - start) / length * POINTS - 1e-9)
                    index = max(since, min(POINTS + 1, point))
                    steps[state][index] -= 1
                    state, since = next_state, index
        if item.state is State.CANCELLED and not has_begun:
            # The time of the cancellation isn't known; the chart shows waiting until the end.
            steps[state][since] += 1
            steps[state][POINTS] -= 1
            since = POINTS
        state = item.state  # from the last change on, draw the item's final state
        steps[state][since] += 1
    points: list[tuple[float, tuple[int, ...]]] = []
    running = [0] * len(State)
    for index in range(POINTS + 1):
        running = [count + steps[state][index] for state, count in zip(State, running, strict=True)]
        points.append((index * length / POINTS, tuple(running)))
    return tuple(points)


# --- durations -----------------------------------------------------------------------------


def _durations(items: Iterable[Item], now: float) -> Durations | None:
    durations = sorted(
        seconds
        for item in items
        if item.state is State.SUCCEEDED and (seconds := item.seconds(now)) is not None
    )
    if not durations:
        return None
    return Durations(
        count=len(durations),
        least=durations[0],
        p50=_quantile(durations, 0.5),
        p95=_quantile(durations, 0.95),
        most=durations[-1],
        total=math.fsum(durations),
        bins=_bins(durations),
    )


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return the quantile at *fraction* by nearest rank."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def _bins(ordered: Sequence[float]) -> tuple[tuple[float, float, int], ...]:
    """Count the durations in ranges of the same width, or of the same ratio if they differ much."""
    least, most = ordered[0], ordered[-1]
    count = max(1, min(BINS, math.ceil(2 * len(ordered) ** (1 / 3))))
    if most - least <= 1e-9 * most or count == 1:
        return ((least, most, len(ordered)),)
    if least > 0 and most / least >= LOG_SCALE_RATIO:
        ratio = math.log(most / least)
        edges = [least * math.exp(ratio * index / count) for index in range(count + 1)]
    else:
        edges = [least + (most - least) * index / count for index in range(count + 1)]
    edges[0], edges[-1] = least, most
    positions = [0, *(bisect_right(ordered, edge) for edge in edges[1:-1]), len(ordered)]
    counts = (after - before for before, after in pairwise(positions))
    return tuple(zip(edges, edges[1:], counts, strict=False))


# --- sweeps --------------------------------------------------------------------------------


def _standing(
    report: BatchReport,
) -> tuple[tuple[int, float] | None, tuple[tuple[int, int, int], ...]]:
    """Return the best trial and its value, and for each rung how many were pruned and went on."""
    if report.goal is None:
        return None, ()
    standing, left = Standing(report.goal), 0
    for item in report.items:
        if item.state is State.SUCCEEDED:
            standing.note_result(item.index, item.result)
        elif item.state is State.PRUNED:
            standing.note_pruned(item.index, item.pruned)
        left += item.state in (State.SUCCEEDED, State.PRUNED)
    found: list[tuple[int, int, int]] = []
    for rung, count in standing.rungs():
        left -= count
        found.append((rung, count, left))
    return standing.best, tuple(found)


def choose_curves(
    reported: Sequence[int], items: Sequence[Item], goal: Goal | None, most: int
) -> list[int]:
    """Choose at most *most* of the items that have *reported*: the best ones, and every nth."""
    if len(reported) <= most:
        return [*reported]
    values = {
        index: value
        for index in reported
        if goal is not None and (value := goal.value_of(items[index].result)) is not None
    }
    is_low = goal is None or goal.direction == "minimize"
    best = sorted(values, key=lambda index: values[index] if is_low else -values[index])
    chosen = {*best[: most // 4]}
    rest = [index for index in reported if index not in chosen]
    step = len(rest) / (most - len(chosen))
    chosen.update(rest[int(number * step)] for number in range(most - len(chosen)))
    return sorted(chosen)


# --- what went wrong -----------------------------------------------------------------------


def _retries(items: Iterable[Item]) -> tuple[tuple[str, int, int], ...]:
    """Count retries by the reason why the previous attempt ended."""
    retries_by_reason: Counter[str] = Counter()
    items_by_reason: Counter[str] = Counter()
    for item in items:
        reasons = [attempt.reason or attempt.kind or "unknown" for attempt in item.earlier_attempts]
        retries_by_reason.update(reasons)
        items_by_reason.update({*reasons})
    return tuple(
        (reason, count, items_by_reason[reason])
        for reason, count in retries_by_reason.most_common()
    )


_VARIABLE_PART = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b|(?<!\w)\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
)


def pattern(message: str) -> str:
    """Replace numbers, addresses, and hashes in *message*, which differ from item to item.

    A number in a name stays, because ``float32`` is not ``float64``.
    """
    return _VARIABLE_PART.sub("N", message)


def group_failures(items: Iterable[Item]) -> list[FailureGroup]:
    """Group failed and lost items by message and reason, the largest group first."""
    groups: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        if item.state.bad:
            reason = item.failure.reason if item.failure is not None else ""
            groups.setdefault((pattern(item.message), reason), []).append(item)
    found = [
        FailureGroup(
            members[0].message, reason, tuple(item.index for item in members), members[0].index
        )
        for (_, reason), members in groups.items()
    ]
    return sorted(found, key=lambda group: (-len(group.items), group.example))
