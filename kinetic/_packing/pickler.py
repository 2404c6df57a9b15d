"""Pickle a function of the project, or the arguments of a call.

Beyond cloudpickle:

- Definitions of the project's modules travel by value, except modules that are compiled or
  installed in a virtual environment of the project.
- In the job, a module of the project has one namespace, which its functions share. If a function
  assigns a global, all functions of the module see it. Modules may refer to each other.
- ``__file__`` of the project's modules names the file in the job's workspace.
- Code keeps the name of its file. The job finds the source in its workspace, or
  in the pickle if the project doesn't have the file.
- A `Data` becomes the path of its content in the job.
- A function that ``kinetic.run`` decorates becomes a function that runs in the job's process.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import linecache
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle

from kinetic._packing import culprit, discover
from kinetic._packing.culprit import Part, isa
from kinetic._packing.discover import Project
from kinetic._runner.protocol import import_hints, pickles, stand_ins
from kinetic.errors import DataError

if TYPE_CHECKING:
    from kinetic.data import Data

_cloudpickle: Any = cloudpickle.cloudpickle
_OURS = frozenset({"kinetic", "kinetic_runner"})
SOURCE_CHARACTERS = 256 * 1024
"""Maximum length of a source in a pickle; tracebacks show no lines of a longer one."""

_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


class Fate(enum.Enum):
    """How the definitions of a module get to the job."""

    VALUE = "its code travels with the function"
    REFERENCE = "it is imported there"
    USUAL = "as cloudpickle decides: by reference, but for ``__main__``"


class Fates:
    """Decide how each module of one project gets to the job."""

    def __init__(self, project: Project) -> None:
        self._below = str(project.root or project.entry_dir)
        self._unpicklable = project.unpicklable
        self._known: dict[str, Fate] = {}

    def of(self, name: str) -> Fate:
        """Return how the module *name* gets to the job."""
        if (fate := self._known.get(name)) is None:
            fate = self._known[name] = self._decide(name)
        return fate

    def _decide(self, name: str) -> Fate:
        module = sys.modules.get(name)
        if module is None or name in ("__main__", "builtins") or name.partition(".")[0] in _OURS:
            return Fate.USUAL
        if getattr(module, "__name__", None) != name:
            return Fate.USUAL  # an alias; cloudpickle registers modules by ``__name__``
        places = _places(module)
        if not places or not all(discover.is_within(one, self._below) for one in places):
            return Fate.USUAL
        if any(self._is_foreign(one) for one in places) or name in self._unpicklable:
            return Fate.REFERENCE
        return Fate.VALUE

    def _is_foreign(self, place: str) -> bool:
        """Return whether a module is compiled, or installed in an environment of the project."""
        return (
            place.endswith(_EXTENSIONS)
            or discover.is_installed(place, self._below)
            or discover.in_environment(os.path.dirname(place), self._below)
        )


def _places(module: types.ModuleType) -> list[str]:
    """Return the file of a module, or the directories of a namespace package."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return [discover.real(file)]
    try:
        return [os.path.realpath(one) for one in getattr(module, "__path__", ())]
    except (TypeError, ValueError):
        return []


def importable_there(name: str, project: Project) -> bool:
    """Return whether the job can import module *name* from the project's archive."""
    module = sys.modules.get(name)
    if module is None or project.root is None or name == "__main__":
        return False
    tail = name.replace(".", "/")
    roots = [os.path.join(project.root, *entry.split("/")) for entry in project.sys_path]
    # normpath: an entry "" leaves a trailing separator.
    expected = {os.path.normpath(os.path.join(one, tail)) for one in roots}
    found = {os.path.splitext(one)[0] for one in _places(module)}
    found |= {os.path.dirname(one) for one in found if os.path.basename(one) == "__init__"}
    return not expected.isdisjoint(found)


class DataTable:
    """The `Data` of a call, each once, in the order of their first use."""

    def __init__(self, start: Sequence[Data] = ()) -> None:
        self.uses = 0
        """How often `index` was called."""
        self._places: dict[int, int] = {}
        self._items: list[Data] = []
        for data in start:
            # One object in two volumes has two places.
            self._places.setdefault(id(data), len(self._items))
            self._items.append(data)

    @property
    def items(self) -> tuple[Data, ...]:
        """All `Data`; the index of each is its number."""
        return tuple(self._items)

    def index(self, data: Data) -> int:
        """Return the number of *data*; equal objects have different numbers."""
        self.uses += 1
        if (place := self._places.get(id(data))) is None:
            place = self._places[id(data)] = len(self._items)
            self._items.append(data)
        return place


def refuse_hidden(parts: Sequence[Part], what: str) -> None:
    """Refuse a `Data` in a set or as a dict key, because its path differs in each job.

    Raises:
        DataError: A `Data` is in a set or is a key; the message says where.
    """
    seen: dict[int, Any] = {}  # by id; it keeps the values, so that no id is used again
    stack = list(reversed(parts))
    while stack:
        part = stack.pop()
        if id(part.value) in seen:
            continue
        seen[id(part.value)] = part.value
        _refuse_in(part, what)
        inside = [*culprit.parts_of(part.value, lambda module: False)]
        stack.extend(
            Part(culprit.joined(part.label, one.label), one.value) for one in reversed(inside)
        )


def _refuse_in(part: Part, what: str) -> None:
    from kinetic.data import Data

    if isa(part.value, set, frozenset):
        place = "in a set"
    elif isa(part.value, dict):
        place = "as a key of a dict"
    else:
        return
    hidden: list[Any] = list(part.value)
    for one in hidden:
        if isinstance(one, Data):
            raise DataError(
                f"{what}: {part.label} has a Data {place}, which kinetic cannot replace by its "
                "path. Use a list, or make it a value of a dict.",
                path=one.path,
            )


# Attributes of a module that its copy in the job doesn't get.
_NOT_CARRIED = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


class CallPickler(pickles.Pickler):
    """Pickle one object, as the module's docstring describes."""

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
        self._project = project
        self._leave_out = leave_out  # ids of objects to replace by None in a search for the culprit
        self._fates = fates
        self._table = table
        self._skeletons: dict[str, _Skeleton] = {}
        self._file_names: dict[str, Any] = {}
        # Without this module there are no instances of Data.
        self._data: type[Any] | None = getattr(sys.modules.get("kinetic.data"), "Data", None)
        decorating = sys.modules.get("kinetic.function")
        self._remote: type[Any] | None = getattr(decorating, "RemoteFunction", None)

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle *obj*; the C pickler handles built-in values itself."""
        kind = type(typing.cast("object", obj))
        if self._leave_out and id(obj) in self._leave_out:
            return type(None), ()
        if kind is types.FunctionType:
            return self._function(obj)
        if issubclass(kind, type) or kind is typing.TypeVar:
            return self._defined(obj)
        if kind in import_hints.REDUCERS and self._travels(obj):
            return import_hints.REDUCERS[kind](obj)
        if kind is types.ModuleType:
            return self._module(obj)
        if self._data is not None and isinstance(obj, self._data):
            return stand_ins.data_path, (self._table.index(typing.cast("Data", obj)),)
        if self._remote is not None and issubclass(kind, self._remote):
            return stand_ins.Decorated, (obj.__wrapped__,)
        if issubclass(kind, _StandIn):
            return typing.cast("_StandIn", obj).reduced
        return self._usual(obj)

    def _usual(self, obj: Any) -> Any:
        return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _fate(self, name: object) -> Fate:
        """Return how a module gets to the job."""
        return self._fates.of(name) if isinstance(name, str) else Fate.USUAL

    def _defined(self, obj: Any) -> Any:
        """Return how to pickle a definition of a module, such as a class."""
        fate = self._fate(getattr(obj, "__module__", None))
        if fate is Fate.REFERENCE and _is_found(obj):
            return NotImplemented
        if fate is not Fate.VALUE:
            return self._usual(obj)
        # Reduce *obj* as cloudpickle reduces what it can't import, or what is registered for it.
        if isinstance(obj, types.FunctionType):
            return self._dynamic_function_reduce(obj)
        if isinstance(obj, type):
            reduced = _cloudpickle._dynamic_class_reduce(obj)
            return pickles.with_slots(obj, import_hints.with_annotations(obj, reduced))
        return _cloudpickle._make_typevar, _cloudpickle._decompose_typevar(obj)

    def _travels(self, obj: Any) -> bool:
        module = getattr(obj, "__module__", None)
        return module == "__main__" or self._fate(module) is Fate.VALUE

    def _function(self, function: types.FunctionType) -> Any:
        reduced = self._defined(function)
        # A function by value: its constructor, the arguments, and the state to set afterwards.
        match reduced:
            case (make, (code, {**namespace}, *more), (attributes, {**facts}), *rest):
                pass
            case _:
                return reduced
        used = facts.get("__globals__")
        if isinstance(used, dict):
            facts["__globals__"] = self._relocated(typing.cast("dict[str, Any]", used))
        home = reduced[1][1]
        module = _module_of(function)
        if module is not None and self._fate(module.__name__) is Fate.VALUE:
            home = _StandIn((vars, (self._skeleton(module),)))
        else:
            home.update(self._relocated(namespace))
        return (make, (code, home, *more), (attributes, facts), *rest)

    def _file_name(self, code: types.CodeType) -> Any:
        file = code.co_filename
        if file not in self._file_names:
            self._file_names[file] = self._sourced(file) or super()._file_name(code)
        return self._file_names[file]

    def _sourced(self, file: str) -> _StandIn | None:
        """Return a stand-in that names *file* in the job and provides its source for tracebacks."""
        place = self._place(file) if os.path.isfile(file) else file
        if isinstance(place, _StandIn):
            return _StandIn((stand_ins.source_at, (file, place)))
        linecache.checkcache(file)
        text = "".join(linecache.getlines(file))
        if not text or len(text) > SOURCE_CHARACTERS:
            return None
        return _StandIn((stand_ins.source_of, (file, text)))

    def _module(self, module: types.ModuleType) -> Any:
        match self._fate(module.__name__):
            case Fate.VALUE:
                # The pickle of a function refers to its module as an empty skeleton. Here the
                # module's globals fill the skeleton.
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
        """Return *namespace* with ``__file__`` and ``__path__`` as they are in the job."""
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
            return path  # already replaced: functions share a namespace
        if root is None or not discover.is_within(there := discover.real(path), str(root)):
            return path
        # The job unpickles in its copy of this working directory.
        start = os.path.join(root, self._project.cwd or "")
        return _StandIn((os.path.abspath, (os.path.relpath(there, start).replace(os.sep, "/"),)))


class _StandIn:
    """A placeholder whose pickle is *reduced*: a function and its arguments."""

    def __init__(self, reduced: tuple[Callable[..., Any], tuple[Any, ...]] | Any) -> None:
        self.reduced = reduced


class _Skeleton(_StandIn):
    """A module of the project without content."""


def _is_of_kinetic(value: Any) -> bool:
    """Return whether *value* belongs to kinetic, which a job needs only if its code uses it."""
    if isinstance(value, types.ModuleType):
        name: Any = value.__name__  # a module may call itself anything
    elif isinstance(value, (types.FunctionType, type)):
        name = value.__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "kinetic"


def _module_of(function: types.FunctionType) -> types.ModuleType | None:
    """Return the module whose globals *function* uses; ``__module__`` may name another."""
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if isinstance(module, types.ModuleType) and vars(module) is function.__globals__:
        return module
    return None


def _is_found(obj: Any) -> bool:
    """Return whether the module of *obj* has *obj* under its qualified name."""
    found: Any = sys.modules.get(obj.__module__)
    for part in getattr(obj, "__qualname__", obj.__name__).split("."):
        found = getattr(found, part, None)
    return found is obj
