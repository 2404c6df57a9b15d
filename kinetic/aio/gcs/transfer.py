"""Upload and download objects atomically.

Every write names the generation that the object must have, so a repetition does no harm. It stores
a random nonce in the metadata, which shows the writer after a lost reply whether it wrote the
object.
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
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import google_crc32c
from aiofiles.threadpool import wrap

from kinetic._tasks import in_thread
from kinetic.aio._net.http import HttpError, close_answer
from kinetic.aio.gcs.http import NONCE, BucketClient, Damaged, Replaced, Verb
from kinetic.aio.ports import Object
from kinetic.errors import BackendError, NotFound

if TYPE_CHECKING:
    import aiohttp
    from aiofiles.threadpool.binary import AsyncBufferedIOBase

CRC32C: Any = google_crc32c  # the library declares only some of its types

CONTENT_TYPE = "application/octet-stream"

BLOCK_BYTES = 4 * 1024 * 1024
"""How many bytes of a file to read and check at a time."""

THREAD_BYTES = 8 * 1024 * 1024
"""Content in memory that is longer than this, in bytes, is joined and checked in a thread."""


def extend_crc32c(value: int, content: bytes) -> int:
    """Return the CRC32C of earlier content, whose checksum is *value*, followed by *content*."""
    return int(CRC32C.extend(value, content))


def encode_crc32c(value: int) -> str:
    """Return a checksum as the service writes it: four bytes, big-endian, in base64."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


async def checksum(content: bytes) -> str:
    """Return the checksum of *content* as the service writes it."""
    is_long = len(content) > THREAD_BYTES
    return encode_crc32c(
        await in_thread(extend_crc32c, 0, content) if is_long else extend_crc32c(0, content)
    )


# --- upload ---


@dataclass(frozen=True, slots=True)
class Content:
    """Content to upload: *size* bytes with a checksum, from memory or from the file ``path``."""

    size: int
    crc32c: str
    body: bytes = b""
    path: Path | None = None

    @classmethod
    async def of(cls, body: bytes | Path, memory_limit: int) -> Content:
        """Compute size and checksum of *body*; keep a file of up to *memory_limit* bytes in memory.

        Raises:
            BackendError: The file can't be read.
        """
        if isinstance(body, bytes):
            return cls(len(body), await checksum(body), body=body)
        try:
            with body.open("rb") as opened:
                # aiofiles.open() would leave the file open if it is cancelled.
                file = wrap(opened)
                first_bytes = await file.read(memory_limit + 1)
                if len(first_bytes) <= memory_limit:
                    return cls(len(first_bytes), await checksum(first_bytes), body=first_bytes)
                size, crc32c = len(first_bytes), extend_crc32c(0, first_bytes)
                while block := await file.read(BLOCK_BYTES):
                    size, crc32c = size + len(block), await in_thread(extend_crc32c, crc32c, block)
        except OSError as exc:
            raise _read_error(body, exc) from exc
        return cls(size, encode_crc32c(crc32c), path=body)

    def open(self) -> IO[bytes]:
        """Open the content for one try of the upload.

        Raises:
            BackendError: The file can't be read, or its size has changed.
        """
        if self.path is None:
            return io.BytesIO(self.body)
        try:
            file = self.path.open("rb")
        except OSError as exc:
            raise _read_error(self.path, exc) from exc
        if os.fstat(file.fileno()).st_size == self.size:
            return file
        file.close()
        raise BackendError(
            f"the size of {self.path} changed during the upload; keep the file as it is and try "
            "again"
        )


def _read_error(path: Path, exc: OSError) -> BackendError:
    return BackendError(f"cannot read {path} to upload it: {exc.strerror or exc}; check it")


async def write(
    client: BucketClient,
    verb: Verb,
    name: str,
    body: bytes | Path,
    metadata: Mapping[str, str],
    *,
    generation: int,
    used: str = "",
) -> int | None:
    """Write the object *name* if its generation is *generation*; 0 means that it doesn't exist.

    *used* is the object's custom time, for objects that are deleted by age. Returns the new
    generation, or None if another process wrote or deleted the object first.

    Cancelled: the object has been written completely or not at all. The service drops an
    unfinished upload after a week.
    """
    content = await Content.of(body, client.limits.piece_bytes)
    object_name, nonce = client.location.object_name(name), secrets.token_hex(8)
    is_large = content.size > client.limits.piece_bytes
    tries, max_position = itertools.count(), 0

    async def attempt() -> int:
        next(tries)
        stream = content.open()
        close = stream.close

        def record_and_close() -> None:
            nonlocal max_position
            if not stream.closed:
                max_position = max(max_position, stream.tell())
            close()

        stream.close = record_and_close  # type: ignore[method-assign] # the library calls it
        try:
            answer = await client.storage.upload(
                client.location.bucket,
                object_name,
                stream,
                content_type=CONTENT_TYPE,
                parameters={"ifGenerationMatch": str(generation), "fields": "generation"},
                metadata={
                    "metadata": {**metadata, NONCE: nonce},
                    "crc32c": content.crc32c,  # the service refuses content that differs
                    **({"Custom-Time": used} if used else {}),  # the service gets it as customTime
                },
                force_resumable_upload=is_large,
                timeout=client.timeout,
            )
        finally:
            stream.close()
        return int(answer["generation"])

    try:
        return await client.perform(
            verb, name, attempt, expected=(412,), progress=lambda: max_position, large=is_large
        )
    except HttpError:
        if next(tries) == 1:  # there was only one try, so another process was faster
            return None
    try:  # an earlier try may have written the object and lost the reply
        stored = await client.read_metadata(name)
    except NotFound:
        return None
    return stored.info.generation if stored.nonce == nonce else None


# --- download ---


async def get(client: BucketClient, name: str, limit: int | None, start: int = 0) -> Object:
    """Read an object from byte *start* on; return an empty body if it has more than *limit* bytes.

    The service knows only the checksum of the whole object, so a partial read isn't checked.
    """

    async def read_body() -> tuple[int, bytes | None]:
        """Return the generation and the body; (0, None) if the body is too long."""
        pieces, size = list[bytes](), 0
        async with _open_content(client, name, start) as answer:
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if limit is not None and size > limit:
                    return 0, None
        body = await in_thread(b"".join, pieces) if size > THREAD_BYTES else b"".join(pieces)
        return _generation(answer), body

    async def attempt() -> Object:
        # Send both requests at once, because the API has no single answer with metadata and
        # content. Let both finish, because cancelling a request closes its connection.
        metadata, content = await asyncio.gather(
            client.read_metadata_once(name), read_body(), return_exceptions=True
        )
        if isinstance(metadata, BaseException):
            raise metadata
        if isinstance(content, BaseException):
            raise content
        generation, body = content
        info = metadata.info
        if generation not in (0, info.generation):
            raise _replaced_error(client, name)
        if body and not start and metadata.crc32c not in ("", await checksum(body)):
            raise _damage_error(client, name)
        return Object(
            name=name, body=body or b"", metadata=info.metadata, generation=info.generation
        )

    return await client.perform(Verb.GET, name, attempt)


async def fetch(client: BucketClient, name: str, path: Path) -> None:
    """Download an object to a new file at *path*, and check it; a failure leaves no file."""
    max_position = 0

    async def attempt() -> None:
        nonlocal max_position
        metadata, crc32c, size = await client.read_metadata_once(name), 0, 0
        async with _new_file(path) as file, _open_content(client, name) as answer:
            if _generation(answer) not in (0, metadata.info.generation):
                raise _replaced_error(client, name)
            async for piece in answer.content.iter_any():
                with _translate_disk_errors(path):
                    await file.write(piece)
                crc32c, size = extend_crc32c(crc32c, piece), size + len(piece)
                max_position = max(max_position, size)
            if metadata.crc32c not in ("", encode_crc32c(crc32c)):
                raise _damage_error(client, name)

    await client.perform(Verb.GET, name, attempt, progress=lambda: max_position, large=True)


@contextlib.asynccontextmanager
async def _open_content(
    client: BucketClient, name: str, start: int = 0
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """Open the content of an object from byte *start* on."""
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    stream = await client.storage.download_stream(
        client.location.bucket,
        client.location.object_name(name),
        headers=headers,
        timeout=client.timeout,
    )
    async with stream as answer:
        try:
            yield answer
        finally:
            close_answer(answer)


def _generation(answer: aiohttp.ClientResponse) -> int:
    """Return the generation of the content; 0 if the server doesn't say."""
    return int(answer.headers.get("X-Goog-Generation", 0))


@contextlib.asynccontextmanager
async def _new_file(path: Path) -> AsyncGenerator[AsyncBufferedIOBase]:
    """Open a new file at *path* that only this user may read; an exception removes it."""
    with _translate_disk_errors(path):
        opened = _create_private(path)
        file = wrap(opened)
        try:
            yield file
            await file.close()
        except BaseException:
            with contextlib.suppress(OSError):  # on a full disk, flushing the buffer fails again
                opened.close()
            os.unlink(path)
            raise


def _create_private(path: Path) -> IO[bytes]:
    return open(path, "xb", opener=functools.partial(os.open, mode=0o600))


@contextlib.contextmanager
def _translate_disk_errors(path: Path) -> Generator[None]:
    """Translate disk errors into `BackendError`; `perform` would take them for network failures."""
    try:
        yield
    except BackendError:
        raise
    except OSError as exc:
        raise BackendError(
            f"cannot write {path}: {exc.strerror or exc}; free some space, or choose another place"
        ) from exc


def _damage_error(client: BucketClient, name: str) -> Damaged:
    return Damaged(
        f"checksum mismatch on download of {name!r} from {client.location.url}; check the network, "
        "then try again"
    )


def _replaced_error(client: BucketClient, name: str) -> Replaced:
    return Replaced(f"{name!r} in {client.location.url} changed while it was read; try again later")
