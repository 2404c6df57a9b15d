"""The time that a job may run: it is counted from the moment its function is called.

What looks after the job's process, and ends it, is another process: a pod's
first one is told so by a message, the local supervisor by a file beside the
job's folder, which it reads when the time could be over.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress


def tell_called(work: str | os.PathLike[str]) -> None:
    """In the job that has the folder *work*: its function is called now."""
    fd = os.open(_marker(work), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, b"%r" % time.monotonic())
    finally:
        os.close(fd)


def called_at(work: str | os.PathLike[str]) -> float | None:
    """When that was, by the monotonic clock that all processes share; None: not yet."""
    try:
        with open(_marker(work), "rb") as file:
            return float(file.read())
    except (OSError, ValueError):
        return None


def forget(work: str | os.PathLike[str]) -> None:
    """The job has ended."""
    with suppress(OSError):
        os.unlink(_marker(work))


def _marker(work: str | os.PathLike[str]) -> str:
    return f"{os.fspath(work)}.called"
