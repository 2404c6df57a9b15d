"""Detect that the kernel has killed a process for lack of memory; an exit status doesn't say so."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

CONTAINER_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Where the kernel counts its kills in this container, in cgroups v2 and v1."""

MAX_COUNT_AGE_S = 10.0
"""Maximum age, in seconds, of the stored count of kills when a process starts."""


class KernelKills:
    """Detect whether the kernel has killed a process for lack of memory since a recent start."""

    def __init__(self, count: Callable[[], int | None]) -> None:
        self._count = count
        self._before = count()
        self._read_at = 0.0

    def refresh_if_stale(self, now: float) -> None:
        """Read an old count again before a process starts: earlier kills don't concern it."""
        if now - self._read_at > MAX_COUNT_AGE_S:
            self._read_at, self._before = now, self._count()

    def has_increased(self) -> bool:
        """Return whether the kernel has killed a process since the stored count was read."""
        after = self._count()
        return after is not None and self._before is not None and after > self._before


def kills_in_container(paths: Sequence[str] = CONTAINER_FILES) -> int | None:
    """Return how many processes of this container the kernel killed; None if unknown."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for line in file:
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


def kills_on_machine() -> int | None:
    """Return how many processes of this control group the kernel killed, else of the machine."""
    paths: list[str] = []
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return None  # macOS keeps no count
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            paths.append(os.path.join("/sys/fs/cgroup", group.lstrip("/"), "memory.events"))
        elif "memory" in controllers.split(","):
            folder = os.path.join("/sys/fs/cgroup/memory", group.lstrip("/"))
            paths.append(os.path.join(folder, "memory.oom_control"))
    return kills_in_container([*paths, "/proc/vmstat"])
