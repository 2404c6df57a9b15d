"""The rights that kinetic needs in a namespace, and the Role that grants them. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["Right", "how_to_grant", "role"]


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
