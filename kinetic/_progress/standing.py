"""How a sweep stands: its best trial so far, and where trials were pruned.

Every process that reads the batch of a sweep can compute this from the notes of its outcomes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from kinetic._runner.protocol.notes import RESULT, Note


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a sweep searches for; the manifest of its batch has these fields.

    ``metric`` names the number in a result; None: the only one. The rungs of the sweep's pruner are
    the steps ``first``, ``first`` times ``reduction``, and so on. If kinetic doesn't know the rungs
    of a pruner, it counts by doubling steps.
    """

    direction: Literal["minimize", "maximize"]
    metric: str | None = None
    first: int = 1
    reduction: int = 2

    def value_of(self, result: Note) -> float | None:
        """Return the value of a trial, given the note of its result; None without a number."""
        names = [name for name in (self.metric, RESULT) if name in result]
        if self.metric is None and not names and len(result) == 1:
            names = [*result]
        value = result[names[0]] if names and names[0] is not None else None
        is_number = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if is_number and value is not None else None

    def rung_of(self, last: Note) -> int:
        """Return the last rung that a pruned trial has reached, given the note of its last report.

        0: the trial was pruned before the first rung.
        """
        step = last.get("step")
        if not isinstance(step, int) or step < self.first:
            return 0
        rung = self.first
        while step >= rung * self.reduction:
            rung *= self.reduction
        return rung


class Standing:
    """How a sweep stands, as far as this process has read the outcomes of its trials."""

    def __init__(self, goal: Goal) -> None:
        self.best: tuple[int, float] | None = None
        """The item with the best value so far, and this value; of equal ones, the first read."""
        self._goal = goal
        self._pruned: set[int] = set()
        self._rungs: Counter[int] = Counter()

    def note_result(self, index: int, result: Note) -> None:
        """Take the note of an item's result."""
        value = self._goal.value_of(result)
        sign = 1 if self._goal.direction == "minimize" else -1
        if value is not None and (self.best is None or sign * value < sign * self.best[1]):
            self.best = index, value

    def note_pruned(self, index: int, last: Note) -> None:
        """Take the note of a pruned item's last report."""
        if index not in self._pruned:
            self._pruned.add(index)
            self._rungs[self._goal.rung_of(last)] += 1

    def rungs(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of a rung and how many trials were pruned there."""
        return tuple(sorted(self._rungs.items()))
