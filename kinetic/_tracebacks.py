"""Leave kinetic's frames out of warnings and tracebacks, so that they show the user's line."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=type)
E = TypeVar("E", bound=BaseException)
F = TypeVar("F", bound=Callable[..., Any])

REMOTE_TRACEBACK = "Remote traceback of "
"""The beginning of the note with the traceback that an exception had in its job."""

_OWN_PACKAGES = (
    *("kinetic", "anyio", "asyncio", "cloudpickle", "concurrent", "contextlib", "dataclasses"),
    "importlib",
)


def count_own_frames() -> int:
    """Count the frames of kinetic from the caller's frame to the first frame outside kinetic.

    With this number as ``stacklevel``, a warning names the first line outside kinetic.
    """
    frame = inspect.currentframe()
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "kinetic":
        count, frame = count + 1, frame.f_back
    return count


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of *trace* that begins outside kinetic and its libraries, if any."""
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").split(".")[0] not in _OWN_PACKAGES:
            return trace
        trace = trace.tb_next
    return None


def of_the_caller(error: E) -> E:
    """Mark *error* as a mistake in the caller's code: its traceback needs no frames of kinetic."""
    BaseException.__setattr__(error, "__kinetic_of_the_caller__", True)
    return error


def hint(error: BaseException) -> str:
    """Return the error code and the command that explains it; empty if kinetic defines no code."""
    from kinetic.errors import BatchError, KineticError  # only an error needs this module

    if not isinstance(error, (KineticError, BatchError)):
        return ""
    return f"{error.code}: `kinetic explain {error.code}` shows the cause and the fix"


class _OwnFramesLeftOut:
    """Leave kinetic's frames out of exceptions that a public function raises.

    This is for exceptions of jobs, for kinetic's errors, for errors that `of_the_caller` has
    marked, for cancellation, and for Ctrl-C. Other exceptions keep all frames, because they show
    defects of kinetic. kinetic's errors also get their `hint` as a note. If a library's exception
    caused an error of kinetic, the traceback doesn't show that exception: the error's message
    describes the cause, and ``__context__`` keeps the exception.
    """

    def __call__(self, function: F) -> F:
        """Return a wrapper that calls, or awaits, *function* in a ``with`` block of this object."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def await_call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return cast("F", await_call if inspect.iscoroutinefunction(function) else call)

    def in_methods(self, cls: C) -> C:
        """Wrap the constructor, the public methods, and ``__exit__`` of *cls*."""
        for name, member in tuple(vars(cls).items()):
            if inspect.isfunction(member) and (name in ("__init__", "__exit__") or name[0] != "_"):
                setattr(cls, name, self(member))
        return cls

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if _hides_own_frames(error):
            # Re-raising would add this frame again; setting the traceback doesn't.
            BaseException.__setattr__(error, "__traceback__", without_own_frames(trace))
        if isinstance(error, KeyboardInterrupt):
            error.__context__ = _first_from_user_code(error.__context__)
        if not (line := hint(error)):
            return
        if _first_from_user_code(error.__cause__ or error.__context__) is None:
            cause = error.__cause__ or error.__context__
            error.__cause__ = None  # a traceback then shows neither the cause nor the context
            error.__context__ = cause
        if line not in _notes(error):
            error.add_note(line)


def _first_from_user_code(error: BaseException | None) -> BaseException | None:
    """Return the first exception in the chain of *error* that has a frame of the user's code."""
    seen = set[int]()
    while error is not None and not _passed_through_user_code(error.__traceback__):
        seen.add(id(error))
        error = error.__cause__ or error.__context__
        if id(error) in seen:  # code that sets contexts can close the chain to a circle
            return None
    return error


def _passed_through_user_code(trace: TracebackType | None) -> bool:
    """Return whether *trace* has a frame outside kinetic and installed libraries."""
    import sysconfig  # only errors need this module

    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    while (trace := without_own_frames(trace)) is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(libraries):
            return True
        trace = trace.tb_next
    return False


def _hides_own_frames(error: BaseException) -> bool:
    """Return whether the traceback of *error* leaves kinetic's frames out."""
    # Don't import asyncio: Ctrl-C may have interrupted its import, which then can't be repeated.
    cancelled: Any = getattr(sys.modules.get("asyncio.exceptions"), "CancelledError", ())
    if hint(error) or isinstance(error, (KeyboardInterrupt, cancelled)):
        return True
    if "__kinetic_of_the_caller__" in vars(error):
        return True
    return any(str(note).startswith(REMOTE_TRACEBACK) for note in _notes(error))


def _notes(error: BaseException) -> Iterable[object]:
    # The class may have a `__getattr__` that raises anything.
    return cast("Iterable[object]", vars(error).get("__notes__", ()))


own_frames_left_out = _OwnFramesLeftOut()
