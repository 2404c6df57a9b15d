"""What service accounts of a test's namespace may do."""

from __future__ import annotations

import time
from typing import Any

import yaml

from kinetic.aio.kubernetes.rights import runner_role

from .fixtures import Namespace

__all__ = ["await_granted", "permit_runner"]

GRANTED_S = 60.0
ROLES = "rbac.authorization.k8s.io/v1"


def permit_runner(namespace: Namespace) -> None:
    """Let the pods' service account delete its own set, Job, or pod, by the Role of the docs."""
    documents = [*yaml.safe_load_all(runner_role(namespace.name, "kinetic"))]
    for document in documents:
        namespace.call("POST", f"{ROLES}/{document['kind'].lower()}s", document)
    await_granted(namespace, documents[0], f"system:serviceaccount:{namespace.name}:kinetic")


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
