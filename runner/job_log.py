"""Lines of the runner itself in the log of a job."""

from __future__ import annotations

import contextlib
import sys


def say(message: str) -> None:
    """Write a line to the log of this job or worker."""
    with contextlib.suppress(Exception):  # the disk may be full, or user code has closed the stream
        print(f"kinetic: {message}", file=sys.stderr, flush=True)
