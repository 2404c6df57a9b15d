"""Contents on their way into the bucket, whole or not at all.

Every write carries a precondition, so that it can be repeated, and a random
nonce in the object's metadata, so that afterwards its writer can tell which of
several equal attempts was its own: a reply that was lost is looked up.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from kinetic.aio._release import release
from kinetic.aio.stores._gcs_content import Content
from kinetic.aio.stores._gcs_errors import Damaged, Refusal, Verb
from kinetic.aio.stores._gcs_http import Http, Limits
from kinetic.aio.stores._gcs_object import NONCE, described
from kinetic.errors import Unavailable, WireError

__all__ = ["write"]

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
    except Refusal as refusal:
        if refusal.status != 412:
            raise http.explained(refusal, verb, name) from None
        return await _resolved(http, name, upload.nonce) if upload.tries > 1 else None


async def _resolved(http: Http, name: str, nonce: str) -> int | None:
    """The generation there is if the write with *nonce* made it."""
    try:
        there = await described(http, name)
    except Refusal as refusal:
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
        except Refusal as refusal:
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
