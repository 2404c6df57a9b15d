"""Requests to an API server: the permission that each needs, and the errors for refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from kinetic import errors
from kinetic._runner.protocol.google_refusals import missing_permission
from kinetic.aio._net.http import HttpError
from kinetic.aio.kubernetes.rights import Right, how_to_grant

MALFORMED = frozenset({400, 405, 406, 413, 415, 422})
"""HTTP statuses that mean that no retry of the same request can succeed."""

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, without its body."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def right(self) -> Right:
        """Return the permission that the request needs: a verb on the resource of its path."""
        is_watch = self.query.get("watch") in ("1", "true")
        return _required_right(self.method.upper(), self.path, is_watch)

    def __str__(self) -> str:
        right = self.right
        name = f" {right.name!r}" if right.name else ""
        in_namespace = f" in namespace {right.namespace!r}" if right.namespace else ""
        return f"{right.verb} {right.resource}{name}{in_namespace}"


_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))(?:/[^/]+)?(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]))?"
    r"(?:/(?P<resource>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>.+))?)?)?/?"
)
"""A path, such as /apis/GROUP/VERSION/namespaces/NAMESPACE/RESOURCE/NAME/SUBRESOURCE."""


@lru_cache(256)
def _required_right(method: str, path: str, is_watch: bool) -> Right:
    match = _PATH.fullmatch(path)
    parts = match.groupdict("") if match is not None else {"resource": path.strip("/")}
    resource, name = parts["resource"], parts.get("name", "")
    if subresource := parts.get("subresource"):
        resource = f"{resource}/{subresource}"
    if method == "GET":
        verb = "watch" if is_watch else "get" if name else "list"
    elif method == "DELETE":
        verb = "delete" if name else "deletecollection"
    else:
        verb = VERBS.get(method, method.lower())
    return Right(
        verb=verb,
        group=parts.get("group", ""),
        resource=resource,
        namespace=parts.get("namespace", ""),
        name=name,
    )


class Forbidden(errors.AuthError):
    """The credentials lack a permission."""


_LACKS_RIGHT = re.compile(r'User "[^"]*" cannot ')
"""An API server's message about a missing permission. Quotas and policies also give status 403."""


def translate_refusal(
    answer: HttpError, request: Request, cluster: str, *, has_worked: bool = False
) -> errors.BackendError:
    """Return the error for a refusal: what failed, on which cluster, what to do next.

    *has_worked* says that this server has answered an earlier request.
    """
    operation, message, right = f"cannot {request} of {cluster}", answer.message, request.right
    # A 404 about a path that every server has: none of another API, nor an answer of a kubelet.
    is_about_path = not ("." in right.group or "/" in right.resource) and (
        not answer.body or "could not find the requested resource" in message
    )
    match answer.status:
        case 401:
            return errors.AuthError(
                f"{operation}: the API server does not accept the credentials ({message}); log in "
                "again, and check that they belong to this cluster"
            )
        case 403 if _LACKS_RIGHT.search(message):
            return Forbidden(f"{operation}: {message}\n{how_to_grant(right, message)}")
        case 403 if lacking := missing_permission("container", message):  # GKE's DNS endpoint
            return errors.AuthError(
                f"{operation}: {message}; grant a role with {lacking} in the project"
            )
        case 403 if not answer.body:
            return errors.AuthError(
                f"{operation}: the server answered 403 ({message}), which names no missing "
                "permission; check whether a proxy or a firewall answers for the API server"
            )
        case 403:
            return errors.Refused(f"{operation}: {message}", answer=answer.body)
        # A server that has just restarted doesn't know its own paths for a moment.
        case 404 if has_worked and is_about_path:
            return errors.Unavailable(
                f"{operation}: the API server doesn't serve this path now ({message}); try again "
                "later, or check the cluster's control plane",
                retryable=True,
            )
        case 404:
            return errors.NotFound(f"{operation}: {message}; check whether the object exists")
        case 409 if answer.body.get("reason") == "AlreadyExists":
            return errors.AlreadyThere(
                f"{operation}: {message}; choose another name, or remove the existing object"
            )
        # No client can change an object that doesn't exist yet: the server has lost a race with
        # itself, such as for the use of a quota (kubernetes/kubernetes#67761).
        case 409 if request.method == "POST":
            return errors.Unavailable(f"{operation}: {message}; try again later", retryable=True)
        case 409:
            return errors.Conflict(
                f"{operation}: {message}; read the object again and repeat the change"
            )
        case 410:
            return errors.Expired(f"{operation}: {message}; list again")
        case 429:
            return errors.Throttled(
                f"{operation}: the API server accepts no more requests now ({message}); "
                "try again later",
                retryable=True,
                retry_after=_retry_after_s(answer),
            )
        case status if status in MALFORMED:
            return errors.Refused(f"{operation}: {message}", answer=answer.body)
        case status if answer.retryable:
            return errors.Unavailable(
                f"{operation}: the API server answered {status} ({message}); try again "
                "later, or check the cluster's control plane",
                retryable=True,
                retry_after=_retry_after_s(answer),
            )
        case status:
            return errors.BackendError(
                f"{operation}: the answer {status} ({message}) isn't from a Kubernetes API "
                "server; check the server's address, and whether a proxy answers for it"
            )


def _retry_after_s(answer: HttpError) -> float | None:
    """Return the pause that the server asks for, in seconds; None if it asks for none."""
    if answer.retry_after is not None:
        return answer.retry_after
    details: Any = answer.body.get("details") or {}
    wait_s = cast("dict[str, Any]", details).get("retryAfterSeconds")
    return float(wait_s) if isinstance(wait_s, int | float) and wait_s > 0 else None
