"""Which nodes could carry a pod, by what it asks for: labels, taints, room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kinetic.aio.kubernetes.diagnosis.documents import Document, part, parts
from kinetic.aio.kubernetes.diagnosis.quantities import number

__all__ = [
    "allocatable",
    "cordoned",
    "is_passing",
    "labels",
    "matches",
    "name_of",
    "refusing",
    "satisfies_affinity",
    "short",
    "taints",
    "wanted",
]

# Taints that a node has for as long as it is made ready, unwell or about to be removed.
_PASSING = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "node.cilium.io/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "cloud.google.com/impending-node-termination",
)


def name_of(node: Document) -> str:
    """The node's name."""
    return str(part(node, "metadata").get("name") or "?")


def labels(node: Document) -> Mapping[str, str]:
    """The node's labels."""
    return part(part(node, "metadata"), "labels")


def allocatable(node: Document, resource: str) -> float:
    """How much of *resource* the node has for pods, in use or not."""
    status: Document = part(node, "status")
    return number((status.get("allocatable") or part(status, "capacity")).get(resource, 0))


def short(asked: Mapping[str, float], node: Document) -> bool:
    """Whether the node has too little of something, even when nothing else runs there."""
    return any(amount > allocatable(node, name) for name, amount in asked.items())


def cordoned(node: Document) -> bool:
    """Whether an operator has closed it."""
    return bool(part(node, "spec").get("unschedulable"))


def refusing(spec: Document, node: Document) -> bool:
    """Whether the node takes no such pod, however much room it has."""
    return cordoned(node) or bool(taints(spec, [node]))


def is_passing(taint: str) -> bool:
    """Whether the taint of this key goes by itself, when the node is ready."""
    return taint.startswith(_PASSING)


def taints(spec: Document, nodes: Iterable[Document]) -> dict[str, str]:
    """The taints of *nodes* that the pod does not tolerate, by key, as people write them."""
    tolerations: Sequence[Mapping[str, Any]] = parts(spec, "tolerations")
    found: dict[str, str] = {}
    for node in nodes:
        for taint in parts(part(node, "spec"), "taints"):
            hard = taint.get("effect") in ("NoSchedule", "NoExecute")
            if hard and not any(_tolerates(one, taint) for one in tolerations):
                key, value = str(taint.get("key", "")), taint.get("value")
                found[key] = f"{key}={value}" if value else key
    return found


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == (
        taint.get("value") or ""
    )


def matches(spec: Document, node: Document) -> bool:
    """Whether the node has the labels that the pod selects."""
    if not part(spec, "nodeSelector").items() <= labels(node).items():
        return False
    return satisfies_affinity(spec, node)


def satisfies_affinity(spec: Document, node: Document) -> bool:
    """Whether the node is one that the pod's required node affinity allows."""
    terms = _terms(spec)
    return not terms or any(_satisfies(term, node) for term in terms)


def wanted(spec: Document) -> str:
    """The labels of the first term of a required affinity, as one says them."""
    told = [
        f"{one.get('key')} {one.get('operator')} {' or '.join(parts(one, 'values'))}".strip()
        for term in _terms(spec)[:1]
        for one in (*parts(term, "matchExpressions"), *parts(term, "matchFields"))
    ]
    return f" ({', '.join(told)})" if told else ""


def _terms(spec: Document) -> Sequence[Document]:
    affinity: Document = part(part(spec, "affinity"), "nodeAffinity")
    required: Document = part(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    return parts(required, "nodeSelectorTerms")


def _satisfies(term: Document, node: Document) -> bool:
    fields = {"metadata.name": name_of(node)}
    return all(_holds(one, labels(node)) for one in parts(term, "matchExpressions")) and all(
        _holds(one, fields) for one in parts(term, "matchFields")
    )


def _holds(expression: Mapping[str, Any], given: Mapping[str, str]) -> bool:
    value = given.get(str(expression.get("key")))
    values: Sequence[str] = parts(expression, "values")
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and number(value) > number(next(iter(values), 0))
        case "Lt":
            return value is not None and number(value) < number(next(iter(values), 0))
        case _:
            return True
