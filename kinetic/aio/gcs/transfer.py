"""Upload and download objects atomically.

Every write names the generation that the object must have, so repeating the write does no harm. A
write also stores a random nonce in the metadata. If the reply is lost, the nonce shows whether this
writer or another one wrote the object.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import google_crc32c
from aiofiles.threadpool import wrap
from anyio import to_thread

from kinetic._tasks import in_thread
from kinetic.aio._net.http import HttpError, close_answer
from kinetic.aio.gcs.http import (
    ENDED,
    INCOMPLETE,
    NONCE,
    PRECONDITION_FAILED,
    BucketClient,
    ObjectMetadata,
    Verb,
)
from kinetic.aio.ports import Object
from kinetic.errors import BackendError, NotFound, Refused, WireError

if TYPE_CHECKING:
    import aiohttp
    from aiofiles.threadpool.binary import AsyncBufferedIOBase
    from aiohttp.abc import AbstractStreamWriter

CRC32C: Any = google_crc32c  # the library declares only some of its types

CONTENT_TYPE = "application/octet-stream"

BLOCK_BYTES = 4 * 1024 * 1024
"""How many bytes of a file to read and check at a time."""

SENT_BYTES = 256 * 1024
"""How many bytes of a large upload to give to the connection at a time."""

THREAD_BYTES = 8 * 1024 * 1024
"""kinetic joins and checks content in memory that has more bytes than this in a thread."""


def extend_crc32c(value: int, content: bytes) -> int:
    """Return the CRC32C of earlier content, whose checksum is *value*, followed by *content*."""
    return int(CRC32C.extend(value, content))


def encode_crc32c(value: int) -> str:
    """Return a checksum as the service writes it: four bytes, big-endian, in base64."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


async def checksum(content: bytes) -> str:
    """Return the checksum of *content* as the service writes it."""
    if len(content) > THREAD_BYTES:  # a short one takes less time than a thread
        return encode_crc32c(await in_thread(extend_crc32c, 0, content))
    return encode_crc32c(extend_crc32c(0, content))


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
            f"the size of {self.path} changed during the upload; try again, and don't change the "
            "file meanwhile"
        )


def _read_error(path: Path, exc: OSError) -> BackendError:
    return BackendError(f"cannot read {path} to upload it: {exc.strerror or exc}; check the file")


async def write(
    client: BucketClient,
    verb: Verb,
    name: str,
    body: bytes | Path,
    metadata: Mapping[str, str],
    *,
    generation: int,
    used: str = "",
    check: Callable[[], object] | None = None,
) -> int | None:
    """Write the object *name* if its generation is *generation*, which is 0 for a missing object.

    *used* is the object's custom time, for objects that are deleted by age. If *check* raises after
    the content was read, nothing is sent: the service refuses any other content. Returns the new
    generation, or None if another process wrote or deleted the object first.

    Raises:
        Refused: Cloud Storage refuses the write for another reason than the generation.

    Cancelled: the object has been written completely or not at all. The service drops an
    unfinished upload after a week.
    """
    content = await Content.of(body, client.limits.piece_bytes)
    if check is not None:
        await to_thread.run_sync(check, abandon_on_cancel=True)
    place, nonce = client.place(name), secrets.token_hex(8)
    params = {"ifGenerationMatch": str(generation), "fields": "generation"}
    resource: dict[str, Any] = {
        "metadata": {**metadata, NONCE: nonce},
        "crc32c": content.crc32c,  # the service refuses content that differs
    }
    large = None
    if content.size > client.limits.piece_bytes:
        resource |= {"name": place[1], "contentType": CONTENT_TYPE}
        large = _LargeUpload(client, content, params, resource)
    if used:
        # The library makes a field's name of a header's name.
        resource["customTime" if large is not None else "Custom-Time"] = used

    async def upload_once() -> int:
        if large is not None:
            answer = await large.send()
        else:
            answer = await client.storage.upload(
                *place,
                content.body,
                content_type=CONTENT_TYPE,
                parameters=dict(params),
                metadata=dict(resource),
                force_resumable_upload=False,
                timeout=client.timeout,
            )
        return int(answer["generation"])

    refusal = HttpError(PRECONDITION_FAILED)
    for _ in range(2):  # the object may change between the refusal and this request
        try:
            return await client.perform(
                verb,
                name,
                upload_once,
                expected=(PRECONDITION_FAILED,),
                progress=(lambda: (large.received, large.sent)) if large is not None else None,
            )
        except HttpError as exc:
            refusal = exc
        try:
            stored = await client.read_metadata(name)
        except NotFound:
            stored = None
        if stored is not None and stored.nonce == nonce:  # an earlier try lost its reply
            return stored.info.generation
        if (stored.info.generation if stored is not None else 0) != generation:
            return None
    raise Refused(
        f"cannot {verb} {name!r} in {client.location.url}: Cloud Storage answered "
        f"{refusal.status} ({refusal.message}), although nothing changed the object; ask the "
        "owner of the bucket what it requires",
        answer=refusal.body,
    )


class _LargeUpload:
    """A resumable upload. Each try continues after the bytes that the service has received.

    ``sent`` and ``received`` are the most bytes that a try has sent, and that the service has had.
    """

    def __init__(
        self,
        client: BucketClient,
        content: Content,
        params: Mapping[str, str],
        resource: Mapping[str, Any],
    ) -> None:
        self.sent = self.received = 0
        self._client = client
        self._content = content
        self._params = {**params, "uploadType": "resumable"}
        self._resource = resource
        self._session = ""  # the URL of the upload, once it has begun

    async def send(self) -> Mapping[str, Any]:
        """Make one try; return the object's resource."""
        size, session, start = self._content.size, self._session, 0
        try:
            if not session:
                headers = {"X-Upload-Content-Length": str(size)}
                bucket = self._client.location.bucket
                answer = await self._client.send(
                    "POST",
                    f"/upload/storage/v1/b/{bucket}/o",
                    headers,
                    params=self._params,
                    json=self._resource,
                )
                await answer.read()
                session = self._session = answer.headers["Location"]
            else:
                headers = {"Content-Range": f"bytes */{size}"}
                try:
                    answer = await self._client.send("PUT", session, headers)
                    return await _json(answer)  # only the reply to the last bytes was lost
                except HttpError as exc:
                    if exc.status != INCOMPLETE:
                        raise
                    last = exc.headers.get("Range", "").rpartition("-")[2]  # of bytes=0-LAST
                    start = int(last) + 1 if last else 0
            self.received = max(self.received, start)
            headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
            with self._content.open() as stream:
                rest = self._rest(stream, start)
                return await _json(await self._client.send("PUT", session, headers, data=rest))
        except HttpError as exc:
            if exc.status in (400, 404, ENDED, PRECONDITION_FAILED):
                self._session = ""
            if session and exc.status == 404:  # some servers answer so instead of ENDED
                raise HttpError(ENDED, exc.text) from exc
            raise

    def _rest(self, stream: IO[bytes], start: int) -> aiohttp.Payload:
        """Return the content in *stream* from byte *start* on."""
        import aiohttp

        upload, size = self, self._content.size - start

        class Rest(aiohttp.Payload):
            _size = size

            def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
                raise NotImplementedError  # only aiohttp's middlewares call it

            async def write(self, writer: AbstractStreamWriter) -> None:
                # aiohttp sends its own payloads again from their start if a connection breaks.
                if self._consumed:
                    raise OSError("the connection broke")
                self._consumed = True
                position = stream.seek(start)
                while block := await to_thread.run_sync(stream.read, SENT_BYTES):
                    await writer.write(block)
                    position += len(block)
                    upload.sent = max(upload.sent, position)

        return Rest(stream, content_type=CONTENT_TYPE)


async def _json(answer: aiohttp.ClientResponse) -> Mapping[str, Any]:
    resource: dict[str, Any] = await answer.json(content_type=None)
    return resource


# --- download ---


async def get(client: BucketClient, name: str, limit: int | None, start: int = 0) -> Object:
    """Read an object from byte *start* on; return an empty body if it has more than *limit* bytes.

    A partial read isn't checked.
    """

    async def read_body(expected: int) -> bytes:
        pieces, size = list[bytes](), 0
        async with _open_content(client, name, start) as answer:
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if size > expected:  # another process has replaced the object
                    break
        return await in_thread(b"".join, pieces) if size > THREAD_BYTES else b"".join(pieces)

    async def get_once() -> Object:
        # The API has no answer with metadata and content. Most outcomes have only metadata.
        metadata = await client.read_metadata_once(name)
        info, body = metadata.info, b""
        size = info.size - start
        if size > 0 and (limit is None or size <= limit):
            body = await read_body(size)
            if not start:  # the service knows only the checksum of the whole object
                _check(client, name, metadata, await checksum(body))
        return Object(name, body, info.metadata, info.generation)

    return await client.perform("get", name, get_once)


async def fetch(client: BucketClient, name: str, path: Path) -> None:
    """Download an object to a new file at *path*. Check its checksum; a failure leaves no file.

    Each try continues after the bytes of the one before, unless the object has changed.
    """
    generation, written, crc32c, most_written = 0, 0, 0, 0

    async with _new_file(path) as file:

        async def download_once() -> None:
            nonlocal generation, written, crc32c, most_written
            metadata = await client.read_metadata_once(name)
            if metadata.info.generation != generation:
                generation, written, crc32c = metadata.info.generation, 0, 0
            with _translate_disk_errors(path):
                await file.seek(written)
                await file.truncate()
            if written < metadata.info.size:
                async with _open_content(client, name, written) as answer:
                    async for piece in answer.content.iter_any():
                        with _translate_disk_errors(path):
                            await file.write(piece)
                        crc32c, written = extend_crc32c(crc32c, piece), written + len(piece)
                        most_written = max(most_written, written)
            generation = 0  # if the checksum differs, start again
            _check(client, name, metadata, encode_crc32c(crc32c))

        await client.perform("get", name, download_once, progress=lambda: most_written)


@contextlib.asynccontextmanager
async def _open_content(
    client: BucketClient, name: str, start: int = 0
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """Open the content of an object from byte *start* on."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    stream = await client.storage.download_stream(
        *client.place(name), headers=headers, timeout=client.timeout
    )
    async with stream as answer:
        try:
            yield answer
        finally:
            close_answer(answer)


@contextlib.asynccontextmanager
async def _new_file(path: Path) -> AsyncGenerator[AsyncBufferedIOBase]:
    """Open a new file at *path* that only this user may read; remove it after an exception."""
    with _translate_disk_errors(path):
        opened = _create_private(path)
    file = wrap(opened)
    try:
        yield file
        with _translate_disk_errors(path):
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
    except OSError as exc:
        raise BackendError(
            f"cannot write {path}: {exc.strerror or exc}; free some space, or choose another folder"
        ) from exc


def _check(client: BucketClient, name: str, metadata: ObjectMetadata, crc32c: str) -> None:
    """Check that the downloaded content, whose checksum is *crc32c*, belongs to *metadata*.

    The checksums also differ if another process replaced the object between the two requests.

    Raises:
        WireError: The checksums differ.
    """
    if metadata.crc32c not in ("", crc32c):
        raise WireError(
            f"checksum mismatch on download of {name!r} from {client.location.url}; check the "
            "network, then try again"
        )
