"""The connections to one API server: few for requests, and others, without number, for streams.

Limits for connecting and for silence but none for the whole; failures of the
network become errors of ours here; and a pass that is refused is renewed once.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kinetic._messages import one_line
from kinetic.aio._net.http import Sockets, cut, retry_after
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials
from kinetic.errors import (
    AlreadyThere,
    AuthError,
    BackendError,
    ClientClosed,
    Conflict,
    Expired,
    KineticError,
    NotFound,
    Refused,
    Throttled,
    Unavailable,
)

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

__all__ = [
    "RIGHTS",
    "Connections",
    "Forbidden",
    "HttpError",
    "Request",
    "Response",
    "Right",
    "explained",
    "how_to_grant",
    "is_crowded",
    "persist",
    "role",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one resource (``pods/log`` with its subresource); "" is the core group."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str = ""


_OWN = ("create", "delete", "deletecollection", "get", "list", "patch", "watch")
_READ = ("get", "list", "watch")
_NEEDED: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("batch", ("jobs",), _OWN),
    ("", ("secrets",), ("create", "delete", "deletecollection", "get", "list", "patch", "update")),
    ("", ("pods",), ("delete", "deletecollection", *_READ)),
    ("", ("pods/log",), ("get",)),
    ("", ("pods/portforward",), ("create", "get")),
    ("", ("events",), _READ),
    ("leaderworkerset.x-k8s.io", ("leaderworkersets",), _OWN),
    ("jobset.x-k8s.io", ("jobsets",), _OWN),
    ("kueue.x-k8s.io", ("workloads",), _READ),
)
"""Group, resources, verbs: everything that kinetic does in a namespace."""

_AROUND: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("", ("nodes",), ("get", "list")),
)
"""The same of what is in no namespace. It is only for saying better why a job does not start."""


def how_to_grant(right: Right, said: str) -> str:
    """What an administrator of the cluster does about a missing *right*; *said* names the user."""
    found = re.search(r'User "(?P<user>[^"]*)"', said)
    user = found["user"] if found else "YOU"
    hint = (
        "These credentials name nobody: log in first. Else an"
        if user == "system:anonymous"
        else "An"
    )
    return (
        f"Missing: verb {right.verb!r} on resource {right.resource!r} of API group "
        f"{right.group!r}. {hint} administrator of the cluster grants it, and all else that "
        f"kinetic needs, with `kubectl apply -f -` and this:\n{role(right, user)}"
    )


def role(right: Right, user: str) -> str:
    """YAML of the Role (of a ClusterRole, for what is in no namespace) and its binding.

    It has all that kinetic needs there, so that it is applied once.
    """
    rules = list(_NEEDED if right.namespace else _AROUND)
    if not any(
        right.group == group and right.resource in resources and right.verb in verbs
        for group, resources, verbs in rules
    ):
        rules.append((right.group, (right.resource,), (right.verb,)))
    kind = "Role" if right.namespace else "ClusterRole"
    place = f", namespace: {json.dumps(right.namespace)}" if right.namespace else ""
    lines = [
        "apiVersion: rbac.authorization.k8s.io/v1",
        f"kind: {kind}",
        f"metadata: {{name: kinetic{place}}}",
        "rules:",
        *(
            f"- {{apiGroups: [{json.dumps(group)}], resources: {json.dumps(list(resources))}, "
            f"verbs: {json.dumps(list(verbs))}}}"
            for group, resources, verbs in rules
        ),
        "---",
        "apiVersion: rbac.authorization.k8s.io/v1",
        f"kind: {kind}Binding",
        f"metadata: {{name: {json.dumps(_binding_name(user))}{place}}}",
        f"roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: {kind}, name: kinetic}}",
        f"subjects: [{_subject(user)}]",
    ]
    return "\n".join(lines) + "\n"


def _binding_name(user: str) -> str:
    """Names of bindings may hold nearly everything; not a slash or a percent sign."""
    return "kinetic-" + re.sub(r"[/%]", "-", user)


def _subject(user: str) -> str:
    parts = user.split(":")
    if parts[:2] == ["system", "serviceaccount"] and len(parts) == 4:
        return (
            f"{{kind: ServiceAccount, namespace: {json.dumps(parts[2])}, "
            f"name: {json.dumps(parts[3])}}}"
        )
    return f"{{kind: User, apiGroup: rbac.authorization.k8s.io, name: {json.dumps(user)}}}"


PASSING = frozenset({408, 429, 500, 502, 503, 504})
CROWDED = frozenset({408, 429, 503, 504})
MALFORMED = frozenset({400, 405, 406, 413, 415, 422})
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; ``words`` say what it does where its path does not."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    words: str = ""

    @property
    def right(self) -> Right:
        """The permission it takes: what its path is about, and what is done to that."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What came back instead of what was asked for."""

    status: int
    text: str
    wish_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The ``Status`` it holds, or nothing if it is none."""
        try:
            body: Any = json.loads(self.text)
        except ValueError:
            return {}
        return cast("dict[str, Any]", body) if isinstance(body, dict) else {}

    @property
    def said(self) -> str:
        """The server's own words, on one line."""
        return one_line(str(self.body.get("message") or self.text or "no reason given"), 600)

    @property
    def wait_s(self) -> float | None:
        """How long the server wants us to wait, if it says so, in seconds."""
        if self.wish_s is not None:
            return self.wish_s
        details: Any = self.body.get("details")
        wish = cast("dict[str, Any]", details).get("retryAfterSeconds") if details else None
        return float(wish) if isinstance(wish, int | float) and wish > 0 else None


class HttpError(Exception):
    """The server answered, with something else than what was asked for; stays in the adapter."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer)
        self.answer = answer


class Forbidden(AuthError):
    """A right is missing."""


def is_crowded(answer: Response) -> bool:
    """Whether fewer requests at a time would help."""
    return answer.status in CROWDED


def explained(answer: Response, ask: Request, cluster: str) -> BackendError:
    """The error that says what failed, on what, and what to do next."""
    what = f"cannot {ask} of {cluster}"
    said = answer.said
    match answer.status:
        case 401:
            return AuthError(
                f"{what}: the API server does not accept the credentials ({said}); log in again, "
                "and check that they are those of this very cluster"
            )
        case 403 if "cannot" in said or not answer.body:  # a quota and the like forbid as well
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
                retry_after=answer.wait_s,
            )
        case status if status in MALFORMED:
            return Refused(f"{what}: {said}", answer=answer.body)
        case status if status in PASSING:
            return Unavailable(
                f"{what}: the API server answered {status} ({said}); try again "
                "later, or look how the cluster's control plane is",
                retryable=True,
                retry_after=answer.wait_s,
            )
        case status:
            return BackendError(
                f"{what}: {status} is no answer of a Kubernetes API server ({said}); check "
                "the server's address, and whether a proxy stands before it"
            )


T = TypeVar("T")

RIGHTS = RetryPolicy(total_s=15.0)
"""For a right that there was: a server that has just started again knows nobody's for a moment."""


async def persist(
    work: Callable[[], Awaitable[T]],
    explain: Callable[[HttpError], BackendError],
    policy: RetryPolicy,
    outage: Outage,
    *,
    had_right: Callable[[], bool] = bool,
    rights: RetryPolicy = RIGHTS,
) -> T:
    """Do *work*, again where that may help; what the server refuses is raised explained.

    *had_right* says whether the right it takes was there before.
    """

    async def explained_work() -> T:
        try:
            return await work()
        except HttpError as refusal:
            raise explain(refusal) from None

    async def with_right() -> T:
        return await retry(
            explained_work,
            rights,
            outage,
            is_passing=lambda failure: isinstance(failure, Forbidden) and had_right(),
        )

    return await retry(with_right, policy, outage)


KEEPALIVE_S = 60.0

HEARTBEAT_S = 30.0
"""After so much silence a WebSocket is asked whether the other side is there."""

IDLE_S = 75.0
ERROR_BYTES = 64 * 1024
STREAM_BYTES = 256 * 1024


class Connections:
    """Of one client, on the event loop that sends the first request."""

    def __init__(self, access: Access, *, connect_s: float, most: int) -> None:
        self._access = access
        self._connect_s = connect_s
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None
        self._sockets = Sockets()
        self._timeouts: dict[float | None, aiohttp.ClientTimeout] = {}
        self._closed = False

    async def send(self, ask: Request, data: bytes | None, content_type: str, idle: float) -> bytes:
        """The body of the answer.

        Raises:
            Refusal: Its status is not one of success.
            Unavailable: There is none.
        """
        session = self._session(streams=False)
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self._answer(session, ask, idle, data, headers) as answer:
            return await answer.read()

    async def stream(self, ask: Request, idle: float | None) -> AsyncGenerator[bytes]:
        """The body of the answer in pieces, as they come; first an empty one when it begins."""
        session = self._session(streams=True)
        async with self._answer(session, ask, idle, None, {}) as answer:
            yield b""
            async for piece in answer.content.iter_any():
                yield piece

    async def upgrade(self, ask: Request, protocol: str) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket that speaks *protocol*; whoever asks for it closes it.

        Raises:
            Refusal: There is none.
            Unavailable: Nobody answers.
        """
        import aiohttp

        session = self._session(streams=True)
        for again in (False, True):
            shown = await self._access.passes.get()
            with self._translated(ask):
                try:
                    return await self._upgraded(session, ask, protocol, shown)
                except aiohttp.WSServerHandshakeError as exc:
                    refused = Response(status=exc.status, text=exc.message)
            if refused.status != 401 or again:
                break
            self._access.passes.forget(shown)
        # Its words are lost there. They are the same for whoever does not ask for a WebSocket.
        try:
            await self.send(ask, None, "", IDLE_S)
        except HttpError as refusal:
            if refusal.answer.status == refused.status:
                raise
        raise HttpError(refused)

    async def _upgraded(
        self, session: aiohttp.ClientSession, ask: Request, protocol: str, shown: ClusterCredentials
    ) -> aiohttp.ClientWebSocketResponse:
        sent = [*self._access.headers]
        if shown.authorization:
            sent.append(("Authorization", shown.authorization))
        return await session.ws_connect(
            self._url(ask),
            method=ask.method,
            protocols=(protocol,),
            headers=sent,
            heartbeat=HEARTBEAT_S,
            ssl=shown.tls if shown.tls is not None else True,
            server_hostname=self._access.tls_name,
        )

    async def aclose(self) -> None:
        """Close all connections; what is under way fails."""
        self._closed = True
        self._sockets.hang_up()
        for session in (self._requests, self._streams):
            if session is not None:
                await session.close()
        await self._sockets.closed()

    @asynccontextmanager
    async def _answer(
        self,
        session: aiohttp.ClientSession,
        ask: Request,
        idle: float | None,
        data: bytes | None,
        headers: dict[str, str],
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        shown = await self._access.passes.get()
        with self._translated(ask):
            answer = await self._request(session, ask, idle, data, headers, shown)
            if answer.status == 401:
                answer.release()
                self._access.passes.forget(shown)
                shown = await self._access.passes.get()
                answer = await self._request(session, ask, idle, data, headers, shown)
            self._sockets.read(answer)
            async with _ended(answer):
                if answer.status >= 300:
                    wish = retry_after(answer.headers.get("Retry-After"))
                    text = await _beginning(answer.content)
                    raise HttpError(Response(status=answer.status, text=text, wish_s=wish))
                yield answer

    async def _request(
        self,
        session: aiohttp.ClientSession,
        ask: Request,
        idle: float | None,
        data: bytes | None,
        headers: dict[str, str],
        shown: ClusterCredentials,
    ) -> aiohttp.ClientResponse:
        sent = [*headers.items(), *self._access.headers]
        if shown.authorization:
            sent.append(("Authorization", shown.authorization))
        return await session.request(
            ask.method,
            self._url(ask),
            data=data,
            headers=sent,
            timeout=self._timeout(idle),
            ssl=shown.tls if shown.tls is not None else True,
            server_hostname=self._access.tls_name,
            allow_redirects=False,
        )

    def _url(self, ask: Request) -> URL:
        from yarl import URL

        url = URL(self._access.server + ask.path, encoded=True)
        return url.with_query(dict(ask.query)) if ask.query else url

    def _timeout(self, idle: float | None) -> aiohttp.ClientTimeout:
        import aiohttp

        known = self._timeouts.get(idle)
        if known is None:
            known = self._timeouts[idle] = aiohttp.ClientTimeout(
                total=None,
                # With the look-up of the name, which has no limit itself.
                connect=3 * self._connect_s,
                sock_connect=self._connect_s,
                sock_read=idle,
            )
        return known

    def _session(self, *, streams: bool) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._closed:
            raise ClientClosed(f"the client of {self._access.name} is closed; open another")
        if loop is not self._loop:
            raise BackendError(
                f"the client of {self._access.name} belongs to another event loop; open one of "
                "its own"
            )
        if streams:
            self._streams = self._streams or self._open(0, STREAM_BYTES)
            return self._streams
        self._requests = self._requests or self._open(self._most, STREAM_BYTES)
        return self._requests

    def _open(self, most: int, buffered: int) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=most, keepalive_timeout=KEEPALIVE_S, socket_factory=self._sockets.make
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "kinetic-aio", "Accept": "application/json, */*"},
            read_bufsize=buffered,
            # Asked for once: aiohttp would read the environment again for each request.
            proxy=self._access.proxy,
        )

    @contextmanager
    def _translated(self, ask: Request) -> Generator[None]:
        """Failures of the network as errors of ours."""
        import aiohttp

        what, server = f"cannot {ask} of {self._access.name}", self._access.server
        try:
            yield
        except (KineticError, HttpError):
            raise
        except aiohttp.ClientConnectorCertificateError as exc:
            raise AuthError(
                f"{what}: the certificate of {server} is not the cluster's ({exc.certificate_error}"
                "); check that address and CA belong together"
            ) from exc
        except aiohttp.ClientSSLError as exc:
            # Cut during the handshake it is like any other connection.
            cut = isinstance(getattr(exc, "os_error", None), ssl.SSLEOFError)
            kind: Any = Unavailable if cut else BackendError
            raise kind(
                f"{what}: no trusted connection to {server} ({exc}); check the clock, the proxy "
                "and the certificates",
                retryable=cut,
            ) from exc
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            if self._closed:
                raise ClientClosed(f"{what}: the client was closed meanwhile") from exc
            raise Unavailable(
                f"{what}: {server} does not answer as it should "
                f"({_words(exc)}); check that the cluster runs, and the network",
                retryable=True,
            ) from exc
        except Exception as exc:
            if not self._closed:
                raise
            # aiohttp has several words for a session that was closed, some of them assertions.
            raise ClientClosed(f"{what}: the client was closed meanwhile") from exc


@asynccontextmanager
async def _ended(answer: aiohttp.ClientResponse) -> AsyncGenerator[None]:
    """Close *answer*; one that is not read to its end ends its connection without a goodbye.

    Its session knows nothing of that connection any more and would not wait for it.
    """
    try:
        yield
    finally:
        cut(answer)


async def _beginning(content: aiohttp.StreamReader) -> str:
    """As much of an answer as is needed to explain it; its parts come one by one."""
    said = b""
    while len(said) < ERROR_BYTES and (piece := await content.read(ERROR_BYTES - len(said))):
        said += piece
    return said.decode(errors="replace")


def _words(failure: Exception) -> str:
    """aiohttp's own words for a connection that was not made name its objects in memory."""
    cause = getattr(failure, "os_error", None) or failure
    return str(cause) or type(cause).__name__
