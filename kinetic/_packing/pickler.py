"""Pickle a function of the project, or the arguments of a call.

kinetic's pickler differs from cloudpickle's in these rules:

- `modules` decides which definitions travel by value. The job imports all others by their names.
  What has no name in a module of the project, such as a lambda, travels by value. In the job, its
  globals are those of the imported module.
- In the job, a module that travels by value has one namespace, which its functions share. If a
  function assigns a global, all functions of the module see it. Modules may refer to each other.
- ``__file__`` of the project's modules names the file in the job's workspace.
- Code keeps the name of its file. The job finds the source in its workspace, or
  in the pickle if the project doesn't have the file. Code of a notebook has the cell's name.
- A `Data` becomes the path of its content in the job.
- A function that ``kinetic.run`` decorates becomes a function that runs in the job's process.
"""

from __future__ import annotations

import copyreg
import importlib
import inspect
import linecache
import os
import sys
import types
import typing
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

from kinetic._packing import culprit, discover
from kinetic._packing.culprit import Part, is_instance
from kinetic._packing.discover import Project
from kinetic._packing.modules import Modules, PicklingMode
from kinetic._runner.protocol import by_value, exceptions, pickles, stand_ins
from kinetic.data import Data
from kinetic.errors import DataError, PackError

_cloudpickle: Any = cloudpickle.cloudpickle
_NEW: Any = getattr(copyreg, "__newobj__")  # noqa: B009 - type checkers do not know it
SOURCE_CHARACTERS = 256 * 1024
"""Maximum length of a source in a pickle; tracebacks show no lines of a longer source."""

MAX_WRAPPERS = 16
"""How many decorators around a function to look through."""


class DataTable:
    """The `Data` of a call, each once, in the order of their first use."""

    def __init__(self, start: Sequence[Data] = ()) -> None:
        self.uses = 0
        """How often `index` was called."""
        self._numbers: dict[int, int] = {}
        self._items: list[Data] = []
        for data in start:
            # A `Data` in two volumes is in the table twice.
            self._numbers.setdefault(id(data), len(self._items))
            self._items.append(data)

    @property
    def items(self) -> tuple[Data, ...]:
        """All `Data`; the index of each is its number."""
        return tuple(self._items)

    def index(self, data: Data) -> int:
        """Return the number of *data*; equal objects have different numbers."""
        self.uses += 1
        if (number := self._numbers.get(id(data))) is None:
            number = self._numbers[id(data)] = len(self._items)
            self._items.append(data)
        return number


def refuse_data_as_key(parts: Sequence[Part], function_name: str) -> None:
    """Refuse a `Data` in a set or as a dict key, because its path differs in each job.

    Raises:
        DataError: A `Data` is in a set or is a key; the message says where.
    """
    seen: dict[int, Any] = {}  # by ID; the dict keeps the values, so Python reuses no ID
    stack = list(reversed(parts))
    while stack:
        part = stack.pop()
        if id(part.value) in seen:
            continue
        seen[id(part.value)] = part.value
        _refuse_data_in(part, function_name)
        inner_parts = [*culprit.parts_of(part.value, lambda module: False)]
        stack.extend(
            Part(culprit.join_location(part.label, inner.label), inner.value)
            for inner in reversed(inner_parts)
        )


def _refuse_data_in(part: Part, function_name: str) -> None:
    """Raise DataError if *part* is a set or a dict with a `Data` as a member or a key."""
    if not is_instance(part.value, set, frozenset, dict):
        return
    location = "as a key of a dict" if is_instance(part.value, dict) else "in a set"
    for member in list(part.value):
        if isinstance(member, Data):
            raise DataError(
                f"{function_name}: {part.label} has a Data {location}, which kinetic cannot "
                "replace by its path. Use a list, or make it a value of a dict.",
                path=member.path,
            )


# Attributes of a module that its copy in the job doesn't get.
_NOT_CARRIED = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


class CallPickler(pickles.Pickler):
    """Pickle one object, as the module's docstring describes.

    *used* collects the functions, classes, and modules that the pickle has or refers to.
    """

    def __init__(
        self,
        sink: Any,
        *,
        project: Project,
        modules: Modules,
        table: DataTable,
        excluded_ids: Collection[int] = (),
        used: list[Any] | None = None,
    ) -> None:
        super().__init__(sink)
        self._used = [] if used is None else used
        self._project = project
        self._excluded_ids = excluded_ids  # they become None in a search for the culprit
        self._modules = modules
        self._table = table
        self._skeletons: dict[str, _StandIn] = {}
        self._file_names: dict[str, Any] = {}
        # Without this module there are no decorated functions.
        function_module = sys.modules.get("kinetic.function")
        self._remote_function_type: type[Any] | None = getattr(
            function_module, "RemoteFunction", None
        )

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle *obj*; the C pickler handles built-in values itself."""
        kind = type(typing.cast("object", obj))
        if self._excluded_ids and id(obj) in self._excluded_ids:
            return type(None), ()
        if kind is types.FunctionType:
            return self._reduce_function(obj)
        if issubclass(kind, type) or kind is typing.TypeVar or kind in by_value.NAMED_REDUCERS:
            return self._reduce_definition(obj)
        if kind is types.ModuleType:
            return self._reduce_module(obj)
        if isinstance(obj, Data):
            return stand_ins.data_path, (self._table.index(obj),)
        if self._is_decorated(obj):
            self._used.append(obj)
            return self._reference(obj) or (stand_ins.Decorated, (obj.__wrapped__,))
        if kind is Changed:
            # Unpickling follows this order: imports, the value, changes.
            found = [name for name in obj.imports if self._modules.imported(name) is not None]
            # None for a module that the job finds by its name
            places = [(name, self._path_in_job(self._modules.files.get(name))) for name in found]
            imports = _StandIn((stand_ins.import_all, (places,)))
            return stand_ins.with_changes, (imports, obj.value, obj.changes)
        if kind is types.MethodType and self._is_decorated(obj.__self__):
            return getattr, (obj.__self__, obj.__name__)
        if kind is Started:
            arguments = _StandIn((stand_ins.set_arguments, (obj.arguments,)))
            return stand_ins.with_arguments, (arguments, obj.value)
        if kind is types.MethodType and obj.__name__ == "get_ipython":
            raise PackError(
                "The function has a magic (%…) or a shell line (!…), which works only in a "
                "notebook, not in a job. Use subprocess.run or a library instead, or put the line "
                "into a cell of its own.",
                culprit="global 'get_ipython'",
            )
        if issubclass(kind, _StandIn):
            return typing.cast("_StandIn", obj).reduced
        reduced = self._reduce_default(obj)
        if reduced is NotImplemented and kind.__flags__ & exceptions.HEAP_TYPE:
            return self._reduce_instance(obj, typing.cast("Any", kind))
        return reduced

    def _is_decorated(self, obj: object) -> bool:
        kind = self._remote_function_type
        return kind is not None and issubclass(type(obj), kind)

    def _reduce_instance(self, obj: Any, kind: Any) -> Any:
        """Return how to pickle an instance; check once for each class that a copy can be made."""
        mode = self._modules.mode_of(kind.__module__)
        is_own = kind.__module__ == "__main__" or mode is not PicklingMode.DEFAULT
        if not is_own or kind in _COPIED or kind in copyreg.dispatch_table:
            return NotImplemented
        reduced: Any = obj.__reduce_ex__(5)
        # Otherwise the job would find out. No constructor is called: it may load what only the job
        # has.
        if not isinstance(reduced, str):
            _check_copy(kind, *reduced[:2])
        _COPIED.add(kind)
        return reduced

    def _reduce_default(self, obj: Any) -> Any:
        return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _reduce_definition(self, obj: Any) -> Any:
        """Return how to pickle a definition of a module, such as a class."""
        name, kind = getattr(obj, "__module__", None), type(typing.cast("object", obj))
        if isinstance(obj, (type, types.FunctionType)):
            self._used.append(obj)
        self._modules.check(name)
        if (reference := self._reference(obj)) is not None:
            _, (module, _, wrappers) = reference
            # pickle's own reference imports the module by its name.
            by_file = wrappers or module.__name__ in self._modules.files
            return reference if by_file else NotImplemented
        mode = self._modules.mode_of(name)
        if mode is PicklingMode.REFERENCE and (found := by_value.reduce_importable(obj)):
            return found
        is_own = mode is not PicklingMode.DEFAULT or self._modules.is_by_value(name)
        if kind in by_value.NAMED_REDUCERS and is_own:
            return by_value.NAMED_REDUCERS[kind](obj)
        if mode is PicklingMode.DEFAULT:
            return self._reduce_default(obj)
        # Reduce *obj* as cloudpickle reduces what it can't import, or what is registered for it.
        if isinstance(obj, types.FunctionType):
            return self._dynamic_function_reduce(obj)
        if isinstance(obj, type):
            reduced = _cloudpickle._dynamic_class_reduce(obj)
            return self._reduce_class(obj, reduced)
        return _cloudpickle._make_typevar, _cloudpickle._decompose_typevar(obj)

    @staticmethod
    def _reduce_class(defined: type, reduced: Any) -> Any:
        """Complete the form of a class by value, unless the job couldn't make the class.

        Raises:
            TypeError: The metaclass is written in C, and needs the whole body of the class.
        """
        make, fill = type(defined).__new__, type(defined).__init__
        is_in_c = isinstance(make, types.BuiltinFunctionType) and make is not type.__new__
        # Since Python 3.13, the metaclasses of ctypes do their work here. The job can make a class
        # if it can import such a metaclass, as that of `torch.Tensor`.
        if isinstance(fill, types.WrapperDescriptorType):
            is_in_c = is_in_c or not by_value.is_importable(fill.__objclass__)
        if is_in_c and isinstance(reduced, tuple):
            raise TypeError(
                f"the class {defined.__qualname__} can't travel by value, because its metaclass "
                f"{type(defined).__qualname__} needs the whole class body; move the class into a "
                "module of the project, which the job imports"
            )
        return pickles.Pickler._reduce_class(defined, reduced)

    def _reference(self, obj: Any) -> Any:
        """Return how the job finds *obj* in a module that it imports; None if it can't."""
        module = self._modules.imported(getattr(obj, "__module__", None))
        name: Any = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", "")
        if module is None:
            return None
        found: Any = module
        try:
            for part in name.split("."):
                found = getattr(found, part)
            # The name of a decorated function refers to what its decorators have returned.
            for count in range(MAX_WRAPPERS):
                if found is obj:
                    return stand_ins.attribute, (module, name, count)
                found = found.__wrapped__
        except Exception:  # the module's own code may look names up
            pass
        return None

    def _reduce_function(self, function: types.FunctionType) -> Any:
        """Return how to pickle a function, with the globals and paths that it has in the job."""
        reduced = self._reduce_definition(function)
        # A function by value: its constructor, the arguments, and the state to set afterwards.
        match reduced:
            case (constructor, (code, {**namespace}, *more), (attributes, {**state}), *rest):
                pass
            case _:
                return reduced
        job_globals = reduced[1][1]
        module = _module_of(function)
        mode = self._modules.mode_of(module.__name__) if module else PicklingMode.DEFAULT
        used_globals = typing.cast("dict[str, Any]", state.get("__globals__", {}))
        if mode is PicklingMode.REFERENCE:
            # pytest adds the modules that its asserts use, under names such as @pytest_ar.
            state["__globals__"] = {
                name: _StandIn((stand_ins.importable, (value.__name__,)))
                for name, value in used_globals.items()
                if name.startswith("@") and isinstance(value, types.ModuleType)
            }
            job_globals = _StandIn((vars, (module,)))
            return (constructor, (code, job_globals, *more), (attributes, state), *rest)
        state["__globals__"] = self._relocate(used_globals)
        if module is not None and mode is PicklingMode.VALUE:
            job_globals = _StandIn((vars, (self._skeleton(module),)))
        elif module is not None and module.__name__ == "__main__":
            own_globals = {**self._relocate(namespace), **typing.cast("Any", state["__globals__"])}
            state["__globals__"] = own_globals
            job_globals = _StandIn((vars, (_StandIn((importlib.import_module, ("__main__",))),)))
            if vars(module).get(function.__name__) is function:
                # In the job, too, pickle and the children of multiprocessing find it by its name.
                own_globals[function.__name__] = function
                args = (constructor, function.__name__, code, job_globals, *more)
                filling = (None, None, by_value.fill_function)
                return (by_value.make_function, args, (attributes, state), *filling)
        else:
            job_globals.update(self._relocate(namespace))
        return (constructor, (code, job_globals, *more), (attributes, state), *rest)

    def _file_name(self, code: types.CodeType) -> Any:
        file = code.co_filename
        if file not in self._file_names:
            self._file_names[file] = self._with_source(file) or super()._file_name(code)
        return self._file_names[file]

    def _with_source(self, file: str) -> _StandIn | None:
        """Return a stand-in for *file* that gives tracebacks its source; None without a source."""
        job_path = self._path_in_job(file) if os.path.isfile(file) else file
        if isinstance(job_path, _StandIn):
            return _StandIn((stand_ins.source_at, (file, job_path)))
        linecache.checkcache(file)
        text = "".join(linecache.getlines(file))
        if not text or len(text) > SOURCE_CHARACTERS:
            return None
        return _StandIn((stand_ins.source_of, (_cell_of(file) or file, text)))

    def _reduce_module(self, module: types.ModuleType) -> Any:
        self._used.append(module)
        self._modules.check(module.__name__)
        match self._modules.mode_of(module.__name__, module):
            case PicklingMode.VALUE:
                # The pickle of a function refers to its module as an empty skeleton. Here the
                # module's globals fill the skeleton.
                state = {
                    name: value
                    for name, value in vars(module).copy().items()
                    if name not in _NOT_CARRIED and not _is_of_kinetic(value)
                }
                return typing.cast, (None, self._skeleton(module)), self._relocate(state)
            case PicklingMode.REFERENCE:
                file = self._modules.files.get(module.__name__)
                if file is None:
                    return importlib.import_module, (module.__name__,)
                return stand_ins.module_at, (module.__name__, self._path_in_job(file))
            case PicklingMode.DEFAULT:
                return self._reduce_default(module)

    def _skeleton(self, module: types.ModuleType) -> _StandIn:
        """Return *module* without its content, the same for all functions of one pickle."""
        name = module.__name__
        if name not in self._skeletons:
            names = ("__name__", "__package__", "__path__", "__file__")
            attributes = {key: vars(module)[key] for key in names if key in vars(module)}
            state = self._relocate(attributes)
            self._skeletons[name] = _StandIn((types.ModuleType, (name,), state))
        return self._skeletons[name]

    def _relocate(self, namespace: Mapping[Any, Any]) -> dict[str, Any]:
        """Return *namespace* with ``__file__`` and ``__path__`` as they are in the job."""
        file, path = namespace.get("__file__"), namespace.get("__path__")
        relocated = dict(namespace)
        if isinstance(file, str):
            relocated["__file__"] = self._path_in_job(file)
        if path is not None and not isinstance(path, str):
            relocated["__path__"] = [
                self._path_in_job(folder) for folder in typing.cast("list[str]", path)
            ]
        return relocated

    def _path_in_job(self, path: Any) -> Any:
        """Return a stand-in for the path in the job if *path* is in the project; else *path*."""
        root = self._project.root
        if not isinstance(path, str):
            return path  # already a stand-in, because functions share a namespace
        if root is None or not discover.is_within(
            real_path := discover.resolve_directory(path), str(root)
        ):
            return path
        # The job unpickles in its copy of this process's working directory.
        start = os.path.join(root, self._project.cwd or "")
        return _StandIn(
            (os.path.abspath, (os.path.relpath(real_path, start).replace(os.sep, "/"),))
        )


class Changed(NamedTuple):
    """A value, the modules that the job imports before it, and values that it sets in modules."""

    value: Any
    imports: Sequence[str]
    changes: Mapping[str, Mapping[str, Any]]


class Started(NamedTuple):
    """A value, and the arguments of the program, which the job sets before it loads the value."""

    value: Any
    arguments: Sequence[str]


class _StandIn:
    """A placeholder whose pickle is *reduced*: a function and its arguments."""

    def __init__(self, reduced: tuple[Callable[..., Any], tuple[Any, ...]] | Any) -> None:
        self.reduced = reduced


def _is_of_kinetic(value: Any) -> bool:
    """Return whether *value* belongs to kinetic, which a job needs only if its code uses it."""
    if isinstance(value, types.ModuleType):
        name: Any = value.__name__  # a module may call itself anything
    elif isinstance(value, (types.FunctionType, type)):
        name = value.__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "kinetic"


_COPIED: weakref.WeakSet[type] = weakref.WeakSet()
"""The classes whose instances a job can make."""


def _check_copy(kind: type, make: Any, args: tuple[Any, ...]) -> None:
    """Raise TypeError if unpickling an instance of *kind* by ``make(*args)`` must fail."""
    if make is _NEW:
        make, args = args[0].__new__, args
    if isinstance(make, (types.FunctionType, types.MethodType, type)):
        try:
            signature = inspect.signature(make)
        except (TypeError, ValueError):  # C code has no signature
            return
        try:
            signature.bind(*args)
        except TypeError as exc:
            raise TypeError(
                f"its class pickles it with arguments that {make.__qualname__}{signature} doesn't "
                f"take ({exc}); define __reduce__ or __getnewargs__"
            ) from None
    if make is object.__new__ and hasattr(kind, "__getattr__"):
        try:  # as unpickling does, before the copy has attributes
            getattr(typing.cast("Any", object.__new__(kind)), "__setstate__", None)
        except RecursionError:
            raise TypeError(
                "__getattr__ of its class looks itself up before the copy has attributes; let it "
                "raise AttributeError for names that begin with __, or define __setstate__"
            ) from None
        except Exception:  # the method needs what only the job has
            return


def _module_of(function: types.FunctionType) -> types.ModuleType | None:
    """Return the module whose globals *function* uses; ``__module__`` may name another."""
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if isinstance(module, types.ModuleType) and vars(module) is function.__globals__:
        return module
    return None


def _cell_of(file: str) -> str | None:
    """Return IPython's name of the cell that it compiled as *file*, such as ``Cell In[3]``."""
    if "IPython" not in sys.modules:
        return None
    shell: Any = typing.cast("Any", sys.modules["IPython"]).get_ipython()
    label = getattr(getattr(shell, "compile", None), "format_code_name", None)
    return " ".join(found) if label is not None and (found := label(file)) else None
