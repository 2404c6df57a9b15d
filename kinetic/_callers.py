"""Whose line a warning is about."""

from __future__ import annotations

import inspect

__all__ = ["own_frames"]


def own_frames() -> int:
    """How many frames above the caller's are kinetic's, the caller's own included.

    As ``stacklevel`` of a warning it blames the first line that is not ours.
    """
    frame = inspect.currentframe()
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "kinetic":
        count, frame = count + 1, frame.f_back
    return count
