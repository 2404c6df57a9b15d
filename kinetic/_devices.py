"""The accelerators that this machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_GPUS = "/proc/driver/nvidia/gpus"

_TPUS = ("accel[0-9]*", "vfio/[0-9]*")
"""The devices of TPU chips below ``/dev``, by the driver's generation."""


def gpus_here(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids in ``CUDA_VISIBLE_DEVICES``, or those that the NVIDIA driver lists."""
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


def tpus_here() -> bool:
    """Return whether this machine has TPU chips."""
    return any(any(Path("/dev").glob(name)) for name in _TPUS)
