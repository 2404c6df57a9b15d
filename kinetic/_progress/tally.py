"""Counts items by what became of them, and says how fast and how far: no batch, no loop."""

from __future__ import annotations

from collections import Counter, deque
from enum import IntEnum

from kinetic.progress import Progress

WINDOW_S = 30.0
WINDOW_ITEMS = 20
"""The rate is that of the last 30 s, or of the last 20 items where that reaches further back."""

MARK_S = 0.5
SHORTEST_S = 1.0
"""What ended within less than a second says little about the second."""


class Pace:
    """Ends of items, on a sliding window; *begun* is when somebody began to count.

    Times are seconds of any clock. One that steps back is taken to stand still,
    so no rate is negative and nothing is counted twice.
    """

    __slots__ = ("_ended", "_marks", "_now")

    def __init__(self, begun: float) -> None:
        self._now = begun
        self._ended = 0
        # (time, how many had ended by then): the first is where the window begins.
        self._marks: deque[tuple[float, int]] = deque([(begun, 0)])

    def end(self, now: float, count: int = 1) -> None:
        """*count* items ended just now."""
        now = self._at(now)
        self._ended += count
        if now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, self._ended))
            self._trim(now)

    def rate(self, now: float) -> float:
        """Items a second; a pause lowers it while it lasts, and is forgotten after it."""
        now = self._at(now)
        self._trim(now)
        begun, before = self._marks[0]
        return (self._ended - before) / max(SHORTEST_S, now - begun)

    def eta(self, now: float, left: int | None) -> float | None:
        """Seconds until *left* more items end; None when that is not known."""
        if left is None:
            return None
        if left <= 0:
            return 0.0
        rate = self.rate(now)
        return left / rate if rate > 0 else None

    def _at(self, now: float) -> float:
        self._now = max(self._now, now)
        return self._now

    def _trim(self, now: float) -> None:
        marks = self._marks
        while len(marks) > 1:
            begun, before = marks[1]
            if now - begun < WINDOW_S or self._ended - before < WINDOW_ITEMS:
                break
            marks.popleft()


class State(IntEnum):
    """Where an item is; what is at or above ``SUCCEEDED`` has ended."""

    WAITING = 0
    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    CANCELLED = 4
    LOST = 5

    @property
    def bad(self) -> bool:
        """Whether it ended as nobody wished it to."""
        return self in (State.FAILED, State.LOST)


class Tally:
    """A byte an item, and the same small work an event however many items there are.

    Nothing depends on how often one is told of an item, or in which order.
    Times are seconds of any clock; one that steps back stands still.
    """

    def __init__(self, begun: float, *, age: float = 0.0) -> None:
        """*begun* is now; the batch itself is *age* seconds old."""
        self._states = bytearray()  # by index
        self._counts = [0] * len(State)
        self._retries: dict[int, int] = {}
        self._retried = 0
        self._retried_after: Counter[str] = Counter()
        self._bad: dict[int, None] = {}  # in the order in which they ended
        self._pace: Pace | None = None
        self._begun = self._now = begun
        self._age = max(0.0, age)

    def start(self, now: float) -> None:
        """What ended so far says nothing of the speed; what ends from now on does."""
        self._pace = Pace(now)

    def put(self, index: int, state: State, retries: int, now: float, after: str = "") -> None:
        """The item is in *state* now, after *retries* attempts that were not its last.

        *after* is why the last one of these failed: those that were not looked at count as it.
        """
        if index >= len(self._states):
            self._states.extend(bytes(index + 1 - len(self._states)))
        before = State(self._states[index])
        if state is not before:
            self._move(index, before, state, now)
        if retries > 0 or index in self._retries:
            more = retries - self._retries.get(index, 0)
            self._retried += more
            if after and more > 0:
                self._retried_after[after] += more
            self._retries[index] = retries

    def _move(self, index: int, before: State, state: State, now: float) -> None:
        self._states[index] = state
        self._counts[before] -= 1
        self._counts[state] += 1
        if before.bad:
            del self._bad[index]
        if state.bad:
            self._bad[index] = None
        if self._pace is not None and before <= State.RUNNING < state:
            self._pace.end(now)

    @property
    def first_bad(self) -> int | None:
        """The item that failed or was lost first, of those that are so now."""
        return next(iter(self._bad), None)

    def value(
        self,
        now: float,
        *,
        total: int | None,
        known: int,
        first_failure: str = "",
        stopped: str = "",
        step: str = "",
    ) -> Progress:
        """The numbers at *now*, of *known* items so far and *total* in the end."""
        now = self._now = max(self._now, now)
        known = max(known, total or 0, len(self._states))
        counts = self._counts
        busy = sum(counts[State.RUNNING :])
        left = None if total is None else known - busy + counts[State.RUNNING]
        return Progress(
            total=None if total is None else known,
            waiting=known - busy,
            running=counts[State.RUNNING],
            succeeded=counts[State.SUCCEEDED],
            failed=counts[State.FAILED],
            cancelled=counts[State.CANCELLED],
            lost=counts[State.LOST],
            retried=self._retried,
            retried_after=tuple(self._retried_after.most_common()),
            elapsed=self._age + now - self._begun,
            rate=self._pace.rate(now) if self._pace is not None else 0.0,
            eta=self._pace.eta(now, left) if self._pace is not None else None,
            first_failure=first_failure,
            stopped=stopped,
            step=step,
        )
