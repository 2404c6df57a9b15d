"""What a job uses in place of the client's decorated functions, `Data`, and source files.

Pickled calls refer to the names in this module.
"""

from __future__ import annotations

import functools
import importlib
import linecache
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

data_paths: list[str] = []
"""The paths of this job's Data, by number."""


def data_path(number: int) -> str:
    """Return the path of Data *number* in this job; unpickling arguments calls this.

    Raises:
        RuntimeError: This process isn't a job with that Data.
    """
    if not 0 <= number < len(data_paths):
        raise RuntimeError(f"this process isn't the job that Data {number} was sent to")
    return data_paths[number]


def source_at(file: str, path: str) -> str:
    """Return *file*, and let tracebacks show its lines from *path*, where the job has a copy."""
    # With this entry, linecache reads the copy only on demand, because most jobs never need it.
    entries: dict[str, Any] = linecache.cache
    entries[file] = (functools.partial(_read_source, path),)
    return file


def _read_source(path: str) -> str | None:
    from importlib.machinery import SourceFileLoader

    return SourceFileLoader("", path).get_source("")


def source_of(file: str, text: str) -> str:
    """Return *file*, and let tracebacks show its lines from *text*, such as a notebook's cell."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return file


def module_at(name: str, file: str) -> types.ModuleType:
    """Return the module *name*; load it from *file* unless it is loaded already.

    The caller's program has loaded such a module from a file that has another name.
    """
    if name not in sys.modules:
        import importlib.util

        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"can't load the module {name} from {file}", name=name, path=file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def importable(name: str) -> types.ModuleType | None:
    """Return the module *name*, or None where it isn't installed; pickles refer to this."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def attribute(module: types.ModuleType, name: str, wrappers: int) -> Any:
    """Return the value of a dotted *name* in *module*, without that many of its *wrappers*."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    for _ in range(wrappers):
        found = found.__wrapped__
    return found


def import_all(modules: Iterable[tuple[str, str | None]]) -> None:
    """Import modules, in this order: each by its name, or from its file."""
    for module, file in modules:
        try:
            importlib.import_module(module) if file is None else module_at(module, file)
        except (Exception, SystemExit) as exc:  # the call may do without it
            text = f"kinetic: this job can't import {module}, which your program has imported: "
            print(text + repr(exc), file=sys.stderr, flush=True)


def with_changes(imported: None, value: Any, changes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return *value*, after setting what the caller's program changed in modules of the project.

    *changes* has values by module and dotted name. Unpickling has *imported* the modules.
    """
    for module, values in changes.items():
        for name, changed in values.items() if module in sys.modules else ():
            owner, _, attribute_name = name.rpartition(".")
            found = attribute(sys.modules[module], owner, 0) if owner else sys.modules[module]
            if isinstance(found, (type, types.ModuleType)):
                setattr(found, attribute_name, changed)
            else:
                vars(found)[attribute_name] = changed  # its class may be frozen
    return value


def set_arguments(arguments: list[str]) -> None:
    """Give this process the arguments of the caller's program, which functions may parse.

    It doesn't get the program's path: a library that runs the program again would submit again.
    """
    sys.argv[1:] = arguments


def with_arguments(arguments: None, value: Any) -> Any:
    """Return *value*; unpickling has set the *arguments* before, as imports may parse them."""
    return value


def importing() -> str:
    """Return the file and line at which a module is being imported; empty if none is."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    for thread in list(frames.values()):
        frame: types.FrameType | None = thread
        while frame is not None:
            spec = frame.f_globals.get("__spec__")
            if frame.f_code.co_name == "<module>" and getattr(spec, "_initializing", False):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
    return ""


def refuse_during_import(operation: str) -> None:
    """Raise RuntimeError if a module of this process is being imported: a job would start jobs."""
    if place := importing():
        raise RuntimeError(refusal_during_import(place, operation))


def refusal_during_import(place: str, operation: str) -> str:
    """Return why *operation* can't be called at *place*, which is a file and a line."""
    return (
        f"{place}: {operation} is called while this module is imported. A job imports the modules "
        "of your project, so the job would make the same call. Put the call below "
        '`if __name__ == "__main__":`, or into a function'
    )


def find_named(decorated: Any) -> Any:
    """Return what a pickle of *decorated* should name, or None if it should have the function.

    `pickle` writes a function as its name, and refuses the function of *decorated*, because that
    name refers to *decorated*. cloudpickle and dill write a function by value if their reader may
    lack its module. So only the pickler that calls ``__reduce__`` tells which form is right.
    """
    frame: types.FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__") == "pickle":  # Python, not C
        frame = frame.f_back
    pickler = "" if frame is None else str(frame.f_globals.get("__name__"))
    if not {"cloudpickle", "dill"}.isdisjoint(pickler.split(".")):
        return None
    try:
        named = attribute(sys.modules[decorated.__module__], decorated.__qualname__, 0)
        kind = type(typing.cast("object", named))
        if hasattr(kind, "__kinetic__") and named.__wrapped__ is decorated.__wrapped__:
            return named
    except (AttributeError, KeyError):
        pass
    return None


_FUNCTION_ATTRIBUTES = frozenset({"__doc__", "__module__"})
"""Attributes to read from the function, because every instance inherits them from its class."""


class Decorated(functools.partial[Any]):
    """Replaces a function that ``kinetic.run`` decorates in the script or the project.

    It delegates unknown attributes to the function. It derives from `functools.partial`, because a
    partial call adds no line to a traceback.
    """

    @property
    def __wrapped__(self) -> Any:
        """The function, with the arguments that `functools.partial` has merged into this object."""
        if self.args or self.keywords:
            return functools.partial(self.func, *self.args, **self.keywords)
        return self.func

    @property
    def local(self) -> Decorated:
        """The same without a check: a call runs the function in this process."""
        return Decorated(self.__wrapped__)

    def options(self, **changes: Any) -> Self:
        """Return this object: a call in this process has no settings to change."""
        return self

    def run_async(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError, because a job can't start jobs."""
        self._refuse("run_async")

    def run_async_map(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError, because a job can't start jobs."""
        self._refuse("run_async_map")

    @property
    def __kinetic__(self) -> NoReturn:
        """Raise RuntimeError: only a submission reads the settings, and a job submits nothing."""
        self._refuse("submitting it")

    def _refuse(self, operation: str) -> NoReturn:
        name = getattr(self, "__name__", type(self.func).__name__)
        refuse_during_import(name)
        raise RuntimeError(
            f"{name}: {operation} starts jobs, and a job can't start jobs; to call the function in "
            f"this process, use {name}(...) or {name}.local(...)"
        )

    def __get__(self, instance: object, owner: type[object] | None = None) -> Decorated:
        return self if instance is None else Decorated(types.MethodType(self.__wrapped__, instance))

    def __getattribute__(self, name: str) -> Any:
        if name in _FUNCTION_ATTRIBUTES:
            return getattr(self.func, name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)

    def __repr__(self) -> str:
        return f"<kinetic function {getattr(self, '__qualname__', self.func)} in its job>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        named = find_named(self)
        if named is self:
            return self.__qualname__
        # `typing.cast` returns the function, and every Python has it. The reader may lack kinetic.
        return typing.cast, (None, self.__wrapped__ if named is None else named)


class _DecoratedInImport(Decorated):
    """A function that a module of the project decorates while the job imports that module.

    A call during an import is an error. The first later call removes this check.
    """

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        refuse_during_import(f"{getattr(self, '__name__', self.func)}()")
        self.__class__ = Decorated  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        return self(*args, **kwargs)


def run(*args: Any, **settings: Any) -> Any:
    """Do in a job what ``kinetic.run`` does in the caller's program; the job needs no settings."""
    if args and not isinstance(args[0], str):
        return _DecoratedInImport(args[0])
    return _DecoratedInImport


class MissingKinetic(types.ModuleType):
    """What ``import kinetic`` gives in a job whose image lacks kinetic.

    The class is also the last finder in ``sys.meta_path``, and the loader of this module, and of
    ``kinetic.errors``.
    """

    run = staticmethod(run)
    exec_module = staticmethod(id)  # the module has no code to execute

    class Data:
        """A `Data` that a module of the project defines; `with_changes` replaces those in use."""

        def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
            self.path = str(path)

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> Any:
        """Return the spec of kinetic or of its errors; None for other modules."""
        from importlib.machinery import ModuleSpec

        if name not in ("kinetic", "kinetic.errors"):
            return None
        return ModuleSpec(name, typing.cast("Any", cls), is_package=name == "kinetic")

    @classmethod
    def create_module(cls, spec: Any) -> types.ModuleType:
        """Return the module."""
        return cls(spec.name)

    def __getattr__(self, name: str) -> Any:
        if name in ("Pruned", "report", "should_stop"):
            return getattr(importlib.import_module(".metrics", __package__), name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"kinetic.{name}: kinetic isn't installed where the job runs, which has only "
            "kinetic.run, kinetic.Data, kinetic.report, kinetic.should_stop, and kinetic.Pruned; "
            "add kinetic-aio to the job's image",
            name="kinetic",
        )
