"""Locks on files, held by this process until it lets go or dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

__all__ = ["acquire", "holding"]


def acquire(path: Path, *, wait: bool) -> int | None:
    """The descriptor that holds the lock; None when another process has it.

    Raises:
        OSError: The file cannot be made or locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def holding(path: Path, *, wait: bool) -> Generator[bool]:
    """Hold the lock within the block; whether it could be had."""
    fd = acquire(path, wait=wait)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)
