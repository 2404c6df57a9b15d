"""Pickle the annotations of functions and classes that travel by value.

Since Python 3.14, annotations are computed on access. cloudpickle accesses the annotations of every
function, and fails if one names an import that only type checkers make. It drops the annotations
of classes.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, ForwardRef

LAZY = sys.version_info >= (3, 14)

# What `type Name = ...` defines, from Python 3.12 on.
_ALIAS: Any = getattr(typing, "TypeAliasType", None)
_NEW: Any = getattr(copyreg, "__newobj_ex__")  # noqa: B009 - type checkers do not know it


def carried(function: types.FunctionType) -> types.FunctionType:
    """Return *function*, or a copy with annotations as text if they can't be computed."""
    if not LAZY or _computed(function) is not None:
        return function
    like = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(like, name, getattr(function, name))
    like.__dict__.update(vars(function))
    like.__annotations__ = _text(function)
    return like


def completed(defined: type, reduced: Any) -> Any:
    """Reduce a class by value as cloudpickle does, with its annotations."""
    match reduced:
        case (_, _, (dict(), _), *_) if LAZY and "__annotate_func__" in vars(defined):
            found = _computed(defined)
            state = reduced[2][0]
            # Replace the annotations under one name, even if they were computed before.
            for name in ("__annotations__", "__annotations_cache__"):
                state.pop(name, None)
            state["__annotations__"] = _text(defined) if found is None else found
        case _:
            pass
    return reduced


def is_found(one: Any) -> bool:
    """Return whether the module of *one* has it by its name, so that it pickles by reference."""
    module = sys.modules.get(getattr(one, "__module__", None) or "")
    return getattr(module, getattr(one, "__name__", ""), None) is one


def _alias(alias: Any) -> Any:
    """Return how to pickle a type alias.

    Its value becomes its name if the alias refers to itself, or to a name that doesn't exist.
    """
    value: Any = ForwardRef(alias.__name__)
    with contextlib.suppress(Exception):
        if not _is_within(alias, alias.__value__, []):
            value = alias.__value__
    facts = {"type_params": alias.__type_params__}
    return _NEW, (type(alias), (alias.__name__, value), facts)


def _is_within(alias: Any, annotation: Any, seen: list[Any]) -> bool:
    if annotation is alias or isinstance(annotation, type):
        return annotation is alias
    parts = [getattr(annotation, "__origin__", None), *getattr(annotation, "__args__", ())]
    if type(annotation) is _ALIAS and annotation not in seen:
        seen.append(annotation)
        parts.append(annotation.__value__)
    return any(_is_within(alias, part, seen) for part in parts if part is not None)


def _computed(one: Any) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = one.__annotations__
    except Exception:  # the hints are the user's code
        return None
    return found


def _text(one: Any) -> dict[str, Any]:
    """Return the annotations as text, like `from __future__ import annotations`."""
    library: Any = importlib.import_module("annotationlib")
    try:
        found: dict[str, Any] = library.get_annotations(one, format=library.Format.STRING)
    except Exception:
        return {}
    return found


KINDS: dict[Any, Callable[[Any], Any]] = {
    typing.ParamSpec: lambda it: (typing.ParamSpec, (it.__name__,)),
    typing.TypeVarTuple: lambda it: (typing.TypeVarTuple, (it.__name__,)),
    typing.NewType: lambda it: (typing.NewType, (it.__name__, it.__supertype__)),
}
"""How to pickle objects that otherwise pickle themselves as a name in a module."""

if _ALIAS is not None:
    KINDS[_ALIAS] = _alias
if LAZY:  # it keeps the whole namespace that its name is looked up in
    KINDS[ForwardRef] = lambda it: (ForwardRef, (it.__forward_arg__,))
