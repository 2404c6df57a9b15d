"""Pickle the annotations of functions and classes that are pickled by value.

Since Python 3.14, annotations are computed on access. cloudpickle accesses the annotations of every
function, and fails if an annotation names something that is imported for type checkers only.
cloudpickle drops the annotations of classes.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, ForwardRef

from . import by_value

LAZY = sys.version_info >= (3, 14)

# What `type Name = ...` defines, from Python 3.12 on.
_ALIAS: Any = getattr(typing, "TypeAliasType", None)
_NEW: Any = getattr(copyreg, "__newobj_ex__")  # noqa: B009 - type checkers do not know it


def with_text_annotations(function: types.FunctionType) -> types.FunctionType:
    """Return *function*, or a copy with annotations as text if they can't be computed."""
    if not LAZY or _computed_annotations(function) is not None:
        return function
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(copy, name, getattr(function, name))
    copy.__dict__.update(vars(function))
    copy.__annotations__ = _text_annotations(function)
    return copy


def with_annotations(defined: type, reduced: Any) -> Any:
    """Add annotations to *reduced*, cloudpickle's form of a class that is pickled by value."""
    match reduced:
        case (_, _, (dict(), _), *_) if LAZY and "__annotate_func__" in vars(defined):
            computed = _computed_annotations(defined)
            state = reduced[2][0]
            # The state has annotations that were computed before, under one of these names.
            for name in ("__annotations__", "__annotations_cache__"):
                state.pop(name, None)
            state["__annotations__"] = _text_annotations(defined) if computed is None else computed
        case _:
            pass
    return reduced


def is_importable(obj: Any) -> bool:
    """Return whether the module of *obj* has it by its name, so that it pickles by reference."""
    module = getattr(obj, "__module__", None) or "__main__"
    found: Any = sys.modules.get(module)
    name: Any = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is obj and module != "__main__"


def _named(hint: Any, make: Any, *args: Any) -> Any:
    """Return how to pickle *hint*: by its name in the job's ``__main__`` if it is global there."""
    name = hint.__name__
    if vars(sys.modules["__main__"]).get(name) is hint:
        return by_value.named, ("__main__", name, make, args)
    return make, args


def _reduce_alias(alias: Any) -> Any:
    """Return how to pickle a type alias.

    If the alias refers to itself, or to a name that doesn't exist, its name replaces its value.
    """
    value: Any = ForwardRef(alias.__name__)
    with contextlib.suppress(Exception):
        if not _is_within(alias, alias.__value__, []):
            value = alias.__value__
    arguments = {"type_params": alias.__type_params__}
    return _named(alias, _NEW, type(alias), (alias.__name__, value), arguments)


def _is_within(alias: Any, annotation: Any, seen: list[Any]) -> bool:
    """Return whether *annotation* refers to *alias*; *seen* collects the aliases on the way."""
    if annotation is alias or isinstance(annotation, type):
        return annotation is alias
    parts = [getattr(annotation, "__origin__", None), *getattr(annotation, "__args__", ())]
    if type(annotation) is _ALIAS and annotation not in seen:
        seen.append(annotation)
        parts.append(annotation.__value__)
    return any(_is_within(alias, part, seen) for part in parts if part is not None)


def _computed_annotations(annotated: Any) -> dict[str, Any] | None:
    try:
        computed: dict[str, Any] = annotated.__annotations__
    except Exception:  # the hints are the user's code
        return None
    return computed


def _text_annotations(annotated: Any) -> dict[str, Any]:
    """Return the annotations as text, like `from __future__ import annotations`."""
    library: Any = importlib.import_module("annotationlib")
    try:
        texts: dict[str, Any] = library.get_annotations(annotated, format=library.Format.STRING)
    except Exception:
        return {}
    return texts


REDUCERS: dict[Any, Callable[[Any], Any]] = {
    type(functools.lru_cache(len)): by_value.reduce_cached,
    typing.ParamSpec: lambda hint: _named(hint, typing.ParamSpec, hint.__name__),
    typing.TypeVarTuple: lambda hint: _named(hint, typing.TypeVarTuple, hint.__name__),
    typing.NewType: lambda hint: _named(hint, typing.NewType, hint.__name__, hint.__supertype__),
}
"""How to pickle objects that otherwise pickle themselves as a name in a module."""

if _ALIAS is not None:
    REDUCERS[_ALIAS] = _reduce_alias
if LAZY:  # a ForwardRef keeps the whole namespace in which Python looks up its name
    REDUCERS[ForwardRef] = lambda hint: (ForwardRef, (hint.__forward_arg__,))
