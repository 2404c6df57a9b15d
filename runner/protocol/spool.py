"""Collect the bytes of a pickle, in memory or in a file, and hash them on the way."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors of a file system without space for kinetic."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """The bytes that a `Spool` has collected, in memory or in a file, with their SHA-256.

    ``fields`` are for the body of the outcome if the content is a file.
    """

    content: bytes | Path
    digest: str
    size: int
    fields: Mapping[str, Any] | None = None


class Spool:
    """Collect bytes in memory, and move them to a private file above *limit* bytes.

    *locate* returns the file's path when it is needed. Without it, all bytes stay in memory.
    """

    def __init__(self, locate: Callable[[], str | Path] | None, limit: int) -> None:
        self.size = 0
        self.path: str | Path | None = None
        self._locate = locate
        self._limit = limit
        self._sha256 = hashlib.sha256()
        self._memory = io.BytesIO()
        self._file: BinaryIO = self._memory

    def write(self, data: bytes | memoryview, /) -> int:
        """Add bytes.

        Raises:
            OSError: The file can't be written.
        """
        size = memoryview(data).nbytes
        if self.path is None and self._locate is not None and self.size + size > self._limit:
            self.path = self._locate()
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._file = open(fd, "wb", buffering=1 << 20)  # noqa: SIM115 - closed at the end
            self._file.write(self._memory.getbuffer())
        self._sha256.update(data)
        self._file.write(data)
        self.size += size
        return size

    def finish(self) -> Spooled:
        """Close the file and return the content.

        Raises:
            OSError: The file can't be written.
        """
        content: bytes | Path = self._memory.getvalue()
        if self.path is not None:
            self._file.close()
            content = Path(self.path)
        return Spooled(content, self._sha256.hexdigest(), self.size)

    def discard(self) -> None:
        """Remove the file, if there is one, to free its disk space."""
        if self.path is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self.path)
