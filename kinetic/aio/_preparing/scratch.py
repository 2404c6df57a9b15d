"""Make private folders for content that moves to or from the store, and remove old ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from kinetic import configuration
from kinetic._runner.protocol.private import make_folder

STALE_S = 24 * 3600.0
"""Above this age, in seconds, a folder counts as left by a killed process, unless that lives."""


class Scratch:
    """A private folder that most calls don't need: it exists from its first use to its removal."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def folder(self) -> Path:
        """Return the folder, in the cache or else in the system's temporary folder."""
        if self._folder is None:
            parent = _parent()
            try:
                make_folder(parent)
                self._folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"{os.getpid()}-"))
            except OSError:
                self._folder = Path(tempfile.mkdtemp(prefix="kinetic-scratch-"))
        return self._folder

    def remove(self) -> None:
        """Remove the folder, if it was made."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def scratch() -> Generator[Path]:
    """Make a folder for the ``with`` block, and remove it at the end."""
    private = Scratch()
    try:
        yield private.folder()
    finally:
        private.remove()


def sweep_scratch() -> None:
    """Remove the folders that killed processes left. This call blocks, and may take long."""
    with contextlib.suppress(OSError), os.scandir(_parent()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # the folder's owner may have just removed it
                is_old = entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_S
                # A submission may wait for days until `max_concurrent` lets it start.
                if is_old and not _lives(entry.name.partition("-")[0]):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _lives(pid: str) -> bool:
    """Return whether the process *pid*, a text that may be no number, runs on this machine."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:  # another user's process has this number now
        return False
    return True


def _parent() -> Path:
    return configuration.home(os.environ) / "cache" / "scratch"
