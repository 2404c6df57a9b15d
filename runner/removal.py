"""Removing what jobs leave in their folders, without keeping anybody waiting."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from . import processes

__all__ = ["aside", "remove_aside", "remove_if_small"]


def remove_if_small(folder: str, entries: int = 256) -> bool:
    """Remove *folder* if it has at most *entries* files and folders; whether it is gone."""
    folders = [folder]
    files: list[str] = []
    for each in folders:  # grows while it is walked
        with os.scandir(each) as found:
            for entry in found:
                inside = folders if entry.is_dir(follow_symlinks=False) else files
                inside.append(entry.path)
                if len(folders) + len(files) > entries:
                    return False
    for file in files:
        os.unlink(file)
    for each in reversed(folders):
        os.rmdir(each)
    return True


def remove_aside(folders: Sequence[str]) -> int:
    """Fork a process that removes *folders* and ends; its id. See `aside`."""

    def remove() -> None:
        for folder in folders:
            _remove(folder)

    return aside(remove)


def aside(work: Callable[[], object]) -> int:
    """Fork a process that does *work* in nobody's way, and ends; its id.

    Call it in a single-threaded process only.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        processes.close_inherited()  # no lock and no socket of the parent's
        os.nice(10)
        work()
    finally:
        os._exit(0)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # folders that were made read-only
        for each, _, _ in os.walk(folder):
            try:
                os.chmod(each, 0o700)
            except OSError:
                continue
        shutil.rmtree(folder, ignore_errors=True)
