"""Give a class that travels by value the ID that each process of the same program computes.

cloudpickle draws a random ID for such a class. Unpickling then makes the class anew in a process
that runs the same program, so `isinstance`, ``==`` of dataclasses, and ``is`` of enum members are
false there. The ID here says where the class is and how it is defined.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
from typing import Any, cast

import cloudpickle

_cloudpickle: Any = cloudpickle.cloudpickle
_CLASSES: Any = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
"""The classes that cloudpickle has pickled or loaded by value, while something refers to them."""

_IDS: Any = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS


def assign(defined: type) -> None:
    """Give *defined* the ID that is the same in each process, if its module has it by its name.

    Any other class, such as one inside a function, gets a random ID from cloudpickle. Two of them
    may differ although their definitions are the same. A class that was loaded keeps its ID.
    """
    with contextlib.suppress(Exception):  # a class may have anything as an attribute
        named = _class_at(defined.__module__, defined.__qualname__)
        if named is defined and defined not in _IDS:
            definition = repr(_definition(defined)).encode()
            digest = hashlib.sha256(definition).hexdigest()
            identity = f"{defined.__module__}:{defined.__qualname__}:{digest}"
            with _cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
                # A cell of a notebook that runs again replaces its class by an equal one.
                if (replaced := _CLASSES.get(identity)) is not None:
                    _IDS.pop(replaced, None)
                _CLASSES[identity], _IDS[defined] = defined, identity
        elif named not in (defined, None):
            assign(named)  # it may have replaced *defined*, and then takes its ID


def find(identity: str) -> type | None:
    """Return the class of this process with this ID; None if there is none."""
    module, _, rest = identity.partition(":")
    named = _class_at(module, rest.rpartition(":")[0])
    if named is not None:
        assign(named)
        if _IDS.get(named) == identity:
            return named
    known: type | None = _CLASSES.get(identity)
    return known


def _class_at(module: str, qualname: str) -> type | None:
    """Return the class that *module* has by the name *qualname*, if it calls itself so."""
    found: Any = sys.modules.get(module)
    with contextlib.suppress(Exception):  # a module may be any object
        for name in qualname.split("."):
            found = getattr(found, "__dict__", {}).get(name)
        own_name = found.__module__, found.__qualname__
        if isinstance(found, type) and own_name == (module, qualname):
            return found
    return None


def _definition(defined: type) -> Any:
    """Return what the statement ``class`` says, without lines and the values of attributes."""
    own: Any = vars(defined)
    functions = {name: _function_in(value) for name, value in own.items()}
    functions.pop("__annotate_func__", None)  # a copy has annotations instead
    codes = {name: _code(value.__code__) for name, value in functions.items() if value}
    names = ("__dataclass_fields__", "__slots__", "_fields")
    fields = [[*own.get(name, ())] for name in names]
    members = {name: repr(member.value) for name, member in own.get("_member_map_", {}).items()}
    bases = [
        _definition(base)
        if base.__module__ == defined.__module__
        else (base.__module__, base.__qualname__)
        for base in defined.__bases__
    ]
    return codes, fields, members, bases, cast("Any", type(defined)).__qualname__


def _function_in(value: Any) -> types.FunctionType | None:
    """Return the function in a method, a property, or a wrapper."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        value = getattr(value, name, None) or value
    return value if type(value) is types.FunctionType else None


def _code(code: types.CodeType) -> Any:
    """Return what *code* does, without lines."""
    constants: list[Any] = [*code.co_consts]
    for number, constant in enumerate(constants):
        if isinstance(constant, types.CodeType):
            constants[number] = _code(constant)
        elif isinstance(constant, frozenset):  # its order differs from process to process
            constants[number] = sorted(map(repr, cast("Any", constant)))
    return code.co_code, code.co_names, code.co_varnames, constants
