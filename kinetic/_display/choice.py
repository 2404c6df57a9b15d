"""How progress is shown in this process: decided from the environment and the error stream."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO, cast

from kinetic._nearest import suggest
from kinetic.errors import ConfigurationError

__all__ = ["VARIABLE", "Manner", "choose", "in_notebook", "is_terminal", "requested"]

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
