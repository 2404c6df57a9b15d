"""The rights that kinetic uses in a cluster, and the Role that grants them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one resource, such as ``pods/log``; the group "" is Kubernetes' core."""

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
    "events": "explaining why a job does not start",
    "nodes": "explaining why a job does not start",
    "persistentvolumeclaims": "explaining why a job does not start",
}
"""Resources that only some jobs need, and the feature that needs them."""

MANIFEST = Path(__file__).parents[2] / "doctor" / "namespace.yaml"
"""The objects that a namespace needs. Its Role allows everything that kinetic does in it."""

_CLUSTER_RULES = ({"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},)
"""The rights outside any namespace: kinetic lists nodes to explain why a job does not start."""


@cache
def _rules_of(role: str) -> list[dict[str, list[str]]]:
    """Return the rules of *role* in `MANIFEST`: ``kinetic`` is for users, the other for pods."""
    import yaml  # imported here, because only a refused request needs it

    for document in yaml.safe_load_all(MANIFEST.read_text()):
        if document["kind"] == "Role" and document["metadata"]["name"] == role:
            return list(document["rules"])
    raise LookupError(f"{MANIFEST} has no Role {role}")


def rights(namespace: str) -> list[Right]:
    """Return every right that kinetic uses, in *namespace* and on resources outside namespaces."""
    return [
        Right(verb=verb, group=rule["apiGroups"][0], resource=rule["resources"][0], namespace=scope)
        for rules, scope in ((_rules_of("kinetic"), namespace), (_CLUSTER_RULES, ""))
        for rule in rules
        for verb in rule["verbs"]
    ]


def by_resource(missing: Iterable[Right]) -> list[str]:
    """Return a phrase for each resource, with its missing verbs and the feature that needs them."""
    by_phrase: dict[str, list[str]] = {}
    for right in missing:
        name = f"{right.resource}.{right.group}" if right.group else right.resource
        feature = NEEDED_BY.get(right.resource)
        by_phrase.setdefault(f"{name} ({feature})" if feature else name, []).append(right.verb)
    return [f"{', '.join(verbs)} {phrase}" for phrase, verbs in by_phrase.items()]


def how_to_grant(right: Right, message: str) -> str:
    """Explain how to grant a missing *right*; the refusal *message* names the user."""
    match = re.search(r'User "(?P<user>[^"]*)"', message)
    user = match["user"] if match else "YOU"
    login_hint = (
        "These credentials name no user: log in first. " if user == "system:anonymous" else ""
    )
    namespace_hint = ""
    if right.namespace:
        namespace_hint = (
            f"If {right.namespace!r} is not the namespace you mean, set KINETIC_NAMESPACE. "
        )
    return (
        f"Missing: verb {right.verb!r} on resource {right.resource!r} of API group "
        f"{right.group!r}. {namespace_hint}{login_hint}An administrator of the cluster grants "
        f"this verb, and all else that kinetic needs, with `kubectl apply -f -` and this:\n"
        f"{role(right, user)}"
    )


def binding_of(user: str) -> str:
    """Return the name of *user*'s role binding; such a name can't contain ``/`` or ``%``."""
    return "kinetic-" + re.sub(r"[/%]", "-", user)


def role(right: Right, user: str) -> str:
    """Return YAML of a Role with *right* and all that kinetic needs, and of its binding to *user*.

    A right outside any namespace needs a ClusterRole.
    """
    rules = [*(_rules_of("kinetic") if right.namespace else _CLUSTER_RULES)]
    wanted = {"apiGroups": [right.group], "resources": [right.resource], "verbs": [right.verb]}
    if not any(all(value in rule[field] for field, (value,) in wanted.items()) for rule in rules):
        rules.append(wanted)
    return _role_and_binding("kinetic", rules, right.namespace, user, binding_of(user))


def runner_role(namespace: str, account: str) -> str:
    """Return YAML of the Role of pods, and of its binding to their service *account*."""
    name, user = "kinetic-runner", f"system:serviceaccount:{namespace}:{account}"
    return _role_and_binding(name, _rules_of(name), namespace, user, name)


def _role_and_binding(
    name: str, rules: list[dict[str, list[str]]], namespace: str, user: str, binding: str
) -> str:
    import yaml

    kind = "Role" if namespace else "ClusterRole"
    api = "rbac.authorization.k8s.io"
    scope = {"namespace": namespace} if namespace else {}
    documents = (
        {
            "apiVersion": f"{api}/v1",
            "kind": kind,
            "metadata": {"name": name, **scope},
            "rules": rules,
        },
        {
            "apiVersion": f"{api}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": binding, **scope},
            "roleRef": {"apiGroup": api, "kind": kind, "name": name},
            "subjects": [subject(user)],
        },
    )
    return str(yaml.safe_dump_all(documents, default_flow_style=None, sort_keys=False, width=200))


def subject(user: str) -> dict[str, Any]:
    """Return the entry with which a role binding names *user*."""
    parts = user.split(":")
    if parts[:2] == ["system", "serviceaccount"] and len(parts) == 4:
        return {"kind": "ServiceAccount", "namespace": parts[2], "name": parts[3]}
    return {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}
