"""Tells code that is installed here from code that belongs to the project."""

from __future__ import annotations

import functools
import os
import sysconfig

__all__ = ["ENVIRONMENT_MARKS", "in_environment", "is_installed", "is_within", "real"]

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
