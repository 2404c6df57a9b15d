"""Find what a call imports before any code of its project runs, without making the call.

A call imports first what its pickles refer to: the function's, then the arguments'. Then the
function's code runs, which often begins with imports. The interpreter may import all this before
its first fork (see `imports`), because neither the call nor its environment can change it.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from typing import Any, NamedTuple, Self

from ..protocol import by_value, pickles, stand_ins
from .imports import ACCELERATORS, Candidate, installed_folders, is_below, names_in_project

_OWN_MODULES = ("kinetic._runner.", "kinetic_runner.")

_PLAIN = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice", "vars"},
    "cloudpickle.cloudpickle": {
        "_builtin_type",
        "_function_setstate",
        "_make_cell",
        "_make_empty_cell",
        "_make_function",
    },
    by_value.__name__: {"fill_function", "make_function"},
    stand_ins.__name__: {"set_arguments", "source_at", "source_of", "with_arguments"},
}
"""What the pickle of a function with plain values may call: nothing that has other effects."""

_IMPORTERS = {("importlib", "import_module"), ("cloudpickle.cloudpickle", "subimport")}
"""Functions that return a module."""

_HARMLESS = ("attribute", "data_path", "with_changes")
"""Functions of `stand_ins` that import nothing, and run no code of the project."""

MOST_BYTES = 1 << 20
"""Read no function or arguments of more bytes: the worker would wait, and keep a copy."""

_GENERATORS = 0x20 | 0x200
"""Flags of code that doesn't run when the function is called (``inspect.CO_GENERATOR``, …)."""

_HEAD = frozenset(
    [
        "CACHE",
        "COPY_FREE_VARS",
        "EXTENDED_ARG",
        "IMPORT_FROM",
        "MAKE_CELL",
        "NOP",
        "POP_TOP",
        "RESUME",
        "RETURN_GENERATOR",
        "STORE_DEREF",
        "STORE_FAST",
        "STORE_GLOBAL",
        "STORE_NAME",
        "SWAP",
    ]
)
"""Instructions of imports. `_imports_at_head` ends with any other, so an unknown one is safe."""


class PlainUnpickler(pickles.Unpickler):
    """An unpickler that calls only what `_PLAIN` names, and imports nothing of others."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _IMPORTERS:
            return self.module
        if module in ("builtins", "cloudpickle.cloudpickle") or module.startswith(_OWN_MODULES):
            found = super().find_class(module, name)
            if name in _PLAIN.get(getattr(found, "__module__", ""), ()):
                return found
        return self.other(module, name)

    def module(self, name: str) -> Any:
        """Return the module *name*, or raise KeyError."""
        return sys.modules[name]

    def other(self, module: str, name: str) -> Any:
        """Return what a name stands for that isn't plain, or raise LookupError."""
        raise LookupError(f"{module}.{name}")


class _Inert:
    """Any class, function, or object of a package; nothing that a pickle does with it counts."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return object.__new__(cls)

    def _ignore(self, *args: Any) -> None:
        pass

    __call__ = __setitem__ = __setstate__ = add = append = extend = _ignore


class _Scan(PlainUnpickler):
    """An unpickler that calls nothing of a package, and notes what the pickle imports."""

    def __init__(self, noted: _Noted, file: Any, *, buffers: Iterable[Any] | None = None) -> None:
        super().__init__(file, buffers=buffers)
        self._noted = noted
        self._main = types.ModuleType("__main__")

    def module(self, name: str) -> Any:
        if name == "__main__":
            return self._main
        self._noted.add(name)
        return _Inert()

    def other(self, module: str, name: str) -> Any:
        if module.startswith((*_OWN_MODULES, "cloudpickle")):
            if name == stand_ins.import_all.__name__:
                return self._import_all
            self._noted.is_over |= name not in _HARMLESS  # it may make a class of the project
        else:
            self._noted.add(module)
        return _Inert

    def _import_all(self, modules: Iterable[tuple[str, str | None]]) -> None:
        for name, _ in modules:
            self._noted.add(name)


class _Import(NamedTuple):
    name: str
    level: int
    names: tuple[str, ...]


class _Noted:
    """The installed modules that a call imports, until it may run code of the project."""

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []
        self.is_over = False
        self._folders = installed_folders()
        self._project = names_in_project(self._folders)

    def add(self, name: str, names: tuple[str, ...] = ()) -> None:
        """Note the import of a module, and of those of *names* that are its submodules."""
        root = name.partition(".")[0]
        if self.is_over or root in sys.stdlib_module_names or root == "kinetic":
            return
        if root in self._project:
            self._add_module_of_project(name)
            self.is_over = True
        elif root in ACCELERATORS or not is_below(self._folders, PathFinder.find_spec(root)):
            self.is_over = True
        else:
            self.candidates.append(Candidate(name, None, names))

    def _add_module_of_project(self, name: str) -> None:
        """Note what a module and the packages around it import before their other code."""
        whole, path = "", None
        for part in name.split("."):
            whole = f"{whole}.{part}" if whole else part
            spec = PathFinder.find_spec(whole, path)
            loader: Any = None if spec is None else spec.loader
            code: types.CodeType | None = None if loader is None else loader.get_code(whole)
            if spec is None or code is None or not self.add_head(code):
                return
            path = spec.submodule_search_locations

    def add_head(self, code: types.CodeType) -> bool:
        """Note the imports with which *code* begins; return whether it does nothing else."""
        for found in _imports_at_head(code):
            if found is None:
                return False
            self.is_over |= found.level > 0  # it may be any module of the project
            self.add(found.name, found.names)
            if self.is_over:
                return False
        return True


def _imports_at_head(code: types.CodeType) -> Iterator[_Import | None]:
    """Yield the imports with which *code* begins, then None if it does anything else."""
    constants = list[Any]()
    for instruction in dis.get_instructions(code):
        kind = instruction.opname
        if kind.startswith("RETURN_") and kind != "RETURN_GENERATOR":
            return
        if kind in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(instruction.argval)
        elif kind == "IMPORT_NAME":
            level, names = constants[-2:]
            yield _Import(instruction.argval, level, names or ())
        elif kind not in _HEAD:
            break
    yield None


def first_imports(function: bytes, arguments: bytes) -> Sequence[Candidate]:
    """Return the installed modules that a call imports before any code of the project runs.

    Call this in the working directory of the call.
    """
    noted = _Noted()

    def scan(*args: Any, **kwargs: Any) -> _Scan:
        return _Scan(noted, *args, **kwargs)

    with contextlib.suppress(Exception):  # the call reports what is wrong
        if len(function) > MOST_BYTES:
            return []
        called: Any = pickles.load(function, unpickler=scan)
        if len(arguments) > MOST_BYTES:
            return noted.candidates
        pickles.load(arguments, unpickler=scan)
        if isinstance(called, types.FunctionType) and not called.__code__.co_flags & _GENERATORS:
            noted.add_head(called.__code__)
    return noted.candidates
