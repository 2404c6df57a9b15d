"""The timeout of a job, which counts from the call of its function.

Another process ends the job when its timeout is over. In a pod, the container's first process does
so: the job sends it a message when it calls the function. On a local machine, the supervisor does
so: the job writes a file beside its folder, which the supervisor reads when the timeout could be
over.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress


def record_call(work: str | os.PathLike[str]) -> None:
    """Record that the function of the job in the folder *work* is called now."""
    fd = os.open(_marker(work), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, b"%r" % time.monotonic())
    finally:
        os.close(fd)


def called_at(work: str | os.PathLike[str]) -> float | None:
    """Return when the function was called, by the monotonic clock; None if it wasn't called yet."""
    try:
        with open(_marker(work), "rb") as file:
            return float(file.read())
    except (OSError, ValueError):
        return None


def forget(work: str | os.PathLike[str]) -> None:
    """Remove the record of a job that has ended."""
    with suppress(OSError):
        os.unlink(_marker(work))


def _marker(work: str | os.PathLike[str]) -> str:
    return f"{os.fspath(work)}.called"
