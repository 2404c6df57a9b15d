"""Find which part of a value cannot be pickled.

The search goes from the outside in. It picks the first part that can't be pickled by itself, and
then searches that part in the same way. It ends when all parts of the picked part can be pickled.
The last picked part is the culprit.
"""

from __future__ import annotations

import collections
import dis
import functools
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEARCH_SECONDS = 5.0
"""How long to search, in seconds."""

MAX_DEPTH = 25
"""How many levels of nested values to search."""


TryPickle = Callable[[Collection[int], Any], Exception | None]
"""A function that pickles a value, but not the objects with the given IDs, and returns the error.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A value inside another; ``label`` says where: ``[2]``, ``.name``, or a description."""

    label: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A part that can't be pickled, and its location."""

    location: str
    value: Any
    error: Exception


def find(
    parts: Sequence[Part],
    try_pickle: TryPickle,
    is_by_value: Callable[[str], bool],
    whole: Any = None,
    seconds: float = SEARCH_SECONDS,
) -> Culprit | None:
    """Return the innermost part of *parts* that cannot be pickled; None if each part can.

    *is_by_value* tells whether a module's code is pickled by value. *whole* is the value that has
    these parts; the search doesn't follow references back to *whole*. After *seconds* the search
    ends with the innermost part found so far.
    """
    deadline = time.monotonic() + seconds
    found: Culprit | None = None
    is_whole = len(parts) == 1 and parts[0].value is whole
    enclosing_ids = set[int]() if is_whole else {id(whole)}
    for _ in range(MAX_DEPTH):
        failing = _first_failing(parts, functools.partial(try_pickle, enclosing_ids), deadline)
        if failing is None:
            break
        part, error = failing
        location = join_location(found.location if found else "", part.label)
        found = Culprit(location=location, value=part.value, error=error)
        if id(part.value) in enclosing_ids or time.monotonic() > deadline:
            break
        enclosing_ids.add(id(part.value))
        parts = list(parts_of(part.value, is_by_value))
    return found


def join_location(outer: str, label: str) -> str:
    """Return the location of a part: the location *outer* of its container, and its *label*."""
    if not outer or label.startswith((".", "[")):
        return outer + label
    return f"{outer}, {label}"


def _first_failing(
    parts: Sequence[Part], try_pickle: Callable[[Any], Exception | None], deadline: float
) -> tuple[Part, Exception] | None:
    """Return the first part that fails, with its error; None if no part fails."""
    parts = list(parts)
    # Bisect the parts, so that a list of a million values isn't pickled a million times.
    while len(parts) > 1 and time.monotonic() < deadline:
        half = len(parts) // 2
        first_half = parts[:half]
        parts = (
            first_half
            if try_pickle([part.value for part in first_half]) is not None
            else parts[half:]
        )
    if len(parts) != 1 or (error := try_pickle(parts[0].value)) is None:
        return None
    return parts[0], error


def captured_parts(function: types.FunctionType) -> Iterator[Part]:
    """Yield what a function captures: closure, defaults, the globals it names, attributes."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Part(f"captured variable {name!r}", cell.cell_contents)
        except ValueError:
            continue  # the variable has no value yet
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        yield Part(f"default of {name!r}", value)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Part(f"default of {name!r}", value)
    for name in dict.fromkeys(_globals_of(code)):
        if name in function.__globals__:
            yield Part(f"global {name!r}", function.__globals__[name])
    yield from (Part(f".{name}", value) for name, value in vars(function).items())


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that *code*, or a function defined in it, reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def parts_of(value: Any, is_by_value: Callable[[str], bool]) -> Iterator[Part]:
    """Yield the parts of *value*; a module or class has parts only if *is_by_value* accepts it."""
    if is_instance(value, dict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary):
        for key, item in list(value.items()):
            key_text = repr(key)
            yield Part(f"[{key_text if len(key_text) <= 40 else key_text[:37] + '...'}]", item)
        yield from (Part(" (a key)", key) for key in list(value))
    elif is_instance(value, list, tuple, set, frozenset, collections.deque):
        yield from (Part(f"[{index}]", item) for index, item in enumerate(value))
    elif is_instance(value, types.FunctionType):
        yield from captured_parts(value)
    elif is_instance(value, types.MethodType):
        yield from (Part(".__self__", value.__self__), Part(".__func__", value.__func__))
    elif is_instance(value, functools.partial):
        yield Part(".func", value.func)
        yield from (Part(f".args[{index}]", item) for index, item in enumerate(value.args))
        yield from (Part(f".keywords[{name!r}]", item) for name, item in value.keywords.items())
    elif is_instance(value, types.ModuleType, type):
        home = value.__name__ if is_instance(value, types.ModuleType) else value.__module__
        if is_by_value(str(home)):
            yield from _attributes(value.__dict__)
    else:
        try:
            state: Any = value.__getstate__()
        except Exception:  # the class's own code may raise
            return
        # An object with slots has a pair: its `__dict__`, and the values of its slots.
        for attributes in state if is_instance(state, tuple) else (state,):
            if is_instance(attributes, dict):
                yield from _attributes(attributes)


def is_instance(value: object, *kinds: type) -> bool:
    """Do what `isinstance` does, without narrowing the type for the type checker."""
    return isinstance(value, kinds)


def _attributes(attributes: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the attributes, except those that Python adds to every module or class."""
    machinery = {"__builtins__", "__dict__", "__loader__", "__spec__", "__weakref__"}
    for name, item in list(attributes.items()):
        if name not in machinery:
            yield Part(f".{name}", item)
