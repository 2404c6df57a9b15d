"""What service accounts of a test's namespace may do."""

from __future__ import annotations

import time
from typing import Any

from .fixtures import Namespace

__all__ = ["await_granted", "permit_runner"]

GRANTED_S = 60.0
ROLES = "rbac.authorization.k8s.io/v1"


def permit_runner(namespace: Namespace) -> None:
    """The pods' service account may delete their own set, which it does through the API server."""
    rule = {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets"],
        "verbs": ["delete"],
    }
    name: dict[str, Any] = {"apiVersion": ROLES, "metadata": {"name": "kinetic-runner"}}
    namespace.call("POST", f"{ROLES}/roles", name | {"kind": "Role", "rules": [rule]})
    whom = {"kind": "ServiceAccount", "name": "kinetic", "namespace": namespace.name}
    which = {"kind": "Role", "name": "kinetic-runner", "apiGroup": "rbac.authorization.k8s.io"}
    binding = name | {"kind": "RoleBinding", "subjects": [whom], "roleRef": which}
    namespace.call("POST", f"{ROLES}/rolebindings", binding)
    user = f"system:serviceaccount:{namespace.name}:kinetic"
    await_granted(namespace, {"rules": [rule]}, user)


def await_granted(namespace: Namespace, role: dict[str, Any], user: str) -> None:
    """Return once the API server knows that *user* has *role*: it learns of it a moment later."""
    until = time.monotonic() + GRANTED_S
    while not all(_may(namespace, rule, user) for rule in role["rules"]):
        assert time.monotonic() < until, f"{user} has no rights after {GRANTED_S:g} s"
        time.sleep(0.02)


def _may(namespace: Namespace, rule: dict[str, Any], user: str) -> bool:
    """Whether *user* may do the first thing that *rule* grants with each of its resources."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
    path = f"/apis/{review['apiVersion']}/subjectaccessreviews"
    for resource in rule["resources"]:
        kind, _, below = resource.partition("/")
        about = {"namespace": namespace.name, "group": rule["apiGroups"][0], "resource": kind}
        about |= {"subresource": below, "verb": rule["verbs"][0]}
        body = review | {"spec": {"user": user, "resourceAttributes": about}}
        if not namespace.admin.call("POST", path, body)["status"]["allowed"]:
            return False
    return True
