"""Read values whose classes another process has sent by value, as instances of this one's classes.

Unpickling makes such a class anew. If this process runs the same program, it has the same class
already: then `isinstance`, ``==`` of dataclasses, and ``is`` of enum members must hold.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, cast

from kinetic._packing.changes import essences
from kinetic._runner.protocol import by_value, pickles


def load(read: Callable[[type[pickles.Unpickler]], Any]) -> Any:
    """Return what *read* unpickles with an unpickler; call it again if this process has a class.

    Raises:
        Exception: *read* raised it at its first call.
    """
    made: dict[str, type] = {}

    def make_class(*args: Any) -> type:
        made[by_value.id_of_class(*args)] = found = by_value.make_class(*args)
        return found

    class Noting(pickles.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            found = super().find_class(module, name)
            return make_class if found is by_value.make_class else found

    value = read(Noting)
    own: dict[str, type] = {}
    for identity, copy in made.items():
        with contextlib.suppress(Exception):  # a class may have anything as an attribute
            if found := _own_class(copy):
                own[identity] = found
    if own:
        by_value.know_classes(own)
        try:
            return read(pickles.Unpickler)
        except Exception:
            by_value.know_classes({identity: made[identity] for identity in own})
    return value


def _own_class(copy: type) -> type | None:
    """Return the class of this process that *copy* is a copy of; None if there is none."""
    found: Any = sys.modules.get(copy.__module__)
    for name in copy.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) and found is not copy and _same(copy, found) else None


@functools.lru_cache(maxsize=128)  # for the items of a batch
def _same(first: type, second: type) -> bool:
    return bool(_definition(first) == _definition(second))


def _definition(defined: type) -> Any:
    """Return what the statement ``class`` says, without lines and the values of attributes."""
    own: Any = vars(defined)
    functions = {name: _function_in(value) for name, value in own.items()}
    functions.pop("__annotate_func__", None)  # a copy has annotations instead
    codes = {name: essences(value.__code__) for name, value in functions.items() if value}
    names = ("__dataclass_fields__", "__slots__", "_fields")
    fields = [[*own.get(name, ())] for name in names]
    members = {name: repr(member.value) for name, member in own.get("_member_map_", {}).items()}
    bases = [
        _definition(base) if base.__module__ == defined.__module__ else base
        for base in defined.__bases__
    ]
    return codes, fields, members, bases, cast("Any", type(defined)).__qualname__


def _function_in(value: Any) -> types.FunctionType | None:
    """Return the function in a method, a property, or a wrapper."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        value = getattr(value, name, None) or value
    return value if type(value) is types.FunctionType else None
