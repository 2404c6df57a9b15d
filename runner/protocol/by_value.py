"""Pickle by value what cloudpickle refuses, or copies without a part.

These are classes whose creation needs more than their name and bases, helpers of the standard
library that hold locks or weak references, objects that only their identity distinguishes, and
annotations. Since Python 3.14, these are computed on access. cloudpickle accesses the annotations
of every function, and fails if an annotation names something that is imported for type checkers
only. It drops the annotations of classes.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import copyreg
import enum
import functools
import importlib
import operator
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any, ForwardRef, cast

import cloudpickle

from . import class_ids
from .exceptions import HEAP_TYPE

_cloudpickle: Any = cloudpickle.cloudpickle
_NEW: Any = getattr(copyreg, "__newobj__")  # noqa: B009 - type checkers do not know it

LAZY = sys.version_info >= (3, 14)

# `type Name = ...` makes objects of this class, from Python 3.12 on.
_ALIAS: Any = getattr(typing, "TypeAliasType", None)
_NEW_EX: Any = getattr(copyreg, "__newobj_ex__")  # noqa: B009 - type checkers do not know it

_IN_C = types.BuiltinFunctionType
"""The type of a ``__new__`` that is written in C."""

_unfilled: weakref.WeakSet[Any] = weakref.WeakSet()
"""Classes and functions that were made, and whose attributes are not set yet."""


def reduce_class(defined: type, reduced: Any) -> Any:
    """Return *reduced*, cloudpickle's form of the class *defined*, with what it leaves out.

    cloudpickle leaves out slots, the name inside a class or function, and of an enum the aliases
    and the attributes of members.
    """
    make, args, (state, slot_state), *_ = reduced
    members: dict[str, Any] = {}
    own: Any = vars(defined)
    if issubclass(defined, enum.Enum):
        all_members: dict[str, Any] = own["_member_map_"]  # with the aliases
        members = {name: _attributes(member) for name, member in all_members.items()}
        state = {name: value for name, value in state.items() if name not in all_members}
        # Without this, a value that is a descriptor, such as a function, makes no member.
        values = {name: enum.member(member._value_) for name, member in all_members.items()}
        args = (*args[:3], values, *args[4:-1], _content(defined))
    else:
        kind, name, bases, namespace, *more = args
        slots: Any = own.get("__slots__")
        namespace = {**namespace, "__qualname__": defined.__qualname__}
        # A named tuple has empty slots and loses nothing.
        if isinstance(slots, (str, tuple, list, dict)) and not issubclass(defined, tuple):
            for slot in cast("Iterable[str]", [slots] if isinstance(slots, str) else slots):
                # The new class makes its own descriptor.
                state.pop(_mangle(slot, defined.__name__), None)
            namespace["__slots__"] = slots
        args = (kind, name, bases, namespace, *more)
    hints = own.get("__annotations__", {})
    state = (state, slot_state, members, _globals_of_annotations(defined.__module__, hints))
    return make_class, (make, *args), state, None, None, fill_class


def _globals_of_annotations(module: str, annotations: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of ``__main__`` that *annotations* of that *module* name as text.

    `typing.get_type_hints` looks them up when, for example, a library reads a dataclass.
    """
    if module != "__main__":
        return {}
    used = set[str]()
    for text in annotations.values():
        if isinstance(text, str):
            with contextlib.suppress(SyntaxError):
                used.update(compile(text, "", "eval").co_names)
    namespace = vars(sys.modules["__main__"])
    return {name: namespace[name] for name in sorted(used) if name in namespace}


def _content(defined: Any) -> dict[str, tuple[Any, ...]] | None:
    """Return what members that are strings, numbers, or tuples consist of, if not of their values.

    Return None for other enums.
    """
    data: Any = _data_type(defined.__mro__)
    if not hasattr(data, "__getnewargs__"):
        return None
    members: dict[str, Any] = defined._member_map_
    content: dict[str, Any] = {
        name: data.__getnewargs__(member) for name, member in members.items()
    }
    values: list[Any] = [(type(member._value_), member._value_) for member in members.values()]
    own: list[Any] = [(type(args[0]), args[0]) for args in content.values()]
    return content if own != values else None


def _data_type(bases: Iterable[type]) -> Any:
    """Return the class of C whose ``__new__`` makes the members of an enum with these bases."""
    found = (parent for base in bases for parent in base.__mro__)
    made_in_c = (kind for kind in found if isinstance(vars(kind).get("__new__"), _IN_C))
    return next((kind for kind in made_in_c if kind is not object), object)


def _attributes(member: enum.Enum) -> dict[str, Any]:
    own = ("_name_", "_value_", "__objclass__", "_sort_order_")
    return {name: value for name, value in vars(member).items() if name not in own}


def _mangle(slot: str, owner: str) -> str:
    owner = owner.lstrip("_")
    private = slot.startswith("__") and not slot.endswith("__")
    return f"_{owner}{slot}" if private and owner else slot


def known_class(*args: Any) -> type | None:
    """Return the class that this process knows by the ID in the arguments of `make_class`."""
    return class_ids.find(args[-2])


def make_class(make: Callable[..., type], *args: Any) -> type:
    """Return the class that this process knows by its ID, or make it; pickles refer to this.

    *make* runs the hooks of the class, such as ``__init_subclass__``. A hook may need what only
    the statement ``class`` has: keyword arguments, or the body. If one fails, run no hooks.
    Run none that travels by value: what it has done, such as adding the class to a list, travels.
    """
    if (known := known_class(*args)) is not None:
        return known
    *_, content = args
    made: Any = None
    try:
        # An enum would make its members of their values.
        if content is None:
            with _without_hooks_by_value(make, *args):
                made = make(*args)
        else:
            made = _make_tracked(make, *args)
    except Exception:
        with contextlib.suppress(Exception):
            made = _make_tracked(make, *args)
        if made is None:
            raise
    _unfilled.add(made)
    if made.__module__ == "__main__" and "." not in made.__qualname__:
        # pickle, and the children of multiprocessing, find the class by its name.
        vars(sys.modules["__main__"]).setdefault(made.__name__, made)
    return cast("type", made)


@contextlib.contextmanager
def _without_hooks_by_value(make: Callable[..., type], *args: Any) -> Generator[None]:
    """Hide the hooks of bases and of the metaclass that travel by value."""
    if make is not _cloudpickle._make_skeleton_class:  # an enum
        yield
        return
    kind, _, bases, *_ = args
    parents = [parent for base in types.resolve_bases(bases) for parent in base.__mro__]
    candidates = [(parent, "__init_subclass__") for parent in parents]
    candidates += [(parent, name) for parent in kind.__mro__ for name in ("__new__", "__init__")]
    hidden: list[tuple[type, str, Any]] = []
    for owner, name in dict.fromkeys(candidates):
        if name in vars(owner) and owner in _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS:
            hidden.append((owner, name, cast("Any", vars(owner)[name])))
            type.__delattr__(owner, name)
    try:
        yield
    finally:
        for owner, name, hook in hidden:
            type.__setattr__(owner, name, hook)


def fill_class(made: type, state: tuple[Any, Any, dict[str, Any], dict[str, Any]]) -> type:
    """Set the attributes of a new class; pickles refer to this. A known class keeps its own."""
    if made in _unfilled:
        _unfilled.discard(made)
        attributes, slot_state, members, hints = state
        _cloudpickle._class_setstate(made, (attributes, slot_state))
        for name, values in members.items():
            member: Any = cast("Any", made)[name]
            member.__dict__.update(values)
        _define(hints)
    return made


def _define(values: dict[str, Any]) -> None:
    for name, value in values.items():
        vars(sys.modules["__main__"]).setdefault(name, value)


def make_function(
    make: Any, name: str, code: types.CodeType, namespace: dict[str, Any], *more: Any
) -> Any:
    """Return the function of *namespace* with this name and code, or make it; for pickles."""
    known = namespace.get(name)
    if isinstance(known, types.FunctionType) and known.__code__ == code:
        return known
    made = make(code, namespace, *more)
    _unfilled.add(made)
    return made


def fill_function(made: Any, state: Any) -> None:
    """Set the globals and attributes of a new function; a known one keeps its own; for pickles."""
    if made in _unfilled:
        _unfilled.discard(made)
        _cloudpickle._function_setstate(made, state)


def add_submodules(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Add to the *state* of a function the submodules that only the functions in it name.

    cloudpickle looks at the names in the function's own code alone. Before Python 3.12, a list
    comprehension is a function, too.
    """
    code = function.__code__
    if (names := names_of(code)) == frozenset(code.co_names):
        return
    cells = [cell for cell in state["__closure__"] or () if cell != types.CellType()]
    packages = [*state["__globals__"].values(), *(cell.cell_contents for cell in cells)]
    state["_cloudpickle_submodules"] = _cloudpickle._find_imported_submodules(
        types.SimpleNamespace(co_names=names), packages
    )


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the globals, attributes, and imports that *code* names, or a function in it."""
    inner = (names_of(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _make_tracked(make: Callable[..., type], *args: Any) -> type:
    made: type = _cloudpickle._lookup_class_or_track(args[-2], _make_without_hooks(make, *args))
    return made


class _NoHooks:
    """A base that ends the chain of ``__init_subclass__``."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _make_without_hooks(make: Any, *args: Any) -> type:
    if make is _cloudpickle._make_skeleton_enum:
        return _make_enum(*args)
    kind, name, bases, namespace, *_ = args
    constructor = abc.ABCMeta if issubclass(kind, abc.ABCMeta) else type
    has_bases = bases != (object,)
    made: Any = constructor.__new__(kind, name, (_NoHooks, *bases) if has_bases else (), namespace)
    if has_bases:
        made.__bases__ = bases
    return cast("type", made)


def _do_nothing(*_: Any) -> None:
    pass


def _make_enum(
    bases: tuple[type, ...],
    name: str,
    qualname: str,
    members: dict[str, enum.member[Any]],
    module: str,
    tracker: str,
    content: dict[str, tuple[Any, ...]] | None,
) -> type:
    """Make an enum whose base takes other arguments than a member's value.

    *content* has these arguments by name; without it, a value is the argument.
    """
    metaclass: Any = type(bases[-1])
    namespace = metaclass.__prepare__(name, bases)
    names = iter(members)
    data = _data_type(bases)

    def make_member(cls: Any, *_: Any) -> Any:
        name = next(names)
        value = members[name].value
        args = () if data is object else (content or {}).get(name, (value,))
        member = data.__new__(cls, *args)
        member._value_ = value
        return member

    namespace["__new__"] = make_member
    namespace["__init__"] = _do_nothing
    for member, value in members.items():
        namespace[member] = value
    made: Any = metaclass.__new__(metaclass, name, bases, namespace)
    del made.__init__
    made.__module__, made.__qualname__ = module, qualname
    return cast("type", made)


def named(module: str, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what *module* has under *name*, or make it; pickles refer to this.

    ``__main__`` keeps what was made, so that a function and its arguments get the same object.
    """
    try:
        namespace = vars(importlib.import_module(module))
    except Exception:  # the module may run any code
        namespace = {}
    made = make(*args)
    if type(found := namespace.get(name)) is type(made):
        return found
    if module == "__main__":
        namespace.setdefault(name, made)
    return made


def _place_of(obj: object, modules: Iterable[str]) -> tuple[str, str] | None:
    """Return the first of *modules* that has *obj* as a global, and the name of that global.

    ``__main__`` is the last, because a script may have imported the object from another module.
    """
    main = sys.modules["__main__"]
    found = {module: sys.modules.get(module) for module in modules}
    others = {name: module for name, module in found.items() if module is not main}
    for module, loaded in {**others, "__main__": main}.items():
        for name, value in tuple(getattr(loaded, "__dict__", {}).items()):
            if value is obj:
                return module, name
    return None


def _global_name(obj: Any, module: Any) -> str | None:
    """Return the name of the global of *module* that is *obj*, if the module's own code makes it.

    The name may differ from ``__qualname__``, as for a class that a decorator has replaced.
    """
    names = [name for name, value in tuple(getattr(module, "__dict__", {}).items()) if value is obj]
    try:
        code = module.__spec__.loader.get_code(module.__name__) if names else None
    except Exception:  # the module may have no loader, or an own one
        return None
    if not isinstance(code, types.CodeType):
        return None
    import dis  # only few pickles need it

    # A program may have put *obj* in place of a constant, which is what an import would give.
    made, is_constant = set[str](), True
    for step in dis.get_instructions(code):
        if step.opname not in ("COPY", "EXTENDED_ARG", "STORE_NAME", "UNPACK_SEQUENCE"):
            is_constant = step.opname in ("LOAD_CONST", "LOAD_SMALL_INT")  # from Python 3.14 on
        elif step.opname == "STORE_NAME" and not is_constant:
            made.add(step.argval)
    return next((name for name in names if name in made), None)


def reduce_importable(obj: Any) -> Any:
    """Return how to find a class or function in its module, where it has another name.

    A generic model of pydantic with type arguments is found through the model. Return None for all
    others.
    """
    generic: Any = getattr(obj, "__dict__", {}).get("__pydantic_generic_metadata__") or {}
    origin: Any = generic.get("origin")
    main = sys.modules["__main__"]
    module = sys.modules.get(getattr(origin or obj, "__module__", None) or "__main__", main)
    # `dataclasses.make_dataclass`, before Python 3.12, and `types.new_class` don't note the module.
    if module is types and (place := _place_of(obj, tuple(sys.modules))):
        module = sys.modules[place[0]]
    if module is main:
        return None
    if origin is not None and getattr(module, origin.__name__, None) is origin:
        return operator.getitem, (origin, generic["args"])
    for cell in getattr(obj, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            if not isinstance(cell.cell_contents, (type, types.FunctionType, types.ModuleType)):
                return None  # the program may have changed it since the import
    return (getattr, (module, name)) if (name := _global_name(obj, module)) else None


def reduce_marker(obj: Any) -> Any:
    """Return how to pickle a global that marks something, such as `dataclasses.MISSING`.

    A marker has no state, and ``is`` tests for it. Return None for all other objects.
    """
    kind: Any = type(cast("object", obj))
    if kind is not object:
        if not kind.__flags__ & HEAP_TYPE:
            return None
        with contextlib.suppress(AttributeError):  # it may have slots
            if object.__getattribute__(obj, "__dict__"):
                return None
        methods = ("__reduce_ex__", "__reduce__", "__eq__", "__getstate__")
        own = any(getattr(kind, name) is not getattr(object, name) for name in methods)
        in_python = kind.__new__ is object.__new__ or isinstance(kind.__new__, types.FunctionType)
        if own or not in_python or object.__getstate__(obj):
            return None
        try:
            obj.__reduce_ex__(5)
        except Exception:  # such as of a lock, whose class is written in C
            return None
    place = _place_of(obj, (kind.__module__,) if kind is not object else tuple(sys.modules))
    return place and (named, (*place, _NEW, (kind,)))


def reduce_cached(cached: Any) -> Any:
    """Return how to pickle what `functools.lru_cache` made, without what it has cached."""
    wrapped, known = cached.__wrapped__, {"__wrapped__", "cache_parameters"}
    known |= {*functools.WRAPPER_ASSIGNMENTS, *getattr(wrapped, "__dict__", ())}
    attributes = cast("dict[str, Any]", vars(cached))
    attributes = {name: value for name, value in attributes.items() if name not in known}
    return make_cached, (wrapped, cached.cache_parameters()), attributes


def make_cached(wrapped: Any, parameters: dict[str, Any]) -> Any:
    """Return *wrapped* with an empty cache; pickles refer to this function."""
    return functools.lru_cache(**parameters)(wrapped)


def _reduce_context_variable(variable: contextvars.ContextVar[Any]) -> Any:
    """Return how to pickle a context variable with its value in this context."""
    parts: list[Any] = []
    for context in (contextvars.Context(), contextvars.copy_context()):
        try:
            parts.append((context.run(variable.get),))
        except LookupError:
            parts.append(())
    return make_context_variable, (_place_of(variable, tuple(sys.modules)), variable.name, *parts)


def make_context_variable(
    place: tuple[str, str] | None, label: str, default: tuple[Any, ...], value: tuple[Any, ...]
) -> Any:
    """Return a context variable, set as in the caller's context; pickles refer to this function."""
    keywords = {"default": default[0]} if default else {}
    constructor: Any = contextvars.ContextVar
    make = functools.partial(constructor, label, **keywords)
    variable = named(*place, make, ()) if place else make()
    if value and not (default and value[0] is default[0]):
        variable.set(value[0])
    return variable


def _reduce_weak(container: Any) -> Any:
    items: Any = [*container] if isinstance(container, weakref.WeakSet) else dict(container)
    return cast("Any", container).__class__, (), items, None, None, fill_weak


def fill_weak(container: Any, items: Any) -> None:
    """Fill a container of weak references; pickles refer to this function.

    The container keeps the items alive, as what the caller's program has beside it does there.
    """
    container.update(items)
    container.kept_by_kinetic = items


def _reduce_cached_property(cached: Any) -> Any:
    attributes = cast("dict[str, Any]", vars(cached))
    attributes = {name: value for name, value in attributes.items() if name != "lock"}
    return make_cached_property, (type(cached),), attributes


def make_cached_property(kind: Any) -> Any:
    """Return a `functools.cached_property` without its function; pickles refer to this function."""
    made = kind.__new__(kind)
    if sys.version_info < (3, 12):
        made.lock = threading.RLock()
    return made


def reduce_validated(wrapper: Any) -> Any:
    """Return how to pickle what pydantic's ``validate_call`` calls, without all of ``__main__``."""
    function, config = wrapper.function, wrapper.config_wrapper.config_dict
    annotated = getattr(function, "func", function)  # of a partial call
    hints = _globals_of_annotations(annotated.__module__, annotated.__annotations__)
    return make_validated, (type(wrapper), hints, function, config, wrapper.validate_return)


def make_validated(
    kind: Any, hints: dict[str, Any], function: Any, config: Any, validate_return: bool
) -> Any:
    """Return a wrapper that makes its validators at the first call; pickles refer to this."""
    _define(hints)
    # The annotations of *function* may not be set yet.
    return kind(function, {**config, "defer_build": True}, validate_return, None)


REDUCERS: dict[Any, Callable[[Any], Any]] = {
    contextvars.ContextVar: _reduce_context_variable,
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: _reduce_weak,
    weakref.WeakSet: _reduce_weak,
    weakref.WeakValueDictionary: _reduce_weak,
}
"""How to pickle objects that hold locks or weak references, or depend on the context."""


# --- annotations ---


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
        return named, ("__main__", name, make, args)
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
    return _named(alias, _NEW_EX, type(alias), (alias.__name__, value), arguments)


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


NAMED_REDUCERS: dict[Any, Callable[[Any], Any]] = {
    type(functools.lru_cache(len)): reduce_cached,
    typing.ParamSpec: lambda hint: _named(hint, typing.ParamSpec, hint.__name__),
    typing.TypeVarTuple: lambda hint: _named(hint, typing.TypeVarTuple, hint.__name__),
    typing.NewType: lambda hint: _named(hint, typing.NewType, hint.__name__, hint.__supertype__),
}
"""How to pickle objects that otherwise pickle themselves as a name in a module."""

if _ALIAS is not None:
    NAMED_REDUCERS[_ALIAS] = _reduce_alias
if LAZY:  # a ForwardRef keeps the whole namespace in which Python looks up its name
    NAMED_REDUCERS[ForwardRef] = lambda hint: (ForwardRef, (hint.__forward_arg__,))
