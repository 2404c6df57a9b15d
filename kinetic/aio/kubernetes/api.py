"""Requests to the API server of one cluster: plain dicts out, plain dicts in, errors of ours."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from absl import logging

from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import Outage, RetryPolicy
from kinetic.aio.kubernetes.credentials import Access
from kinetic.aio.kubernetes.http import (
    RIGHTS,
    Connections,
    Request,
    explained,
    is_crowded,
    retry_request,
)
from kinetic.errors import Unavailable

if TYPE_CHECKING:
    import aiohttp

FIRST, MOST = 16, 256
SLOW_S = 5.0
"""Whoever has waited longer than this for a turn was held up by the limit: it is told."""
TELL_S = 60.0


class Turn:
    """One request under way; ``refused`` says that the server had too many."""

    __slots__ = ("age", "refused")

    def __init__(self, age: int) -> None:
        self.age = age
        self.refused = False


class AdaptiveLimit:
    """The limit of one server, on one event loop.

    Turns are given in the order they are asked for, but those who ask *again*
    go first: else their patience would end while they wait. *cluster* is the
    server's name for the log.
    """

    def __init__(self, cluster: str, *, first: int = FIRST, most: int = MOST) -> None:
        self._cluster = cluster
        self._most = most
        self._level = float(min(first, most))
        self._rushing = True
        self._age = 0
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._told: float | None = None

    @property
    def now(self) -> int:
        """How many requests may be under way at a time."""
        return int(self._level)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, *, again: bool = False) -> AsyncGenerator[Turn]:
        """Wait for one's turn, and have it while the block runs."""
        await self._wait(again)
        turn, full = Turn(self._age), self._busy >= self.now
        worked = False
        try:
            yield turn
            worked = True
        finally:
            self._busy -= 1
            if turn.refused:
                self._halve(turn)
            elif worked and full:
                self._grow()
            self._admit()

    async def _wait(self, again: bool) -> None:
        if self._busy < self.now and not self._waiting:
            self._busy += 1
            return
        loop = asyncio.get_running_loop()
        asked, mine = loop.time(), loop.create_future()
        if again:
            self._waiting.appendleft(mine)
        else:
            self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._busy -= 1  # it was our turn already: it is the next one's
                self._admit()
            elif mine in self._waiting:  # else it was passed over since
                self._waiting.remove(mine)
            raise
        self._tell(loop.time(), loop.time() - asked)

    def _admit(self) -> None:
        while self._waiting and self._busy < self.now:
            one = self._waiting.popleft()
            if not one.done():
                self._busy += 1
                one.set_result(None)

    def _grow(self) -> None:
        step = 1.0 if self._rushing else 1.0 / self._level
        self._level = min(float(self._most), self._level + step)

    def _halve(self, turn: Turn) -> None:
        """Once for all that were under way together: they say the same."""
        if turn.age == self._age:
            self._age += 1
            self._rushing = False
            self._level = max(1.0, self._level / 2)

    def _tell(self, now: float, waited: float) -> None:
        if waited < SLOW_S or (self._told is not None and now - self._told < TELL_S):
            return
        self._told = now
        why = "it refuses more" if not self._rushing else "this client sends no more"
        logging.info(
            "the API server of %s is the limit now: %d requests at a time (%s), %d wait",
            self._cluster,
            self.now,
            why,
            self.waiting,
        )


T = TypeVar("T")

ONCE = RetryPolicy(total_s=0.0)
"""For whoever asks again by himself."""

LONGEST_LINE = 64 * 1024**2
"""No event of a watch is nearly as long: an object has 1.5 MiB at most, twice that in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is asked at a time and how long is waited; seconds.

    ``idle_s`` is the silence after which a connection counts as dead. The
    server itself ends what takes longer than a minute.
    """

    requests: int = 256
    first_requests: int = 16
    connect_s: float = 10.0
    idle_s: float = 75.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rights: RetryPolicy = RIGHTS


class Api:
    """One cluster for one event loop; as many of them as there are clusters.

    Nothing is opened before the first request. What may pass (429, 5xx,
    connections that fail) is asked again, with growing and random pauses or
    those the server wishes: so whoever creates something chooses its name, and
    takes `AlreadyThere` for what a lost reply was about.

    Errors of every method: `AuthError` (the credentials, or a missing right and
    the Role that grants it), `NotFound`, `AlreadyThere`, `Conflict`, `Expired`,
    `Refused` (the server's own words), `Throttled` and `Unavailable`.
    """

    def __init__(self, access: Access, limits: Limits | None = None) -> None:
        self.server = access.server
        self.default_namespace = access.namespace
        self.cluster = access.name
        self._access = access
        self._limits = limits or Limits()
        self._level = AdaptiveLimit(
            access.name, first=self._limits.first_requests, most=self._limits.requests
        )
        self._outage = Outage(access.name)
        self._had: set[tuple[str, ...]] = set()
        self._http = Connections(
            access, connect_s=self._limits.connect_s, most=self._limits.requests
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        rights: RetryPolicy | None = None,
    ) -> dict[str, Any]:
        """Send one request, e.g. ``GET /apis/batch/v1/namespaces/x/jobs``, and decode the answer.

        *rights* says how long to wait for a right that there was; None: as `Limits` does.

        Cancelled: the request may or may not have reached the server.
        """
        ask = Request(method=method, path=path, query=query or {})
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        again = False

        async def once() -> dict[str, Any]:
            nonlocal again
            first, again = not again, True
            return await self._try(ask, data, content_type, again=not first)

        return await self._retry(once, ask, self._limits.retry, rights)

    async def lines(
        self, path: str, *, query: Mapping[str, str] | None = None, idle: float | None = None
    ) -> AsyncGenerator[bytes]:
        """The lines of a `stream`, without their newlines; the last needs none.

        Raises:
            Unavailable: The connection broke, or was silent for *idle*; or what comes
                is no line, however long one waits for its end.
        """
        rest: list[bytes] = []
        size = 0
        async with aclosing(self.stream(path, query=query, idle=idle)) as pieces:
            async for piece in pieces:
                first, *others = piece.split(b"\n")
                rest.append(first)
                size += len(first)
                for other in others:
                    yield b"".join(rest)
                    rest, size = [other], len(other)
                if size > LONGEST_LINE:
                    raise Unavailable(
                        f"cannot read {path} of {self.cluster}: it tells a line of more than "
                        f"{LONGEST_LINE >> 20} MiB; check whether a proxy stands before it",
                        retryable=True,
                    )
        if last := b"".join(rest):
            yield last

    async def stream(
        self, path: str, *, query: Mapping[str, str] | None = None, idle: float | None = None
    ) -> AsyncGenerator[bytes]:
        """The content of an answer in pieces, as they come, until the server ends it.

        There are as many connections as streams, beside those of requests. It is
        not repeated when it breaks: only the caller knows where to go on.

        Args:
            idle: The silence, in seconds, that counts as a dead connection;
                None for a server that may be silent for ever.

        Raises:
            Unavailable: The connection broke, or was silent for *idle*.
        """
        ask = Request(method="GET", path=path, query=query or {})

        async def begun() -> AsyncGenerator[bytes]:
            pieces = self._http.stream(ask, idle)
            await anext(pieces)
            self._had.add(_key(ask))
            return pieces

        async with aclosing(await self._retry(begun, ask, ONCE)) as pieces:
            async for piece in pieces:
                yield piece

    async def tunnel(
        self, path: str, protocol: str, *, query: Mapping[str, str] | None = None
    ) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket to *path* that speaks *protocol*; whoever asks for it closes it."""
        ask = Request(method="GET", path=path, query=query or {})

        async def begun() -> aiohttp.ClientWebSocketResponse:
            return await self._http.upgrade(ask, protocol)

        return await self._retry(begun, ask, ONCE)

    async def aclose(self) -> None:
        """Close all connections; what is under way fails."""
        await self._http.aclose()
        await self._access.passes.aclose()

    async def _retry(
        self,
        work: Callable[[], Awaitable[T]],
        ask: Request,
        policy: RetryPolicy,
        rights: RetryPolicy | None = None,
    ) -> T:
        return await retry_request(
            work,
            lambda refusal: explained(refusal, ask, self.cluster),
            policy,
            self._outage,
            had_right=lambda: _key(ask) in self._had,
            rights=rights or self._limits.rights,
        )

    async def _try(
        self, ask: Request, data: bytes | None, content_type: str, *, again: bool
    ) -> dict[str, Any]:
        async with self._level.turn(again=again) as turn:
            try:
                raw = await self._http.send(ask, data, content_type, self._limits.idle_s)
            except HttpError as refusal:
                turn.refused = is_crowded(refusal)
                raise
            except Unavailable as exc:
                turn.refused = isinstance(exc.__cause__, TimeoutError)
                raise
        self._had.add(_key(ask))
        return _decoded(raw, ask, self.cluster)


def _key(ask: Request) -> tuple[str, ...]:
    """The right that a request takes, whatever the name of its object."""
    right = ask.right
    return right.verb, right.group, right.resource, right.namespace


def _decoded(raw: bytes, ask: Request, cluster: str) -> dict[str, Any]:
    try:
        decoded: Any = json.loads(raw) if raw else {}
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        said = HttpError(200, raw[:4096].decode(errors="replace"))
        raise explained(said, ask, cluster)
    return cast("dict[str, Any]", decoded)
