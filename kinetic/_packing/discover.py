"""Finds the project a function belongs to.

The rules, in order:

1. `KINETIC_PACKAGE_ROOT`, when set, is the root.
2. The search starts at the directory of the module that holds the function's
   code. It starts at the working directory when there is no such file
   (notebook, REPL, ``python -c``, standard input, builtins) and when that file
   is installed: the code of a third party is not a project.
3. It leaves packages: up while there is an ``__init__.py``.
4. The nearest directory at or above with a project marker is the root; without
   one, the directory of step 3.
5. The home directory, what lies above it, ``/`` and the shared directories for
   temporary files are never roots. When only those are left there is no root,
   nothing ships, and a warning says so.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from absl import logging

from kinetic.errors import ConfigurationError

ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})
"""A directory that has one of these is a virtual environment, whatever its name."""

_PACKAGES = frozenset({"site-packages", "dist-packages"})


def real(path: str | os.PathLike[str]) -> str:
    """The path of a file, its directory resolved, its own name kept.

    A module that is a link lies where the link lies: that is what ships.
    """
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(directory), name)


def is_within(path: str, directory: str) -> bool:
    """Whether *path* is *directory* or lies below it; both absolute and resolved."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def is_installed(path: str, below: str = os.sep) -> bool:
    """Whether a file belongs to the interpreter or to a distribution.

    Only the directories under *below* count, so that a project may lie in any
    directory at all.
    """
    parts = os.path.relpath(path, below).split(os.sep) if is_within(path, below) else []
    if not _PACKAGES.isdisjoint(parts[:-1]):
        return True
    return any(
        is_within(path, library) and not is_within(below, library) for library in _libraries()
    )


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = (paths.get(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple({os.path.realpath(path) for path in found if path})


@functools.lru_cache(maxsize=4096)
def in_environment(directory: str, below: str) -> bool:
    """Whether *directory*, which lies under *below*, is part of a virtual environment.

    *below* itself may be one: people do create environments in place.
    """
    if directory == below or not is_within(directory, below):
        return False
    if any(os.path.lexists(os.path.join(directory, mark)) for mark in ENVIRONMENT_MARKS):
        return True
    return in_environment(os.path.dirname(directory), below)


MARKERS = ("pyproject.toml", "requirements.txt", "setup.py", "setup.cfg", ".git")
"""What makes a directory a project; ``.git`` may be a file (a worktree)."""

ROOT_VARIABLE = "KINETIC_PACKAGE_ROOT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Where a function's code lies, and how it was imported.

    All directories are absolute and resolved. ``root`` is None when nothing
    ships. ``cwd`` is the working directory relative to the root, ``""`` for
    the root itself, None when it lies outside. ``sys_path`` are the entries of
    ``sys.path`` in the root, relative to it, in their order; the root itself
    (``""``) is there even when the client could not import from it.
    """

    root: Path | None
    entry_dir: Path
    cwd: str | None
    sys_path: tuple[str, ...]
    unpicklable: set[str] = field(default_factory=set[str], compare=False, repr=False)
    """Modules that have been found not to pickle: what one dump learns, the next one knows."""


def find_project(
    function: Callable[..., Any],
    *,
    environ: Mapping[str, str],
    cwd: Path,
    path: Iterable[str] | None = None,
) -> Project:
    """Find the project of *function*; *path* stands for ``sys.path``.

    Raises:
        ConfigurationError: `KINETIC_PACKAGE_ROOT` is no directory, or does not
            contain the function.
    """
    here = os.path.realpath(cwd)
    entry = _code_directory(function) or here
    root = _chosen_root(entry, environ, here) or _nearest_root(entry, _never_roots(environ))
    if root is None:
        logging.warning(
            "No files are shipped: %s is no project of its own. Work in a directory below it, "
            "or name the project's directory in %s.",
            entry,
            ROOT_VARIABLE,
        )
        return Project(root=None, entry_dir=Path(entry), cwd=None, sys_path=())
    return Project(
        root=Path(root),
        entry_dir=Path(entry),
        cwd=_relative(here, root) if is_within(here, root) else None,
        sys_path=_import_paths(root, here, sys.path if path is None else path),
    )


def _code_directory(function: Callable[..., Any]) -> str | None:
    """The directory of the file with the function's code, None when there is none of ours."""
    code = _innermost(function)
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if file is None and module is None:  # the module was made by hand, or is gone
        file = getattr(getattr(code, "__code__", None), "co_filename", None)
    if not file or (directory := _existing(os.path.dirname(real(file)))) is None:
        return None
    if is_installed(real(file)):
        return None
    return directory


def _innermost(function: Any) -> Any:
    """What holds the code: behind partials, methods, wrappers and callable objects."""
    for _ in range(64):
        if issubclass(type(cast("object", function)), functools.partial):
            function = function.func
        elif (inner := getattr(function, "__func__", None)) is not None:  # of a method
            function = inner
        elif (wrapped := getattr(function, "__wrapped__", None)) is not None:
            function = wrapped
        else:
            break
    if inspect.isclass(function) or inspect.isroutine(function):
        return function
    return type(cast("object", function))


def _existing(directory: str) -> str | None:
    """*directory*, or the nearest above that exists: modules may lie in a zip file."""
    if not os.path.isabs(directory):
        return None
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory


def _chosen_root(entry: str, environ: Mapping[str, str], here: str) -> str | None:
    if not (chosen := environ.get(ROOT_VARIABLE)):
        return None
    root = os.path.realpath(os.path.join(here, os.path.expanduser(chosen)))
    if not os.path.isdir(root):
        raise ConfigurationError(f"{ROOT_VARIABLE}={chosen} is not a directory")
    if os.path.dirname(root) == root:
        raise ConfigurationError(f"{ROOT_VARIABLE}={chosen} is the whole machine: name a project")
    if not is_within(entry, root):
        raise ConfigurationError(
            f"{ROOT_VARIABLE}={chosen} does not contain {entry}, where the function's code lies: "
            "name a directory above it, or unset the variable"
        )
    return root


def _nearest_root(entry: str, never: frozenset[str]) -> str | None:
    start = entry
    while os.path.isfile(os.path.join(start, "__init__.py")) and os.path.dirname(start) != start:
        start = os.path.dirname(start)
    directory = start
    while directory not in never and os.path.dirname(directory) != directory:
        if any(os.path.lexists(os.path.join(directory, marker)) for marker in MARKERS):
            return directory
        directory = os.path.dirname(directory)
    return None if start in never else start


def _never_roots(environ: Mapping[str, str]) -> frozenset[str]:
    """``/``, the home directory and what is above it, and where everybody's temporary files are."""
    home = os.path.realpath(environ.get("HOME") or os.path.expanduser("~"))
    never = {home, *(str(parent) for parent in Path(home).parents)}
    for shared in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        never.add(os.path.realpath(shared))
    return frozenset(never | {os.path.abspath(os.sep)})


def _import_paths(root: str, here: str, path: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for entry in path:
        # '' is the working directory; entries of other types (loaders' keys) are no paths.
        full = os.path.realpath(os.path.join(here, entry))
        if not is_within(full, root) or not os.path.exists(full):
            continue
        inside = os.path.join(full, "module.py")
        if is_installed(inside, root) or in_environment(full, root):
            continue
        found[_relative(full, root)] = None
    return tuple(found | {"": None})


def _relative(path: str, root: str) -> str:
    relative = os.path.relpath(path, root).replace(os.sep, "/")
    return "" if relative == "." else relative
