"""Count the items of a batch by their state, and measure how fast they end."""

from __future__ import annotations

from collections import Counter, deque
from enum import IntEnum

from kinetic.progress import Progress

WINDOW_S = 30.0
WINDOW_ITEMS = 20
"""The rate covers the last 30 s or the last 20 items, whichever is longer."""

MARK_S = 0.5
"""Minimum seconds between two marks; a mark is a time and how many items had ended by then."""

SHORTEST_S = 1.0
"""Minimum length of the window, in seconds, because a shorter window gives a wrong rate."""


class Pace:
    """Measure the rate at which items end, on a sliding window that starts at *begun*.

    Times are seconds of a monotonic clock.
    """

    __slots__ = ("_ended", "_marks")

    def __init__(self, begun: float) -> None:
        self._ended = 0
        # Each mark: a time, and how many items had ended by then. The first mark begins the window.
        self._marks: deque[tuple[float, int]] = deque([(begun, 0)])

    def end(self, now: float) -> None:
        """Count an item that ended at *now*."""
        self._ended += 1
        if now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, self._ended))
            self._trim(now)

    def rate(self, now: float) -> float:
        """Return how many items ended per second, in the window up to *now*."""
        self._trim(now)
        window_start, ended_before = self._marks[0]
        return (self._ended - ended_before) / max(SHORTEST_S, now - window_start)

    def eta(self, now: float, left: int | None) -> float | None:
        """Return the seconds until *left* more items end; None if that isn't known."""
        if left is None:
            return None
        if left <= 0:
            return 0.0
        rate = self.rate(now)
        return left / rate if rate > 0 else None

    def _trim(self, now: float) -> None:
        """Drop the oldest marks, if the window stays long enough without them."""
        marks = self._marks
        while len(marks) > 1:
            next_start, ended_before = marks[1]
            if now - next_start < WINDOW_S or self._ended - ended_before < WINDOW_ITEMS:
                break
            marks.popleft()


class State(IntEnum):
    """The state of an item; from ``SUCCEEDED`` on it has ended."""

    WAITING = 0
    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    CANCELLED = 4
    LOST = 5
    PRUNED = 6

    @property
    def bad(self) -> bool:
        """Whether the item failed or was lost."""
        return self in (State.FAILED, State.LOST)


class Tally:
    """Count items by state, in one byte per item and constant time per event.

    Each `put` replaces the item's state; a repeated `put` changes nothing. Times are seconds of a
    monotonic clock.
    """

    def __init__(self, begun: float, *, age: float = 0.0) -> None:
        """Start counting at *begun*; the batch is *age* seconds old."""
        self._states = bytearray()  # each item's state, by index
        self._counts = [0] * len(State)
        self._retries: dict[int, int] = {}
        self._retried = 0
        self._retried_after: Counter[str] = Counter()
        self._bad: dict[int, None] = {}  # failed and lost items, in the order of their ends
        self._pace: Pace | None = None
        self._begun = begun
        self._age = max(0.0, age)

    def start(self, now: float) -> None:
        """Measure the rate from *now* on; items that ended before don't count."""
        self._pace = Pace(now)

    def put(self, index: int, state: State, retries: int, now: float, after: str = "") -> None:
        """Set an item's *state* and number of retries.

        *after* is why the attempt before the last retry failed. If several retries are new, that
        reason counts for all of them.
        """
        if index >= len(self._states):
            self._states.extend(bytes(index + 1 - len(self._states)))
        old_state = State(self._states[index])
        if state is not old_state:
            self._states[index] = state
            self._counts[old_state] -= 1
            self._counts[state] += 1
            if old_state.bad:
                del self._bad[index]
            if state.bad:
                self._bad[index] = None
            # A final state may still change, such as LOST; the item counts once.
            if self._pace is not None and old_state <= State.RUNNING < state:
                self._pace.end(now)
        if retries > 0 or index in self._retries:
            new_retries = retries - self._retries.get(index, 0)
            self._retried += new_retries
            if after and new_retries > 0:
                self._retried_after[after] += new_retries
            self._retries[index] = retries

    @property
    def first_bad(self) -> int | None:
        """The item that ended first among the items that are failed or lost now, if any."""
        return next(iter(self._bad), None)

    def value(self, now: float, *, total: int | None, known: int) -> Progress:
        """Return the progress at *now*, of *known* items so far; *total* is None while unknown."""
        known = max(known, total or 0, len(self._states))
        counts = self._counts
        started = sum(counts[State.RUNNING :])
        left = None if total is None else known - started + counts[State.RUNNING]
        return Progress(
            total=None if total is None else known,
            waiting=known - started,
            running=counts[State.RUNNING],
            succeeded=counts[State.SUCCEEDED],
            failed=counts[State.FAILED],
            cancelled=counts[State.CANCELLED],
            lost=counts[State.LOST],
            pruned=counts[State.PRUNED],
            retried=self._retried,
            retried_after=tuple(self._retried_after.most_common()),
            elapsed=self._age + now - self._begun,
            rate=self._pace.rate(now) if self._pace is not None else 0.0,
            eta=self._pace.eta(now, left) if self._pace is not None else None,
        )
