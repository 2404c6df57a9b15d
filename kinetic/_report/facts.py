"""What a report is made of: one batch as its objects tell of it, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kinetic._progress.tally import State
from kinetic._runner.protocol.notes import Note

__all__ = ["Attempt", "BatchReport", "Example", "Item"]


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
    def begun(self) -> float | None:
        """When its last attempt began."""
        return self.attempts[-1].begun if self.attempts else None

    @property
    def message(self) -> str:
        """Why it has no value; empty while that is not known."""
        if self.state.bad and self.attempts:
            last = self.attempts[-1]
            return last.message or last.reason
        return ""

    def seconds(self, now: float) -> float | None:
        """How long its last attempt took, or takes until *now*; None: nobody knows."""
        if not self.attempts or (begun := self.attempts[-1].begun) is None:
            return None
        ended = self.attempts[-1].ended
        if ended is None and self.state is not State.RUNNING:
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
    each group.
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
    items: tuple[Item, ...] = ()
    examples: Mapping[int, Example] = field(default_factory=dict[int, Example])
