"""Notice that a container nears its memory limit, at which the kernel would kill all of it.

With control groups v2, the kubelet sets ``memory.oom.group`` for each container, unless its node
pool has ``singleProcessOOMKill``. The kernel then kills all processes of the container at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection

from ..job import processes

FOLDER = "/sys/fs/cgroup"
"""The container's own control group; KINETIC_POD_CGROUP_FOLDER overrides this path."""

RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""The parts of the memory in use that the kernel frees before it kills a process."""

MARGIN, LEAST_MARGIN, MOST_MARGIN = 0.04, 16 << 20, 512 << 20
"""How much of its limit a container may leave free before a process must end: a part, and bytes."""

FASTEST = 4 << 30
"""How many bytes a second the processes may take, for the pause until the next look."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.25


class MemoryLimit:
    """The memory limit of a container that the kernel would kill as a whole."""

    def __init__(self, folder: str, limit: int) -> None:
        self.limit = limit
        self._folder = folder
        self._margin = min(max(int(limit * MARGIN), LEAST_MARGIN), MOST_MARGIN)

    @classmethod
    def find(cls) -> MemoryLimit | None:
        """Read the control group; None if it has no limit, or if the kernel kills one process."""
        folder = os.environ.get("KINETIC_POD_CGROUP_FOLDER", FOLDER)
        with contextlib.suppress(OSError, ValueError):  # no limit is "max"
            if _read(folder, "memory.oom.group") == "1":
                return cls(folder, int(_read(folder, "memory.max")))
        return None

    def pause(self) -> float:
        """Return the seconds until the next look; 0 if a process must end now."""
        try:
            used = int(_read(self._folder, "memory.current"))
            for line in _read(self._folder, "memory.stat").splitlines():
                name, _, count = line.partition(" ")
                used -= int(count) if name in RECLAIMABLE else 0
        except (OSError, ValueError):
            return LONGEST_PAUSE_S
        left = self.limit - used - self._margin
        if left <= 0:
            return 0.0
        return min(max(left / FASTEST, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name)) as file:
        return file.read().strip()


def kill_largest(parents: Collection[int], levels: int) -> bool:
    """Kill the largest of the processes that are *levels* generations below *parents*.

    Return whether there was one. Level 0 is the parents themselves.
    """
    found = [*parents]
    for _ in range(levels):
        found = [child for parent in found for child in processes.children(parent)]
    with contextlib.suppress(OSError, ValueError):  # it has ended
        os.kill(max(found, key=_resident_pages), signal.SIGKILL)
        return True
    return False


def _resident_pages(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(_read(f"/proc/{pid}", "statm").split()[1])
    return 0
