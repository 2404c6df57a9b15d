"""Did the kernel kill for want of memory? Its own counters are the only evidence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

__all__ = ["KernelKills", "count_kills"]

FRESH_S = 10.0
"""A reading this old is renewed before a job starts."""


class KernelKills:
    """Notices that the kernel has killed something since the last job started."""

    def __init__(self, count: Callable[[], int | None]) -> None:
        self._count = count
        self._before = count()
        self._read_at = 0.0

    def note(self, now: float) -> None:
        """A job starts: older kills are none of its business."""
        if now - self._read_at > FRESH_S:
            self._read_at, self._before = now, self._count()

    def happened(self) -> bool:
        """Whether there was a kill since."""
        after = self._count()
        return after is not None and self._before is not None and after > self._before


def count_kills() -> int | None:
    """How many processes of our control group, or else of this machine, the kernel killed."""
    for path in _counters():
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None


def _counters() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    paths: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return paths  # macOS keeps no count
    for line in lines:
        _, kinds, group = line.split(":", 2)
        group = group.lstrip("/")
        if not kinds:
            paths.append(root / group / "memory.events")
        elif "memory" in kinds.split(","):
            paths.append(root / "memory" / group / "memory.oom_control")
    return [*paths, Path("/proc/vmstat")]
