"""A server on loopback that handles each request the way its test sets, and records it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio._net.tokens import FreshCredentials, TokenCache
from kinetic.aio.kubernetes.access import Access, ClusterCredentials
from kinetic.aio.kubernetes.api import Limits

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """A request as the server received it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    groups: list[str] = field(default_factory=list)


class FaultServer:
    """``async with FaultServer() as server:`` answers ``{}``, unless `then` has queued a handler.

    ``always`` replaces that answer. At the end of the block, all pending requests are cut off.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[Seen] = []
        self.always: Handler = answer({})
        self.busy = self.most_busy = 0
        self.ended: Counter[str] = Counter()
        self._next: deque[Handler] = deque()
        self._over = asyncio.Event()
        self._tls = tls

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(
            web.Server(self._handle, access_log=None, handler_cancellation=True),
            shutdown_timeout=0,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._over.set()
        while self.busy:
            await asyncio.sleep(0)
        await self._runner.cleanup()

    def then(self, *handlers: Handler) -> None:
        """Queue *handlers* for the next requests, one each."""
        self._next.extend(handlers)

    @property
    def paths(self) -> list[str]:
        return [f"{request.method} {request.path}" for request in self.seen]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(
            Seen(
                request.method,
                request.path,
                dict(request.query),
                dict(request.headers),
                await request.read(),
                request.headers.getall("Impersonate-Group", []),
            )
        )
        handler = self._next.popleft() if self._next else self.always
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        handling = asyncio.ensure_future(handler(request))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({handling, over}, return_when=asyncio.FIRST_COMPLETED)
            if handling.done():
                return handling.result()
            return cut(request)
        except asyncio.CancelledError:
            self.ended[request.path] += 1  # the client has closed the connection
            return cut(request)
        finally:
            handling.cancel()
            over.cancel()
            self.busy -= 1


def answer(body: Any, status: int = 200, **headers: str) -> Handler:
    """Answer with *body*: a string as plain text, anything else as JSON."""
    text = body if isinstance(body, str) else json.dumps(body)
    kind = "text/plain" if isinstance(body, str) else "application/json"
    dashed = {name.replace("_", "-"): value for name, value in headers.items()}

    async def handle(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type=kind, headers=dashed)

    return handle


def status(code: int, reason: str = "", message: str = "because", **headers: str) -> Handler:
    """Answer with a ``Status`` as an API server sends it."""
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason}
    return answer({**body, "message": message}, code, **headers)


def cut(request: web.BaseRequest) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def reset() -> Handler:
    """Cut the connection without an answer."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return cut(request)

    return handle


def silence() -> Handler:
    """Keep the connection open and never answer, like a machine that is gone."""

    async def handle(_: web.BaseRequest) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    return handle


def stream(*pieces: bytes, then: str = "end", code: int = 200) -> Handler:
    """Send *pieces* one by one, and then ``end``, ``cut``, or be ``silent``."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(status=code)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.001)  # makes the pieces arrive one by one
        if then == "cut":
            cut(request)
        elif then == "silent":
            await asyncio.Event().wait()
        return response

    return handle


LIMITS = Limits(
    connect_s=30.0,
    idle_s=30.0,
    retry=RetryPolicy(total_s=30.0, first_pause_s=0.005, longest_pause_s=0.02),
)
"""Long limits: server and client share a process, so when it stalls, the client sees silence."""


class Tokens:
    """Make credentials with numbered tokens; ``made`` counts them."""

    def __init__(self) -> None:
        self.made = 0
        self.passes = TokenCache(self._renew, "a test")

    async def _renew(self) -> FreshCredentials[ClusterCredentials]:
        self.made += 1
        return FreshCredentials(value=ClusterCredentials(authorization=f"Bearer token-{self.made}"))


def anonymous(server: FaultServer) -> Access:
    """Return access to *server* without credentials."""

    async def fresh() -> FreshCredentials[ClusterCredentials]:
        return FreshCredentials(value=ClusterCredentials())

    return Access(server=server.url, name="a test", credentials=TokenCache(fresh, "a test"))
