"""Read what the text of a module's file says about its names, without running it."""

from __future__ import annotations

import ast
import functools
import os
import re
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

DEFINED = "defined"
"""A function or class without a decorator, at the level of the module or class itself."""

MADE = "made"
"""A call with literals, such as one that makes an instance."""

_STORED = re.compile(
    r"(?<!self)(?<!cls)\.(\w+)\s*(?::[^=\n]+)?=(?!=)|\bsetattr\([^,\n]+,\s*[\"'](\w+)"
)
_GLOBAL = re.compile(r"^\s+global\s+(.+)$", re.MULTILINE)


class _Literal(NamedTuple):
    value: Any
    is_conditional: bool = True


class Scope:
    """What the text gives to the names of a module, or of a class in it.

    ``given`` has what each statement gives to a name: a literal, the module and name that it
    imports, `DEFINED`, `MADE`, or None. ``read`` are the names that statements use. ``is_open``
    says that there may be other names.
    """

    def __init__(self) -> None:
        self.given: defaultdict[str, list[Any]] = defaultdict(list)
        self.read: set[str] = set()
        self.is_open = False

    def literals(self, name: str) -> list[Any] | None:
        """Return the possible values of a name that gets only literals; else None."""
        found = self.given.get(name)
        if not found or not all(isinstance(given, _Literal) for given in found):
            return None
        if name in self.read and isinstance(found[-1].value, (list, dict, set)):
            return None  # the module may fill it
        last_counts = not any(given.is_conditional for given in found)
        return [given.value for given in (found[-1:] if last_counts else found)]

    def imports(self) -> Iterator[tuple[str, str]]:
        """Yield the module and name of each import; the name is empty for a whole module."""
        for given in self.given.values():
            yield from (origin for origin in given if type(origin) is tuple)


class Text(NamedTuple):
    """The scopes of a module: its own under ``""``, and those of its classes by their names.

    ``own`` are the names that functions of the module assign. ``stored`` are these, and the
    attributes that its code sets of other objects than ``self``.
    """

    scopes: dict[str, Scope]
    own: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()


def file_of(module: types.ModuleType) -> tuple[str, int, int] | None:
    """Return the source file of a module, its time in ns, and its size; None without a source."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return file, status.st_mtime_ns, status.st_size


def text_of(module: types.ModuleType) -> Text:
    """Return what the text of a module says; it is parsed once, unless the file changes."""
    file = file_of(module)
    return Text({}) if file is None else parse(*file, str(vars(module).get("__package__") or ""))


def _tree(file: str) -> tuple[str, list[ast.stmt]]:
    try:
        with open(file, "rb") as source:
            content = source.read()
        return content.decode(errors="replace"), ast.parse(content).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return "", []


@functools.lru_cache(maxsize=4096)
def parse(file: str, changed: int, size: int, package: str) -> Text:
    """Parse a file that was *changed* at a time and has a *size*, which are keys of the cache."""
    text, body = _tree(file)
    scopes: dict[str, Scope] = {}
    _read_scope(body, "", package, scopes)
    own = frozenset(name.strip() for line in _GLOBAL.findall(text) for name in line.split(","))
    stored = (name for names in _STORED.findall(text) for name in names)
    return Text(scopes, own, own.union(stored))


@functools.lru_cache(maxsize=256)
def attributes(file: str, changed: int, size: int, class_name: str) -> dict[str, list[Any] | None]:
    """Return the literals that a class gives to attributes first; None if it gives others too."""
    body = _tree(file)[1]
    for name in class_name.split("."):
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
        body = classes[-1].body if classes else []
    scopes: dict[str, Scope] = {}
    _read_scope(body, "", "", scopes)
    own = scopes[""]
    values: dict[ast.AST, Any] = {}
    for method in body:
        is_first = isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for node in ast.walk(method):
            match node:
                case ast.Assign(targets=[target], value=value):  # it comes before its target
                    values[target] = _value(value)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    if (given := values.get(node)) is None or is_first:
                        own.given[name].append(given)
                case _:
                    pass
    return {name: own.literals(name) for name in own.given}


def _read_scope(body: list[ast.stmt], owner: str, package: str, scopes: dict[str, Scope]) -> None:
    """Read the scope of a module (*owner* is empty) or a class, and those of classes in it."""
    scope = scopes[owner] = Scope()
    stack: list[ast.AST] = [*body[::-1]]  # to keep the order of the statements
    while stack:
        node = stack.pop()
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                given = _value(value, node not in body)
                scope.given[name].append(given)
                stack += [] if isinstance(given, _Literal) else [value]
                continue
            case ast.AnnAssign(value=None) | ast.Lambda():
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                is_as_written = not node.decorator_list and node in body
                scope.given[node.name].append(DEFINED if is_as_written else None)
                stack += node.decorator_list
                if isinstance(node, ast.ClassDef):
                    _read_scope(node.body, f"{owner}.{node.name}".lstrip("."), package, scopes)
                else:
                    stack += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
                continue
            case ast.ImportFrom():
                base = package.rsplit(".", max(node.level - 1, 0))[0] if node.level else ""
                base = ".".join(filter(None, (base, node.module)))
                for alias in node.names:
                    scope.given[alias.asname or alias.name].append((base, alias.name))
                    scope.is_open |= alias.name == "*"
            case ast.Import():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    scope.given[name].append((alias.name, ""))
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
        stack += [*ast.iter_child_nodes(node)][::-1]


def _value(node: ast.expr, is_conditional: bool = True) -> Any:
    """Return what an assignment of the expression *node* gives: a literal, `MADE`, or None."""
    parts = [node]
    if isinstance(node, ast.Call):
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    try:
        values = [ast.literal_eval(part) for part in parts]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return MADE if isinstance(node, ast.Call) else _Literal(values[0], is_conditional)
