"""Compare a pod's requests with nodes: labels, taints, resources in Kubernetes' quantities."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kinetic.aio.kubernetes.diagnosis.documents import Document, get_dict, get_list, labels_of

_TEMPORARY_TAINTS = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "node.cilium.io/",
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
    "ToBeDeletedByClusterAutoscaler",
    "cloud.google.com/impending-node-termination",
)
"""Prefixes of taints that a node has while it starts, is unwell, or is about to be removed."""

_GPU_TYPE = "cloud.google.com/gke-accelerator"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node doesn't take a pod: *text* completes a sentence that begins "NODE has".

    A *temporary* refusal ends by itself.
    """

    text: str
    advice: str = ""
    temporary: bool = False


def refusals(spec: Document, node: Document) -> list[Refusal]:
    """Return why *node* wouldn't take a pod of this *spec* even if it ran no other pod.

    Labels are not considered; see `matches`.
    """
    return [*_resource_refusals(requests(spec), node), *_taint_refusals(spec, node)]


def fits(spec: Document, node: Document) -> bool:
    """Return whether *node* would take a pod of this *spec* if it ran no other pod."""
    return matches(spec, node) and not refusals(spec, node)


def _resource_refusals(requested: Mapping[str, float], node: Document) -> list[Refusal]:
    """Return a refusal for each requested resource of which *node* has too little."""
    status, found = get_dict(node, "status"), list[Refusal]()
    allocatable = status.get("allocatable") or get_dict(status, "capacity")
    for name, amount in requested.items():
        available = parse_quantity(allocatable.get(name, 0))
        # GKE, "Troubleshoot GPUs": a node whose driver isn't installed has no nvidia.com/gpu.
        if name == "nvidia.com/gpu" and not available and (kind := labels_of(node).get(_GPU_TYPE)):
            advice = (
                "wait until the driver is installed; if that takes longer than 10 min, create the "
                "node pool with gpu-driver-version=default"
            )
            found.append(Refusal(f"no usable {kind} yet: its driver isn't ready", advice, True))
        elif amount > available:
            no_amount = f"no {format_amount(name, 0).split(' ', 1)[-1]}"
            text = f"only {format_amount(name, available)}" if available else no_amount
            found.append(Refusal(text, "request less, or add a larger machine type"))
    return found


def _taint_refusals(spec: Document, node: Document) -> list[Refusal]:
    """Return refusals because of the taints of *node*, and because an operator cordoned it."""
    taints = _untolerated_taints(spec, node)
    permanent = [text for key, text in taints.items() if not key.startswith(_TEMPORARY_TAINTS)]
    found: list[Refusal] = []
    if permanent:
        text = f"taint {', '.join(sorted(permanent))}, which the pod doesn't tolerate"
        advice = "add a node pool whose taints the pod tolerates, or have the taint removed"
        found.append(Refusal(text, advice))
    if get_dict(node, "spec").get("unschedulable"):
        found.append(Refusal("been cordoned by an operator", "have it uncordoned, or wait", True))
    if taints and not found:
        names = ", ".join(sorted(key.rpartition("/")[2] for key in taints))
        advice = "wait; this isn't an error"
        if "memory-pressure" in names:
            advice = "wait, or request memory (memory=) to start there earlier"
        found.append(Refusal(f"temporary taint {names}", advice, True))
    return found


def _untolerated_taints(spec: Document, node: Document) -> dict[str, str]:
    """Return the node's taints that a pod of this *spec* doesn't tolerate, by key."""
    found: dict[str, str] = {}
    tolerations = get_list(spec, "tolerations")
    for taint in get_list(get_dict(node, "spec"), "taints"):
        hard = taint.get("effect") in ("NoSchedule", "NoExecute")
        if hard and not any(_tolerates(toleration, taint) for toleration in tolerations):
            key, value = str(taint.get("key", "")), taint.get("value")
            found[key] = f"{key}={value}" if value else key
    return found


def _tolerates(toleration: Document, taint: Document) -> bool:
    key, value = toleration.get("key"), toleration.get("value") or ""
    any_value = toleration.get("operator") == "Exists"
    return (
        (toleration.get("effect") or taint.get("effect")) == taint.get("effect")
        and (key == taint.get("key") if key else any_value)
        and (any_value or value == (taint.get("value") or ""))
    )


def matches(spec: Document, node: Document) -> bool:
    """Return whether *node* has the labels that a pod of this *spec* selects."""
    labels = labels_of(node)
    return all(labels.get(key) in values for key, values in required_labels(spec).items())


def required_labels(spec: Document) -> dict[str, Sequence[str]]:
    """Return the values that the pod's selector and node affinity accept, for each label."""
    affinity: Document = get_dict(get_dict(spec, "affinity"), "nodeAffinity")
    required: Document = get_dict(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    accepted = {
        str(expression.get("key")): get_list(expression, "values")
        for term in get_list(required, "nodeSelectorTerms")[:1]
        for expression in get_list(term, "matchExpressions")
        if expression.get("operator") == "In"
    }
    selector = get_dict(spec, "nodeSelector")
    return accepted | {key: (value,) for key, value in selector.items() if value is not None}


# --- quantities (``500m``, ``2Gi``) ---------------------------------------------------------

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([A-Za-z]*)")
_UNITS = {
    "": 1.0,
    **{unit: 1000.0**-power for power, unit in enumerate("mun", 1)},
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}
NAMES = {
    "cpu": "CPUs",
    "memory": "of memory",
    "ephemeral-storage": "of ephemeral storage",
    "google.com/tpu": "TPU chips",
    "nvidia.com/gpu": "GPUs",
}
"""The words that follow an amount of a resource."""


def parse_quantity(quantity: object) -> float:
    """Return *quantity* in its resource's unit (cores, bytes, pieces); 0 if it isn't a quantity."""
    match = _QUANTITY.fullmatch(str(quantity).strip())
    return float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0


def format_amount(resource: str, amount: float) -> str:
    """Format *amount* of *resource*: ``64 CPUs``, ``500Gi of memory``."""
    name = NAMES.get(resource, resource)
    if resource.endswith(("memory", "storage")) or resource.startswith("hugepages-"):
        return f"{_format_bytes(amount)} {name}"
    is_single = amount == 1 and resource in NAMES
    return f"{amount:g} {name.removesuffix('s') if is_single else name}"


def _format_bytes(size: float) -> str:
    """Format bytes in the largest unit that fits, such as ``1.46Gi``."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if (count := size / _UNITS[unit]) >= 1:
            return f"{count:.0f}{unit}" if count >= 100 else f"{count:.3g}{unit}"
    return f"{size:g}"


def requests(spec: Document) -> dict[str, float]:
    """Return the resources that a pod of this *spec* requests."""
    sidecars = (
        container
        for container in get_list(spec, "initContainers")
        if container.get("restartPolicy") == "Always"
    )
    total: defaultdict[str, float] = defaultdict(float)
    overhead = {"resources": {"requests": get_dict(spec, "overhead")}}
    for container in (*get_list(spec, "containers"), *sidecars, overhead):
        resources: Document = get_dict(container, "resources")
        # A limit counts as the request of a resource for which there is no request.
        requested = {**get_dict(resources, "limits"), **get_dict(resources, "requests")}
        for name, quantity in requested.items():
            total[name] += parse_quantity(quantity)
    return dict(total)
