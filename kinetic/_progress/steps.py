"""Long single steps of this process, such as packing: who shows progress can see them here.

Who does the work reports to `step` and need not know whether anybody looks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar

from kinetic._messages import amount, one_line

SHORT_S = 1.0
"""A step that takes less is not worth a word."""

Show = Callable[["Step"], Callable[[], None]]
"""Puts a step on a display; what it returns takes the step away."""

WANTED: ContextVar[Callable[[], Show | None] | None] = ContextVar("kinetic_progress", default=None)
"""Where what runs in this context shows how far it is; None: nobody asked. The sync face asks."""


class Step:
    """One step: `update` it from any thread, as often as you like.

    With *show* it is put on the display, by the first update after a second;
    what *show* returns takes it away.
    """

    __slots__ = ("_clock", "_hide", "_show", "begun", "done", "title", "total")

    def __init__(
        self,
        title: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        show: Show | None = None,
    ) -> None:
        self.title = one_line(title, 60)
        self.begun = clock()
        self.done = 0
        self.total = 0
        self._clock = clock
        self._show = show
        self._hide: Callable[[], None] | None = None

    def update(self, done: int, total: int) -> None:
        """*done* of *total* bytes are done."""
        self.done, self.total = done, total
        if self._show is not None and self._clock() - self.begun > SHORT_S:
            show, self._show = self._show, None
            self._hide = show(self)

    def say(self, title: str) -> None:
        """Change the title of a step whose size nobody knows."""
        self.title = one_line(title, 60)
        self.update(0, 0)

    def end(self) -> None:
        """Take it off the display."""
        self._show = None
        if self._hide is not None:
            self._hide()

    @property
    def fraction(self) -> float | None:
        """Which part is done, 0 to 1; None while that is not known."""
        return min(1.0, max(0.0, self.done / self.total)) if self.total > 0 else None

    def line(self) -> str:
        """As one plain line."""
        fraction = self.fraction
        if fraction is None:
            return self.title
        return f"{self.title}: {fraction:.0%} of {amount(self.total)}"


_RUNNING: dict[int, Step] = {}


@contextlib.contextmanager
def step(title: str, *, clock: Callable[[], float] = time.monotonic) -> Generator[Step, None, None]:
    """Do a step that may take long; it is shown only once it has taken more than a second.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has a value that means nothing.
    """
    shower = WANTED.get()
    one = Step(title, clock=clock, show=shower() if shower is not None else None)
    _RUNNING[id(one)] = one
    try:
        yield one
    finally:
        del _RUNNING[id(one)]
        one.end()


def current(*, clock: Callable[[], float] = time.monotonic) -> str:
    """The line of the longest-running step that is worth a word, or nothing."""
    now = clock()
    for one in tuple(_RUNNING.values()):
        if now - one.begun > SHORT_S:
            return one.line()
    return ""
