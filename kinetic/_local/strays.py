"""Finding and ending the processes of a supervisor that is no more, by the mark they carry."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

from kinetic._runner.processes import LINUX, MARK, mark_of

__all__ = ["end_strays", "strays"]


def strays(directory: str) -> list[int]:
    """The processes that carry the mark of the state *directory*, but for this one."""
    found = _by_proc(directory) if LINUX else _by_ps(directory)
    return [pid for pid in found if pid != os.getpid()]


def end_strays(directory: str, patience: float = 10.0) -> list[int]:
    """Kill them until none is left; those that did not go within *patience* seconds.

    Nobody may be starting such processes meanwhile: the caller holds the lock.
    """
    until = time.monotonic() + patience
    while (pids := strays(directory)) and time.monotonic() < until:
        for pid in pids:
            _kill(pid, directory, until)
    return pids


def _by_proc(directory: str) -> Iterator[int]:
    mine = os.getuid()
    for entry in os.scandir("/proc"):
        try:
            if not entry.name.isdigit() or entry.stat().st_uid != mine:
                continue
        except OSError:
            continue  # it ended meanwhile
        if mark_of(int(entry.name))[0] == directory:
            yield int(entry.name)


def _by_ps(directory: str) -> Iterator[int]:
    """Where there is no ``/proc``: ``ps`` shows the environment of one's own processes."""
    import subprocess  # slow to load, and not needed on Linux

    listing = subprocess.run(
        ["ps", "-A", "-E", "-ww", "-o", "pid=,command="],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    ).stdout
    for line in listing.splitlines():
        pid, _, words = line.strip().partition(" ")
        if f" {MARK}={directory}:" in words and pid.isdigit():
            yield int(pid)


def _kill(pid: int, directory: str, until: float) -> None:
    """Kill one process and see it go, without ever meeting another that got its number."""
    if not LINUX:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # the next look says whether it is gone
        return
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return  # it went by itself
    try:
        # The descriptor stands for whoever has the number now: look once more.
        if mark_of(pid)[0] != directory:
            return
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        select.select([fd], [], [], max(0.0, until - time.monotonic()))
    except OSError:
        return
    finally:
        os.close(fd)
