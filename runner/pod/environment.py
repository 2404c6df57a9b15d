"""The environment of a pod, and the streams of its processes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..protocol import wire

KEY_FILE = "/var/run/kinetic/key"
TERMINATION_LOG = "/dev/termination-log"
RUNNER_VARIABLES = (
    "KINETIC_ORDER",
    "KINETIC_FAILURES",
    "KINETIC_DISRUPTIONS",
    "KINETIC_KEY_FILE",
    "KINETIC_POD_NAME",
)
"""Variables of the runner, which the job doesn't get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The environment of a pod: its order and its key.

    ``name`` is the pod's own, and empty in a set of hosts. ``receipt`` is the file for the receipt,
    and empty if there is none.
    """

    order: wire.Order
    key: bytes
    executor: str
    name: str
    receipt: str


def read_pod(environ: Mapping[str, str]) -> Pod:
    """Read the environment of a pod.

    Raises:
        ValueError: The environment is incomplete, or this runner can't read its format.
        OSError: The key cannot be read.
    """
    order = wire.Order.decode(environ.get("KINETIC_ORDER", "null"))
    executor = environ.get("KINETIC_POD_UID", "")
    if not executor:
        raise ValueError("KINETIC_POD_UID is not set, so the attempt cannot be claimed")
    receipt = environ.get("KINETIC_TERMINATION_LOG", TERMINATION_LOG)
    return Pod(
        order=order,
        key=Path(environ.get("KINETIC_KEY_FILE", KEY_FILE)).read_bytes(),
        executor=executor,
        name=environ.get("KINETIC_POD_NAME", ""),
        receipt=receipt if os.path.exists(receipt) else "",
    )


def open_stream(fd: int) -> io.TextIOWrapper:
    """Open a stream that writes at once and escapes what can't be encoded."""
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it lives as long as the job
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def print_error() -> None:
    """Print why there is no outcome; only a defect of the runner shows a traceback."""
    import traceback

    error = sys.exception()
    with contextlib.suppress(OSError, ValueError):
        if isinstance(error, OSError):  # the store, or the disk
            print(f"kinetic: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
