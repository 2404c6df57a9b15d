"""Make private folders for content that moves to or from the store, and remove old ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Self

from kinetic import configuration
from kinetic._runner.protocol.private import make_folder

STALE_S = 24 * 3600.0
"""Above this age, in seconds, a folder counts as left by a killed process."""


def scratch_folder() -> Path:
    """Make a folder in the cache, or in the system's temporary folder; the caller removes it."""
    parent = _parent()
    try:
        make_folder(parent)
        return Path(tempfile.mkdtemp(dir=parent))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kinetic-scratch-"))


def sweep_scratch() -> None:
    """Remove the folders that killed processes left. It blocks, and may take long."""
    with contextlib.suppress(OSError), os.scandir(_parent()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # the folder's owner may have just removed it
                if entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_S:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _parent() -> Path:
    return configuration.home(os.environ) / "cache" / "scratch"


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
        """The path of the folder, which the first use makes."""
        if self._folder is None:
            self._folder = scratch_folder()
        return self._folder
