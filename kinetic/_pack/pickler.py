"""Pickles what belongs to one call: a function of the project, or its arguments.

Beyond cloudpickle:

- What the project's modules define goes by value, except what is compiled or
  installed in a virtual environment of the project.
- A module of the project has one namespace there, shared by its functions and
  by the module itself where that is captured too. So what a function assigns
  to a global is seen through the module, and modules may refer to each other.
- ``__file__`` of the project's modules names the file in the job's workspace.
- A `Data` becomes the path of its content in the job.
- A decorated function becomes one that runs in the job's own process.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from kinetic._pack import installed
from kinetic._pack.carried import Fate, Fates, register
from kinetic._pack.datatable import DataTable
from kinetic._pack.discover import Project
from kinetic._runner import decorated, hints, pickles

if TYPE_CHECKING:
    from kinetic.data import Data

__all__ = ["CallPickler"]

# A module's own; what the other side makes of a module has none of it.
_NOT_CARRIED = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


class CallPickler(pickles.Pickler):
    """One use pickles one object; `close` must follow."""

    def __init__(
        self,
        sink: Any,
        *,
        project: Project,
        fates: Fates,
        table: DataTable,
        leave_out: Collection[int] = (),
    ) -> None:
        super().__init__(sink)
        self.met_data = False
        self._project = project
        self._leave_out = leave_out  # ids of what becomes None, when a culprit is looked for
        self._fates = fates
        self._table = table
        self._held: set[str] = set()
        self._skeletons: dict[str, _Skeleton] = {}
        # Without the module there are no instances.
        self._data: type[Any] | None = getattr(sys.modules.get("kinetic.data"), "Data", None)
        decorating = sys.modules.get("kinetic.function")
        self._remote: type[Any] | None = getattr(decorating, "RemoteFunction", None)

    def close(self) -> None:
        """Take the modules that were met off cloudpickle's list."""
        if self._held:
            held, self._held = self._held, set()
            register.release(held)

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle *obj*; called for everything but the plainest values."""
        kind = type(typing.cast("object", obj))
        if self._leave_out and id(obj) in self._leave_out:
            return type(None), ()
        if kind is types.FunctionType:
            return self._function(obj)
        if issubclass(kind, type) or kind is typing.TypeVar:
            return self._defined(obj)
        if kind in hints.KINDS and self._travels(obj):
            return hints.KINDS[kind](obj)
        if kind is types.ModuleType:
            return self._module(obj)
        if self._data is not None and isinstance(obj, self._data):
            from kinetic._runner import views

            self.met_data = True
            return views.data_path, (self._table.index(typing.cast("Data", obj)),)
        if self._remote is not None and issubclass(kind, self._remote):
            return decorated.Decorated, (obj.__wrapped__,)
        if issubclass(kind, _StandIn):
            return typing.cast("_StandIn", obj).reduced
        return self._usual(obj)

    def _usual(self, obj: Any) -> Any:
        return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _fate(self, name: object) -> Fate:
        """The fate of a module; one that goes by value is on cloudpickle's list from here on."""
        if not isinstance(name, str):
            return Fate.USUAL
        fate = self._fates.of(name)
        if fate is Fate.VALUE and name not in self._held:
            register.hold(name)
            self._held.add(name)
        return fate

    def _defined(self, obj: Any) -> Any:
        """A class or another thing that a module defines."""
        fate = self._fate(getattr(obj, "__module__", None))
        if fate is Fate.REFERENCE and _is_found(obj):
            return NotImplemented
        return self._usual(obj)

    def _travels(self, obj: Any) -> bool:
        module = getattr(obj, "__module__", None)
        return module == "__main__" or self._fate(module) is Fate.VALUE

    def _function(self, function: types.FunctionType) -> Any:
        reduced = self._defined(function)
        # Of a function by value: what makes it, what from, and what is set on it afterwards.
        match reduced:
            case (make, (code, {**namespace}, *more), (attributes, {**facts}), *rest):
                pass
            case _:
                return reduced
        used = facts.get("__globals__")
        if isinstance(used, dict):
            facts["__globals__"] = self._relocated(typing.cast("dict[str, Any]", used))
        home = reduced[1][1]
        if (module := _module_of(function)) is not None and self._carries(module):
            home = _StandIn((vars, (self._skeleton(module),)))
        else:
            home.update(self._relocated(namespace))
        return (make, (code, home, *more), (attributes, facts), *rest)

    def _carries(self, module: types.ModuleType) -> bool:
        return self._fate(module.__name__) is Fate.VALUE

    def _module(self, module: types.ModuleType) -> Any:
        match self._fate(module.__name__):
            case Fate.VALUE:
                # The same module that the functions live in; only now it is filled.
                state = {
                    name: value
                    for name, value in vars(module).copy().items()
                    if name not in _NOT_CARRIED and not _is_of_kinetic(value)
                }
                return typing.cast, (None, self._skeleton(module)), self._relocated(state)
            case Fate.REFERENCE:
                return importlib.import_module, (module.__name__,)
            case Fate.USUAL:
                return self._usual(module)

    def _skeleton(self, module: types.ModuleType) -> _Skeleton:
        name = module.__name__
        if name not in self._skeletons:
            wanted = ("__name__", "__package__", "__path__", "__file__")
            facts = {key: vars(module)[key] for key in wanted if key in vars(module)}
            state = self._relocated(facts)
            self._skeletons[name] = _Skeleton((types.ModuleType, (name,), state))
        return self._skeletons[name]

    def _relocated(self, namespace: Mapping[Any, Any]) -> dict[str, Any]:
        """*namespace* with the places of the project's files as they are in the job."""
        file, path = namespace.get("__file__"), namespace.get("__path__")
        moved = dict(namespace)
        if isinstance(file, str):
            moved["__file__"] = self._place(file)
        if path is not None and not isinstance(path, str):
            moved["__path__"] = [self._place(one) for one in typing.cast("list[str]", path)]
        return moved

    def _place(self, path: Any) -> Any:
        root = self._project.root
        if not isinstance(path, str):
            return path  # it was done before: functions share a namespace
        if root is None or not installed.is_within(there := installed.real(path), str(root)):
            return path
        # The job unpickles in the directory that stands for the working directory here.
        start = os.path.join(root, self._project.cwd or "")
        return _StandIn((os.path.abspath, (os.path.relpath(there, start).replace(os.sep, "/"),)))


class _StandIn:
    """Pickled as what *reduced* makes."""

    def __init__(self, reduced: tuple[Callable[..., Any], tuple[Any, ...]] | Any) -> None:
        self.reduced = reduced


class _Skeleton(_StandIn):
    """A module of the project before anything is in it."""


def _is_of_kinetic(value: Any) -> bool:
    """A module that submits jobs is no reason for kinetic to be there; what is used of it is."""
    if isinstance(value, types.ModuleType):
        name: Any = value.__name__  # a module may call itself anything
    elif isinstance(value, (types.FunctionType, type)):
        name = value.__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "kinetic"


def _module_of(function: types.FunctionType) -> types.ModuleType | None:
    """The module in which *function* runs; a wrapper's ``__module__`` may name another."""
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if isinstance(module, types.ModuleType) and vars(module) is function.__globals__:
        return module
    return None


def _is_found(obj: Any) -> bool:
    """Whether importing its module gives *obj* under its own name."""
    found: Any = sys.modules.get(obj.__module__)
    for part in getattr(obj, "__qualname__", obj.__name__).split("."):
        found = getattr(found, part, None)
    return found is obj
