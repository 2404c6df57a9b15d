"""Send exceptions from a job to its client, as instances of the original classes.

pickle rebuilds an exception by calling its class with ``args``, which many constructors don't
accept. It also drops the cause. So kinetic uses pickle's way only if the copy equals the original,
and adds the cause. Otherwise kinetic sends the attributes, and makes the copy without ``__init__``.

`failure_of` in ``kinetic/aio/_engine/results.py`` decides which exception the client raises.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any, cast

from . import pickles

HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has defined."""

_IDENTITY: Any = object.__eq__

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
    """Pickles exceptions, at any depth, with their attributes."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle *obj*; called for everything but the plainest values."""
        if issubclass(type(obj), BaseException):
            return self._reduce_exception(obj)
        return super().reducer_override(obj)

    def _reduce_exception(self, error: BaseException) -> tuple[Any, ...]:
        return _reduce_by_class(error) or _reduce_by_attributes(error)


class _CarefulPickler(_Pickler):
    """Pickles exceptions without the parts that can't be sent; see `_is_sendable`.

    *known* says of exceptions, by their IDs, whether they can be sent.
    """

    def __init__(self, sink: Any, known: dict[int, bool]) -> None:
        super().__init__(sink)
        self._known = known

    def _reduce_exception(self, error: BaseException) -> tuple[Any, ...]:
        reduced = _reduce_by_class(error, can_link=self._is_sendable)
        if reduced is not None and self._is_sendable((reduced[1], reduced[2][:3])):
            return reduced
        return _reduce_by_attributes(error, is_kept=self._is_sendable)

    def _is_sendable(self, value: Any) -> bool:
        """Return whether *value* can be pickled and rebuilt, in at most `PART_BYTES`.

        This checks an exception only once, because each check also checks the exceptions that it
        is linked to. Otherwise, the time grows exponentially with the length of the chain.
        """
        if not isinstance(value, BaseException):
            return _can_send(value, _Pickler)
        if id(value) not in self._known:
            self._known[id(value)] = False  # a chain that leads back to this exception ends here
            pickler = functools.partial(_CarefulPickler, known=self._known)
            self._known[id(value)] = _can_send(value, pickler)
        return self._known[id(value)]


def _accept_all(_: Any) -> bool:
    return True


def _can_send(value: Any, pickler: Callable[[Any], pickles.Pickler]) -> bool:
    sink = io.BytesIO()
    try:
        pickles.dump(value, sink, pickler=pickler)
        pickles.load(sink.getvalue())
    except Exception:  # the class may raise anything
        return False
    return len(sink.getvalue()) <= PART_BYTES


def _reduce_by_class(
    error: BaseException, can_link: Callable[[Any], bool] = _accept_all
) -> tuple[Any, ...] | None:
    """Return how to pickle *error* as its class does; None if the copy isn't equal.

    *can_link* selects the linked exceptions, such as the cause, that are sent along.
    """
    try:
        reduced: Any = error.__reduce_ex__(5)
        make, args, *more = reduced
        state = more[0] if more else None
        copy: BaseException = _made(make, args)
        _complete(copy, (state, {}, {}, {}))
        copied, original = ({**vars(value), **_slot_values(value)} for value in (copy, error))
        same = type(copy) is type(error) and copy.args == error.args
        same = same and copied.keys() == original.keys()
        if not same or not all(_are_alike(copied[name], value) for name, value in original.items()):
            return None
    except Exception:  # the class may not support copies
        return None
    return _made, (make, args), (state, {}, {}, _links(error, can_link)), None, None, _complete


def _are_alike(first: Any, second: Any) -> bool:
    """Return whether two values are equal, or of one class without equality, such as locks."""
    if first == second:
        return True
    kind = type(cast("object", second))
    return type(cast("object", first)) is kind and kind.__eq__ is _IDENTITY


def _reduce_by_attributes(
    error: BaseException, is_kept: Callable[[Any], bool] = _accept_all
) -> tuple[Any, ...]:
    """Return how to pickle *error* by its class, attributes, and the state of its built-in base.

    *is_kept* selects the values to keep; a note on the copy names the others.
    """
    kind: Any = type(error)
    base: Any = next(parent for parent in kind.__mro__ if not parent.__flags__ & HEAP_TYPE)
    _, args, *more = base.__reduce__(error)
    attributes = dict(vars(error))
    base_state = cast("dict[str, Any]", more[0] if more and more[0] else {})  # such as `name`
    members = {**base_state, **_slot_values(error)}
    members = {name: value for name, value in members.items() if name not in attributes}
    omitted: list[str] = []
    if base is not BaseExceptionGroup:  # a group's exceptions are pickled one by one
        kept_flags = [is_kept(value) for value in args]
        omitted += [f"args[{index}]" for index, keep in enumerate(kept_flags) if not keep]
        args = tuple(
            value if keep else _text(value) for value, keep in zip(args, kept_flags, strict=True)
        )
    for values in (attributes, members):
        for name in [name for name, value in values.items() if not is_kept(value)]:
            omitted.append(f"{name} ({type(values.pop(name)).__qualname__})")
    if omitted:
        parts = ", ".join(omitted)
        note = (
            f"The job couldn't send these parts, which can't be pickled or are too large: {parts}"
        )
        attributes["__notes__"] = [*attributes.get("__notes__", ()), note]
    state = (None, attributes, members, _links(error, is_kept))
    return _put_together, (kind, base, args), state, None, None, _complete


def _slot_values(error: BaseException) -> dict[str, Any]:
    state = cast("Any", object.__getstate__(error))  # a dict, or a tuple of dict and slots, or None
    return cast("dict[str, Any]", {} if state is None or hasattr(state, "keys") else state[1])


def _text(value: Any) -> str:
    try:
        return f"{value}"[:1000]
    except Exception as exc:
        return f"<{type(value).__qualname__} that has no text ({type(exc).__name__})>"


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


def _made(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call an exception's own constructor; pickles refer to this function by its name."""
    return make(*args)


def _put_together(kind: type[BaseException], base: Any, args: tuple[Any, ...]) -> Any:
    """Rebuild an exception without its own ``__init__``; pickles refer to this function."""
    error = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


def _complete(error: BaseException, state: tuple[Any, dict[str, Any], Any, Any]) -> None:
    """Set the state of a rebuilt exception; pickles refer to this function."""
    own_state, attributes, members, links = state
    if own_state is not None:
        error.__setstate__(own_state)
    vars(error).update(attributes)
    for name, value in {**members, **links}.items():
        object.__setattr__(error, name, value)  # the class may refuse `setattr`
