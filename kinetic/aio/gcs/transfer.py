"""Contents on their way into the bucket, whole or not at all.

Every write carries a precondition, so that it can be repeated, and a random
nonce in the object's metadata, so that afterwards its writer can tell which of
several equal attempts was its own: a reply that was lost is looked up.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import re
import secrets
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
from aiofiles.threadpool import wrap
from aiofiles.threadpool.binary import AsyncBufferedReader

from kinetic._tasks import all_or_none, in_thread, release
from kinetic.aio._net.http import HttpError
from kinetic.aio.gcs.http import (
    DAMAGED_TRIES,
    NONCE,
    Damaged,
    Described,
    Http,
    Limits,
    Verb,
    described,
)
from kinetic.aio.ports import Object
from kinetic.errors import BackendError, Unavailable, WireError

if TYPE_CHECKING:
    import aiohttp

BLOCK = 1024 * 1024
LIBRARY: Any = google_crc32c  # it ships half of its types


def of(content: bytes) -> str:
    """The checksum of *content*, as the service writes it."""
    return text(extended(0, content))


def extended(value: int, content: bytes) -> int:
    """The checksum of something with *value*, and of *content* after it."""
    return int(LIBRARY.extend(value, content))


def of_file(file: int, start: int, stop: int, value: int = 0) -> int:
    """*value* extended by the bytes of an open file; it may end before *stop*."""
    while start < stop and (block := os.pread(file, min(BLOCK, stop - start), start)):
        value = extended(value, block)
        start += len(block)
    return value


def text(value: int) -> str:
    """As the service writes it: four bytes, the highest first, in base64."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


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
        value = of(body) if len(body) <= small else await in_thread(of, body)
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
            return Content(len(held), of(held), held=held)
        value = 0
        for start in range(0, size, STRETCH):
            stop = min(size, start + STRETCH)
            value = await in_thread(of_file, file.fileno(), start, stop, value)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    return Content(size, text(value), file=file, path=path)


def _unreadable(path: str, exc: OSError) -> BackendError:
    return BackendError(f"cannot read {path} to upload it: {exc.strerror or exc}; check it")


RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
LONG = 8 * 1024 * 1024
"""Bytes; what is done with more of them is done in a worker thread."""

CHANGES = 10
"""How often an object that is replaced each time is read again."""

Sink = Callable[[bytes], Awaitable[None]]


async def get(http: Http, name: str, limit: int | None, start: int = 0) -> Object:
    """The object from *start* on, in memory; one of more than *limit* bytes without its content.

    The service has a checksum of the whole only: a part is not held against any.
    """
    damaged = 0
    for _ in range(CHANGES):
        # Together, for the API gives the metadata and the content by two requests. Both run to
        # their end, whatever the other says: a connection that is left alone is lost.
        about, body = await asyncio.gather(
            described(http, name), _body(http, name, limit, start), return_exceptions=True
        )
        if isinstance(about, Described) and isinstance(body, _TooLong):
            return Object(name=name, body=b"", metadata=about.metadata, generation=about.generation)
        for failure in (about, body):
            if isinstance(failure, HttpError):
                raise http.explained(failure, Verb.GET, name) from None
            if isinstance(failure, BaseException):
                raise failure
        assert isinstance(about, Described) and isinstance(body, _Body)
        if body.generation not in (0, about.generation):
            continue  # it was replaced in between
        if start or about.crc32c in ("", await _crc32c(body.content)):
            return Object(
                name=name, body=body.content, metadata=about.metadata, generation=about.generation
            )
        damaged += 1
        if damaged == DAMAGED_TRIES:
            raise _damaged(http, name)
    raise Unavailable(
        f"{name!r} in {http.place.url} changes faster than it can be read; try again later",
        retryable=True,
    )


async def fetch(http: Http, name: str, path: Path) -> None:
    """The content in a new file at *path*, which appears when it is complete and right.

    Cancelled: nothing is left.
    """
    failure: Exception | None = None
    for _ in range(DAMAGED_TRIES):
        try:
            about = await described(http, name)
        except HttpError as refusal:
            raise http.explained(refusal, Verb.GET, name) from None
        try:
            await _fetched(http, name, about, path)
        except HttpError as refusal:
            if refusal.status != 404:
                raise http.explained(refusal, Verb.GET, name) from None
            failure = http.explained(refusal, Verb.GET, name)  # replaced in between, or deleted
        except Damaged as exc:
            failure = exc
        except OSError as exc:
            if isinstance(exc, BackendError):
                raise
            raise _unwritable(path, exc) from exc
        else:
            return
    assert failure is not None
    raise failure


async def _fetched(http: Http, name: str, about: Described, path: Path) -> None:
    file, temporary = tempfile.mkstemp(prefix=".kinetic-", dir=path.parent)
    try:
        try:
            os.ftruncate(file, about.size)
            await _filled(http, name, about, temporary, path)
            await _checked(http, name, about, file)
        finally:
            os.close(file)
        _publish(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _publish(temporary: str, path: Path) -> None:
    """Give the file its name, unless somebody else has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.replace(temporary, path)


async def _filled(http: Http, name: str, about: Described, temporary: str, path: Path) -> None:
    part = http.limits.part_bytes
    parts = iter(range(0, about.size, part))

    async def stream() -> None:
        file = _writer(temporary)

        async def sink(content: bytes) -> None:
            try:
                await file.write(content)
            except OSError as exc:  # or it would pass for a failure of the network
                raise _unwritable(path, exc) from exc

        try:
            for start in parts:
                stop = min(about.size, start + part)
                await file.seek(start)
                await _Stream(http, name, sink, start=start, stop=stop, about=about).run()
            await file.flush()
        finally:  # after what is just being written: the two have a lock
            await release(file.close(), what=f"closing {temporary}")

    streams = min(http.limits.parts, -(-about.size // part))
    await all_or_none(*(stream() for _ in range(streams)))


def _writer(path: str) -> AsyncBufferedReader:
    """Opened here and now: a file must not be lost in a thread whose caller is cancelled."""
    file: AsyncBufferedReader = wrap(open(path, "r+b"))  # noqa: SIM115  # the caller closes it
    return file


async def _checked(http: Http, name: str, about: Described, file: int) -> None:
    """From the file, not from the stream: what is checked is what will be read."""
    value = 0
    for start in range(0, about.size, STRETCH):
        stop = min(about.size, start + STRETCH)
        value = await in_thread(of_file, file, start, stop, value)
    if about.crc32c and text(value) != about.crc32c:
        raise _damaged(http, name)


@dataclass(frozen=True, slots=True)
class _Body:
    content: bytes
    generation: int


class _TooLong(Exception):
    """More comes than there may be."""


async def _body(http: Http, name: str, limit: int | None, start: int) -> _Body:
    pieces: list[bytes] = []
    left: float = math.inf if limit is None else limit

    async def sink(content: bytes) -> None:
        nonlocal left
        left -= len(content)
        if left < 0:
            raise _TooLong
        pieces.append(content)

    stream = _Stream(http, name, sink, start=start)
    await stream.run()
    if sum(map(len, pieces)) > LONG:  # joining lets go of the interpreter, and may take long
        return _Body(await in_thread(b"".join, pieces), stream.generation)
    return _Body(b"".join(pieces), stream.generation)


async def _crc32c(content: bytes) -> str:
    return of(content) if len(content) <= LONG else await in_thread(of, content)


class _Stream:
    """A content, or bytes *start* to *stop* of it, into a sink; cut, it goes on where it was."""

    def __init__(
        self,
        http: Http,
        name: str,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        about: Described | None = None,
    ) -> None:
        self.generation = about.generation if about is not None else 0
        self._http = http
        self._name = name
        self._url = http.object_url(http.place.object_name(name))
        self._sink = sink
        self._offset = start
        self._stop = stop

    async def run(self) -> None:
        """Read it to its end.

        Raises:
            HttpError: There is no such object, or no such generation any more.
        """
        in_parts = self._stop is not None
        await self._http.do(
            Verb.GET, self._name, self._once, progress=lambda: self._offset, transfer=in_parts
        )

    async def _once(self) -> None:
        if self._stop is not None and self._offset >= self._stop:
            return
        params, headers = {"alt": "media"}, dict[str, str]()
        if self.generation:
            params["generation"] = str(self.generation)
        if self._offset or self._stop is not None:
            last = "" if self._stop is None else str(self._stop - 1)
            headers["Range"] = f"bytes={self._offset}-{last}"
        async with self._http.response("GET", self._url, params=params, headers=headers) as answer:
            self.generation = self.generation or int(answer.headers.get("X-Goog-Generation", 0))
            begins = RANGE.match(answer.headers.get("Content-Range", "bytes 0-0/*"))
            if begins is None or int(begins[1]) != self._offset:
                raise self._cut("another range was sent than was asked for")
            if self._stop is None and answer.content_length is not None:
                self._stop = self._offset + answer.content_length
            await self._read(answer)
        if self._stop is not None and self._offset < self._stop:
            raise self._cut("it ended early")

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        waiting, size = list[bytes](), 0
        try:
            async for chunk in answer.content.iter_any():
                waiting.append(chunk)
                size += len(chunk)
                if size >= self._http.limits.piece_bytes:
                    content, waiting, size = b"".join(waiting), [], 0
                    await self._take(content)
        except Exception:
            await self._take(b"".join(waiting))  # so much less is to be asked for again
            raise
        await self._take(b"".join(waiting))

    async def _take(self, content: bytes) -> None:
        if content:
            await self._sink(content)
            self._offset += len(content)

    def _cut(self, how: str) -> Unavailable:
        return Unavailable(
            f"the content of {self._name!r} in {self._http.place.url} did not come whole: {how}; "
            "check the network",
            retryable=True,
        )


def _unwritable(path: Path, exc: OSError) -> BackendError:
    return BackendError(
        f"cannot write {path}: {exc.strerror or exc}; free some space, or choose another place"
    )


def _damaged(http: Http, name: str) -> Damaged:
    return Damaged(
        f"{name!r} arrived from {http.place.url} as something else than is kept there; check the "
        "network, then try again"
    )


FIELDS = "generation,crc32c"
TYPE = "application/octet-stream"
DONE = re.compile(r"bytes=0-(\d+)")
RELEASE_S = 10.0
LIBRARY_KEYS = {"customTime": "Custom-Time"}
"""The client library makes a field's name of what would be that of a header."""


async def write(
    http: Http,
    verb: Verb,
    name: str,
    content: Content,
    metadata: Mapping[str, str],
    *,
    generation: int,
    used: str = "",
) -> int | None:
    """Write *name* over *generation*, 0 for none; its new one, or None if it is another by now.

    *used* is the time of its last use, for what goes by age.

    Cancelled: the object is there whole or not at all, and no upload stays open.
    """
    small = content.size <= http.limits.piece_bytes and content.file is None
    kind = _Whole if small else _Resumable
    upload = kind(http, verb, name, content, metadata, generation, used)
    try:
        return await upload.run()
    except HttpError as refusal:
        if refusal.status != 412:
            raise http.explained(refusal, verb, name) from None
        return await _resolved(http, name, upload.nonce) if upload.tries > 1 else None


async def _resolved(http: Http, name: str, nonce: str) -> int | None:
    """The generation there is if the write with *nonce* made it."""
    try:
        there = await described(http, name)
    except HttpError as refusal:
        if refusal.status == 404:
            return None
        raise http.explained(refusal, Verb.GET, name) from None
    return there.generation if there.nonce == nonce else None


class _Whole:
    """A content of one piece: metadata, content and checksum in one request."""

    def __init__(
        self,
        http: Http,
        verb: Verb,
        name: str,
        content: Content,
        metadata: Mapping[str, str],
        generation: int,
        used: str,
    ) -> None:
        self.nonce = secrets.token_hex(8)
        self.tries = 0
        self._http = http
        self._verb = verb
        self._name = name
        self._content = content
        self._object = http.place.object_name(name)
        self._resource: dict[str, Any] = {
            "metadata": {**metadata, NONCE: self.nonce},
            "crc32c": content.crc32c,
            **({"customTime": used} if used else {}),
        }
        self._parameters = {"ifGenerationMatch": str(generation), "fields": FIELDS}

    async def run(self) -> int:
        """Write it; the new generation."""
        return await self._http.do(self._verb, self._name, self._once)

    async def _once(self) -> int:
        self.tries += 1
        limits = self._http.limits
        # aiohttp sees silence only while it waits for an answer, not while it sends.
        async with asyncio.timeout(limits.connect_s + 2 * limits.idle_s):
            answer = await self._http.storage.upload(
                self._http.place.bucket,
                self._object,
                self._content.held,
                content_type=TYPE,
                parameters=dict(self._parameters),
                metadata={LIBRARY_KEYS.get(key, key): v for key, v in self._resource.items()},
                force_resumable_upload=False,
                timeout=self._http.timeout,
            )
        return await self._accepted(answer)

    async def _accepted(self, answer: Mapping[str, Any]) -> int:
        """The generation of what was stored; a new object that is not what was sent is removed."""
        generation = int(answer["generation"])
        if answer.get("crc32c", self._content.crc32c) == self._content.crc32c:
            return generation
        words = (
            f"{self._name!r} arrived in {self._http.place.url} as something else than was sent; "
            "check the network, then try again"
        )
        if self._verb is not Verb.CREATE:
            raise WireError(words)
        await self._http.storage.delete(
            self._http.place.bucket,
            self._object,
            params={"ifGenerationMatch": str(generation)},
            timeout=self._http.timeout,
        )
        raise Damaged(words)


class _Resumable(_Whole):
    """A content of any size, in a stream that goes on where it was cut."""

    _session = ""
    _offset = 0
    _doubtful = False

    async def run(self) -> int:
        """Write it; the new generation."""
        try:
            return await self._http.do(
                self._verb, self._name, self._once, progress=lambda: self._offset, transfer=True
            )
        except BaseException:
            if self._session:
                what = f"cancelling the upload of {self._name}"
                await release(self._cancel(), what=what, grace=RELEASE_S)
            raise

    async def _once(self) -> int:
        self.tries += 1
        try:
            if not self._session:
                await self._open()
            answer = await self._ask() if self._doubtful else None
            while answer is None:
                self._doubtful, before = True, self._offset
                answer = await self._send()
                if answer is None and self._offset <= before:
                    raise Unavailable(
                        f"{self._http.place.url} takes nothing of {self._name!r}; try again later",
                        retryable=True,
                    )
        except HttpError as refusal:
            lost = refusal.status in (404, 410) and self._session != ""
            if lost or refusal.status in (400, 412):
                self._session = ""  # it has ended, in one way or another
            if lost:
                raise Unavailable(
                    f"the upload of {self._name!r} has to start again", retryable=True
                ) from refusal
            raise
        self._session = ""
        return await self._accepted(answer)

    async def _open(self) -> None:
        """Begin a session; cancelled meanwhile, its name is waited for: it has to be ended."""
        self._doubtful, self._offset = False, 0
        beginning = asyncio.create_task(self._begin(), name=f"kinetic upload of {self._name}")

        async def begun() -> None:
            self._session = await beginning

        try:
            await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await release(begun(), what=f"beginning the upload of {self._name}", grace=RELEASE_S)
            raise
        await begun()

    async def _begin(self) -> str:
        url = f"{self._http.endpoint}/upload/storage/v1/b/{self._http.place.bucket}/o"
        async with (
            asyncio.timeout(self._http.limits.connect_s + self._http.limits.idle_s),
            self._http.response(
                "POST",
                url,
                params={"uploadType": "resumable", **self._parameters},
                headers={
                    "Content-Type": "application/json; charset=UTF-8",
                    "X-Upload-Content-Type": TYPE,
                    "X-Upload-Content-Length": str(self._content.size),
                },
                data=json.dumps(
                    {"name": self._object, "contentType": TYPE, **self._resource}
                ).encode(),
            ) as answer,
        ):
            return answer.headers["Location"]

    async def _ask(self) -> dict[str, Any] | None:
        """How far it has come: the object if it is there, else `_offset` is right again."""
        async with asyncio.timeout(self._http.limits.connect_s + self._http.limits.idle_s):
            return await self._put(f"bytes */{self._content.size}", b"")

    async def _send(self) -> dict[str, Any] | None:
        """Stream what is missing; the object, or None when the server took only some of it."""
        size = self._content.size
        if self._offset >= size:
            return await self._ask()
        async with asyncio.timeout(self._http.limits.connect_s) as idle:
            pieces = _Pieces(self._content, self._offset, self._http.limits, idle)
            try:
                return await self._put(f"bytes {self._offset}-{size - 1}/{size}", pieces)
            except Exception:
                if pieces.failure is not None:
                    raise pieces.failure from None
                raise

    async def _put(self, content_range: str, data: bytes | _Pieces) -> dict[str, Any] | None:
        missing = self._content.size - self._offset if data else 0
        async with self._http.response(
            "PUT",
            self._session,
            headers={"Content-Range": content_range, "Content-Length": str(missing)},
            data=data,
            accepted=(308,),
        ) as answer:
            if answer.status == 308:
                done = DONE.fullmatch(answer.headers.get("Range", ""))
                self._offset = int(done[1]) + 1 if done else 0
                return None
            decoded: dict[str, Any] = await answer.json(content_type=None)
            return decoded

    async def _cancel(self) -> None:
        async with self._http.response(
            "DELETE", self._session, headers={"Content-Length": "0"}, accepted=(404, 410, 499)
        ):
            pass


class _Pieces:
    """A content from *offset* on; *idle* runs out when the next piece is not taken in time.

    No generator: one that was left half-way would have to be closed by somebody.
    """

    def __init__(
        self, content: Content, offset: int, limits: Limits, idle: asyncio.Timeout
    ) -> None:
        self.failure: Exception | None = None
        """Why the content cannot be read; aiohttp calls it a failure of the connection."""
        self._content = content
        self._offset = offset
        self._begun = False
        self._limits = limits
        self._idle = idle

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        start, stop = self._offset, self._offset + self._limits.piece_bytes
        stop = min(self._content.size, stop)
        try:
            piece = b""
            if start < stop:
                piece = await self._content.read(start, stop, goes_on=self._begun)
        except Exception as exc:
            self.failure = exc
            raise
        if not self._idle.expired():
            self._idle.reschedule(asyncio.get_running_loop().time() + self._limits.idle_s)
        if not piece:
            raise StopAsyncIteration
        self._offset, self._begun = stop, True
        return piece
