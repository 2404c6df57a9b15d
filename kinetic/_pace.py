"""How fast items end, and when the last one will: arithmetic over times that it is told."""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]

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
