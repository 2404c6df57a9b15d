"""The processors, memory, and accelerators that this machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_GPU_FOLDER = "/proc/driver/nvidia/gpus"

_TPU_PATTERNS = ("accel[0-9]*", "vfio/[0-9]*")
"""Patterns of the devices of TPU chips below ``/dev``, one for each generation of the driver."""


def count_cpus(environ: Mapping[str, str]) -> int:
    """Return ``KINETIC_LOCAL_SLOTS``, or the number of processors that this process may use."""
    configured = environ.get("KINETIC_LOCAL_SLOTS", "")
    if configured.isdigit() and int(configured) > 0:  # clients refuse other values
        return int(configured)
    affinity = getattr(os, "sched_getaffinity", None)  # missing on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_ids(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the IDs of the GPUs that this process may use.

    They are the IDs in ``CUDA_VISIBLE_DEVICES``. If the variable isn't set, they are the numbers of
    all GPUs that the driver lists.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [part.strip() for part in visible.split(",")]
        # Like CUDA, ignore all IDs from the first one on that names no device.
        end = next(
            (index for index, device in enumerate(ids) if device in ("", "-1", "NoDevFiles")),
            len(ids),
        )
        return tuple(dict.fromkeys(ids[:end]))
    try:
        return tuple(str(number) for number in range(len(os.listdir(_GPU_FOLDER))))
    except OSError:
        return ()


def has_tpus() -> bool:
    """Return whether this machine has TPU chips."""
    return any(any(Path("/dev").glob(pattern)) for pattern in _TPU_PATTERNS)
