"""Pack the exception of a failed job: all of it, or as much as can be sent.

`failure_of` in ``kinetic/aio/_submissions/results.py`` decides which exception the client raises.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

from . import exceptions, pickles

PART_BYTES = 16 * 1024
"""If the whole exception can't be sent, leave out parts above this size."""


def dumps(error: BaseException, limit: int) -> bytes:
    """Pack *error*, its causes, and the errors of a group into at most *limit* bytes.

    If an attribute can't be pickled, or is too large, leave it out, and name it in a note.

    Raises:
        Exception: *error* can't be pickled, or its copy can't be rebuilt.
    """
    try:
        return _dumps(error, limit, _Pickler)
    except Exception:
        return _dumps(error, limit, functools.partial(_CarefulPickler, known={}))


def _dumps(error: BaseException, limit: int, pickler: Callable[[Any], pickles.Pickler]) -> bytes:
    pickled = pickles.dumps(error, pickler=pickler)
    if len(pickled) > limit:
        raise ValueError(f"its pickle has {len(pickled):,} bytes, and the limit is {limit:,}")
    pickles.load(pickled)
    return pickled


class _Pickler(pickles.Pickler):
    """Pickles exceptions, at any depth, with the exceptions that a traceback shows before them."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle *obj*; called for everything but the plainest values."""
        if issubclass(type(obj), BaseException):
            return self._reduce_exception(obj)
        return super().reducer_override(obj)

    def _reduce_exception(self, error: BaseException) -> tuple[Any, ...]:
        return exceptions.reduce(error, _links(error, lambda _: True))


class _CarefulPickler(_Pickler):
    """Pickles exceptions without the parts that can't be sent; see `_is_sendable`.

    *known* says of exceptions, by their IDs, whether they can be sent.
    """

    def __init__(self, sink: Any, known: dict[int, bool]) -> None:
        super().__init__(sink)
        self._known = known

    def _reduce_exception(self, error: BaseException) -> tuple[Any, ...]:
        return exceptions.reduce(error, _links(error, self._is_sendable), self._is_sendable)

    def _is_sendable(self, value: Any) -> bool:
        """Return whether *value* can be pickled and rebuilt, in at most `PART_BYTES`."""
        if not isinstance(value, BaseException):
            return _can_send(value, _Pickler)
        # Each check also checks the linked exceptions, so the time would grow exponentially with
        # the length of the chain.
        if id(value) not in self._known:
            self._known[id(value)] = False  # a chain that leads back to this exception ends here
            pickler = functools.partial(_CarefulPickler, known=self._known)
            self._known[id(value)] = _can_send(value, pickler)
        return self._known[id(value)]


def _can_send(value: Any, pickler: Callable[[Any], pickles.Pickler]) -> bool:
    sink = io.BytesIO()
    try:
        pickles.dump(value, sink, pickler=pickler)
        pickles.load(sink.getvalue())
    except Exception:  # the class may raise anything
        return False
    return len(sink.getvalue()) <= PART_BYTES


def _links(error: BaseException, is_kept: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the attributes that link *error* to the exception that a traceback shows before it."""
    hidden = error.__suppress_context__
    linked = {"__cause__": error.__cause__, "__context__": None if hidden else error.__context__}
    links: dict[str, Any] = {
        name: exception
        for name, exception in linked.items()
        if exception is not None and is_kept(exception)
    }
    return {**links, "__suppress_context__": hidden}  # must come last: setting a cause changes it
