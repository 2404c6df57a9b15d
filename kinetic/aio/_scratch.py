"""A private folder for what is on its way to the store."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Self

from kinetic import configuration

__all__ = ["Scratch", "scratch_folder"]

STALE_S = 24 * 3600.0
"""A folder that old belongs to a process that was killed over it."""


def scratch_folder() -> Path:
    """Make one, under the user's own cache where that can be written; the caller removes it."""
    parent = configuration.home(os.environ) / "cache" / "scratch"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            _sweep(parent)
        return Path(tempfile.mkdtemp(dir=parent))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kinetic-scratch-"))


def _sweep(parent: Path) -> None:
    for entry in os.scandir(parent):
        if entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_S:
            shutil.rmtree(entry.path, ignore_errors=True)


class Scratch:
    """A folder that is made when it is first needed, and removed at the end of ``with``."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def folder(self) -> Path:
        """Its path."""
        if self._folder is None:
            self._folder = scratch_folder()
        return self._folder
