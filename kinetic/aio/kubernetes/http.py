"""The connections to one API server: few for requests, and others, without number, for streams.

Limits for connecting and for silence but none for the whole; failures of the
network become errors of ours here; and a pass that is refused is renewed once.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kinetic.aio._net.http import HttpClient, HttpError, cut
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.aio._net.tokens import with_token
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one resource (``pods/log`` with its subresource); "" is the core group."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str = ""


NEEDED_BY = {
    "leaderworkersets": "jobs on several hosts",
    "jobsets": "jobs on several hosts with KINETIC_MULTIHOST=jobset",
    "workloads": "jobs in a queue of Kueue",
    "pods/portforward": "debug=True",
    "events": "saying why a job does not start",
    "nodes": "saying why a job does not start",
}
"""What is not needed for every job, and what it is needed for."""

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


def rights(namespace: str) -> list[Right]:
    """All that kinetic does: in *namespace*, and with what is in none."""
    return [
        Right(verb=verb, group=group, resource=resource, namespace=where)
        for table, where in ((_NEEDED, namespace), (_AROUND, ""))
        for group, resources, verbs in table
        for resource in resources
        for verb in verbs
    ]


def how_to_grant(right: Right, said: str) -> str:
    """What an administrator of the cluster does about a missing *right*; *said* names the user."""
    found = re.search(r'User "(?P<user>[^"]*)"', said)
    user = found["user"] if found else "YOU"
    hint = (
        "These credentials name nobody: log in first. Else an"
        if user == "system:anonymous"
        else "An"
    )
    where = ""
    if right.namespace:
        where = f"If {right.namespace!r} is not the namespace you mean, set KINETIC_NAMESPACE. "
    return (
        f"Missing: verb {right.verb!r} on resource {right.resource!r} of API group "
        f"{right.group!r}. {where}{hint} administrator of the cluster grants it, and all else that "
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


class Forbidden(AuthError):
    """A right is missing."""


def is_crowded(answer: HttpError) -> bool:
    """Whether fewer requests at a time would help."""
    return answer.status in CROWDED


def explained(answer: HttpError, ask: Request, cluster: str) -> BackendError:
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
    """How long the server wants us to wait, if it says so, in seconds."""
    if answer.retry_after is not None:
        return answer.retry_after
    details: Any = answer.body.get("details")
    wish = cast("dict[str, Any]", details).get("retryAfterSeconds") if details else None
    return float(wish) if isinstance(wish, int | float) and wish > 0 else None


T = TypeVar("T")

RIGHTS = RetryPolicy(total_s=15.0)
"""For a right that there was: a server that has just started again knows nobody's for a moment."""


async def retry_request(
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


HEARTBEAT_S = 30.0
"""After so much silence a WebSocket is asked whether the other side is there."""

IDLE_S = 75.0


class Connections:
    """To one API server: few for requests, and others, without number, for streams."""

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
        """The body of the answer.

        Raises:
            HttpError: Its status is not one of success.
            Unavailable: There is none.
        """
        headers = {"Content-Type": content_type} if data is not None else {}
        async with self._answer(self._most, ask, idle, data, headers) as answer:
            return await answer.read()

    async def stream(self, ask: Request, idle: float | None) -> AsyncGenerator[bytes]:
        """The body of the answer in pieces, as they come; first an empty one when it begins."""
        async with self._answer(0, ask, idle, None, {}) as answer:
            yield b""
            async for piece in answer.content.iter_any():
                yield piece

    async def upgrade(self, ask: Request, protocol: str) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket that speaks *protocol*; whoever asks for it closes it.

        Raises:
            HttpError: There is none.
            Unavailable: Nobody answers.
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
        # Its words are lost there. They are the same for whoever does not ask for a WebSocket.
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
        """What each request shows: aiohttp's arguments for it."""
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
