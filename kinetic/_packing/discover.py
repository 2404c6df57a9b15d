"""Find the project of a function.

The rules, in order:

1. `KINETIC_PACKAGE_ROOT`, if set, is the root.
2. The search starts at the directory of the module that holds the function's code. If the module
   has no file (notebook, REPL, ``python -c``, standard input, builtins), or if its file is
   installed, the search starts at the working directory: third-party code is not a project.
3. The search goes up while the directory has an ``__init__.py``, to leave packages.
4. The root is the nearest directory, from there upwards, with a project marker. If none has a
   marker, the root is the directory of step 3.
5. ``/``, the home directory and its parents, and the shared directories for temporary files are
   never roots. If no other directory is left, no files ship, and a warning reports that.
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
"""A directory with one of these is a virtual environment."""

_PACKAGES = frozenset({"site-packages", "dist-packages"})


def real(path: str | os.PathLike[str]) -> str:
    """Return the path of a file, with the links in its directory resolved and its name kept.

    If a module's file is itself a link, the link ships, so the link's directory counts.
    """
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(directory), name)


def is_within(path: str, directory: str) -> bool:
    """Return whether *path* is *directory* or lies below it; both absolute and resolved."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def is_installed(path: str, below: str = os.sep) -> bool:
    """Return whether a file belongs to the interpreter or to a distribution.

    Only the directories under *below* count, because *below* itself may lie in ``site-packages``.
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
    """Return whether *directory*, under *below*, is part of a virtual environment.

    *below* itself doesn't count, because users create environments in the project's root.
    """
    if directory == below or not is_within(directory, below):
        return False
    if any(os.path.lexists(os.path.join(directory, mark)) for mark in ENVIRONMENT_MARKS):
        return True
    return in_environment(os.path.dirname(directory), below)


MARKERS = ("pyproject.toml", "requirements.txt", "setup.py", "setup.cfg", ".git")
"""A directory with one of these is a project; in a worktree, ``.git`` is a file."""

ROOT_VARIABLE = "KINETIC_PACKAGE_ROOT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The project of a function.

    All directories are absolute and resolved. ``root`` is None if no files ship. ``cwd`` is the
    working directory relative to the root, or None if it lies outside. ``sys_path`` has the entries
    of ``sys.path`` in the root, relative to it, and always the root itself (``""``).
    """

    root: Path | None
    entry_dir: Path
    cwd: str | None
    sys_path: tuple[str, ...]
    unpicklable: set[str] = field(default_factory=set[str], compare=False, repr=False)
    """Modules that failed to pickle; the next dump of this project doesn't try them again."""


def find_project(
    function: Callable[..., Any],
    *,
    environ: Mapping[str, str],
    cwd: Path,
    path: Iterable[str] | None = None,
) -> Project:
    """Find the project of *function*; *path* replaces ``sys.path``.

    Raises:
        ConfigurationError: `KINETIC_PACKAGE_ROOT` isn't a directory, or doesn't contain the
            function.
    """
    here = os.path.realpath(cwd)
    entry = _code_directory(function) or here
    root = _chosen_root(entry, environ, here) or _nearest_root(entry, _never_roots(environ))
    if root is None:
        logging.warning(
            "No files are shipped: %s can't be a project. Work in a directory below it, or set %s "
            "to the project's directory.",
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
    """Return the directory of the function's code; None if it has no file or is installed."""
    code = innermost(function)
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if file is None and module is None:  # the module isn't in sys.modules
        file = getattr(getattr(code, "__code__", None), "co_filename", None)
    if not file or is_installed(real(file)):
        return None
    folder = Path(real(file)).parent
    # A module may lie in a zip file.
    return str(next(one for one in (folder, *folder.parents) if one.is_dir()))


def innermost(function: Any) -> Any:
    """Return the function or class that holds the code of a partial, method, wrapper, or object."""
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


def _chosen_root(entry: str, environ: Mapping[str, str], here: str) -> str | None:
    if not (chosen := environ.get(ROOT_VARIABLE)):
        return None
    root = os.path.realpath(os.path.join(here, os.path.expanduser(chosen)))
    if not os.path.isdir(root):
        raise ConfigurationError(f"{ROOT_VARIABLE}={chosen} is not a directory")
    if os.path.dirname(root) == root:
        raise ConfigurationError(
            f"{ROOT_VARIABLE}={chosen} is the root of the file system; set it to a project"
        )
    if not is_within(entry, root):
        raise ConfigurationError(
            f"{ROOT_VARIABLE}={chosen} does not contain {entry}, which has the function's "
            "code: set it to a directory above that one, or unset the variable"
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
    """Return ``/``, the home directory, its parents, and the folders of temporary files."""
    home = os.path.realpath(environ.get("HOME") or os.path.expanduser("~"))
    never = {home, *(str(parent) for parent in Path(home).parents)}
    for shared in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        never.add(os.path.realpath(shared))
    return frozenset(never | {os.path.abspath(os.sep)})


def _import_paths(root: str, here: str, path: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for entry in path:
        # '' is the working directory.
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
