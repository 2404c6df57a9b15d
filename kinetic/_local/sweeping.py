"""What jobs leave in their folders is removed aside, by a process of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from kinetic._runner import removal

__all__ = ["Sweeper"]


class Sweeper:
    """Puts folders into *refuse*, and has them removed, one process at a time."""

    def __init__(self, refuse: Path) -> None:
        self.helpers: set[int] = set()
        self._sweeping = 0
        self._refuse = str(refuse)
        self._waiting = [entry.path for entry in os.scandir(refuse)]

    def put_aside(self, folder: str, name: str) -> None:
        """Take *folder* out of the way, if its job has left it."""
        if not os.path.lexists(folder):
            return  # the usual case: the job has removed it by itself
        aside = f"{self._refuse}/{name}"
        with contextlib.suppress(OSError):
            os.rename(folder, aside)
            self._waiting.append(aside)

    def sweep(self) -> None:
        """Begin to remove what waits, unless that is going on."""
        if self._waiting and self._sweeping not in self.helpers:
            with contextlib.suppress(OSError):  # no process to be had: later
                self._sweeping = removal.remove_aside(self._waiting)
                self.helpers.add(self._sweeping)
                self._waiting = []

    def aside(self, work: Callable[[], object]) -> None:
        """Have something else done that may take long."""
        with contextlib.suppress(OSError):  # no process to be had: another time
            self.helpers.add(removal.aside(work))

    def helped(self, pid: int) -> None:
        """A child of the supervisor has ended; it may have been a helper."""
        self.helpers.discard(pid)
