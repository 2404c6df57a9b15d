"""Pickle an exception so that its copy has the class and the state of the original.

pickle rebuilds an exception by calling its class with ``args``, which many constructors don't
accept. So kinetic uses a class's own pickling if the class defines one, and if a copy can be made.
Otherwise kinetic sends the state, and makes the copy without the class's own ``__init__``.
"""

from __future__ import annotations

import contextlib
import copyreg
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has defined, and of some classes of extensions."""

_OWN_PICKLING = ("__reduce__", "__reduce_ex__", "__setstate__")

_MEMBER_TYPES = (types.MemberDescriptorType, types.GetSetDescriptorType)
"""The types of slots, and of attributes that C code keeps outside ``__dict__``."""


def reduce(
    error: BaseException,
    links: Mapping[str, Any] | None = None,
    is_kept: Callable[[Any], bool] = lambda _: True,
) -> tuple[Any, ...]:
    """Return how to pickle *error*, with *links*: attributes such as the cause.

    *is_kept* selects the values to keep. A note on the copy names the others.
    """
    reduced = _reduce_by_class(error, links or {})
    if reduced is not None and is_kept((reduced[1], reduced[2][0])):
        return reduced
    return _reduce_by_state(error, links or {}, is_kept)


def _reduce_by_class(error: BaseException, links: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return how the class of *error* pickles it; None without own pickling that makes a copy."""
    kind = type(error)
    registered = cast("dict[Any, Any]", copyreg.dispatch_table).get(kind)
    own_classes = [vars(parent) for parent in kind.__mro__ if parent.__flags__ & HEAP_TYPE]
    if not registered and not any(name in own for own in own_classes for name in _OWN_PICKLING):
        return None
    try:
        reduced: Any = registered(error) if registered else error.__reduce_ex__(5)
        make, args, *more = reduced
        (own_state,) = more or (None,)
        # Few classes pickle the notes, which any code may have added.
        notes = {name: value for name, value in vars(error).items() if name == "__notes__"}
        state: tuple[Any, ...] = (own_state, notes, {}, links)
        copy: object = _made(make, args)
        _complete(cast("BaseException", copy), (own_state, {}, {}, {}))
    except Exception:  # the class may not support copies
        return None
    if type(copy) is not kind:
        return None
    return _made, (make, args), state, None, None, _complete


def _reduce_by_state(
    error: BaseException, links: Mapping[str, Any], is_kept: Callable[[Any], bool]
) -> tuple[Any, ...]:
    """Return how to pickle *error* by its class, ``args``, and attributes."""
    kind: Any = type(error)
    parents: tuple[type, ...] = kind.__mro__
    base: Any = next(
        parent
        for parent in parents  # the first whose objects C code makes
        if not parent.__flags__ & HEAP_TYPE
        or isinstance(vars(parent).get("__new__"), types.BuiltinFunctionType)
    )
    attributes = dict(vars(error))
    state = cast("Any", object.__getstate__(error))  # a dict, or a tuple of dict and slots, or None
    slots: dict[str, Any] = {} if state is None or hasattr(state, "keys") else state[1]
    members = {**_built_in_members(error), **slots}
    omitted: list[str] = []
    args: tuple[Any, ...] = error.args
    if issubclass(kind, BaseExceptionGroup):  # its exceptions are pickled one by one
        group: Any = error
        args = (group.message, [*group.exceptions])
    else:
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
    return (
        _put_together,
        (kind, base, args),
        (None, attributes, members, links),
        None,
        None,
        _complete,
    )


def _built_in_members(error: BaseException) -> dict[str, Any]:
    """Return what the built-in classes of *error* keep outside ``__dict__``, such as ``errno``."""
    members: dict[str, Any] = {}
    for parent in type(error).__mro__:
        if parent.__flags__ & HEAP_TYPE or parent in (BaseExceptionGroup, BaseException, object):
            continue
        for name, member in vars(parent).items():
            # An AttributeError's `obj` may be anything; Python doesn't pickle it, either.
            if isinstance(member, _MEMBER_TYPES) and name != "obj":
                with contextlib.suppress(AttributeError):  # it has no value
                    members.setdefault(name, member.__get__(error))
    return {name: value for name, value in members.items() if value is not None}


def _text(value: Any) -> str:
    try:
        return f"{value}"[:1000]
    except Exception as exc:
        return f"<{type(value).__qualname__} that has no text ({type(exc).__name__})>"


def _made(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call an exception's own constructor; pickles refer to this function by its name."""
    return make(*args)


def _put_together(kind: type[BaseException], base: Any, args: tuple[Any, ...]) -> Any:
    """Rebuild an exception without its own ``__init__``; pickles refer to this function."""
    error = base.__new__(kind, *args)
    # The class may not have called this `__init__`, which then refuses its `args`.
    with contextlib.suppress(TypeError):
        base.__init__(error, *args)
    return error


def _complete(error: BaseException, state: tuple[Any, dict[str, Any], Any, Any]) -> None:
    """Set the state of a rebuilt exception; pickles refer to this function."""
    own_state, attributes, members, links = state
    if own_state is not None:
        cast("Any", error).__setstate__(own_state)
    vars(error).update(attributes)  # not by `setattr`, which a class may refuse
    for name, value in {**members, **links}.items():
        found = (vars(parent).get(name) for parent in type(error).__mro__)
        next(member for member in found if isinstance(member, _MEMBER_TYPES)).__set__(error, value)
