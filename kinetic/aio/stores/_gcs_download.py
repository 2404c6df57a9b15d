"""Contents on their way out of the bucket: checked, resumed where they were cut, in flat memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiofiles.threadpool import wrap
from aiofiles.threadpool.binary import AsyncBufferedReader

from kinetic.aio._release import all_or_none, in_thread, release
from kinetic.aio.ports import Object
from kinetic.aio.stores import _gcs_checksum as checksum
from kinetic.aio.stores._gcs_content import STRETCH
from kinetic.aio.stores._gcs_errors import Damaged, Refusal, Verb
from kinetic.aio.stores._gcs_http import Http
from kinetic.aio.stores._gcs_object import Described, described
from kinetic.aio.stores._gcs_retry import DAMAGED_TRIES
from kinetic.errors import BackendError, Unavailable

if TYPE_CHECKING:
    import aiohttp

__all__ = ["fetch", "get"]

RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
LONG = 8 * 1024 * 1024
"""Bytes; what is done with more of them is done in a worker thread."""

CHANGES = 10
"""How often an object that is replaced each time is read again."""

Sink = Callable[[bytes], Awaitable[None]]


async def get(http: Http, name: str, limit: int | None) -> Object:
    """The whole object, in memory; one of more than *limit* bytes without its content."""
    damaged = 0
    for _ in range(CHANGES):
        # Together, for the API gives the metadata and the content by two requests. Both run to
        # their end, whatever the other says: a connection that is left alone is lost.
        about, body = await asyncio.gather(
            described(http, name), _body(http, name, limit), return_exceptions=True
        )
        if isinstance(about, Described) and isinstance(body, _TooLong):
            return Object(name=name, body=b"", metadata=about.metadata, generation=about.generation)
        for failure in (about, body):
            if isinstance(failure, Refusal):
                raise http.explained(failure, Verb.GET, name) from None
            if isinstance(failure, BaseException):
                raise failure
        assert isinstance(about, Described) and isinstance(body, _Body)
        if body.generation not in (0, about.generation):
            continue  # it was replaced in between
        if about.crc32c in ("", await _crc32c(body.content)):
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
        except Refusal as refusal:
            raise http.explained(refusal, Verb.GET, name) from None
        try:
            await _fetched(http, name, about, path)
        except Refusal as refusal:
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
        value = await in_thread(checksum.of_file, file, start, stop, value)
    if about.crc32c and checksum.text(value) != about.crc32c:
        raise _damaged(http, name)


@dataclass(frozen=True, slots=True)
class _Body:
    content: bytes
    generation: int


class _TooLong(Exception):
    """More comes than there may be."""


async def _body(http: Http, name: str, limit: int | None) -> _Body:
    pieces: list[bytes] = []
    left: float = math.inf if limit is None else limit

    async def sink(content: bytes) -> None:
        nonlocal left
        left -= len(content)
        if left < 0:
            raise _TooLong
        pieces.append(content)

    stream = _Stream(http, name, sink)
    await stream.run()
    if sum(map(len, pieces)) > LONG:  # joining lets go of the interpreter, and may take long
        return _Body(await in_thread(b"".join, pieces), stream.generation)
    return _Body(b"".join(pieces), stream.generation)


async def _crc32c(content: bytes) -> str:
    return checksum.of(content) if len(content) <= LONG else await in_thread(checksum.of, content)


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
            Refusal: There is no such object, or no such generation any more.
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
