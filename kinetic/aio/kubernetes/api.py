"""Requests to the API server of one cluster: dicts out, dicts in, kinetic's own errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import Outage, RetryPolicy, is_retryable, retry
from kinetic.aio.kubernetes.credentials import Access
from kinetic.aio.kubernetes.http import Connections, Forbidden, Request, explained
from kinetic.errors import Unavailable

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

LONGEST_LINE = 64 * 1024**2
"""The longest line of a watch, in bytes. An object has at most 1.5 MiB, twice that in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many requests one client makes at a time, and how long it waits; in seconds.

    ``idle_s`` is the silence after which a connection counts as dead; the server
    itself ends a request after a minute. ``rights_s`` is how long the client
    retries when a right is missing that it had before: a server that has just
    restarted grants nobody anything for a moment.
    """

    requests: int = 64
    connect_s: float = 10.0
    idle_s: float = 75.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rights_s: float = 15.0


class Api:
    """Requests to one cluster, on one event loop.

    It connects on the first request. It retries what may pass (429, 5xx, failed
    connections) after growing, random pauses, or the pause that the server asks
    for. A retried request may have succeeded before, so whoever creates an object
    chooses its name and takes `AlreadyThere` for success.

    Every method raises `AuthError` (refused credentials, or a missing right with the
    Role that grants it), `NotFound`, `AlreadyThere`, `Conflict`, `Expired`,
    `Refused` (in the server's own words), `Throttled`, and `Unavailable`.
    """

    def __init__(self, access: Access, limits: Limits | None = None) -> None:
        self.server = access.server
        self.default_namespace = access.namespace
        self.cluster = access.name
        self._access = access
        self._limits = limits or Limits()
        # A request keeps its turn while it waits to retry: a server that takes fewer gets fewer.
        self._turns = asyncio.Semaphore(self._limits.requests)
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
        rights_s: float | None = None,
    ) -> dict[str, Any]:
        """Send one request, such as ``GET /apis/batch/v1/namespaces/x/jobs``; return its JSON.

        *rights_s* replaces the one of `Limits`.

        Cancelled: the request may or may not have reached the server.
        """
        ask = Request(method=method, path=path, query=query or {})
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()

        async def answered() -> dict[str, Any]:
            raw = await self._http.send(ask, data, content_type, self._limits.idle_s)
            return _decoded(raw, ask, self.cluster)

        async with self._turns:
            return await self._retry(answered, ask, self._limits.retry, rights_s)

    async def lines(
        self, path: str, *, query: Mapping[str, str] | None = None, idle: float | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield the lines of a `stream`, without their newlines; the last one needs none.

        Raises:
            Unavailable: The connection broke, was silent for *idle*, or sends an endless line.
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
                        f"cannot read {path} of {self.cluster}: a line is longer than "
                        f"{LONGEST_LINE >> 20} MiB; check whether a proxy answers for the server",
                        retryable=True,
                    )
        if last := b"".join(rest):
            yield last

    async def stream(
        self, path: str, *, query: Mapping[str, str] | None = None, idle: float | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield the body of an answer in pieces, as they come, until the server ends it.

        Each stream has its own connection, beside those of requests. A stream that
        breaks isn't repeated: only the caller knows where to go on.

        Args:
            idle: The silence, in seconds, after which the connection counts as dead;
                None for a server that may be silent forever.

        Raises:
            Unavailable: The connection broke, or was silent for *idle*.
        """
        ask = Request(method="GET", path=path, query=query or {})

        async def begun() -> AsyncGenerator[bytes]:
            pieces = self._http.stream(ask, idle)
            await anext(pieces)
            return pieces

        async with aclosing(await self._retry(begun, ask)) as pieces:
            async for piece in pieces:
                yield piece

    async def tunnel(
        self, path: str, protocol: str, *, query: Mapping[str, str] | None = None
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket to *path* that speaks *protocol*; the caller closes it."""
        ask = Request(method="GET", path=path, query=query or {})
        return await self._retry(lambda: self._http.upgrade(ask, protocol), ask)

    async def aclose(self) -> None:
        """Close all connections; requests under way fail."""
        await self._http.aclose()
        await self._access.passes.aclose()

    async def _retry(
        self,
        work: Callable[[], Awaitable[T]],
        ask: Request,
        policy: RetryPolicy | None = None,
        rights_s: float | None = None,
    ) -> T:
        """Await ``work()``, and again by *policy*; without one, only for a right that it had."""
        patience_s = self._limits.rights_s if rights_s is None else rights_s
        clock, missing_since = asyncio.get_running_loop().time, None

        async def explained_work() -> T:
            try:
                result = await work()
            except HttpError as refusal:
                raise explained(refusal, ask, self.cluster) from None
            self._had.add(_key(ask))
            return result

        def may_pass(failure: Exception) -> bool:
            nonlocal missing_since
            if isinstance(failure, Forbidden) and _key(ask) in self._had:
                missing_since = missing_since or clock()
                return clock() < missing_since + patience_s
            return policy is not None and is_retryable(failure)

        return await retry(
            explained_work, policy or self._limits.retry, self._outage, is_passing=may_pass
        )


def _key(ask: Request) -> tuple[str, ...]:
    """Return the right that a request needs, whatever the name of its object."""
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
