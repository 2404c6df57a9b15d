"""Ask an API server what these credentials allow, and which user they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kinetic._tasks import all_or_none
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.rights import Right
from kinetic.errors import AuthError, NotFound


async def is_allowed(api: Api, right: Right) -> bool:
    """Return whether these credentials have *right*."""
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "namespace": right.namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "name": right.name,
    }
    spec = {"resourceAttributes": attributes}
    answer = await _review(api, "authorization.k8s.io/v1", "SelfSubjectAccessReview", spec=spec)
    return bool(answer.get("status", {}).get("allowed"))


async def missing_rights(api: Api, wanted: Sequence[Right]) -> list[Right]:
    """Return those of the *wanted* rights that these credentials lack."""
    answers = await all_or_none(*(is_allowed(api, right) for right in wanted))
    return [right for right, is_held in zip(wanted, answers, strict=True) if not is_held]


async def user_name(api: Api) -> str:
    """Return the name of these credentials' user; ``YOU`` if the server can't tell."""
    try:
        answer = await _review(api, "authentication.k8s.io/v1", "SelfSubjectReview")
    except (AuthError, NotFound):  # Kubernetes before 1.28 has no SelfSubjectReview
        return "YOU"
    return str(answer["status"]["userInfo"].get("username") or "YOU")


async def _review(api: Api, group: str, kind: str, **fields: Any) -> dict[str, Any]:
    body = {"apiVersion": group, "kind": kind, **fields}
    return await api.call("POST", f"/apis/{group}/{kind.lower()}s", body=body)
