"""What a request to an API server is about, and what its answer means. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from kinetic._words import one_line
from kinetic.aio.clusters._api_role import Right, how_to_grant
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

__all__ = [
    "Answer",
    "Ask",
    "Refusal",
    "explained",
    "is_crowded",
    "is_forbidden",
    "is_passing",
]

PASSING = frozenset({408, 429, 500, 502, 503, 504})
CROWDED = frozenset({408, 429, 503, 504})
MALFORMED = frozenset({400, 405, 406, 413, 415, 422})
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
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
class Answer:
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


class Refusal(Exception):
    """The server answered, with something else than what was asked for; stays in the adapter."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.answer = answer


def is_passing(answer: Answer) -> bool:
    """Whether the same request may succeed a little later."""
    return answer.status in PASSING


def is_forbidden(answer: Answer) -> bool:
    """Whether it is a right that is missing. A quota and the like forbid things as well."""
    return answer.status == 403 and ("cannot" in answer.said or not answer.body)


def is_crowded(answer: Answer) -> bool:
    """Whether fewer requests at a time would help."""
    return answer.status in CROWDED


def explained(answer: Answer, ask: Ask, cluster: str) -> BackendError:
    """The error that says what failed, on what, and what to do next."""
    what = f"cannot {ask} of {cluster}"
    said = answer.said
    match answer.status:
        case 401:
            return AuthError(
                f"{what}: the API server does not accept the credentials ({said}); log in again, "
                "and check that they are those of this very cluster"
            )
        case 403 if is_forbidden(answer):
            return AuthError(f"{what}: {said}\n{how_to_grant(ask.right, said)}")
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
