"""Nodes beside what a pod asks for: labels, taints, room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinetic.aio.kubernetes.diagnosis.documents import Document, part, parts
from kinetic.aio.kubernetes.diagnosis.quantities import number, requests

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


@dataclass(frozen=True, slots=True)
class Offer:
    """A node that has the labels which a pod selects, as that pod sees it."""

    node: Document
    short: bool
    """Whether it has too little of something, even when nothing else runs there."""
    taints: Mapping[str, str]
    """Those that the pod does not tolerate, by key, as people write them."""

    @property
    def name(self) -> str:
        """The node's name."""
        return str(part(self.node, "metadata").get("name") or "?")

    @property
    def cordoned(self) -> bool:
        """Whether an operator has closed it."""
        return bool(part(self.node, "spec").get("unschedulable"))

    @property
    def kept(self) -> list[str]:
        """The taints that do not go by themselves."""
        return [text for key, text in self.taints.items() if not key.startswith(_PASSING)]

    @property
    def closed(self) -> list[str]:
        """What closes it to the pod; what goes by itself only if there is nothing else."""
        stays = [f"taint {text}" for text in self.kept] + ["cordoned"] * self.cordoned
        return stays or [key.rpartition("/")[2] for key in self.taints]


def offers(spec: Document, nodes: Sequence[Document]) -> list[Offer]:
    """What those of *nodes* offer that a pod of this *spec* selects."""
    asked = requests(spec)
    return [
        Offer(node, short(asked, node), _taints(spec, node))
        for node in nodes
        if matches(spec, node)
    ]


def labels(node: Document) -> Mapping[str, str]:
    """The node's labels."""
    found = part(part(node, "metadata"), "labels")
    return {key: value for key, value in found.items() if value is not None}


def allocatable(node: Document, resource: str) -> float:
    """How much of *resource* the node has for pods, in use or not."""
    status: Document = part(node, "status")
    return number((status.get("allocatable") or part(status, "capacity")).get(resource, 0))


def short(asked: Mapping[str, float], node: Document) -> bool:
    """Whether the node has too little of something, even when nothing else runs there."""
    return any(amount > allocatable(node, name) for name, amount in asked.items())


def refusing(spec: Document, node: Document) -> bool:
    """Whether the node takes no such pod, however much room it has."""
    return bool(Offer(node, False, _taints(spec, node)).closed)


def _taints(spec: Document, node: Document) -> dict[str, str]:
    found: dict[str, str] = {}
    for taint in parts(part(node, "spec"), "taints"):
        hard = taint.get("effect") in ("NoSchedule", "NoExecute")
        if hard and not any(_tolerates(one, taint) for one in parts(spec, "tolerations")):
            key, value = str(taint.get("key", "")), taint.get("value")
            found[key] = f"{key}={value}" if value else key
    return found


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    key, value = toleration.get("key"), toleration.get("value") or ""
    every = toleration.get("operator") == "Exists"
    return (
        (toleration.get("effect") or taint.get("effect")) == taint.get("effect")
        and (key == taint.get("key") if key else every)
        and (every or value == (taint.get("value") or ""))
    )


def matches(spec: Document, node: Document) -> bool:
    """Whether the node has the labels that the pod selects, and one of each that it accepts."""
    given = labels(node)
    return part(spec, "nodeSelector").items() <= given.items() and all(
        given.get(key) in values for key, values in accepted(spec).items()
    )


def accepted(spec: Document) -> dict[str, Sequence[str]]:
    """Return the values that the pod's required node affinity accepts, by label."""
    affinity: Document = part(part(spec, "affinity"), "nodeAffinity")
    required: Document = part(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    return {
        str(one.get("key")): parts(one, "values")
        for term in parts(required, "nodeSelectorTerms")[:1]
        for one in parts(term, "matchExpressions")
        if one.get("operator") == "In"
    }
