"""The content of a report, read once from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kinetic._progress.standing import Goal
from kinetic._progress.tally import State
from kinetic._runner.protocol.notes import Note

Direction = Literal["minimize", "maximize"]
"""Whether the best item has the lowest or the highest metric."""


Curve = Sequence[tuple[int, float | Mapping[str, float]]]
"""What an attempt has reported, in the order of its steps: pairs of a step and a value."""


class Attempt(NamedTuple):
    """One attempt of an item. Times are seconds since 1970, by the clock of the job.

    ``kind`` is value, error, lost, or cancelled; empty while the attempt has no outcome.
    """

    number: int
    kind: str = ""
    reason: str = ""
    message: str = ""
    begun: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item: its attempts in order, and the scalars of its input and its result.

    A pruned item has no result; ``pruned`` has the scalars of its last report. ``has_tail`` says
    that its outcome has reports.
    """

    index: int
    state: State = State.WAITING
    attempts: tuple[Attempt, ...] = ()
    input: Note = field(default_factory=dict[str, "bool | int | float | str | None"])
    result: Note = field(default_factory=dict[str, "bool | int | float | str | None"])
    pruned: Note = field(default_factory=dict[str, "bool | int | float | str | None"])
    has_tail: bool = False

    @property
    def last(self) -> Attempt | None:
        """The running or last attempt; None while the item waits for its next attempt."""
        return self.attempts[-1] if self.attempts and self.state is not State.WAITING else None

    @property
    def earlier_attempts(self) -> tuple[Attempt, ...]:
        """The attempts before `last`; all of them while the item waits."""
        return self.attempts if self.state is State.WAITING else self.attempts[:-1]

    @property
    def failure(self) -> Attempt | None:
        """The last attempt that failed or was lost; None if the item isn't failed or lost."""
        ended = (
            attempt for attempt in reversed(self.attempts) if attempt.kind in ("error", "lost")
        )
        return next(ended, None) if self.state.bad else None

    @property
    def message(self) -> str:
        """Why the item has no value; empty while that isn't known."""
        if self.state is State.PRUNED:
            return f"pruned at step {self.pruned['step']}" if self.pruned else "pruned"
        failure = self.failure
        return (failure.message or failure.reason) if failure is not None else ""

    def seconds(self, now: float) -> float | None:
        """Return how long the last attempt took, or runs at *now*; None if that isn't known."""
        if (last := self.last) is None or (start := last.begun) is None:
            return None
        if (end := last.ended) is None and self.state is not State.RUNNING:
            return None
        return max(0.0, (now if end is None else end) - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A failure in full, from the body of its outcome."""

    message: str
    traceback: str = ""
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The curves of some items, by index, and how many items have reported."""

    by_item: Mapping[int, Curve] = field(default_factory=dict[int, Curve])
    reported: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of several batches that a page compares; ``first`` is the position of its first item."""

    label: str
    report: BatchReport
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """A batch at the time ``read_at``, in seconds since 1970.

    ``total`` is None while the number of items isn't known. ``examples`` has one full failure of
    each group, by item. ``metric`` names the result that ranks the items. None: the page chooses.
    ``goal`` is what a sweep searches for. ``parts`` are the batches of a comparison.
    """

    group_id: str
    name: str = ""
    function: str = ""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    where: str = ""
    accelerator: str = ""
    max_concurrent: int | None = None
    created: float = 0.0
    read_at: float = 0.0
    total: int | None = None
    direction: Direction = "minimize"
    metric: str | None = None
    goal: Goal | None = None
    curves: Curves = field(default_factory=Curves)
    parts: tuple[Part, ...] = ()
    items: tuple[Item, ...] = ()
    examples: Mapping[int, Example] = field(default_factory=dict[int, Example])
