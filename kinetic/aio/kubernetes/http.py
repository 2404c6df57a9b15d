"""Connections to one API server: a bounded pool for requests, and one each for streams.

Connecting and silence have timeouts; a whole request has none. Network
failures become kinetic's errors here, and refused credentials are renewed once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from kinetic.aio._net.http import HttpClient, HttpError, cut
from kinetic.aio._net.tokens import with_token
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials
from kinetic.aio.kubernetes.rights import Right, how_to_grant
from kinetic.errors import (
    AlreadyThere,
    AuthError,
    BackendError,
    Conflict,
    Expired,
    NotFound,
    Refused,
    Throttled,
    Unavailable,
)

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL


MALFORMED = frozenset({400, 405, 406, 413, 415, 422})
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; ``words`` say what it does if its path doesn't."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    words: str = ""

    @property
    def right(self) -> Right:
        """Return the permission it needs: a verb on the resource of its path."""
        watches = self.query.get("watch") in ("1", "true")
        return _right(self.method.upper(), self.path, watches)

    def __str__(self) -> str:
        if self.words:
            return self.words
        right = self.right
        name = f" {right.name!r}" if right.name else ""
        where = f" in namespace {right.namespace!r}" if right.namespace else ""
        return f"{right.verb} {right.resource or self.path}{name}{where}"


@lru_cache(256)
def _right(method: str, path: str, watches: bool) -> Right:
    parts = [part for part in path.split("/") if part]
    group = ""
    if parts[:1] == ["apis"]:
        group, parts = "".join(parts[1:2]), parts[3:]
    elif parts[:1] == ["api"]:
        parts = parts[2:]
    namespace = ""
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    resource, name, below = "".join(parts[:1]), "".join(parts[1:2]), "/".join(parts[2:])
    if method == "GET":
        verb = "watch" if watches else "get" if name else "list"
    elif method == "DELETE":
        verb = "delete" if name else "deletecollection"
    else:
        verb = VERBS.get(method, method.lower())
    return Right(
        verb=verb,
        group=group,
        resource=f"{resource}/{below}" if below else resource,
        namespace=namespace,
        name=name,
    )


class Forbidden(AuthError):
    """A right is missing."""


def explained(answer: HttpError, ask: Request, cluster: str) -> BackendError:
    """Return the error for an *answer* of refusal: what failed, on what, what to do next."""
    what = f"cannot {ask} of {cluster}"
    said = answer.said
    match answer.status:
        case 401:
            return AuthError(
                f"{what}: the API server does not accept the credentials ({said}); log in again, "
                "and check that they are those of this very cluster"
            )
        case 403 if "cannot" in said or not answer.body:  # a used-up quota is a 403 as well
            return Forbidden(f"{what}: {said}\n{how_to_grant(ask.right, said)}")
        case 403:
            return Refused(f"{what}: {said}", answer=answer.body)
        case 404:
            return NotFound(f"{what}: {said}; see whether it is there, or has been removed")
        case 409 if answer.body.get("reason") == "AlreadyExists":
            return AlreadyThere(f"{what}: {said}; take another name, or remove what is there")
        case 409:
            return Conflict(f"{what}: {said}; read it again and repeat the change")
        case 410:
            return Expired(f"{what}: {said}; list again")
        case 429:
            return Throttled(
                f"{what}: the API server takes no more requests now ({said}); try again later",
                retryable=True,
                retry_after=_wish(answer),
            )
        case status if status in MALFORMED:
            return Refused(f"{what}: {said}", answer=answer.body)
        case status if answer.retryable:
            return Unavailable(
                f"{what}: the API server answered {status} ({said}); try again "
                "later, or look how the cluster's control plane is",
                retryable=True,
                retry_after=_wish(answer),
            )
        case status:
            return BackendError(
                f"{what}: {status} is no answer of a Kubernetes API server ({said}); check "
                "the server's address, and whether a proxy stands before it"
            )


def _wish(answer: HttpError) -> float | None:
    """Return the pause that the server asks for, in seconds, if it does."""
    if answer.retry_after is not None:
        return answer.retry_after
    details: Any = answer.body.get("details")
    wish = cast("dict[str, Any]", details).get("retryAfterSeconds") if details else None
    return float(wish) if isinstance(wish, int | float) and wish > 0 else None


HEARTBEAT_S = 30.0
"""Seconds of silence after which a WebSocket is pinged."""

IDLE_S = 75.0


class Connections:
    """The connections to one API server: a pool for requests, an unbounded one for streams."""

    def __init__(self, access: Access, *, connect_s: float, most: int) -> None:
        self._access = access
        self._most = most
        self._http = HttpClient(
            f"the client of {access.name}",
            connect_s=connect_s,
            proxy=access.proxy,
            headers={"Accept": "application/json, */*"},
        )
        self.aclose = self._http.aclose

    async def send(self, ask: Request, data: bytes | None, content_type: str, idle: float) -> bytes:
        """Return the body of the answer.

        Raises:
            HttpError: The status is not one of success.
            Unavailable: No answer came.
        """
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self._answer(self._most, ask, idle, data, headers) as answer:
            return await answer.read()

    async def stream(self, ask: Request, idle: float | None) -> AsyncGenerator[bytes]:
        """Yield the body in pieces, as they come; an empty one first, when the answer begins."""
        async with self._answer(0, ask, idle, None, {}) as answer:
            yield b""
            async for piece in answer.content.iter_any():
                yield piece

    async def upgrade(self, ask: Request, protocol: str) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket that speaks *protocol*; the caller closes it.

        Raises:
            HttpError: The server refuses it.
            Unavailable: No answer came.
        """

        async def upgraded(shown: ClusterCredentials) -> aiohttp.ClientWebSocketResponse:
            session: Any = self._http.session()
            with self._translated(ask):
                opened = await session.ws_connect(
                    self._url(ask),
                    method=ask.method,
                    protocols=(protocol,),
                    heartbeat=HEARTBEAT_S,
                    **self._shown(shown, {}),
                )
            return cast("aiohttp.ClientWebSocketResponse", opened)

        try:
            return await with_token(self._access.passes, upgraded)
        except HttpError as exc:
            refused = exc
        # aiohttp drops the body of the refusal. The same request without an upgrade brings it.
        try:
            await self.send(ask, None, "", IDLE_S)
        except HttpError as refusal:
            if refusal.status == refused.status:
                raise
        raise refused

    @asynccontextmanager
    async def _answer(
        self,
        limit: int,
        ask: Request,
        idle: float | None,
        data: bytes | None,
        headers: dict[str, str],
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        session = self._http.session(limit)

        async def answered(shown: ClusterCredentials) -> aiohttp.ClientResponse:
            return await self._http.answered(
                session.request(
                    ask.method,
                    self._url(ask),
                    data=data,
                    timeout=self._http.timeout(idle),
                    allow_redirects=False,
                    **self._shown(shown, headers),
                )
            )

        with self._translated(ask):
            answer = await with_token(self._access.passes, answered)
            try:
                yield answer
            finally:
                cut(answer)

    def _shown(self, shown: ClusterCredentials, headers: dict[str, str]) -> dict[str, Any]:
        """Return aiohttp's arguments for the credentials of a request."""
        sent = [*headers.items(), *self._access.headers]
        if shown.authorization:
            sent.append(("Authorization", shown.authorization))
        return {
            "headers": sent,
            "ssl": shown.tls if shown.tls is not None else True,
            "server_hostname": self._access.tls_name,
        }

    def _url(self, ask: Request) -> URL:
        from yarl import URL

        url = URL(self._access.server + ask.path, encoded=True)
        return url.with_query(dict(ask.query)) if ask.query else url

    def _translated(self, ask: Request) -> AbstractContextManager[None]:
        return self._http.translated(
            f"cannot {ask} of {self._access.name}",
            self._access.server,
            whose="the cluster's",
            advice="check that the cluster runs, and the network",
        )
