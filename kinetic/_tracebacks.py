"""Whose line a warning, or the traceback of a job's exception, is about."""

from __future__ import annotations

import inspect
from types import TracebackType

__all__ = ["REMOTE_TRACEBACK", "own_frames", "own_frames_left_out"]

REMOTE_TRACEBACK = "Remote traceback of "
"""How the note begins that tells where in its job an exception was raised."""

_OURS = ("kinetic", "anyio", "asyncio")


def own_frames() -> int:
    """How many frames above the caller's are kinetic's, the caller's own included.

    As ``stacklevel`` of a warning it blames the first line that is not ours.
    """
    frame = inspect.currentframe()
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "kinetic":
        count, frame = count + 1, frame.f_back
    return count


class _OwnFramesLeftOut:
    """Around the body of what users call: what a job raised is told of their line, not of ours.

    Only if it has passed nothing but our frames; what is raised here keeps all of them.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        notes = getattr(error, "__notes__", ())
        if error is None or not any(str(one).startswith(REMOTE_TRACEBACK) for one in notes):
            return
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").split(".")[0] not in _OURS:
                return
            trace = trace.tb_next
        # What is raised again is not told of the frame that does so.
        BaseException.__setattr__(error, "__traceback__", None)


own_frames_left_out = _OwnFramesLeftOut()
