"""Find what a job needs so that a call sees the project's modules as a direct call does.

The job imports these modules itself. A search goes from functions and classes of the call to the
names that their code uses, and on to what containers and instances have. The job then

- imports all modules that the search has reached, in the order of this process, with what they
  register at import;
- sets the plain values (numbers, text, None, and containers of them) that differ from the literals
  of the module's file. Only names count of which every assignment at the level of the module or
  class is a literal, or imports such a name. So do attributes that a class gives only literals, of
  an instance that the file makes from literals;
- sets `Data`, which becomes a path.

A warning names, once, what else the program has replaced, such as a function, and a file that was
edited after its import.
"""

from __future__ import annotations

import abc
import functools
import opcode
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from absl import logging

from kinetic._packing import source_text
from kinetic._packing.discover import BY_VALUE_VARIABLE
from kinetic._packing.modules import Modules
from kinetic._packing.source_text import DEFINED, MADE, Scope, Text
from kinetic._runner.protocol.by_value import names_of
from kinetic.data import Data
from kinetic.options import STARTED

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, types.MappingProxyType)
_MAX_DEPTH = 20
_MAX_ITEMS = 10_000
"""The search leaves out larger containers."""

_WRAPPERS = (
    *(functools.partial, types.MethodType, staticmethod, classmethod, property),
    *(functools.cached_property, type(functools.cache(len))),
)
_WRAPPED = ("__wrapped__", "__func__", "func", "fget", "fset")
"""Objects around a function, and their attributes that have it."""

_OUTSIDE = ("__main__", "unittest.mock")
"""No module of the project has values of these modules at its import."""

_named: set[str] = set()
"""What this process has named in a warning."""


class Changes(NamedTuple):
    """The modules that a job imports, and the values, by module and name, that it then sets."""

    imports: tuple[str, ...]
    values: dict[str, dict[str, Any]]


class _Literals(NamedTuple):
    """The possible values of attributes of *holder*, which is at *place* in *module*.

    The attributes of a state belong together: if one isn't plain now, the job sets none.
    """

    holder: Any
    module: str
    place: str
    values: Mapping[str, list[Any] | None]
    is_state: bool


def find(used: Iterable[Any], modules: Modules) -> Changes:
    """Return what the job of a call needs that uses the objects *used*."""
    start = _Search(modules)
    start.visit((value, frozenset()) for value in used)
    key = (modules.key, frozenset((id(value), names) for value, names in start.roots))
    search = _known.pop(key, None)
    if search is None or search.identity != search.identify():
        search = _Search(modules, start.roots)
        search.finish()
    _known[key] = search  # as the latest
    if len(_known) > 32:
        _known.pop(next(iter(_known)), None)
    values = search.compare()
    needs_imports = values or not search.is_imported
    order = [name for name in list(sys.modules) if name in search.reached]
    return Changes(tuple(order) if needs_imports else (), values)


class _Search:
    """A search from values to the *roots* in modules that the job imports; or from these on."""

    def __init__(self, modules: Modules, roots: Iterable[tuple[Any, frozenset[str]]] = ()) -> None:
        self.roots = list(roots)
        self.is_imported = True
        self.identity = 0
        self.reached: dict[str, types.ModuleType] = {}
        self._is_first = not self.roots
        self._modules = modules
        self._seen: dict[Any, tuple[Any, frozenset[str]]] = {}
        self._texts: dict[str, Text] = {}
        self._used: dict[tuple[str, str], Any] = {}
        self._literals: list[_Literals] = []

    def finish(self) -> None:
        """Search from the roots; warn of replacements, and prepare the other methods."""
        self.visit(self.roots)
        self._literals = [
            literals for module in self.reached.values() for literals in self._literals_of(module)
        ]
        self._warn()
        # Definitions stay alive, so that Python reuses no ID in `identify`.
        keep = [value for value, _ in self._seen.values() if not _is_module(value)]
        keep = [*filter(_items, keep), *self.reached.values()]
        self._seen = {id(value): (value, frozenset()) for value in keep}
        self.identity = self.identify()
        # Unpickling imports the modules of the roots, and their texts import others.
        stack, imported = [_home(value) for value, _ in self.roots], set[str]()
        while stack:
            if (name := stack.pop()) not in imported:
                imported.add(name)
                scope = self._text(name).scopes.get("") if name in self.reached else None
                for base, inner in scope.imports() if scope else ():
                    stack += base, f"{base}.{inner}"
                stack.append(name.rpartition(".")[0])
        self.is_imported = imported.issuperset(self.reached)

    def identify(self) -> int:
        """Return a number that changes if a search would see other objects than plain values."""
        found: list[Any] = [len(sys.modules), *map(source_text.file_of, self.reached.values())]
        for value, _ in self._seen.values():
            items = _items(value)
            found.append(len(items))
            found += [id(item) for item in items if _kind(item) not in _PLAIN]
        return hash(tuple(found))

    def visit(self, values: Iterable[tuple[Any, frozenset[str]]]) -> None:
        """Follow *values*, each with the names that the code around it uses."""
        stack = list(values)
        while stack:
            value, names = stack.pop()
            kind = _kind(value)
            key = (id(value), id(names) if _is_module(value) else "__subclasses__" in names)
            if kind in _PLAIN or key in self._seen:
                continue
            self._seen[key] = (value, names)  # keeps both alive, so Python reuses no ID
            home = _home(value)
            if (module := self._modules.imported(home)) is None:
                stack += self._parts(value, names, None, self._modules.is_by_value(home))
            elif not self._is_first:
                self.reached[home] = module
                stack += self._parts(value, names, module, True)
            elif "<locals>" in getattr(value, "__qualname__", "") and not issubclass(kind, type):
                # It travels by value. No root refers to it, because it may hold large values.
                self.roots.append((module, names_of(value.__code__)))
                stack += self._parts(value, names, None, True)
            else:
                self.roots.append((value, names))

    def _parts(
        self, value: Any, names: frozenset[str], module: types.ModuleType | None, is_own: bool
    ) -> Iterator[tuple[Any, frozenset[str]]]:
        """Yield what *value* uses; what is not *is_own* knows no names of the project."""
        kind, others = _kind(value), list[Any]()
        if kind is types.FunctionType:
            names, space = names_of(value.__code__), value.__globals__
            if module is not None and vars(module) is not space:
                module = None  # a function of an earlier module of this name
            for name in names & space.keys() if is_own else ():
                yield self._use(module, name, space[name]), names
            # A cache entry of other code may look like this instruction: then this finds no more.
            if is_own and opcode.opmap["IMPORT_NAME"] in value.__code__.co_code[::2]:
                package = space.get("__package__")
                # `import a.b` gives the name a, by which code may use a.c, too.
                tops = (name.partition(".")[0] for name in names)
                places = {*names, *tops, *(f"{package}.{name}" for name in names)}
                others += [sys.modules[name] for name in places & sys.modules.keys()]
            others += _items(value)
        elif _is_module(value):
            for name in names & _namespace(value).keys() if is_own else ():
                yield self._use(module, name, _namespace(value)[name]), names
        elif issubclass(kind, type):
            is_named = _attribute(module, value.__qualname__) is value
            for name, part in [*_namespace(value).items()] if is_own else ():
                place = f"{value.__qualname__}.{name}"
                yield self._use(module if is_named else None, place, part), names
            others += [*value.__bases__, kind] if is_own else ()
            if is_own and "__subclasses__" in names:
                others += type.__subclasses__(value)
            if is_own and issubclass(kind, abc.ABCMeta):  # with what ``register`` has added
                others += [known() for known in cast("Any", abc)._get_dump(value)[0]]
        else:
            home = kind.__module__
            is_own = self._modules.is_by_value(home) or self._modules.imported(home) is not None
            is_container = issubclass(kind, _CONTAINERS) or _is_wrapper(value)
            others += [kind, *(_items(value) if is_own or is_container else ())]
        yield from ((other, names) for other in others)

    def _use(self, module: types.ModuleType | None, place: str, value: Any) -> Any:
        """Note that the call uses what *place* has, and return it."""
        if module is not None:
            self._used[module.__name__, place] = value
        return value

    def _text(self, name: str) -> Text:
        if name not in self._texts:
            module = self._modules.imported(name)
            self._texts[name] = Text({}) if module is None else source_text.text_of(module)
        return self._texts[name]

    # --- values ---------------------------------------------------------------------------

    def compare(self) -> dict[str, dict[str, Any]]:
        """Return the values that differ from the literals, and those with `Data`."""
        values: dict[str, dict[str, Any]] = {}
        for (module, place), value in self._used.items():
            if _has_data(value):
                values.setdefault(module, {})[place] = value
        for holder, module, place, literals, is_state in self._literals:
            now = {name: value for name, value in [*_namespace(holder).items()] if name in literals}
            plain = {name: value for name, value in now.items() if _is_plain(value)}
            for name, value in plain.items() if not is_state or len(plain) == len(now) else ():
                known = literals[name]
                if known is not None and not any(_same(value, literal) for literal in known):
                    values.setdefault(module, {})[f"{place}.{name}".lstrip(".")] = value
        return values

    def _literals_of(self, module: types.ModuleType) -> Iterator[_Literals]:
        """Yield the literals of *module*, of its classes, and of its instances."""
        text, home = self._text(module.__name__), module.__name__
        for owner, scope in text.scopes.items():
            holder: Any = _attribute(module, owner) if owner else module
            if owner and not issubclass(type(holder), type):
                continue
            literals: dict[str, list[Any]] = {}
            for name, value in [*_namespace(holder).items()]:
                if (found := self._literals_at(scope, name)) is not None:
                    literals[name] = found
                elif not (owner or scope.is_open or name in scope.given or name[:2] == "__"):
                    literals[name] = []  # the file lacks the name
                elif scope.given.get(name) == [MADE] and not owner:
                    yield _Literals(value, home, name, self._attributes_of(value), True)
            own = {name: literals.pop(name) for name in text.own & literals.keys() if not owner}
            yield _Literals(holder, home, owner, literals, False)
            yield _Literals(holder, home, owner, own, True)

    def _literals_at(self, scope: Scope | None, name: str, depth: int = 0) -> list[Any] | None:
        """Return the possible values of a name that gets only literals, or imports such a name."""
        match scope.given.get(name) if scope else None:
            case [(str(module), str(original))] if depth < _MAX_DEPTH:
                return self._literals_at(self._text(module).scopes.get(""), original, depth + 1)
            case _:
                return scope.literals(name) if scope else None

    def _attributes_of(self, instance: Any) -> dict[str, list[Any] | None]:
        """Return the possible values of all attributes; None for those that get others too."""
        found: dict[str, list[Any] | None] = {}
        for base in _kind(instance).__mro__[-2::-1]:
            module = self._modules.imported(base.__module__)
            file = source_text.file_of(module) if module is not None else None
            if file is None:
                return {}  # an unknown class may read files, or the environment
            for name, literals in source_text.attributes(*file, base.__qualname__).items():
                before = found.get(name, [])
                found[name] = None if literals is None or before is None else before + literals
        return {name: found.get(name) for name in _namespace(instance)}

    # --- replacements ---------------------------------------------------------------------

    def _warn(self) -> None:
        stored = frozenset[str]().union(*(text.stored for text in self._texts.values()))
        replaced: dict[str, str] = {}
        for (name, place), value in self._used.items():
            full = f"{name}.{place}"
            if full not in _named and self._is_replaced(name, place, value, stored):
                _named.add(full)
                replaced[full] = name
        if replaced:
            packages = sorted({*replaced.values()})
            logging.warning(
                "The job doesn't get what this process put in place of %s, because it imports %s. "
                "Pass the replacement as an argument, or set %s=%s to send definitions by value.",
                ", ".join(sorted(replaced)),
                ", ".join(packages),
                BY_VALUE_VARIABLE,
                ",".join(packages),
            )
        files = {name: source_text.file_of(module) for name, module in self.reached.items()}
        new = {name: file for name, file in files.items() if file and file[1] / 1e9 > STARTED}
        for value, _ in self._seen.values():
            if _kind(value) is not types.FunctionType or not (file := new.get(_home(value))):
                continue
            if value.__code__.co_filename != file[0] or file[0] in _named:
                continue
            if not _essences(value.__code__) <= _essences_of(*file):
                _named.add(file[0])
                logging.warning(
                    "%s was changed on disk after this process imported it: the job runs the new "
                    "text.",
                    file[0],
                )

    def _is_replaced(self, home: str, place: str, value: Any, stored: frozenset[str]) -> bool:
        """Return whether the program has put *value* in place of what the text of *home* gives.

        *stored* are the names that code of the project may set outside of its module.
        """
        kind, scopes = _kind(value), self._text(home).scopes
        owner, _, name = place.rpartition(".")
        if owner not in scopes or _is_module(value):
            return False
        parts = [value, *(_namespace(value).values() if kind is types.FunctionType else ())]
        parts += [item for part in parts if _kind(part) in _CONTAINERS for item in _items(part)]
        if any((_home(part) or _kind(part).__module__) in _OUTSIDE for part in parts):
            return True
        scope = scopes[owner]
        match scope.given.get(name):
            case [(str(origin), str(original))] if not owner:
                module, texts = self._modules.imported(origin), self._text(origin).scopes
                is_defined = "" in texts and texts[""].given.get(original) == [DEFINED]
                return is_defined and not _has_original(value, module, original)
            case [source_text.DEFINED] if not scope.is_open:
                module = self.reached[home]
                is_kept = not owner or _keeps_methods(module, owner, scopes)
                return is_kept and not _has_original(value, module, place)
            case _:
                is_set = not owner and scope.literals(name) is not None and name not in stored
                return is_set and kind not in (*_PLAIN, *_CONTAINERS)


_known: dict[Any, _Search] = {}
"""The latest searches, by their roots."""


def _attribute(value: Any, dotted: str) -> Any:
    """Return an attribute of *value*; None if it has none, or its own code raises."""
    try:
        for name in dotted.split("."):
            value = getattr(value, name)
    except Exception:  # the user's code may compute attributes
        return None
    return value


def _kind(value: object) -> Any:
    """Return the class of *value*; `isinstance` would run code of a proxy."""
    return type(value)


def _is_module(value: Any) -> bool:
    return issubclass(_kind(value), types.ModuleType)


def _is_wrapper(value: Any) -> bool:
    return issubclass(_kind(value), _WRAPPERS) or hasattr(_kind(value), "__kinetic__")


def _home(value: Any) -> str:
    """Return the name of the module of a function, of a class, or of *value*, a module; or ""."""
    name: Any = ""
    if _kind(value) is types.FunctionType:
        name = value.__globals__.get("__name__")
    elif _is_module(value) or issubclass(_kind(value), type):
        name = value.__name__ if _is_module(value) else value.__module__
    return name if isinstance(name, str) else ""


def _namespace(value: Any) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _items(value: Any) -> list[Any]:
    """Return what a container, a wrapper, a function, or anything else with attributes has."""
    kind = _kind(value)
    base: Any = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base and base.__len__(value) <= _MAX_ITEMS:  # not by the user's own methods
        is_dict = issubclass(kind, (dict, types.MappingProxyType))
        return [*base.__iter__(value), *(base.values(value) if is_dict else ())]
    if _is_wrapper(value):
        return [_attribute(value, name) for name in _WRAPPED]
    cells = value.__closure__ or () if kind is types.FunctionType else ()
    return [*(_attribute(cell, "cell_contents") for cell in cells), *_namespace(value).values()]


def _keeps_methods(module: types.ModuleType, owner: str, scopes: dict[str, Scope]) -> bool:
    """Return whether no decorator, metaclass, or ``__init_subclass__`` has changed a class."""
    cls: Any = _attribute(module, owner)
    hooks = [base for base in cls.__mro__[1:-1] if "__init_subclass__" in vars(base)]
    outer, _, name = owner.rpartition(".")
    while name and scopes[outer].given.get(name) == [DEFINED]:
        outer, _, name = outer.rpartition(".")
    is_typing = all(base.__module__ == "typing" for base in hooks)
    return not name and type(cls) in (type, abc.ABCMeta) and is_typing


def _has_original(value: Any, module: Any, place: str) -> bool:
    """Return whether *value* is what *module* defines at *place*, or a wrapper that has it."""
    stack = [value]
    for _ in range(100):  # a wrapper has few parts
        part: Any = stack.pop() if stack else None
        if _kind(part) is types.FunctionType:
            name = place.rpartition(".")[2]
            if part.__globals__ is vars(module) and part.__code__.co_name == name:
                return True
        elif issubclass(_kind(part), type):
            own = [item for item in _namespace(part).values() if _kind(item) is types.FunctionType]
            is_here = part.__module__ == module.__name__ or not own
            is_here |= any(item.__globals__ is vars(module) for item in own)
            if is_here and part.__qualname__ == place:
                return True
            continue
        stack += _items(part)
    return bool(stack)


def _is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    kind = _kind(value)
    if kind in _PLAIN:
        return True
    if kind not in _CONTAINERS or kind is types.MappingProxyType or not depth:
        return False
    parts = [*value, *value.values()] if kind is dict else value
    return all(_is_plain(part, depth - 1) for part in parts)


def _has_data(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether *value* is a `Data`, or a container of plain values and `Data`."""
    if _kind(value) not in (list, tuple, dict) or not depth or len(value) > _MAX_ITEMS:
        return issubclass(_kind(value), Data)
    parts = list(value.values() if _kind(value) is dict else value)
    found = [_has_data(part, depth - 1) for part in parts]
    is_known = (has or _is_plain(part) for has, part in zip(found, parts, strict=True))
    return any(found) and all(is_known)


def _same(first: Any, second: Any) -> bool:
    """Return whether two plain values are equal and of the same types: 1 differs from True."""
    if _kind(first) is not _kind(second):
        return False
    if _kind(first) is dict:
        return [*first] == [*second] and all(_same(first[key], second[key]) for key in first)
    if _kind(first) in (list, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _essences(code: types.CodeType) -> frozenset[Any]:
    """Return what *code* and the code in it do, without lines, which a reload may leave."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    constants = tuple((_kind(part), part) for part in code.co_consts if part not in inner)
    own = (code.co_code, code.co_names, code.co_varnames, constants)
    return frozenset([own]).union(*map(_essences, inner))


@functools.lru_cache(maxsize=4096)
def _essences_of(file: str, changed: int, size: int) -> frozenset[Any]:
    """Return the essences of a file; the other arguments are keys of the cache."""
    try:
        with open(file, "rb") as source:
            return _essences(compile(source.read(), file, "exec", dont_inherit=True))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
