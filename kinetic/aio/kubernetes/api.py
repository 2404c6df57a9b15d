"""Send requests to a cluster's API server. Bodies are dicts; failures raise kinetic's errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kinetic.aio._net.http import HttpClient, HttpError, close_answer
from kinetic.aio._net.retry import NO_RETRIES, Outage, RetryPolicy, is_retryable, retry
from kinetic.aio._net.tokens import with_token
from kinetic.aio.kubernetes.access import Access, ClusterCredentials
from kinetic.aio.kubernetes.request import Forbidden, Request, translate_refusal
from kinetic.aio.kubernetes.rights import Right
from kinetic.errors import Unavailable

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

LONGEST_LINE = 8 * 1024**2
"""Maximum bytes of a line in an answer.

A watch sends an object of at most 1.5 MiB on a line; its JSON may be twice as long.
"""

METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""The header that asks for the metadata of an object; a server may return the whole object."""

HEARTBEAT_S = 30.0
"""After this many seconds of silence, kinetic pings the server of a WebSocket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one client: concurrent requests, and timeouts in seconds.

    ``idle_s`` is the silence after which a connection counts as dead. It exceeds the
    minute after which the server itself ends a request. ``rights_s`` is how long the client
    retries when it lacks a permission that it had before: a server that has just
    restarted refuses everything for a moment.
    """

    requests: int = 64
    connect_s: float = 10.0
    idle_s: float = 75.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rights_s: float = 15.0


ONE_TRY = Limits(retry=NO_RETRIES, rights_s=0.0, idle_s=20.0)
"""The limits while a person waits; see `NO_RETRIES`."""


class Api:
    """Sends requests to one cluster, on one event loop.

    The client connects on the first request. It retries failures that may pass (429, 5xx, broken
    connections) after growing, random pauses, or the pause that the server asks for.
    If the server refuses the credentials, the client renews them once. A request may be sent again
    after it has succeeded. So callers choose the names of what they create, and take `AlreadyThere`
    for success. Connecting and silence have time limits; a request as a whole has none.

    Every method that sends a request may raise `NotFound`, `AlreadyThere`, `Conflict`, `Expired`,
    `Refused`, `Throttled`, `Unavailable`, and, for credentials or permissions, `AuthError`.
    """

    def __init__(self, access: Access, limits: Limits | None = None) -> None:
        self.server = access.server
        self.cluster = access.name
        self._access = access
        self._limits = limits or Limits()
        # A request keeps its turn while it waits to retry, so a busy server gets fewer requests.
        self._turns = asyncio.Semaphore(self._limits.requests)
        self._outage = Outage(access.name)
        self._granted: set[Right] = set()
        self._http = HttpClient(
            f"the client of {access.name}",
            connect_s=self._limits.connect_s,
            proxy=access.proxy,
            headers={"Accept": "application/json, */*"},
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
        metadata_only: bool = False,
    ) -> dict[str, Any]:
        """Send a request, such as ``GET /apis/batch/v1/namespaces/x/jobs``; return its JSON.

        The body of a PATCH is a JSON merge patch, unless *content_type* says otherwise. With
        *metadata_only*, the server returns an object without its spec and status.

        Cancelled: the request may or may not have reached the server.
        """
        request = Request(method=method, path=path, query=query or {})
        limits, data, headers = self._limits, None, dict[str, str]()
        if body is not None:
            data = json.dumps(body, separators=(",", ":")).encode()
            usual = f"application/{'merge-patch+' if method == 'PATCH' else ''}json"
            headers["Content-Type"] = content_type or usual
        if metadata_only:
            headers["Accept"] = METADATA_ONLY

        async def send() -> dict[str, Any]:
            answer = await self._send(request, limits.requests, limits.idle_s, data, headers)
            try:
                return self._decode(await answer.read(), request)
            finally:
                close_answer(answer)

        async with self._turns:
            return await self._retry(send, request, limits.retry)

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str] | None = None, idle_s: float | None = None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Send a GET request and yield an iterator over the pieces of its body as they arrive.

        Each stream has its own connection, which no other request uses. A stream that breaks isn't
        repeated, because only the caller knows where to continue.

        Args:
            path: The path of the request.
            query: The query parameters of the request.
            idle_s: The silence, in seconds, after which the connection counts as dead;
                None for a server that may be silent forever.

        Raises:
            Unavailable: The connection broke, or was silent for *idle_s*.
        """
        request = Request(method="GET", path=path, query=query or {})
        answer = await self._retry(lambda: self._send(request, 0, idle_s), request)
        with self._translate_errors(request):
            try:
                yield answer.content.iter_any()
            finally:
                close_answer(answer)

    async def lines(
        self, path: str, *, query: Mapping[str, str] | None = None, idle_s: float | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield the lines of a `stream` without their newlines, also a last line without a newline.

        Raises:
            Unavailable: The connection broke or was silent for *idle_s*, or a line is longer than
                `LONGEST_LINE`.
        """
        rest = b""
        async with self.stream(path, query=query, idle_s=idle_s) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > LONGEST_LINE:
                    raise Unavailable(
                        f"cannot read {path} of {self.cluster}: a line is longer than "
                        f"{LONGEST_LINE >> 20} MiB; check whether a proxy answers for the server",
                        retryable=True,
                    )
        if rest:
            yield rest

    async def tunnel(
        self, path: str, protocol: str, *, query: Mapping[str, str] | None = None
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket to *path* that speaks *protocol*; the caller closes it."""
        request = Request(method="GET", path=path, query=query or {})
        session: Any = self._http.session()

        async def upgrade(credentials: ClusterCredentials) -> aiohttp.ClientWebSocketResponse:
            with self._translate_errors(request):
                socket = await session.ws_connect(
                    self._url(request),
                    method=request.method,
                    protocols=(protocol,),
                    heartbeat=HEARTBEAT_S,
                    **self._request_options(credentials, {}),
                )
            return cast("aiohttp.ClientWebSocketResponse", socket)

        async def open_socket() -> aiohttp.ClientWebSocketResponse:
            try:
                return await with_token(self._access.credentials, upgrade)
            except HttpError as exc:
                refused = exc
            # aiohttp drops the body of a refusal. A plain request gets the refusal with its body.
            try:
                close_answer(await self._send(request, 0, self._limits.idle_s))
            except HttpError as refusal:
                if refusal.status == refused.status:
                    raise
            raise refused

        return await self._retry(open_socket, request)

    async def aclose(self) -> None:
        """Close all connections; requests in progress fail."""
        await self._http.aclose()
        await self._access.credentials.aclose()

    async def _retry(
        self, work: Callable[[], Awaitable[T]], request: Request, policy: RetryPolicy | None = None
    ) -> T:
        """Await ``work()`` and retry its temporary failures by *policy*.

        If the client lacks a permission that it had before, retry for ``Limits.rights_s`` seconds.
        If *policy* is None, retry nothing else. All retries of requests happen here.
        """
        clock, missing_since = asyncio.get_running_loop().time, None
        permission = replace(request.right, name="")  # on all objects of this kind

        async def run_once() -> T:
            try:
                with self._translate_errors(request):
                    result = await work()
            except HttpError as refusal:
                raise translate_refusal(
                    refusal, request, self.cluster, has_worked=bool(self._granted)
                ) from None
            self._granted.add(permission)
            return result

        def is_temporary(failure: Exception) -> bool:
            nonlocal missing_since
            # A server that has just restarted refuses everything for a moment.
            if isinstance(failure, Forbidden) and permission in self._granted:
                missing_since = missing_since or clock()
                return clock() < missing_since + self._limits.rights_s
            return policy is not None and is_retryable(failure)

        return await retry(
            run_once, policy or self._limits.retry, self._outage, should_retry=is_temporary
        )

    async def _send(
        self,
        request: Request,
        connections: int,
        idle_s: float | None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientResponse:
        """Send a request; the caller reads the answer's body, then calls `close_answer`.

        *connections* is the size of the pool that the request's connection comes from; 0 means
        no limit.
        """
        session = self._http.session(connections)

        async def send(credentials: ClusterCredentials) -> aiohttp.ClientResponse:
            response = session.request(
                request.method,
                self._url(request),
                data=data,
                timeout=self._http.timeout(idle_s),
                allow_redirects=False,
                **self._request_options(credentials, headers or {}),
            )
            return await self._http.receive(response)

        return await with_token(self._access.credentials, send)

    def _request_options(
        self, credentials: ClusterCredentials, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return aiohttp's arguments for the credentials of a request."""
        sent = [*headers.items(), *self._access.headers]
        if credentials.authorization:
            sent.append(("Authorization", credentials.authorization))
        return {
            "headers": sent,
            "ssl": credentials.tls if credentials.tls is not None else True,
            "server_hostname": self._access.tls_name,
        }

    def _url(self, request: Request) -> URL:
        from yarl import URL

        url = URL(self._access.server + request.path, encoded=True)
        return url.with_query(dict(request.query)) if request.query else url

    def _translate_errors(self, request: Request) -> AbstractContextManager[None]:
        """Return a context manager that turns failures of the network into kinetic's errors."""
        return self._http.translate_errors(
            f"cannot {request} of {self.cluster}",
            self.server,
            certificate_owner="the cluster's",
            advice="check that the cluster runs, and the network",
        )

    def _decode(self, raw: bytes, request: Request) -> dict[str, Any]:
        """Return the JSON object in *raw*, empty for an empty body; refuse any other content."""
        try:
            decoded: Any = json.loads(raw) if raw else {}
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            error = HttpError(200, raw[:4096].decode(errors="replace"))
            raise translate_refusal(error, request, self.cluster)
        return cast("dict[str, Any]", decoded)
