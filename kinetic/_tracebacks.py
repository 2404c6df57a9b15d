"""Whose line a warning, or the traceback of an exception, is about."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

REMOTE_TRACEBACK = "Remote traceback of "
"""How the note begins that tells where in its job an exception was raised."""

_OURS = ("kinetic", "anyio", "asyncio", "cloudpickle", "contextlib")


def own_frames() -> int:
    """How many frames above the caller's are kinetic's, the caller's own included.

    As ``stacklevel`` of a warning it blames the first line that is not ours.
    """
    frame = inspect.currentframe()
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "kinetic":
        count, frame = count + 1, frame.f_back
    return count


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return *trace* from the first frame on that is not kinetic's, or of what carries it out."""
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").split(".")[0] not in _OURS:
            return trace
        trace = trace.tb_next
    return None


class _OwnFramesLeftOut:
    """Around what users call: an exception shows their line, and none of ours above it.

    It does so for what a job raised, for the errors of kinetic, which say all in words, and for
    Ctrl-C. Anything else is a defect, or the user's, and keeps all frames.
    """

    def __call__(self, function: F) -> F:
        """Decorate a function, or a coroutine function, with this block."""

        @functools.wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return cast("F", awaited if inspect.iscoroutinefunction(function) else entered)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and _shows_the_line_alone(error):
            # What is raised again is not told of the frame that does so.
            BaseException.__setattr__(error, "__traceback__", without_own_frames(trace))


def _shows_the_line_alone(error: BaseException) -> bool:
    from kinetic.errors import (
        BatchError,
        KineticError,
    )  # `import kinetic.aio` loads no more than names

    if isinstance(error, (KineticError, BatchError, KeyboardInterrupt)):
        return True
    return any(str(one).startswith(REMOTE_TRACEBACK) for one in getattr(error, "__notes__", ()))


own_frames_left_out = _OwnFramesLeftOut()
