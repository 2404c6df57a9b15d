"""Find the project of a function.

The rules, in order:

1. `KINETIC_PACKAGE_ROOT`, if set, is the root.
2. The search starts at the directory of the module that holds the function's code. If the module
   has no file (notebook, REPL, ``python -c``, standard input, builtins), or if its file is
   installed, the search starts at the working directory: third-party code is not a project.
3. The search goes up while the directory has an ``__init__.py``, to leave packages.
4. The root is the nearest directory with a project marker, from the directory of rule 3 upwards.
   If none has a marker, the root is the directory of rule 3.
5. Rule 4 never chooses ``/``, the home directory or its parents, or a shared directory for
   temporary files. If the directory of rule 3 is one of these, no files ship, and kinetic warns.
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

ENVIRONMENT_MARKERS = frozenset({"pyvenv.cfg", "conda-meta"})
"""A directory with one of these entries is a virtual environment."""

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def resolve_directory(path: str | os.PathLike[str]) -> str:
    """Return the path of a file, with the links in its directory resolved and its name kept.

    If a module's file is itself a link, the link ships, so the link's directory counts.
    """
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(directory), name)


def is_within(path: str, directory: str) -> bool:
    """Return whether *path* is *directory* or below it; both must be absolute and resolved."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


def is_installed(path: str, base: str = os.sep) -> bool:
    """Return whether a file belongs to the interpreter or to a distribution.

    Only the directories under *base* count, because *base* itself may lie in ``site-packages``.
    """
    parts = os.path.relpath(path, base).split(os.sep) if is_within(path, base) else []
    if not _PACKAGE_FOLDERS.isdisjoint(parts[:-1]):
        return True
    return any(
        is_within(path, library) and not is_within(base, library) for library in _library_folders()
    )


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = (paths.get(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple({os.path.realpath(path) for path in found if path})


@functools.lru_cache(maxsize=4096)
def is_in_environment(directory: str, base: str) -> bool:
    """Return whether *directory* is in a virtual environment that lies below *base*.

    An environment in *base* itself doesn't count: users create them in the project's root.
    """
    if directory == base or not is_within(directory, base):
        return False
    if any(os.path.lexists(os.path.join(directory, marker)) for marker in ENVIRONMENT_MARKERS):
        return True
    return is_in_environment(os.path.dirname(directory), base)


PROJECT_MARKERS = ("pyproject.toml", "requirements.txt", "setup.py", "setup.cfg", ".git")
"""A directory with one of these entries is a project; in a worktree, ``.git`` is a file."""

ROOT_VARIABLE = "KINETIC_PACKAGE_ROOT"
BY_VALUE_VARIABLE = "KINETIC_BY_VALUE"


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
    by_value: frozenset[str] = frozenset()
    """The modules and packages that `KINETIC_BY_VALUE` names: the job doesn't import them."""
    changes: dict[tuple[int, ...], tuple[list[Any], Any]] = field(
        default_factory=dict[Any, Any], compare=False, repr=False
    )
    """What `changes` has found for the classes of arguments."""


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
    working_directory = os.path.realpath(cwd)
    by_value = frozenset(environ.get(BY_VALUE_VARIABLE, "").replace(",", " ").split())
    code_directory = _code_directory(function) or working_directory
    root = _configured_root(code_directory, environ, working_directory) or _nearest_root(
        code_directory, _forbidden_roots(environ)
    )
    if root is None:
        logging.warning(
            "No files are shipped: %s can't be a project. Work in a directory below it, or set %s "
            "to the project's directory.",
            code_directory,
            ROOT_VARIABLE,
        )
        return Project(
            root=None, entry_dir=Path(code_directory), cwd=None, sys_path=(), by_value=by_value
        )
    return Project(
        root=Path(root),
        entry_dir=Path(code_directory),
        cwd=_relative_path(working_directory, root) if is_within(working_directory, root) else None,
        sys_path=_import_paths(root, working_directory, sys.path if path is None else path),
        by_value=by_value,
    )


def current_directory() -> Path:
    """Return the current directory.

    Raises:
        ConfigurationError: It was deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as exc:
        raise ConfigurationError(
            "the current directory of this program was deleted: start the program in another one, "
            "or call os.chdir() before you submit"
        ) from exc


def _code_directory(function: Callable[..., Any]) -> str | None:
    """Return the directory of the function's code; None if the code has no file or is installed."""
    code = unwrap_callable(function)
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    namespace = getattr(code, "__globals__", None)
    if namespace is not None and module is not None and vars(module) is not namespace:
        file = namespace.get("__file__") or file  # a profiler runs the script in its own __main__
    if file is None and module is None:  # the module isn't in sys.modules
        file = getattr(getattr(code, "__code__", None), "co_filename", None)
    if not file or is_installed(resolve_directory(file)):
        return None
    folder = Path(resolve_directory(file)).parent
    # A module may lie in a zip file.
    return str(next(directory for directory in (folder, *folder.parents) if directory.is_dir()))


def scripts_of(function: Any) -> tuple[Path, ...]:
    """Return the files that may list dependencies in a comment: the script, and the function's."""
    code = getattr(unwrap_callable(function), "__code__", None)
    files = (getattr(sys.modules["__main__"], "__file__", None), code and code.co_filename)
    return tuple(Path(file) for file in files if file)


def unwrap_callable(function: Any) -> Any:
    """Return the function or class that holds the code of a partial, method, wrapper, or object."""
    for _ in range(64):
        if issubclass(type(cast("object", function)), functools.partial):
            function = function.func
        elif (inner := getattr(function, "__func__", None)) is not None:  # a method
            function = inner
        elif (wrapped := getattr(function, "__wrapped__", None)) is not None:
            function = wrapped
        else:
            break
    if inspect.isclass(function) or inspect.isroutine(function):
        return function
    return type(cast("object", function))


def _configured_root(
    code_directory: str, environ: Mapping[str, str], working_directory: str
) -> str | None:
    """Return the root that `KINETIC_PACKAGE_ROOT` names; None if it isn't set."""
    if not (configured := environ.get(ROOT_VARIABLE)):
        return None
    root = os.path.realpath(os.path.join(working_directory, os.path.expanduser(configured)))
    if not os.path.isdir(root):
        raise ConfigurationError(f"{ROOT_VARIABLE}={configured} is not a directory")
    if os.path.dirname(root) == root:
        raise ConfigurationError(
            f"{ROOT_VARIABLE}={configured} is the root of the file system; set it to a project"
        )
    if not is_within(code_directory, root):
        raise ConfigurationError(
            f"{ROOT_VARIABLE}={configured} does not contain {code_directory}, which has the "
            "function's code: set it to a directory above that one, or unset the variable"
        )
    return root


def _nearest_root(code_directory: str, forbidden: frozenset[str]) -> str | None:
    """Return the root by rules 3 and 4 of the module; None if rule 5 forbids that root."""
    start = code_directory
    while os.path.isfile(os.path.join(start, "__init__.py")) and os.path.dirname(start) != start:
        start = os.path.dirname(start)
    directory = start
    while directory not in forbidden and os.path.dirname(directory) != directory:
        if any(os.path.lexists(os.path.join(directory, marker)) for marker in PROJECT_MARKERS):
            return directory
        directory = os.path.dirname(directory)
    return None if start in forbidden else start


def _forbidden_roots(environ: Mapping[str, str]) -> frozenset[str]:
    """Return ``/``, the home directory, its parents, and the folders of temporary files."""
    home = os.path.realpath(environ.get("HOME") or os.path.expanduser("~"))
    shared = map(os.path.realpath, (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    return frozenset({home, *map(str, Path(home).parents), *shared, os.path.abspath(os.sep)})


def _import_paths(root: str, working_directory: str, path: Iterable[str]) -> tuple[str, ...]:
    """Return the entries of *path* that are in the project, relative to *root*, and ``""``."""
    found: dict[str, None] = {}
    for entry in path:
        # '' is the working directory.
        absolute = os.path.realpath(os.path.join(working_directory, entry))
        if not is_within(absolute, root) or not os.path.exists(absolute):
            continue
        module_file = os.path.join(absolute, "module.py")
        if is_installed(module_file, root) or is_in_environment(absolute, root):
            continue
        found[_relative_path(absolute, root)] = None
    return tuple(found | {"": None})


def _relative_path(path: str, root: str) -> str:
    relative = os.path.relpath(path, root).replace(os.sep, "/")
    return "" if relative == "." else relative
