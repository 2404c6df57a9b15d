"""Upload and download objects atomically.

Every write carries a precondition, so it can be repeated, and a random nonce in the object's
metadata. If a reply is lost, the nonce tells the writer whether the object is its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import google_crc32c
from aiofiles.threadpool import wrap

from kinetic._tasks import in_thread
from kinetic.aio._net.http import HttpError, cut
from kinetic.aio.gcs.http import DAMAGED_TRIES, NONCE, Damaged, Described, Http, Verb
from kinetic.aio.ports import Object
from kinetic.errors import BackendError, NotFound, Unavailable

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedIOBase

T = TypeVar("T")
CRC32C: Any = google_crc32c  # it ships half of its types

TYPE = "application/octet-stream"

BLOCK = 4 * 1024 * 1024
"""Bytes to read and check at a time."""

LONG = 8 * 1024 * 1024
"""Bytes above which memory is joined and checked in a worker thread."""

LOOKS = 10
"""How many times per `Limits.idle_s` kinetic checks the progress of an upload."""


def extended(value: int, content: bytes) -> int:
    """Return the CRC32C of content with checksum *value*, followed by *content*."""
    return int(CRC32C.extend(value, content))


def encoded(value: int) -> str:
    """Return a checksum as the service writes it: four bytes, big-endian, in base64."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


async def checksum(content: bytes) -> str:
    """Return the checksum of *content* as the service writes it."""
    long = len(content) > LONG
    return encoded(await in_thread(extended, 0, content) if long else extended(0, content))


# --- upload ---


@dataclass(frozen=True, slots=True)
class Content:
    """Content to upload: *size* bytes with a checksum, from memory or from the file ``path``."""

    size: int
    crc32c: str
    held: bytes = b""
    path: Path | None = None

    @classmethod
    async def of(cls, body: bytes | Path, small: int) -> Content:
        """Examine *body*; a file of at most *small* bytes is read into memory.

        Raises:
            BackendError: The file can't be read.
        """
        if isinstance(body, bytes):
            return cls(len(body), await checksum(body), held=body)
        try:
            with body.open("rb") as opened:
                # aiofiles.open() loses the file if it is cancelled while it opens it.
                file = wrap(opened)
                held = await file.read(small + 1)
                if len(held) <= small:
                    return cls(len(held), await checksum(held), held=held)
                size, value = len(held), extended(0, held)
                while block := await file.read(BLOCK):
                    size, value = size + len(block), await in_thread(extended, value, block)
        except OSError as exc:
            raise _unreadable(body, exc) from exc
        return cls(size, encoded(value), path=body)

    def open(self) -> IO[bytes]:
        """Open the content for one try.

        Raises:
            BackendError: The file can't be read, or its size has changed.
        """
        if self.path is None:
            return io.BytesIO(self.held)
        try:
            file = self.path.open("rb")
        except OSError as exc:
            raise _unreadable(self.path, exc) from exc
        if os.fstat(file.fileno()).st_size == self.size:
            return file
        file.close()
        raise BackendError(
            f"the size of {self.path} changed during the upload; keep the file as it is and try "
            "again"
        )


def _unreadable(path: Path, exc: OSError) -> BackendError:
    return BackendError(f"cannot read {path} to upload it: {exc.strerror or exc}; check it")


async def write(
    http: Http,
    verb: Verb,
    name: str,
    body: bytes | Path,
    metadata: Mapping[str, str],
    *,
    generation: int,
    used: str = "",
) -> int | None:
    """Write *name* over *generation*, where 0 means that it doesn't exist.

    *used* is the object's custom time, for objects that are collected by age. Returns the new
    generation, or None if another process was faster.

    Cancelled: the object is there whole or not at all. The service drops an unfinished upload
    after a week.
    """
    content = await Content.of(body, http.limits.piece_bytes)
    object_name, nonce = http.place.object_name(name), secrets.token_hex(8)
    large = content.size > http.limits.piece_bytes
    tries, furthest = itertools.count(), 0

    async def once() -> int:
        next(tries)
        with content.open() as stream:

            def sent() -> int:
                nonlocal furthest
                furthest = max(furthest, content.size if stream.closed else stream.tell())
                return furthest

            sending = http.storage.upload(
                http.place.bucket,
                object_name,
                stream,
                content_type=TYPE,
                parameters={"ifGenerationMatch": str(generation), "fields": "generation"},
                metadata={
                    "metadata": {**metadata, NONCE: nonce},
                    "crc32c": content.crc32c,  # the service refuses content that differs
                    **({"Custom-Time": used} if used else {}),  # the library sends customTime
                },
                force_resumable_upload=large,
                timeout=http.timeout,
            )
            answer = await _unless_silent(sending, sent, http.limits.idle_s)
        return int(answer["generation"])

    try:
        return await http.do(verb, name, once, known=(412,), progress=lambda: furthest, large=large)
    except HttpError:
        if next(tries) == 1:  # there was one
            return None
    try:  # an earlier try may have written it, and its reply was lost
        there = await http.described(name)
    except NotFound:
        return None
    return there.info.generation if there.nonce == nonce else None


async def _unless_silent(
    work: Coroutine[Any, Any, T], progress: Callable[[], int], idle_s: float
) -> T:
    """Await *work*, but no longer than *idle_s* after *progress* has changed.

    aiohttp has limits for the silence before an answer, but none while it sends.

    Raises:
        TimeoutError: *progress* stood still.
    """
    task, before, quiet = asyncio.create_task(work), -1, 0
    try:
        while not (await asyncio.wait({task}, timeout=idle_s / LOOKS))[0]:
            now = progress()
            quiet = quiet + 1 if now == before else 0
            if quiet > LOOKS:
                raise TimeoutError(f"nothing was taken for {idle_s:g} s")
            before = now
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


# --- download ---


class _TooLong(Exception):
    """The content has more bytes than allowed."""


class Replaced(Unavailable):
    """Another process replaced the object while kinetic read it."""


async def get(http: Http, name: str, limit: int | None, start: int = 0) -> Object:
    """Read an object from byte *start* on; one with more than *limit* bytes has an empty body.

    The service knows only the checksum of the whole, so a part isn't checked.
    """

    async def once() -> Object:
        pieces, size = list[bytes](), 0

        async def take(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if limit is not None and size > limit:
                raise _TooLong
            pieces.append(piece)

        # Send both requests at once, because the API has no single answer with metadata and
        # content. Let both finish, because cancelling a request closes its connection.
        about, read = await asyncio.gather(
            http.described(name),
            _download(http, name, take, start=start),
            return_exceptions=True,
        )
        if isinstance(about, BaseException):
            raise about
        if isinstance(read, _TooLong):
            return _object(about, b"")
        if isinstance(read, BaseException):
            raise read
        if read not in (0, about.info.generation):
            raise _replaced(http, name)
        body = await in_thread(b"".join, pieces) if size > LONG else b"".join(pieces)
        if not start and about.crc32c not in ("", await checksum(body)):
            raise _damaged(http, name)
        return _object(about, body)

    return await _consistent(once)


def _object(about: Described, body: bytes) -> Object:
    info = about.info
    return Object(name=info.name, body=body, metadata=info.metadata, generation=info.generation)


async def fetch(http: Http, name: str, path: Path) -> None:
    """Download an object to a new file at *path*, and check it; a failure leaves no file."""

    async def once() -> None:
        about, value = await http.described(name), 0
        async with _new_file(path) as file:

            async def take(piece: bytes) -> None:
                nonlocal value
                with _writing(path):
                    await file.write(piece)
                value = extended(value, piece)

            await _download(http, name, take, about=about)
            if about.crc32c not in ("", encoded(value)):
                raise _damaged(http, name)

    await _consistent(once)


async def _consistent(once: Callable[[], Awaitable[T]]) -> T:
    """Read an object; read it again if it arrives damaged or another process replaced it."""
    for _ in range(DAMAGED_TRIES - 1):
        with contextlib.suppress(Damaged, Replaced):
            return await once()
    return await once()


async def _download(
    http: Http,
    name: str,
    take: Callable[[bytes], Awaitable[None]],
    *,
    start: int = 0,
    about: Described | None = None,
) -> int:
    """Pass the content from byte *start* on to *take*; continue after a cut connection.

    *about*, if known, says which generation to read. Returns the generation, or 0 if the server
    doesn't tell.
    """
    object_name, offset = http.place.object_name(name), start
    generation = about.info.generation if about is not None else 0

    async def once() -> None:
        nonlocal generation, offset
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        stream = await http.storage.download_stream(
            http.place.bucket, object_name, headers=headers, timeout=http.timeout
        )
        async with stream as answer:
            try:
                current = int(answer.headers.get("X-Goog-Generation", 0))
                if generation and current not in (0, generation):
                    raise _replaced(http, name)
                generation = generation or current
                async for piece in answer.content.iter_any():
                    await take(piece)
                    offset += len(piece)
            finally:
                cut(answer)

    large = about is not None and about.info.size > http.limits.piece_bytes
    await http.do(Verb.GET, name, once, progress=lambda: offset, large=large)
    return generation


@contextlib.asynccontextmanager
async def _new_file(path: Path) -> AsyncGenerator[AsyncBufferedIOBase]:
    """Open a new, private file at *path*; a failure removes it."""
    with _writing(path):
        opened = _create_private(path)
        file = wrap(opened)
        try:
            yield file
            await file.close()
        except BaseException:
            with contextlib.suppress(OSError):  # what it still holds doesn't fit either
                opened.close()
            os.unlink(path)
            raise


def _create_private(path: Path) -> IO[bytes]:
    return open(path, "xb", opener=functools.partial(os.open, mode=0o600))


@contextlib.contextmanager
def _writing(path: Path) -> Generator[None]:
    """Turn failures of the disk into kinetic's error; `Http.do` would blame the network."""
    try:
        yield
    except BackendError:
        raise
    except OSError as exc:
        raise BackendError(
            f"cannot write {path}: {exc.strerror or exc}; free some space, or choose another place"
        ) from exc


def _damaged(http: Http, name: str) -> Damaged:
    return Damaged(
        f"checksum mismatch on download of {name!r} from {http.place.url}; check the network, "
        "then try again"
    )


def _replaced(http: Http, name: str) -> Replaced:
    return Replaced(f"{name!r} in {http.place.url} changed while it was read; try again later")
