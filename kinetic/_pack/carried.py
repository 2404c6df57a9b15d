"""Decides which modules travel with a function, and tells cloudpickle for as long as it takes.

cloudpickle's list of modules that go by value belongs to the whole process. A
module is on it while at least one dump needs it, so threads that pack at the
same time do not take it away from each other; a module that the user put there
stays.
"""

from __future__ import annotations

import enum
import importlib.machinery
import os
import sys
import threading
import types
from collections.abc import Iterable

import cloudpickle

from kinetic._pack import installed
from kinetic._pack.discover import Project

__all__ = ["Fate", "Fates", "Register", "importable_there", "register"]

_OURS = frozenset({"kinetic", "kinetic_runner"})
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


class Fate(enum.Enum):
    """How what a module defines gets to the other side."""

    VALUE = "its code travels with the function"
    REFERENCE = "it is imported there"
    USUAL = "as cloudpickle decides: by reference, but for ``__main__``"


class Fates:
    """The fate of each module, for one project."""

    def __init__(self, project: Project) -> None:
        self._below = str(project.root or project.entry_dir)
        self._unpicklable = project.unpicklable
        self._known: dict[str, Fate] = {}

    def of(self, name: str) -> Fate:
        """The fate of the module called *name*."""
        if (fate := self._known.get(name)) is None:
            fate = self._known[name] = self._decide(name)
        return fate

    def _decide(self, name: str) -> Fate:
        module = sys.modules.get(name)
        if module is None or name in ("__main__", "builtins") or name.partition(".")[0] in _OURS:
            return Fate.USUAL
        if getattr(module, "__name__", None) != name:
            return Fate.USUAL  # an alias; cloudpickle's list goes by the module's own name
        places = _places(module)
        if not places or not all(installed.is_within(one, self._below) for one in places):
            return Fate.USUAL
        if any(self._is_foreign(one) for one in places) or name in self._unpicklable:
            return Fate.REFERENCE
        return Fate.VALUE

    def _is_foreign(self, place: str) -> bool:
        """Installed in the project's own virtual environment, or compiled."""
        return (
            place.endswith(_EXTENSIONS)
            or installed.is_installed(place, self._below)
            or installed.in_environment(os.path.dirname(place), self._below)
        )


def _places(module: types.ModuleType) -> list[str]:
    """The file of a module; the directories of a namespace package."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return [installed.real(file)]
    try:
        return [os.path.realpath(one) for one in getattr(module, "__path__", ())]
    except (TypeError, ValueError):
        return []


def importable_there(name: str, project: Project) -> bool:
    """Whether the project's archive has module *name* where the job looks for it."""
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


class Register:
    """Counts who needs a module on cloudpickle's list."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._needed: dict[str, int] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def hold(self, name: str) -> None:
        """Put a module on the list, until `release` was called as often."""
        with self._lock:
            if name not in self._needed:
                if name in cloudpickle.list_registry_pickle_by_value():
                    return  # the user's own
                _put_on(name)
            self._needed[name] = self._needed.get(name, 0) + 1

    def release(self, names: Iterable[str]) -> None:
        """Undo one `hold` of each."""
        with self._lock:
            for name in names:
                if (count := self._needed.get(name, 0) - 1) > 0:
                    self._needed[name] = count
                elif count == 0:
                    del self._needed[name]
                    _take_off(name)

    def _forget(self) -> None:
        # The threads that held these do not exist in a forked process; nor does who has the lock.
        self._lock = threading.Lock()
        for name in self._needed:
            _take_off(name)
        self._needed = {}


def _put_on(name: str) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[name])  # pyright: ignore[reportUnknownMemberType]


def _take_off(name: str) -> None:
    module = sys.modules.get(name)
    if module is not None and name in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(module)  # pyright: ignore[reportUnknownMemberType]


register = Register()
"""The process's one register, as cloudpickle's list is the process's one list."""
