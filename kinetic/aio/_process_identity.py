"""The identity of a process, and whether it still runs."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.2
"""Seconds between two checks whether a process of this machine has ended."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process; a later process with the same process ID has another identity."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return this process."""
        return _identity_of(os.getpid())  # a forked child has another one

    @classmethod
    def from_fields(cls, fields: dict[str, Any] | None) -> ProcessIdentity | None:
        """Return the process in *fields*, or None without fields; `ValueError` if one is wrong."""
        if not fields:
            return None
        values: list[Any] = [fields.get(name) for name in cls.__slots__]
        if [type(value) for value in values] != [str, str, int, str] or fields["pid"] < 0:
            raise ValueError(f"{fields!r} doesn't name a process")
        return cls(*values)

    @property
    def is_local(self) -> bool:
        """Whether the process began on this machine, or in this container, since the last boot."""
        return (self.host, self.boot) == (platform.node(), _boot_id())

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; only meaningful if `is_local`."""
        return _start_time(self.pid) == self.started != ""

    @property
    def is_dead(self) -> bool:
        """Whether the process has certainly ended; False if this machine can't know."""
        return self.is_local and not self.is_alive

    async def wait_for_end(self, timeout: float) -> bool:
        """Wait up to *timeout* seconds for the process to end; return whether it certainly has."""
        if not self.is_local:
            await asyncio.sleep(timeout)
            return False
        # Count the polls instead of reading a clock. With a deadline, the last pause could be too
        # short to advance the virtual clock of a test, and this loop would never end.
        for _ in range(math.ceil(timeout / POLL_S)):
            if not self.is_alive:
                return True
            await asyncio.sleep(POLL_S)
        return not self.is_alive


@functools.lru_cache(maxsize=1)
def _identity_of(pid: int) -> ProcessIdentity:
    return ProcessIdentity(platform.node(), _boot_id(), pid, _start_time(pid))


def _boot_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Two containers can use the same process ID, so the namespace belongs to the identity.
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty if it doesn't exist."""
    if not Path("/proc/self/stat").exists():  # macOS shows only whether the process exists
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "running"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended
