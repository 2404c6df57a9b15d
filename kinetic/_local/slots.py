"""Who may use which part of this machine now: CPUs are counted, GPUs are named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Grant", "Need", "Slots", "cpus_here", "gpus_here", "memory_here"]

_GPUS = "/proc/driver/nvidia/gpus"


@dataclass(frozen=True, slots=True)
class Need:
    """What a job wants."""

    cpus: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """What a job has got; given back as it is."""

    cpus: int
    gpus: tuple[str, ...]


class Slots:
    """The free and the taken slots of one machine."""

    def __init__(self, cpus: int, gpus: tuple[str, ...] = ()) -> None:
        self.cpus = max(1, cpus)
        self.gpus = gpus
        self._free_cpus = self.cpus
        self._free_gpus = list(gpus)

    def fit(self, need: Need) -> Need:
        """*need*, cut down to what the machine has."""
        cpus = min(max(1, need.cpus), self.cpus)
        return Need(cpus, min(need.gpus, len(self.gpus)))

    def take(self, need: Need) -> Grant | None:
        """Take what *need* asks for, or nothing."""
        if need.cpus > self._free_cpus or need.gpus > len(self._free_gpus):
            return None
        self._free_cpus -= need.cpus
        gpus, self._free_gpus = self._free_gpus[: need.gpus], self._free_gpus[need.gpus :]
        return Grant(need.cpus, tuple(gpus))

    def give(self, grant: Grant) -> None:
        """Give back what was taken."""
        self._free_cpus += grant.cpus
        self._free_gpus = sorted([*self._free_gpus, *grant.gpus], key=self.gpus.index)

    def taken(self, need: Need) -> str:
        """How much is taken of what *need* waits for, in words."""
        if need.gpus > len(self._free_gpus):
            what, free, there = "GPU", len(self._free_gpus), len(self.gpus)
            wanted = need.gpus
        else:
            what, free, there = "slot", self._free_cpus, self.cpus
            wanted = need.cpus
        wish = f"a {what}" if wanted == 1 else f"{wanted} {what}s"
        return f"waiting for {wish}: {there - free} of {there} busy"

    def has_gpus(self, need: Need) -> bool:
        """Whether CPUs are all that *need* may have to wait for."""
        return need.gpus <= len(self._free_gpus)


def cpus_here(environ: Mapping[str, str]) -> int:
    """``KINETIC_LOCAL_SLOTS``, or the processors this process may use."""
    asked = environ.get("KINETIC_LOCAL_SLOTS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def memory_here() -> int:
    """The bytes of memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpus_here(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The ids in ``CUDA_VISIBLE_DEVICES``, or the GPUs that the NVIDIA driver lists."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [part.strip() for part in visible.split(",")]
        # CUDA itself ends the list at the first id that names no device.
        end = next((i for i, one in enumerate(ids) if one in ("", "-1", "NoDevFiles")), len(ids))
        return tuple(dict.fromkeys(ids[:end]))
    try:
        return tuple(str(number) for number in range(len(os.listdir(_GPUS))))
    except OSError:
        return ()
