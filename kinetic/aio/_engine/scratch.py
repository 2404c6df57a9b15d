"""Keep content that moves to or from the store in a private folder.

The folder is named after its process, so a later process can remove that of a killed one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

from kinetic import configuration
from kinetic._runner.protocol.private import make_folder
from kinetic.aio._process_identity import ProcessIdentity

STALE_S = 24 * 3600.0
"""Above this age, a folder is removed without knowing whether its process lives."""


def scratch_folder() -> Path:
    """Make a folder, in the user's cache if that is writable; the caller removes it."""
    parent = _parent()
    try:
        make_folder(parent)
        return Path(tempfile.mkdtemp(prefix=_prefix(_me(os.getpid())), dir=parent))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kinetic-scratch-"))


def sweep_scratch() -> None:
    """Remove the folders of killed processes. It blocks, and may take long."""
    with contextlib.suppress(OSError), os.scandir(_parent()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # its owner has just removed it
                old = entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_S
                if old or _is_orphan(entry.name):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _parent() -> Path:
    return configuration.home(os.environ) / "cache" / "scratch"


@functools.lru_cache(1)
def _me(pid: int) -> ProcessIdentity:
    return ProcessIdentity.me()  # not that of the process this one was forked from


def _prefix(owner: ProcessIdentity) -> str:
    """What the names of *owner*'s folders begin with; no other process, of any machine, has it."""
    place = hashlib.sha256(f"{owner.host} {owner.boot}".encode()).hexdigest()[:12]
    return f"{place}-{owner.pid}-{owner.started}-"


def _is_orphan(name: str) -> bool:
    me = _me(os.getpid())
    _, pid, started, *_ = [*name.split("-"), "", "", ""]
    if not pid.isdecimal():
        return False
    owner = replace(me, pid=int(pid), started=started)
    return name.startswith(_prefix(owner)) and not owner.alive


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
