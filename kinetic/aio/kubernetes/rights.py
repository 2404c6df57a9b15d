"""The rights that kinetic uses in a cluster, and the Role that grants them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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
}
"""The resources that not every job needs, and what needs them."""


def _rule(group: str, resource: str, verbs: str) -> dict[str, list[str]]:
    return {"apiGroups": [group], "resources": [resource], "verbs": verbs.split()}


_OWN = "create delete deletecollection get list patch watch"
_NEEDED = (
    _rule("batch", "jobs", _OWN),
    _rule("", "secrets", "create delete deletecollection get list patch update"),
    _rule("", "pods", "delete deletecollection get list watch"),
    _rule("", "pods/log", "get"),
    _rule("", "pods/portforward", "create get"),
    _rule("", "events", "get list watch"),
    _rule("leaderworkerset.x-k8s.io", "leaderworkersets", _OWN),
    _rule("jobset.x-k8s.io", "jobsets", _OWN),
    _rule("kueue.x-k8s.io", "workloads", "get list watch"),
)
"""All that kinetic does in a namespace; ``kinetic/doctor/namespace.yaml`` grants the same."""

_AROUND = (_rule("", "nodes", "get list"),)
"""The resources outside a namespace that explain why a job does not start."""


def rights(namespace: str) -> list[Right]:
    """Return every right that kinetic uses: in *namespace*, and outside any."""
    return [
        Right(verb=verb, group=rule["apiGroups"][0], resource=rule["resources"][0], namespace=where)
        for rules, where in ((_NEEDED, namespace), (_AROUND, ""))
        for rule in rules
        for verb in rule["verbs"]
    ]


def by_resource(missing: Iterable[Right]) -> list[str]:
    """Return a phrase for each resource, with its missing verbs and what needs them."""
    verbs: dict[str, list[str]] = {}
    for one in missing:
        name = f"{one.resource}.{one.group}" if one.group else one.resource
        what = NEEDED_BY.get(one.resource)
        verbs.setdefault(f"{name} ({what})" if what else name, []).append(one.verb)
    return [f"{', '.join(several)} {name}" for name, several in verbs.items()]


def how_to_grant(right: Right, said: str) -> str:
    """Explain how an administrator grants a missing *right*; the refusal *said* names the user."""
    found = re.search(r'User "(?P<user>[^"]*)"', said)
    user = found["user"] if found else "YOU"
    login = "These credentials name no user: log in first. " if user == "system:anonymous" else ""
    where = ""
    if right.namespace:
        where = f"If {right.namespace!r} is not the namespace you mean, set KINETIC_NAMESPACE. "
    return (
        f"Missing: verb {right.verb!r} on resource {right.resource!r} of API group "
        f"{right.group!r}. {where}{login}An administrator of the cluster grants it, and all else "
        f"that kinetic needs, with `kubectl apply -f -` and this:\n{role(right, user)}"
    )


def binding_of(user: str) -> str:
    """Return the name of the binding of *user*; it may hold nearly anything but these two."""
    return "kinetic-" + re.sub(r"[/%]", "-", user)


def role(right: Right, user: str) -> str:
    """Return YAML of the Role with *right* and all that kinetic needs, bound to *user*.

    A right outside any namespace needs a ClusterRole.
    """
    import yaml  # kubernetes_asyncio needs it; only a refused request does here

    rules = [*(_NEEDED if right.namespace else _AROUND)]
    wanted = _rule(right.group, right.resource, right.verb)
    if not any(
        wanted["apiGroups"] == rule["apiGroups"]
        and wanted["resources"] == rule["resources"]
        and right.verb in rule["verbs"]
        for rule in rules
    ):
        rules.append(wanted)
    kind = "Role" if right.namespace else "ClusterRole"
    api = "rbac.authorization.k8s.io"
    place = {"namespace": right.namespace} if right.namespace else {}
    documents = (
        {
            "apiVersion": f"{api}/v1",
            "kind": kind,
            "metadata": {"name": "kinetic", **place},
            "rules": rules,
        },
        {
            "apiVersion": f"{api}/v1",
            "kind": f"{kind}Binding",
            "metadata": {"name": binding_of(user), **place},
            "roleRef": {"apiGroup": api, "kind": kind, "name": "kinetic"},
            "subjects": [subject(user)],
        },
    )
    return str(yaml.safe_dump_all(documents, default_flow_style=None, sort_keys=False, width=200))


def subject(user: str) -> dict[str, Any]:
    """Return *user* as a binding names them."""
    parts = user.split(":")
    if parts[:2] == ["system", "serviceaccount"] and len(parts) == 4:
        return {"kind": "ServiceAccount", "namespace": parts[2], "name": parts[3]}
    return {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}
