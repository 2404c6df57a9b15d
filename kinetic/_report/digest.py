"""Compute the statistics that a batch's report shows; pure functions."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kinetic._progress.tally import State
from kinetic._report.facts import BatchReport, Item

POINTS = 160
"""How many points a line over time has; more aren't visible in a chart."""

BINS = 24
"""Maximum number of bars that show the durations."""

SLOWEST = 20
"""How many of the slowest items the report lists."""

WIDE = 50.0
"""From this ratio of the longest to the shortest duration on, bars cover logarithmic ranges."""


@dataclass(frozen=True, slots=True)
class Point:
    """How many items were in each `State`, ``seconds`` after the batch began."""

    seconds: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """How many items took at least ``start`` and less than ``stop`` seconds."""

    start: float
    stop: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """The durations, in seconds, of attempts that returned a value.

    Each quantile is a duration that occurred.
    """

    count: int
    least: float
    p50: float
    p95: float
    most: float
    total: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Retries:
    """How many retries had this ``reason``, and how many items had them."""

    reason: str
    attempts: int
    items: int


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Items whose messages differ in numbers only; ``example`` is one of the items."""

    message: str
    reason: str
    items: tuple[int, ...]
    example: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Statistics of all items. Seconds count from ``begun``, the start of the batch."""

    begun: float
    seconds: float
    counts: Mapping[State, int]
    states: tuple[Point, ...]
    concurrency: tuple[tuple[float, int], ...]
    peak: int
    mean: float
    durations: Durations | None
    retries: tuple[Retries, ...]
    failures: tuple[FailureGroup, ...]
    slowest: tuple[int, ...]


def digest(report: BatchReport) -> Digest:
    """Compute the statistics of *report*."""
    items = report.items
    moments = [
        moment
        for item in items
        for attempt in item.attempts
        for moment in (attempt.begun, attempt.ended)
        if moment is not None
    ]
    begun = min([report.created or report.read_at, *moments])
    finished = report.total is not None and all(item.state > State.RUNNING for item in items)
    end = max(moments, default=begun) if finished else max([report.read_at, *moments])
    seconds = max(0.0, end - begun)
    changes = _concurrency(items, begun, end)
    timed = sorted(
        ((taken, item.index) for item in items if (taken := item.seconds(report.read_at))),
        key=lambda one: (-one[0], one[1]),
    )
    busy = sum(count * (after - at) for (at, count), (after, _) in pairwise(changes))
    return Digest(
        begun=begun,
        seconds=seconds,
        counts=Counter(item.state for item in items),
        states=_states(items, begun, end),
        concurrency=_thinned(changes),
        peak=max((count for _, count in changes), default=0),
        mean=busy / seconds if seconds else 0.0,
        durations=_durations(items, report.read_at),
        retries=_retries(items),
        failures=tuple(grouped(items)),
        slowest=tuple(index for _, index in timed[:SLOWEST]),
    )


# --- over time -----------------------------------------------------------------------------


def _concurrency(items: Iterable[Item], begun: float, end: float) -> list[tuple[float, int]]:
    """Return how many attempts ran, as (seconds, number) at each change; the first is at 0."""
    deltas: Counter[float] = Counter()
    for item in items:
        for attempt in item.attempts:
            if attempt.begun is None:
                continue
            if attempt.ended is not None:
                deltas[attempt.begun - begun] += 1
                deltas[max(attempt.begun, attempt.ended) - begun] -= 1
            elif attempt is item.last and item.state is State.RUNNING:
                deltas[attempt.begun - begun] += 1
    changes, count = [(0.0, 0)], 0
    for at, delta in sorted(deltas.items()):
        if delta:
            count += delta
            changes.append((at, count))
    if changes[-1][0] < end - begun:
        changes.append((end - begun, count))
    return changes


def _thinned(changes: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Keep at most about 2 * `POINTS` changes: the minimum and maximum of each interval."""
    if len(changes) <= 2 * POINTS:
        return tuple(changes)
    step = changes[-1][0] / POINTS or 1.0
    stretches: dict[int, list[tuple[float, int]]] = {}
    for at, count in changes:
        stretches.setdefault(min(POINTS - 1, int(at / step)), []).append((at, count))
    kept: list[tuple[float, int]] = []
    for inside in stretches.values():
        low, high = min(inside, key=_count), max(inside, key=_count)
        kept += sorted({low, high})
    return (*kept, changes[-1]) if kept[-1] != changes[-1] else tuple(kept)


def _count(change: tuple[float, int]) -> int:
    return change[1]


def _states(items: Sequence[Item], begun: float, end: float) -> tuple[Point, ...]:
    """Return how many items were in each state, at evenly spaced times."""
    length = end - begun
    if length <= 0:
        return ()
    steps = [[0] * (POINTS + 2) for _ in State]

    def at(moment: float) -> int:
        """Return the index of the first point at or after *moment*."""
        return min(POINTS + 1, max(0, math.ceil((moment - begun) / length * POINTS - 1e-9)))

    for item in items:
        state, since, has_begun = State.WAITING, 0, False
        for attempt in item.attempts:
            for moment, then in ((attempt.begun, State.RUNNING), (attempt.ended, State.WAITING)):
                if moment is not None:
                    has_begun = True
                    steps[state][since] += 1
                    place = max(since, at(moment))
                    steps[state][place] -= 1
                    state, since = then, place
        if item.state is State.CANCELLED and not has_begun:
            # When it was cancelled isn't known; the chart shows it as waiting until the end.
            steps[state][since] += 1
            steps[state][POINTS] -= 1
            since = POINTS
        state = item.state  # from the last change on, draw the item's final state
        steps[state][since] += 1
    points: list[Point] = []
    running = [0] * len(State)
    for place in range(POINTS + 1):
        running = [count + steps[state][place] for state, count in zip(State, running, strict=True)]
        points.append(Point(place * length / POINTS, tuple(running)))
    return tuple(points)


# --- durations -----------------------------------------------------------------------------


def _durations(items: Iterable[Item], now: float) -> Durations | None:
    taken = sorted(
        seconds
        for item in items
        if item.state is State.SUCCEEDED and (seconds := item.seconds(now)) is not None
    )
    if not taken:
        return None
    return Durations(
        count=len(taken),
        least=taken[0],
        p50=_quantile(taken, 0.5),
        p95=_quantile(taken, 0.95),
        most=taken[-1],
        total=math.fsum(taken),
        bins=_bins(taken),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile by nearest rank."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _bins(ordered: Sequence[float]) -> tuple[Bin, ...]:
    least, most = ordered[0], ordered[-1]
    count = max(1, min(BINS, math.ceil(2 * len(ordered) ** (1 / 3))))
    if most - least <= 1e-9 * most or count == 1:
        return (Bin(least, most, len(ordered)),)
    if least > 0 and most / least >= WIDE:
        ratio = math.log(most / least)
        edges = [least * math.exp(ratio * place / count) for place in range(count + 1)]
    else:
        edges = [least + (most - least) * place / count for place in range(count + 1)]
    edges[0], edges[-1] = least, most
    places = [0, *(bisect_right(ordered, edge) for edge in edges[1:-1]), len(ordered)]
    return tuple(
        Bin(edges[place], edges[place + 1], places[place + 1] - places[place])
        for place in range(count)
    )


# --- what went wrong -----------------------------------------------------------------------


def _retries(items: Iterable[Item]) -> tuple[Retries, ...]:
    """Count retries by the reason why the previous attempt ended."""
    attempts: Counter[str] = Counter()
    concerned: Counter[str] = Counter()
    for item in items:
        reasons = [one.reason or one.kind or "unknown" for one in item.before]
        attempts.update(reasons)
        concerned.update({*reasons})
    return tuple(Retries(why, count, concerned[why]) for why, count in attempts.most_common())


_VARIES = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b|(?<!\w)\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def pattern(message: str) -> str:
    """Replace numbers, addresses, and hashes in *message*, which differ from item to item.

    A number in a name stays, because ``float32`` is not ``float64``.
    """
    return _VARIES.sub("N", message)


def grouped(items: Iterable[Item]) -> list[FailureGroup]:
    """Group failed and lost items by message and reason, the largest group first."""
    groups: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        if item.state.bad:
            reason = item.failure.reason if item.failure is not None else ""
            groups.setdefault((pattern(item.message), reason), []).append(item)
    found = [
        FailureGroup(inside[0].message, reason, tuple(one.index for one in inside), inside[0].index)
        for (_, reason), inside in groups.items()
    ]
    return sorted(found, key=lambda group: (-len(group.items), group.example))
