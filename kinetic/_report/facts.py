"""What a report is made of: one batch as its objects tell of it, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kinetic._progress.tally import State
from kinetic._runner.protocol.notes import Note

Direction = Literal["minimize", "maximize"]
"""Whether the best item has the lowest or the highest metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at an item. Times are seconds since the epoch, by the clock of the job.

    ``kind`` is value, error, lost or cancelled, and empty while it has no outcome.
    """

    number: int
    kind: str = ""
    reason: str = ""
    message: str = ""
    begun: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One call: its attempts in order, and the scalars of its input and its result."""

    index: int
    state: State = State.WAITING
    attempts: tuple[Attempt, ...] = ()
    input: Note = field(default_factory=dict[str, "bool | int | float | str | None"])
    result: Note = field(default_factory=dict[str, "bool | int | float | str | None"])

    @property
    def last(self) -> Attempt | None:
        """The attempt that runs, or was its last; None while it waits for one."""
        return self.attempts[-1] if self.attempts and self.state is not State.WAITING else None

    @property
    def before(self) -> tuple[Attempt, ...]:
        """The attempts before that."""
        return self.attempts if self.state is State.WAITING else self.attempts[:-1]

    @property
    def failure(self) -> Attempt | None:
        """By which attempt it failed or was lost: one that was cancelled after it is none."""
        ended = (one for one in reversed(self.attempts) if one.kind in ("error", "lost"))
        return next(ended, None) if self.state.bad else None

    @property
    def message(self) -> str:
        """Why it has no value; empty while that is not known."""
        failure = self.failure
        return (failure.message or failure.reason) if failure is not None else ""

    def seconds(self, now: float) -> float | None:
        """How long its last attempt took, or takes until *now*; None: nobody knows."""
        if (last := self.last) is None or (begun := last.begun) is None:
            return None
        if (ended := last.ended) is None and self.state is not State.RUNNING:
            return None
        return max(0.0, (now if ended is None else ended) - begun)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A failure in full: what the body of its outcome says."""

    message: str
    traceback: str = ""
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """A batch at one moment, ``read_at``.

    ``total`` is None while nobody knows it; ``examples`` has failures in full, by item: one of
    each group. ``metric`` names the result that ranks the items; None lets the page choose.
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
    items: tuple[Item, ...] = ()
    examples: Mapping[int, Example] = field(default_factory=dict[int, Example])
