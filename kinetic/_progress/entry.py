"""One thing whose progress is shown, as its owner and the drawing thread share it."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO, cast

from kinetic._messages import one_line, suggest
from kinetic._progress.steps import Step
from kinetic.errors import ConfigurationError
from kinetic.progress import Progress

VARIABLE = "KINETIC_PROGRESS"
VALUES = ("auto", "live", "plain", "off")

Manner = Literal["live", "plain", "notebook", "off"]


def requested(environ: Mapping[str, str]) -> str:
    """The value of ``KINETIC_PROGRESS``: auto, live, plain or off.

    Raises:
        ConfigurationError: It is something else.
    """
    named = (environ.get(VARIABLE) or "auto").strip().lower()
    if named not in VALUES:
        hint = suggest(named, VALUES, otherwise="set it to one of them, or leave it unset")
        raise ConfigurationError(f"{VARIABLE}={named} is none of {', '.join(VALUES)}; {hint}")
    return named


def choose(environ: Mapping[str, str], stream: TextIO | None) -> Manner:
    """The manner for a process with this environment, whose error stream is *stream*.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has a value that means nothing.
    """
    named = requested(environ)
    if named == "off" or stream is None or getattr(stream, "closed", False):
        return "off"
    if named == "auto":
        if in_notebook():
            return "notebook"
        dumb = environ.get("TERM", "") in ("dumb", "unknown")
        return "live" if is_terminal(stream) and not dumb else "plain"
    return "live" if named == "live" else "plain"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person may be looking at it; a closed stream has nobody."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, which shows what cells display."""
    if "IPython" not in sys.modules:
        return False
    ipython = cast("Any", sys.modules["IPython"])
    shell = getattr(ipython, "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Entry:
    """A batch or a step; the owner sets ``value``, the drawing thread reads it when it draws.

    ``due`` is when it is worth a line. ``drawn`` tells that it was shown, ``stays`` whether
    the last line of a batch is kept although the batch goes on.
    ``context`` is its owner's: the output of a notebook's cell belongs to it.
    """

    __slots__ = ("begun", "context", "drawn", "due", "stays", "title", "value")

    def __init__(
        self, title: str, value: Progress | Step | None, *, begun: float, delay: float
    ) -> None:
        self.title = one_line(title, 60)
        self.value = value
        self.begun = begun
        self.due = begun + delay
        self.drawn = False
        self.stays = False
        self.context = contextvars.copy_context()

    @property
    def kept(self) -> bool:
        """Whether its last line is worth keeping; a step's never is."""
        return isinstance(self.value, Progress) and (self.stays or self.value.finished)

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
