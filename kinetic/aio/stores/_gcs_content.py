"""What is uploaded: bytes, or an open file, read piece by piece."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiofiles.threadpool import wrap
from aiofiles.threadpool.binary import AsyncBufferedReader

from kinetic.aio._release import in_thread, release
from kinetic.aio.stores import _gcs_checksum as checksum
from kinetic.errors import BackendError

__all__ = ["Content", "opened"]

STRETCH = 64 * 1024 * 1024
"""So many bytes are read by one call of a worker thread: it cannot be cancelled meanwhile."""


@dataclass(frozen=True, slots=True)
class Content:
    """Something of *size* bytes with a checksum; ``file`` has them, else ``held`` is all."""

    size: int
    crc32c: str
    held: bytes = b""
    file: AsyncBufferedReader | None = None
    path: str = ""

    async def read(self, start: int, stop: int, *, goes_on: bool = False) -> bytes:
        """The bytes from *start* to *stop*; *goes_on* where the last ones read ended at *start*.

        Raises:
            BackendError: The file has fewer by now, or cannot be read.
        """
        if self.file is None:
            return self.held[start:stop]
        try:
            if not goes_on:
                await self.file.seek(start)
            piece = await self.file.read(stop - start)
        except OSError as exc:
            raise _unreadable(self.path, exc) from exc
        if len(piece) < stop - start:
            raise BackendError(
                f"{self.path} became shorter while it was uploaded; keep it as it is and try again"
            )
        return piece


@asynccontextmanager
async def opened(body: bytes | Path, small: int) -> AsyncGenerator[Content]:
    """*body* as content; a file of up to *small* bytes is read at once."""
    if isinstance(body, bytes):
        value = checksum.of(body) if len(body) <= small else await in_thread(checksum.of, body)
        yield Content(len(body), value, held=body)
        return
    path = os.fspath(body)
    try:
        file = _reader(path)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    try:
        yield await _content_of(file, path, small)
    finally:  # after what is just being read: the two have a lock
        await release(file.close(), what=f"closing {path}")


def _reader(path: str) -> AsyncBufferedReader:
    """Opened here and now: a file must not be lost in a thread whose caller is cancelled."""
    file: AsyncBufferedReader = wrap(open(path, "rb"))  # noqa: SIM115  # the caller closes it
    return file


async def _content_of(file: AsyncBufferedReader, path: str, small: int) -> Content:
    size = os.fstat(file.fileno()).st_size
    try:
        if size <= small:
            held = await file.read(small + 1)
            return Content(len(held), checksum.of(held), held=held)
        value = 0
        for start in range(0, size, STRETCH):
            stop = min(size, start + STRETCH)
            value = await in_thread(checksum.of_file, file.fileno(), start, stop, value)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    return Content(size, checksum.text(value), file=file, path=path)


def _unreadable(path: str, exc: OSError) -> BackendError:
    return BackendError(f"cannot read {path} to upload it: {exc.strerror or exc}; check it")
