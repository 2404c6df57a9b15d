"""A process as a submitter of work, and whether it is still there."""

from __future__ import annotations

import asyncio
import os
import platform
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Owner", "lifetime"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from a later one with the same number."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        return cls(platform.node(), _boot(), os.getpid(), _started(os.getpid()))

    @classmethod
    def named(cls, fields: dict[str, Any] | None) -> Owner | None:
        """The one a manifest names; those of earlier versions name nobody.

        Raises:
            ValueError: That is no process.
        """
        if not fields:
            return None
        try:
            owner = cls(**{name: fields[name] for name in cls.__slots__})
        except (LookupError, TypeError) as exc:
            raise ValueError(f"{fields!r} names no process") from exc
        texts = (owner.host, owner.boot, owner.started)
        if (
            type(owner.pid) is not int
            or owner.pid < 0
            or not all(type(one) is str for one in texts)
        ):
            raise ValueError(f"{fields!r} names no process")
        return owner

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this machine since it was started."""
        return (self.host, self.boot) == (platform.node(), _boot())

    @property
    def alive(self) -> bool:
        """Whether it still runs; only meaningful when it is `here`."""
        return _started(self.pid) == self.started != ""

    @property
    def dead(self) -> bool:
        """Whether it certainly runs no more."""
        return self.here and not self.alive

    async def ended(self, patience: float) -> bool:
        """Wait up to *patience* seconds for its end; whether that is certain now."""
        if self.here:
            return await _ended(self, patience)
        await asyncio.sleep(patience)
        return False


def lifetime() -> float:
    """Seconds on a clock that counts sleep; Linux keeps that apart from the monotonic one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def _ended(owner: Owner, patience: float) -> bool:
    """Wait up to *patience* seconds for a process of this machine to end."""
    if not owner.alive:
        return True
    if not hasattr(os, "pidfd_open"):
        await asyncio.sleep(min(patience, 1.0))
        return not owner.alive
    try:
        fd = os.pidfd_open(owner.pid)
    except (ProcessLookupError, OSError):
        return not owner.alive
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    try:
        if select.select([fd], [], [], 0)[0]:
            return True
        loop.add_reader(fd, over.set)
        try:
            await asyncio.wait_for(over.wait(), patience)
        except TimeoutError:
            return not owner.alive
        finally:
            loop.remove_reader(fd)
        return True
    finally:
        os.close(fd)


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # a container numbers its own
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty when there is none."""
    if not Path("/proc/self/stat").exists():  # not Linux: only whether it is there
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
    return "" if fields[0] in "ZX" else fields[19]
