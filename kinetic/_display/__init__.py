"""What a person sees of progress: a live line, plain lines or a cell's output, and where to stop.

Nothing here blocks its caller: a thread of its own draws, and what it cannot draw it leaves out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kinetic._display.choice import requested
from kinetic._display.drawing import DISPLAY, Display, Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from kinetic._steps import Step

__all__ = ["DISPLAY", "Display", "Entry", "shower"]


def shower() -> Callable[[Step], Callable[[], None]] | None:
    """What puts a step on the display; None: nothing is shown.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has a value that means nothing.
    """
    return None if requested(os.environ) == "off" else DISPLAY.show_step
