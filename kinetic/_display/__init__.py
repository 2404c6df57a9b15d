"""What a person sees of progress: a live line, plain lines or a cell's output, and where to stop.

Nothing here blocks its caller: a thread of its own draws, and what it cannot draw it leaves out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from kinetic._display.choice import requested
from kinetic._display.drawing import DISPLAY, Display, Entry
from kinetic._steps import WANTED, Show

__all__ = ["DISPLAY", "Display", "Entry", "shower", "wanted"]


def shower() -> Show | None:
    """What puts a step on the display; None: nothing is shown.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has a value that means nothing.
    """
    return None if requested(os.environ) == "off" else DISPLAY.show_step


@contextlib.contextmanager
def wanted(answer: bool | None) -> Generator[None]:
    """What the block begins shows how far it is, or does not; None: as it was before."""
    token = None if answer is None else WANTED.set(shower if answer else None)
    try:
        yield
    finally:
        if token is not None:
            WANTED.reset(token)
