"""Sum the run time of a submission's attempts, from which kinetic estimates the cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kinetic._runner.protocol import wire


class _RunTime(NamedTuple):
    """Total seconds of the timed attempts, and the counts of timed and untimed attempts."""

    seconds: float = 0.0
    timed: int = 0
    untimed: int = 0


_NONE = _RunTime()


class Meter:
    """Count each attempt once, regardless of how often its item is read.

    The meter sends no requests: its callers pass objects that they have read.
    """

    def __init__(self) -> None:
        self._seconds, self._timed, self._untimed = 0.0, 0, 0
        self._items: dict[int, _RunTime] = {}  # only items that may get another attempt

    @property
    def seconds(self) -> float:
        """Total run time of the attempts that ended, in seconds.

        An attempt whose process died without storing its times counts with the average duration.
        """
        return self._seconds + self._untimed * self.average

    @property
    def average(self) -> float:
        """Average of the known durations, in seconds; 0 while there is none."""
        return self._seconds / self._timed if self._timed else 0.0

    def note(self, index: int, attempts: Mapping[int, wire.Attempt], *, final: bool) -> None:
        """Add all attempts of an item; a *final* item gets no further attempt."""
        previous, current = self._items.pop(index, _NONE), _sum_attempts(attempts)
        if current.timed + current.untimed < previous.timed + previous.untimed:
            current = previous  # *attempts* comes from an older read
        self._seconds += current.seconds - previous.seconds
        self._timed += current.timed - previous.timed
        self._untimed += current.untimed - previous.untimed
        if not final and current != _NONE:
            self._items[index] = current

    def to_fields(self) -> Sequence[float]:
        """Return the sums, for `restore`."""
        return self._seconds, self._timed, self._untimed

    def restore(self, fields: Iterable[Any]) -> None:
        """Continue from the sums that `to_fields` returned."""
        (self._seconds, self._timed, self._untimed), self._items = _RunTime(*fields), {}


def _sum_attempts(attempts: Mapping[int, wire.Attempt]) -> _RunTime:
    """Return the sums over ended attempts; leave out attempts that no process began."""
    seconds, timed, untimed = 0.0, 0, 0
    for attempt in attempts.values():
        outcome = attempt.outcome
        if outcome is None:
            continue
        if outcome.started is not None and outcome.ended is not None:
            seconds += max(0.0, outcome.ended - outcome.started)
            timed += 1
        elif attempt.executor not in (None, "", wire.VOID):
            untimed += 1
    return _RunTime(seconds, timed, untimed)
