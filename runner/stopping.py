"""SIGTERM becomes an exception in the user's code, and only there; SIGXCPU likewise.

The platform gives a job some seconds between SIGTERM and SIGKILL; a platform
of ours says by SIGXCPU that the job's own time is over. While the user's code
runs it is interrupted at once, so that its ``finally`` blocks run; while the
runner prepares or commits, the signal is only remembered.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

__all__ = ["STOPS", "Stopped", "Stopping", "running_seconds"]

BEGAN = time.monotonic()

_signal: Any = importlib.import_module("_signal")  # `signal` without the detour over its enums
STOPS = (int(signal.SIGTERM), int(signal.SIGXCPU))
"""The signals; the warm parent holds them back from a fork that cannot take them yet."""


class Stopped(BaseException):
    """The platform asked the job to end."""


class Stopping:
    """Remembers SIGTERM and raises `Stopped` where that is allowed."""

    def __init__(self) -> None:
        self.requested = False
        self.out_of_time = False
        self._armed = False
        self._process = 0

    def install(self) -> None:
        """Take the signals over, also those held back so far; call it in the main thread."""
        self._process = os.getpid()
        for number in STOPS:
            _signal.signal(number, self._on_signal)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, STOPS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork of the user's, such as a worker of a pool
            _signal.signal(number, _signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.requested = True
        self.out_of_time = self.out_of_time or number == signal.SIGXCPU
        if self._armed:
            self._armed = False  # once: a clean-up that was begun is not torn down
            raise Stopped

    def interruptible(self) -> Stopping:
        """For ``with``: within its block SIGTERM raises `Stopped`; at once, if it came before."""
        return self

    def __enter__(self) -> None:
        self._armed = True
        if self.requested:
            self._armed = False
            raise Stopped

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._armed = False


def running_seconds() -> float:
    """How long this process has been running, at most 20 ms too much.

    The platform counts a deadline from the process's start, which is before
    its first line of Python: in a warm fork by little, in a pod by seconds.
    """
    if sys.platform != "linux":
        return time.monotonic() - BEGAN
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return age + 0.02
