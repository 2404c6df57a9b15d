"""Report long steps of this process, such as packing, to the progress display, if it exists.

The code that does the work calls `step`, and doesn't know whether a display shows the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar

from kinetic._messages import format_size, one_line

SHOWN_AFTER_S = 1.0
"""How many seconds a step must run until the display shows it."""

Show = Callable[["Step"], Callable[[], None]]
"""A function that shows a step on a display, and returns a function that removes the step."""

SHOW_FACTORY: ContextVar[Callable[[], Show | None] | None] = ContextVar(
    "kinetic_progress", default=None
)
"""A function that returns the `Show` for steps of this context. If the variable or the function's
result is None, steps are hidden. The sync API sets this variable."""


class Step:
    """One step; any thread may call `update`, at any rate.

    The first update after a second calls *show*; `end` calls the function that *show* returned.
    """

    __slots__ = ("_clock", "_hide", "_show", "begun", "done", "title", "total")

    def __init__(
        self, title: str, *, clock: Callable[[], float] = time.monotonic, show: Show | None = None
    ) -> None:
        self.title = one_line(title, 60)
        self.begun = clock()
        self.done = 0
        self.total = 0
        self._clock = clock
        self._show = show
        self._hide: Callable[[], None] | None = None

    def update(self, done: int, total: int) -> None:
        """Report that *done* of *total* bytes are done; pass 0, 0 while the total is unknown."""
        self.done, self.total = done, total
        if self._show is not None and self._clock() - self.begun > SHOWN_AFTER_S:
            show, self._show = self._show, None
            self._hide = show(self)

    def set_title(self, title: str) -> None:
        """Change the title of a step whose total is unknown."""
        self.title = one_line(title, 60)
        self.update(0, 0)

    def end(self) -> None:
        """Remove the step from the display."""
        self._show = None
        if self._hide is not None:
            self._hide()

    @property
    def fraction(self) -> float | None:
        """How much is done, from 0 to 1; None while the total isn't known."""
        return min(1.0, max(0.0, self.done / self.total)) if self.total > 0 else None

    def line(self) -> str:
        """Return the step as one plain line."""
        fraction = self.fraction
        if fraction is None:
            return self.title
        return f"{self.title}: {fraction:.0%} of {format_size(self.total)}"


_RUNNING: dict[Step, None] = {}
"""The steps of this process that run now, the oldest first."""


@contextlib.contextmanager
def step(title: str, *, clock: Callable[[], float] = time.monotonic) -> Generator[Step, None, None]:
    """Run a step in the block; the first update after `SHOWN_AFTER_S` seconds shows the step.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has an invalid value.
    """
    find_show = SHOW_FACTORY.get()
    new_step = Step(title, clock=clock, show=find_show() if find_show is not None else None)
    _RUNNING[new_step] = None
    try:
        yield new_step
    finally:
        del _RUNNING[new_step]
        new_step.end()


def current_line(*, clock: Callable[[], float] = time.monotonic) -> str:
    """Return the line of the oldest step that has run for `SHOWN_AFTER_S` seconds, else ""."""
    now = clock()
    for running_step in tuple(_RUNNING):
        if now - running_step.begun > SHOWN_AFTER_S:
            return running_step.line()
    return ""
