"""Where pickles go: memory, a file once they are large, or nowhere."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["MEMORY_BYTES", "Counter", "Pickled", "Spool", "SpoolError"]

MEMORY_BYTES = 1024 * 1024
"""Content that is larger than this goes to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickled:
    """A container of `runner.pickles`, in memory or in a file that the caller removes.

    ``digest`` is the SHA-256 of the content, ``size`` its bytes.
    """

    content: bytes | Path
    digest: str
    size: int


class SpoolError(Exception):
    """The spool failed, as opposed to what was pickled into it."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Counter:
    """Counts bytes and forgets them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: bytes | memoryview, /) -> int:
        size = memoryview(data).nbytes
        self.size += size
        return size


class Spool:
    """Bytes in memory, from 1 MiB on in a private file under *directory*; hashed on the way.

    Without a directory they stay in memory.

    Raises:
        SpoolError: The file cannot be written; from `write` and `finish`.
    """

    def __init__(self, directory: Path | None) -> None:
        self.size = 0
        self._directory = directory
        self._sha256 = hashlib.sha256()
        self._memory = io.BytesIO()
        self._file: BinaryIO = self._memory
        self._path: Path | None = None

    def write(self, data: bytes | memoryview, /) -> int:
        size = memoryview(data).nbytes
        try:
            if self._path is None and self._directory and self.size + size > MEMORY_BYTES:
                self._move(self._directory)
            self._file.write(data)
        except OSError as exc:
            raise SpoolError(exc) from exc
        self._sha256.update(data)
        self.size += size
        return size

    def _move(self, directory: Path) -> None:
        descriptor, name = tempfile.mkstemp(suffix=".pkl", dir=directory)
        self._path = Path(name)
        self._file = open(descriptor, "wb")  # noqa: SIM115 - closed by finish or discard
        self._file.write(self._memory.getbuffer())

    def finish(self) -> Pickled:
        """What was written; nothing more may be."""
        content: bytes | Path
        if self._path is None:
            content = self._memory.getvalue()
        else:
            try:
                self._file.close()
            except OSError as exc:
                raise SpoolError(exc) from exc
            content = self._path
        return Pickled(content=content, digest=self._sha256.hexdigest(), size=self.size)

    def discard(self) -> None:
        """Remove the file, if there is one."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # the disk is full, which is why
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
