"""Decide how the job gets each module that a call refers to.

The job imports the project's modules from the archive, like any program. These definitions travel
by value instead:

- those of ``__main__``, also in a spawned process, of a notebook, and of ``exec``;
- those of modules that the program has made without a file, or by running a file itself;
- those of the modules that `KINETIC_BY_VALUE` names, or ``cloudpickle.register_pickle_by_value``;
- those of modules that the job can't find: nothing ships, or their package lies elsewhere.
"""

from __future__ import annotations

import enum
import functools
import importlib.machinery
import os
import subprocess
import sys
import types
from typing import Any

import cloudpickle

from kinetic._packing import discover
from kinetic._packing.discover import Project
from kinetic._runner.protocol import stand_ins
from kinetic.errors import PackError

_cloudpickle: Any = cloudpickle.cloudpickle
_KINETIC_PACKAGES = frozenset({"kinetic", "kinetic_runner"})
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


class PicklingMode(enum.Enum):
    """How the definitions of a module get to the job."""

    VALUE = "the module's code travels with the function"
    REFERENCE = "the job imports the module from the archive"
    DEFAULT = "cloudpickle decides: by value for ``__main__``, by reference for other modules"


class Modules:
    """The modules of this process, and how each gets to the jobs of one project."""

    def __init__(self, project: Project) -> None:
        self._base = str(project.root or project.entry_dir)
        self._ships = project.root is not None
        self._roots = [
            os.path.normpath(os.path.join(self._base, entry)) for entry in project.sys_path
        ]
        self._by_value = project.by_value
        self._modes: dict[str, PicklingMode] = {}
        self._outside: dict[str, str] = {}
        self.files: dict[str, str] = {}
        """The file of each module that the job loads from its file, because its name differs."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides how modules get to the job."""
        registered = frozenset(_cloudpickle.list_registry_pickle_by_value())
        return self._base, self._ships, tuple(self._roots), self._by_value, registered

    def mode_of(self, name: object, module: types.ModuleType | None = None) -> PicklingMode:
        """Return how the module *name* gets to the job.

        Python may have forgotten *module*, which a function still refers to.
        """
        if not isinstance(name, str):
            return PicklingMode.DEFAULT  # an object may name anything as its module
        if (mode := self._modes.get(name)) is None:
            mode = self._decide(name, sys.modules.get(name, module))
            if name in sys.modules:
                self._modes[name] = mode
        return mode

    def is_by_value(self, name: object) -> bool:
        """Return whether the code of the module *name* travels with the function."""
        return name == "__main__" or self.mode_of(name) is PicklingMode.VALUE

    def imported(self, name: object) -> types.ModuleType | None:
        """Return the module *name* if the job imports it from the archive; else None."""
        return sys.modules[str(name)] if self.mode_of(name) is PicklingMode.REFERENCE else None

    def check(self, name: object) -> None:
        """Check that a job can import module *name*, before anything is sent.

        Raises:
            PackError: The module is neither installed nor in the project. Or this process imports
                it now: its top level makes the call, which the job's import would repeat.
        """
        module = self.imported(name)
        if module is not None and getattr(module.__spec__, "_initializing", False):
            raise PackError(stand_ins.refusal_during_import(stand_ins.importing(), "kinetic"))
        if self.mode_of(name) is PicklingMode.DEFAULT and str(name) in self._outside:
            file = self._outside[str(name)]
            if not _is_installed_elsewhere(str(name).partition(".")[0]):
                raise PackError(
                    f"the job can't import the module {name}: its file {file} is outside the "
                    f"project {self._base}, and it isn't installed. Set "
                    f"{discover.ROOT_VARIABLE} to a directory that contains both, install the "
                    f"module, or set {discover.BY_VALUE_VARIABLE}={name} to send its definitions "
                    "by value.",
                    culprit=str(name),
                )

    def _decide(self, name: str, module: types.ModuleType | None) -> PicklingMode:
        top = name.partition(".")[0]
        if module is None or name in ("__main__", "builtins") or top in _KINETIC_PACKAGES:
            return PicklingMode.DEFAULT
        if getattr(module, "__name__", None) != name:
            return PicklingMode.DEFAULT  # an alias; cloudpickle registers modules by ``__name__``
        # A process that multiprocessing has spawned has the script under this name.
        if name == "__mp_main__" or self._is_chosen(name, module):
            return PicklingMode.VALUE
        paths = _module_paths(module)
        if not paths:
            # Only what the program itself made has no spec; a package makes its own submodules.
            is_made = type(module) is types.ModuleType and module.__spec__ is None
            return PicklingMode.VALUE if is_made and "." not in name else PicklingMode.DEFAULT
        if not all(discover.is_within(path, self._base) for path in paths):
            if not any(discover.is_installed(path) for path in paths):
                self._outside[name] = paths[0]
            return PicklingMode.DEFAULT
        if any(
            discover.is_installed(path, self._base)
            or discover.is_in_environment(os.path.dirname(path), self._base)
            for path in paths
        ):
            return PicklingMode.DEFAULT
        found = self._is_found(name, module, paths)
        return PicklingMode.REFERENCE if found else PicklingMode.VALUE

    def _is_chosen(self, name: str, module: types.ModuleType) -> bool:
        """Return whether the user wants the module *name*, or a package around it, by value."""
        parts = name.split(".")
        packages = {".".join(parts[: count + 1]) for count in range(len(parts))}
        registered: bool = _cloudpickle._is_registered_pickle_by_value(module)
        return registered or not self._by_value.isdisjoint(packages)

    def _is_found(self, name: str, module: types.ModuleType, paths: list[str]) -> bool:
        """Return whether the job finds the module by its name, or else by its file."""
        if not self._ships:
            return False
        tail = os.path.join(*name.split("."))
        # A link to a package ships as a folder, so its own place counts, too.
        for place in map(_importable_path, [*paths, *_places(module)]):
            head = place.removesuffix(f"{os.sep}{tail}")
            if head != place and os.path.realpath(head) in self._roots:
                return True
        package = name.rpartition(".")[0]
        has_package = not package or self.imported(package) is not None
        # A module loaded from its file can import its own package only by name. Without a spec, the
        # program has run the file itself, as `runpy.run_path` does: a job must not run it again.
        is_loaded = module.__spec__ is not None and paths[0].endswith(".py")
        if has_package and package not in self.files and is_loaded:
            self.files[name] = paths[0]
        return name in self.files


def _module_paths(module: types.ModuleType) -> list[str]:
    """Return the file of a module, or the directories of a namespace package, resolved."""
    resolve = discover.resolve_directory if _has_file(module) else os.path.realpath
    return [resolve(place) for place in _places(module)]


def _has_file(module: types.ModuleType) -> bool:
    return isinstance(getattr(module, "__file__", None), str)


def _places(module: types.ModuleType) -> list[str]:
    """Return where the module was found: its file, or the directories of a namespace package."""
    if _has_file(module):
        return [os.path.abspath(str(module.__file__))]
    try:
        return [os.path.abspath(path) for path in getattr(module, "__path__", ())]
    except (TypeError, ValueError):
        return []


def _importable_path(path: str) -> str:
    """Return the path of a module's file without its suffix, or of a package's directory."""
    for suffix in (".py", ".pyc", *_EXTENSIONS):
        if path.endswith(suffix):
            path = path.removesuffix(suffix)
            break
    folder, name = os.path.split(path)
    return folder if name == "__init__" else path


@functools.cache
def _is_installed_elsewhere(name: str) -> bool:
    """Return whether another process of this interpreter finds the module without ``sys.path``.

    It does so after an editable install, or by `PYTHONPATH`, which a job may capture.
    """
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    command = [sys.executable, "-P", "-c", code, name]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
