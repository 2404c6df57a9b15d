"""Find what the program has changed in the project's modules since their import.

The job imports these modules anew. So that it sees what a direct call sees, it then sets:

- plain values (numbers, text, None, and containers of them) that differ from the literals of the
  module's file. Only names count of which every assignment at the level of the module, or of a
  class, is a literal, or imports such a name;
- `Data`, which becomes a path.

A warning names, once, what else was replaced, such as a function, and a file that was edited after
its import. The search goes from the functions and classes of the call to the names that their code
uses. It can't see names that code computes, as for `getattr`.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from absl import logging

from kinetic._packing.culprit import is_instance
from kinetic._packing.discover import BY_VALUE_VARIABLE
from kinetic._packing.modules import Modules
from kinetic.data import Data
from kinetic.options import STARTED

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MUTABLE = (list, dict, set)
_MAX_DEPTH = 20
_MAX_ITEMS = 10_000
"""The search for `Data` and for replacements leaves out larger containers."""

_WRAPPERS = (
    *(functools.partial, types.MethodType, staticmethod, classmethod, property),
    *(functools.cached_property, type(functools.cache(len))),
)
_WRAPPED = ("__wrapped__", "__func__", "func", "fget")
"""Objects around a function, and their attributes that have it."""

_OUTSIDE = ("__main__", "unittest.mock")
"""No module of the project has values of these modules at its import."""

_named: set[str] = set()
"""What this process has named in a warning."""


class _Literal(NamedTuple):
    """A literal that a line of a file assigns, perhaps only under a condition."""

    line: int
    value: Any
    is_conditional: bool


class _Scope:
    """What the file of a module says about its names, or about those of a class in it.

    ``given`` has what each statement gives to a name: a literal, the module and name that it
    imports, its definition, or None. ``read`` are the names that statements use, and ``own`` those
    that functions of the module assign. ``is_open`` says that there may be other names.
    """

    def __init__(self) -> None:
        self.given: defaultdict[str, list[Any]] = defaultdict(list)
        self.read: set[str] = set()
        self.own: set[str] = set()
        self.is_open = False

    def literals(self, name: str) -> list[Any] | None:
        """Return the possible values of a name that gets only literals; else None."""
        found = sorted(self.given.get(name, ()), key=lambda given: getattr(given, "line", 0))
        if not found or not all(isinstance(given, _Literal) for given in found):
            return None
        if name in self.read and isinstance(found[-1].value, _MUTABLE):
            return None  # the module may fill it
        last_counts = not any(given.is_conditional for given in found)
        return [given.value for given in (found[-1:] if last_counts else found)]

    def origin(self, name: str) -> tuple[str, str] | None:
        """Return the module and name that *name* is imported from, if nothing else assigns it."""
        match self.given.get(name):
            case [(str(module), str(original))]:
                return module, original
            case _:
                return None

    def defines(self, name: str) -> bool:
        """Return whether *name* is a function or class without a decorator, and nothing else."""
        given = self.given.get(name, [])
        return len(given) == 1 and getattr(given[0], "decorator_list", None) == []


def find(used: Iterable[Any], modules: Modules) -> dict[str, dict[str, Any]]:
    """Return the changed values by module and name, for a call that uses the objects *used*."""
    search = _Search(modules)
    search.visit(used)
    search.compare()
    if search.replaced:
        names, packages = sorted(search.replaced), sorted({*search.replaced.values()})
        logging.warning(
            "The job doesn't get what this process put in place of %s, because it imports %s. Pass "
            "the replacement as an argument, or set %s=%s to send definitions by value.",
            ", ".join(names),
            ", ".join(packages),
            BY_VALUE_VARIABLE,
            ",".join(packages),
        )
    for file in search.edited:
        logging.warning(
            "%s was changed on disk after this process imported it: the job runs the new text.",
            file,
        )
    return search.changes


class _Search:
    def __init__(self, modules: Modules) -> None:
        self.changes: dict[str, dict[str, Any]] = {}
        self.replaced: dict[str, str] = {}
        self.edited: list[str] = []
        self._modules = modules
        self._reached: dict[str, types.ModuleType] = {}
        self._seen: dict[tuple[int, int], Any] = {}
        self._parsed: dict[str, dict[str, _Scope]] = {}

    def visit(self, used: Iterable[Any]) -> None:
        """Follow the names that the code of *used* has, through functions, classes, and modules."""
        stack: list[tuple[Any, frozenset[str]]] = [(value, frozenset()) for value in used]
        while stack:
            value, names = stack.pop()
            key = (id(value), id(names) if isinstance(value, types.ModuleType) else 0)
            if key not in self._seen:
                self._seen[key] = (value, names)  # keeps both alive, so Python reuses no ID
                stack.extend(self._parts(value, names))

    def _parts(self, value: Any, names: frozenset[str]) -> Iterator[tuple[Any, frozenset[str]]]:
        """Yield the values that *value* uses, with the names that the code around them uses."""
        if isinstance(value, types.FunctionType):
            yield from self._parts_of_function(value)
        elif isinstance(value, types.ModuleType):
            if self._reach(value.__name__):
                for name in names & vars(value).keys():
                    yield from self._part(value, name, vars(value)[name], names)
        elif isinstance(value, type):
            module = self._reach(value.__module__)
            has_name = _attribute(module, value.__qualname__) is value
            for name, part in list(vars(value).items()) if module and has_name else ():
                yield from self._part(module, f"{value.__qualname__}.{name}", part, names)
            yield from ((base, names) for base in value.__bases__)
        else:
            if is_instance(value, *_WRAPPERS) or hasattr(
                type(cast("object", value)), "__kinetic__"
            ):
                inner = (_attribute(value, name) for name in _WRAPPED)
                yield from ((part, names) for part in inner if isinstance(part, types.FunctionType))
            yield type(value), names

    def _parts_of_function(
        self, function: types.FunctionType
    ) -> Iterator[tuple[Any, frozenset[str]]]:
        names = _names_of(function.__code__)
        space = function.__globals__
        home = space.get("__name__")
        module = self._reach(home)
        if module is not None and vars(module) is not space:
            module = None  # a function of an earlier module of this name
        if module is not None:
            self._check_edited(module, function)
        for name in names & space.keys():
            yield from self._part(module, name, space[name], names)
        package = space.get("__package__")
        local = [f"{package}.{name}" for name in names] if module and package else []
        for name in (*names, *local):  # modules that the function itself imports
            if name in sys.modules and (imported := self._modules.imported(name)) is not None:
                yield imported, names
        cells = [_attribute(cell, "cell_contents") for cell in function.__closure__ or ()]
        yield from ((part, names) for part in (*cells, vars(function).get("__wrapped__")))

    def _part(
        self, module: types.ModuleType | None, name: str, value: Any, names: frozenset[str]
    ) -> Iterator[tuple[Any, frozenset[str]]]:
        """Yield the *value* of a global; note the `Data` in it, and a replacement."""
        if module is not None:
            place = f"{module.__name__}.{name}"
            if _has_data(value):
                self._change(module.__name__, name, value)
            elif place not in _named and self._is_replaced(module, name, value):
                _named.add(place)
                self.replaced[place] = module.__name__
        yield value, names

    def _reach(self, name: Any) -> types.ModuleType | None:
        module = self._modules.imported(name)
        if module is not None:
            self._reached[module.__name__] = module
        return module

    def _change(self, module: str, name: str, value: Any) -> None:
        self.changes.setdefault(module, {})[name] = value

    def _scopes(self, module: types.ModuleType) -> dict[str, _Scope]:
        """Return the scopes of a module's file: its own under "", those of its classes by name."""
        if module.__name__ not in self._parsed:
            package = str(vars(module).get("__package__") or "")
            file = _file_of(module)
            self._parsed[module.__name__] = {} if file is None else parse(*file, package)
        return self._parsed[module.__name__]

    def compare(self) -> None:
        """Compare the plain values of the modules that were reached with those of their files."""
        for module in list(self._reached.values()):
            for owner, scope in self._scopes(module).items():
                holder: Any = _attribute(module, owner) if owner else module
                if owner and not isinstance(holder, type):
                    continue
                for name, value in list(vars(holder).items()):
                    literals = self._literals(scope, name)
                    if not (owner or scope.is_open or name in scope.given or name[:2] == "__"):
                        literals = []  # the file lacks the name
                    if literals is None or not _is_plain(value):
                        continue
                    if not any(_same(value, literal) for literal in literals):
                        self._change(module.__name__, f"{owner}.{name}".lstrip("."), value)

    def _literals(self, scope: _Scope, name: str, depth: int = _MAX_DEPTH) -> list[Any] | None:
        """Return the possible values of a name that gets only literals, or imports such a name."""
        if (origin := scope.origin(name)) is None or not depth:
            return scope.literals(name)
        module = self._modules.imported(origin[0])
        found = self._scopes(module).get("") if module is not None else None
        return None if found is None else self._literals(found, origin[1], depth - 1)

    def _is_replaced(self, module: types.ModuleType, place: str, value: Any) -> bool:
        """Return whether the program has put *value* in place of what the file defines."""
        if is_instance(value, classmethod, staticmethod):
            value = value.__func__  # Python makes these of methods such as ``__new__``
        owner, _, name = place.rpartition(".")
        scopes = self._scopes(module)
        if (scope := scopes.get(owner)) is None or isinstance(value, types.ModuleType):
            return False
        if any(_origin(part) in _OUTSIDE for part in (value, *_contents(value))):
            return True
        if scope.defines(name):
            outer, _, class_name = owner.rpartition(".")
            # A decorator of the class may have wrapped its methods.
            is_as_written = not owner or (outer in scopes and scopes[outer].defines(class_name))
            space = getattr(value, "__globals__", None) if is_as_written else None
            if space is not None and space is not vars(module):
                return True
            here = (module.__name__, place)
            return (_origin(value), getattr(value, "__qualname__", None)) != here
        # A class may turn the literals of its body into anything.
        is_set_outside = not owner and scope.literals(name) is not None and name not in scope.own
        return is_set_outside and not _is_plain(value) and type(value) not in _MUTABLE

    def _check_edited(self, module: types.ModuleType, function: types.FunctionType) -> None:
        """Note the file of *module* if its text has another code for *function*."""
        if (state := _file_of(module)) is None or state[0] in _named:
            return
        file, changed, size = state
        is_of_file = function.__code__.co_filename == file
        if (
            is_of_file
            and changed / 1e9 > STARTED
            and _essence(function.__code__) not in _codes(file, changed, size)
        ):
            _named.add(file)
            self.edited.append(file)


def _attribute(value: Any, dotted: str) -> Any:
    """Return an attribute of *value*; None if it has none, or its own code raises."""
    try:
        for name in dotted.split("."):
            value = getattr(value, name)
    except Exception:  # the user's code may compute attributes
        return None
    return value


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Return the globals, attributes, and imports that *code* names, or a function in it."""
    inner = (_names_of(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _origin(value: Any) -> Any:
    """Return the name of the module that defines a function, a class, or the class of *value*."""
    is_definition = is_instance(value, types.FunctionType, type)
    return value.__module__ if is_definition else type(cast("object", value)).__module__


def _contents(value: Any) -> list[Any]:
    """Return the parts of a container, such as a registry; none of a large container."""
    if not is_instance(value, dict, list, set, tuple) or len(value) > _MAX_ITEMS:
        return []
    return list(value.values() if is_instance(value, dict) else value)


# --- values -------------------------------------------------------------------------------


def _is_plain(value: Any, depth: int = _MAX_DEPTH) -> bool:
    kind = type(cast("object", value))
    if kind in _PLAIN:
        return True
    if kind not in _CONTAINERS or not depth:
        return False
    parts = (*value.keys(), *value.values()) if kind is dict else tuple(value)
    return all(_is_plain(part, depth - 1) for part in parts)


def _has_data(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether *value* is a `Data`, or a container of plain values and `Data`."""
    if isinstance(value, Data):
        return True
    if type(value) not in (list, tuple, dict) or not depth:
        return False
    parts = _contents(value)
    found = [_has_data(part, depth - 1) for part in parts]
    return any(found) and all(
        has or _is_plain(part) for has, part in zip(found, parts, strict=True)
    )


def _same(first: Any, second: Any) -> bool:
    """Return whether two plain values are equal and of the same types: 1 differs from True."""
    if type(cast("object", first)) is not type(cast("object", second)):
        return False
    if is_instance(first, dict):
        return [*first] == [*second] and all(_same(first[key], second[key]) for key in first)
    if is_instance(first, list, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


# --- files --------------------------------------------------------------------------------


def _file_of(module: types.ModuleType) -> tuple[str, int, int] | None:
    """Return the source file of a module, its time in ns, and its size; None without a source."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return file, status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=256)
def _codes(file: str, changed: int, size: int) -> frozenset[Any]:
    """Return what is essential of each function's code in a file; see `parse` for the arguments."""
    try:
        with open(file, "rb") as source:
            stack = [compile(source.read(), file, "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    found: set[Any] = set()
    while stack:
        inner = [part for part in stack.pop().co_consts if isinstance(part, types.CodeType)]
        found.update(map(_essence, inner))
        stack += inner
    return frozenset(found)


def _essence(code: types.CodeType) -> Any:
    """Return what *code* does, without its name and lines, which a reload may leave different."""
    constants: list[Any] = [
        _essence(part) if isinstance(part, types.CodeType) else (type(part), part)
        for part in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, tuple(constants)


@functools.lru_cache(maxsize=4096)
def parse(file: str, changed: int, size: int, package: str) -> dict[str, _Scope]:
    """Parse a file that was *changed* at a time and has a *size*, which are keys of the cache."""
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}
    scopes: dict[str, _Scope] = {}
    _read_scope(tree.body, "", package, scopes)
    return scopes


def _read_scope(body: list[ast.stmt], owner: str, package: str, scopes: dict[str, _Scope]) -> None:
    """Read the scope of a module (*owner* is empty) or a class, and those of classes in it."""
    scope = scopes[owner] = _Scope()
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if (literal := _literal(value)) is not None:
                scope.given[name].append(_Literal(node.lineno, literal[0], node not in body))
                continue
            case ast.AnnAssign(value=None) | ast.Lambda():
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                scope.given[node.name].append(node)
                inner = [part for part in ast.walk(node) if isinstance(part, ast.Global)]
                scope.own.update(name for part in inner for name in part.names)
                stack += node.decorator_list
                if isinstance(node, ast.ClassDef):
                    _read_scope(node.body, f"{owner}.{node.name}".lstrip("."), package, scopes)
                else:
                    stack += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
                continue
            case ast.ImportFrom():
                for alias in node.names:
                    origin = (_absolute(node, package), alias.name)
                    scope.given[alias.asname or alias.name].append(origin)
                    scope.is_open |= alias.name == "*"
            case ast.Import():
                for alias in node.names:
                    scope.given[alias.asname or alias.name.partition(".")[0]].append(None)
            case ast.Name(id=name, ctx=ast.Load()):
                scope.read.add(name)
                scope.is_open |= name in ("globals", "exec", "vars", "setattr", "locals")
            case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store()):
                scope.given[name].append(None)  # changes what the name has
            case (
                ast.Name(id=name) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name))
            ):
                scope.given[name].append(None)
            case _:
                pass
        stack += ast.iter_child_nodes(node)


def _literal(node: ast.expr) -> tuple[Any] | None:
    """Return, in a tuple, the value of a literal; None for other expressions."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the module that ``from … import`` names."""
    if not node.level:
        return node.module or ""
    base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
    return f"{base}.{node.module}" if node.module else base
