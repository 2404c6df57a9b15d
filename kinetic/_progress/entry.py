"""Entries of the display, and the choice of the surface that draws them."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO, cast

from kinetic._messages import one_line, suggest
from kinetic._progress.steps import Step
from kinetic.errors import ConfigurationError
from kinetic.progress import Progress

VARIABLE = "KINETIC_PROGRESS"
VALUES = ("auto", "live", "plain", "off")

Mode = Literal["live", "plain", "notebook", "off"]


def requested_mode(environ: Mapping[str, str]) -> str:
    """Return the value of ``KINETIC_PROGRESS``: auto, live, plain, or off.

    Raises:
        ConfigurationError: The variable has another value.
    """
    value = (environ.get(VARIABLE) or "auto").strip().lower()
    if value not in VALUES:
        hint = suggest(value, VALUES, otherwise="set it to one of them, or leave it unset")
        raise ConfigurationError(f"{VARIABLE}={value} is none of {', '.join(VALUES)}; {hint}")
    return value


def choose_mode(environ: Mapping[str, str], stream: TextIO | None) -> Mode:
    """Return how a process with the variables *environ* shows progress on its *stream* of errors.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has an invalid value.
    """
    value = requested_mode(environ)
    if value == "off" or stream is None or getattr(stream, "closed", False):
        return "off"
    if value == "auto":
        if in_notebook():
            return "notebook"
        is_dumb = environ.get("TERM", "") in ("dumb", "unknown")
        return "live" if is_terminal(stream) and not is_dumb else "plain"
    return "live" if value == "live" else "plain"


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether *stream* is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    ipython = cast("Any", sys.modules["IPython"])
    shell = getattr(ipython, "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Entry:
    """A batch or a step on the display: its owner sets ``value``, and the drawing thread reads it.

    The entry gets a line from the time ``due`` on; ``drawn`` says whether it has had a line. If
    ``stays`` is true, its last line stays on the screen although the batch continues. ``context``
    is the context of the owner, so that a notebook shows the entry below the owner's cell.
    ``details`` returns HTML that a notebook shows below the line.
    """

    __slots__ = ("begun", "context", "details", "drawn", "due", "stays", "title", "value")

    def __init__(
        self,
        title: str,
        value: Progress | Step | None,
        *,
        begun: float,
        delay: float,
        details: Callable[[], str] = str,
    ) -> None:
        self.title = one_line(title, 60)
        self.value = value
        self.begun = begun
        self.due = begun + delay
        self.drawn = False
        self.stays = False
        self.details = details
        self.context = contextvars.copy_context()

    @property
    def kept(self) -> bool:
        """Whether the entry's last line stays on the screen; the line of a step never does."""
        return isinstance(self.value, Progress) and (self.stays or self.value.finished)

    def line(self) -> str:
        """Return the entry as one plain line."""
        if isinstance(self.value, Progress):
            return f"{self.title}: {self.value.line()}"
        return self.value.line() if self.value is not None else self.title
