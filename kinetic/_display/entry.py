"""One thing whose progress is shown, as its owner and the drawing thread share it."""

from __future__ import annotations

import contextvars
from typing import Protocol

from kinetic._steps import Step
from kinetic._words import one_line
from kinetic.progress import Progress

__all__ = ["Entry", "Surface"]


class Entry:
    """A batch or a step; the owner sets ``value``, the drawing thread reads it when it draws.

    ``due`` is when it is worth a line. ``drawn`` tells that it was shown.
    ``context`` is its owner's: the output of a notebook's cell belongs to it.
    """

    __slots__ = ("begun", "context", "drawn", "due", "title", "value")

    def __init__(
        self, title: str, value: Progress | Step | None, *, begun: float, delay: float
    ) -> None:
        self.title = one_line(title, 60)
        self.value = value
        self.begun = begun
        self.due = begun + delay
        self.drawn = False
        self.context = contextvars.copy_context()

    @property
    def finished(self) -> bool:
        """Whether its last line is worth keeping: a batch that is over."""
        return isinstance(self.value, Progress) and self.value.finished

    def line(self) -> str:
        """As one plain line."""
        if isinstance(self.value, Progress):
            return f"{self.title}: {self.value.line()}"
        return self.value.line() if self.value is not None else self.title


class Surface(Protocol):
    """Where entries are drawn; all its methods are called by the drawing thread."""

    def draw(self, entries: list[Entry], now: float) -> None:
        """Show *entries* as they are at *now*, at most ten times a second."""
        ...

    def finish(self, entry: Entry, now: float) -> None:
        """*entry* is over and will not be drawn again."""
        ...

    def close(self, *, quietly: bool = False) -> None:
        """Nothing is left to draw: let go of what is held; *quietly*: write nothing."""
        ...
