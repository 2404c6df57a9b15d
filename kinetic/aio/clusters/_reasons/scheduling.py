"""Why a pod has no node: what it asks, beside what the nodes have and the autoscaler says.

The scheduler's own message counts each node under its first refusal only and
names no taint, so the request is compared with the nodes themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinetic._words import one_line
from kinetic.aio.clusters._reasons.documents import Document, conditions, part, parts
from kinetic.aio.clusters._reasons.quantities import number, requests, shown
from kinetic.aio.clusters._reasons.verdict import Outlook, Seen
from kinetic.job_status import Reason

__all__ = ["Placing", "placing"]

_GKE = "cloud.google.com/"
_TEMPORARY = re.compile(
    r"max (node group size|cluster \w+|limit)|reached|in backoff|failed scale-up|quota", re.I
)
_MISSING = re.compile(
    r"(?P<kind>persistentvolumeclaim|resourceclaim|storageclass\S*)"
    r' "?(?P<name>[^\s"]+)"? not found',
    re.IGNORECASE,
)
_OTHERS = re.compile(
    r"node\(s\) [^,.]*(anti-affinity|affinity rules|free ports|topology spread|volume)[^,.]*"
)
_UNBOUND = re.compile(r"unbound immediate PersistentVolumeClaims")
_KINDS = {"persistentvolumeclaim": "PersistentVolumeClaim", "resourceclaim": "ResourceClaim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Why it waits for a node, and whether time may bring one."""

    message: str
    advice: str = ""
    outlook: Outlook = Outlook.OPEN
    too_large: bool = False
    reason: Reason = Reason.UNSCHEDULABLE


_NO_NODE = Placing(
    message="the cluster has no node at all: nothing can start until a node pool has nodes",
    advice="add a node pool, or let one grow from zero",
    outlook=Outlook.BLOCKED,
)


def placing(seen: Seen, pod: Document) -> Placing:
    """Judge a pod that the scheduler has looked at and given no node."""
    said = _said(pod)
    if missing := _MISSING.search(said):
        kind = _KINDS.get(missing["kind"].lower(), missing["kind"])
        return Placing(
            message=f"{kind} {missing['name']!r} does not exist in the namespace",
            advice="create it or correct the name",
            outlook=Outlook.BLOCKED,
            reason=Reason.SETUP,
        )
    if _UNBOUND.search(said):
        return Placing(
            message="a PersistentVolumeClaim of the pod is not bound to a volume yet",
            advice="see the claim: does its StorageClass exist, is there such a volume?",
            outlook=Outlook.BLOCKED,
            reason=Reason.SETUP,
        )
    spec: Document = part(pod, "spec")
    found = _by_words(spec, pod) if seen.nodes is None else _compared(spec, seen.nodes, _said(pod))
    return _scaled(seen, pod, found)


def _said(pod: Document) -> str:
    """The scheduler's words."""
    said = [one for one in conditions(pod) if one.get("type") == "PodScheduled"]
    return str(said[0].get("message") or "") if said else ""


def _by_words(spec: Document, pod: Document) -> Placing:
    """The nodes are not known: all there is are the scheduler's words.

    Where removing other pods would help, it looks for victims; on the other
    nodes preemption is "not helpful".
    """
    said, _, victims = _said(pod).partition(" preemption: ")
    if said.startswith("no nodes available"):
        return _NO_NODE
    words = one_line(re.sub(r"^\S+ nodes are available: |\. no new claims.*$", "", said))
    asked = requests(spec)
    selector = [f"{k.removeprefix(_GKE)}={v}" for k, v in part(spec, "nodeSelector").items()]
    wanted = ", ".join([*(shown(name, asked[name]) for name in sorted(asked)), *selector])
    asks = f" (it asks for {wanted})" if wanted else ""
    if "No preemption victims" in victims or ("Insufficient" in said and not victims):
        return Placing(
            message=f"what it asks for is in use{asks}: it starts when other work ends ({words})",
            advice="wait, or see what else runs there",
        )
    return Placing(
        message=f"no node can take it{asks}: {words}",
        advice="compare what it asks for with the cluster's node pools",
        outlook=Outlook.BLOCKED,
    )


def _scaled(seen: Seen, pod: Document, found: Placing) -> Placing:
    """*found*, in the light of what the cluster autoscaler said last."""
    events = seen.about(pod, "TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
    if not events and found.too_large and seen.growing is False:
        return replace(found, outlook=Outlook.FINAL)
    if not events:
        return found
    last = events[-1]
    words = one_line(str(last.get("message") or "").partition(": ")[2] or str(last.get("message")))
    if any(event.get("reason") == "FailedScaleUp" for event in events[-1:]):
        stock = re.search(r"out.of.resources|stockout|exhausted|does not have enough", words, re.I)
        zones = re.search(r"zones? ([\w, -]+?) associated", str(last.get("message")))
        where = f" in {zones[1]}" if zones else ""
        if stock:
            return Placing(
                message=f"the cloud has none of this machine left{where} (out of resources), so "
                "no node can be added",
                advice="use another zone or another type, or wait",
            )
        return Placing(
            message=f"a node could not be added{where}: {words}",
            advice="see the quota of the project, use another zone or type, or wait",
        )
    if last.get("reason") == "TriggeredScaleUp":
        return Placing(message="a node is being added for this pod: it takes some minutes")
    if found.outlook is Outlook.OPEN or _TEMPORARY.search(words):
        return Placing(
            message=f"{found.message}; no node is added now ({words})",
            advice=found.advice or "wait for other work to end, or let the node pool grow",
        )
    return Placing(
        message=f"{found.message}; no node pool could hold this pod, so none is added: it can "
        "never start as asked",
        advice=found.advice,
        outlook=Outlook.FINAL,
    )


def _compared(spec: Document, nodes: Sequence[Document], said: str) -> Placing:
    if not nodes:
        return _NO_NODE
    matching = [node for node in nodes if _matches(spec, node)]
    if not matching:
        return _no_label(spec, nodes)
    return _no_room(spec, matching, said)


def _no_label(spec: Document, nodes: Sequence[Document]) -> Placing:
    """No node carries the labels: which one is it, and what is there instead?"""
    selector: Mapping[str, str] = part(spec, "nodeSelector")
    unmet = {
        key: value
        for key, value in selector.items()
        if not any(_labels(node).get(key) == value for node in nodes)
    }
    if not selector or not (unmet or len(selector) > 1):
        return Placing(
            message=f"no node has what the pod's affinity asks for{_wanted(spec)}",
            advice="ask for what a node pool has, or make such a pool",
            outlook=Outlook.BLOCKED,
        )
    told: list[str] = []
    for key, value in (unmet or selector).items():
        others = {k: v for k, v in selector.items() if k not in unmet}
        near = [node for node in nodes if others.items() <= _labels(node).items()] or nodes
        values = sorted({str(_labels(node)[key]) for node in near if key in _labels(node)})
        there = f" (there are {' and '.join(values)})" if values and unmet else ""
        told.append(f"{key.removeprefix(_GKE)}={value}{there}")
    together = "" if unmet else " together"
    return Placing(
        message=f"no node has {', '.join(told)}{together}",
        advice="ask for what a node pool has, or make such a pool",
        outlook=Outlook.BLOCKED,
    )


def _wanted(spec: Document) -> str:
    """The labels of the first term of a required affinity, as one says them."""
    affinity = part(part(spec, "affinity"), "nodeAffinity")
    terms = parts(
        part(affinity, "requiredDuringSchedulingIgnoredDuringExecution"), "nodeSelectorTerms"
    )
    told = [
        f"{one.get('key')} {one.get('operator')} {' or '.join(parts(one, 'values'))}".strip()
        for term in terms[:1]
        for one in parts(term, "matchExpressions")
    ]
    return f" ({', '.join(told)})" if told else ""


def _no_room(spec: Document, matching: Sequence[Document], said: str) -> Placing:
    """Nodes carry the labels: are they closed, tainted, too small, or only busy?"""
    asked = requests(spec)
    open_nodes = [node for node in matching if not _refusing(spec, node)]
    closed = [node for node in matching if _cordoned(node)]
    large = [node for node in matching if not _short(asked, node)]
    if not large:
        return _too_small(asked, matching, open_nodes)
    if fitting := [node for node in open_nodes if node in large]:
        if "Insufficient" in said or "Too many pods" in said:
            return _busy(asked, fitting)
        if others := _OTHERS.search(said):
            return Placing(
                message=f"a node is large enough, but {others[0].strip()}",
                advice="compare the pod's affinity, ports and volumes with what else runs there",
                outlook=Outlook.BLOCKED if "olume" in others[0] else Outlook.OPEN,
            )
        return Placing(message="a node that fits is there now: it is placed when that is seen")
    if all(node in closed for node in large):
        return Placing(
            message=f"{_only(large)} cordoned: an operator has closed it",
            advice="uncordon it, or wait",
            outlook=Outlook.BLOCKED,
        )
    taints = _taints(spec, [node for node in large if node not in closed])
    passing = [key for key in taints if key.startswith("node.kubernetes.io/")]
    if passing and len(passing) == len(taints):
        states = ", ".join(key.removeprefix("node.kubernetes.io/") for key in passing)
        return Placing(
            message=f"{_only(large)} closed for now ({states})",
            advice="it starts when a node is well again",
        )
    if open_nodes:
        return _too_small(asked, matching, open_nodes)
    return Placing(
        message=f"{_only(large)} kept for others by taint {', '.join(taints.values())}, which the "
        "pod does not tolerate",
        advice="add the toleration (GKE adds it by itself when the accelerator is in the limits)",
        outlook=Outlook.BLOCKED,
    )


def _too_small(
    asked: Mapping[str, float], matching: Sequence[Document], open_nodes: Sequence[Document]
) -> Placing:
    """More of some resource is asked for than any node open to the pod has."""
    pool = open_nodes or matching
    name = next(
        (
            one
            for one in sorted(asked, key=lambda one: "/" not in one)
            if asked[one] > max(_has(node, one) for node in pool)
        ),
        "",
    )
    if not name:
        return Placing(
            message="no single node has all that the pod asks for: "
            + ", ".join(shown(one, amount) for one, amount in sorted(asked.items())),
            advice="ask for less, or add a larger machine type",
            outlook=Outlook.BLOCKED,
        )
    most = max(_has(node, name) for node in pool)
    have = f"has {most:g}" if most else "has none"
    if name in ("memory", "ephemeral-storage"):
        have = f"has {shown(name, most)}" if most else "has none"
    beyond = max(_has(node, name) for node in matching)
    words = f"a pod asked for {shown(name, asked[name])}, the largest matching node {have}"
    if beyond >= asked[name] > most:
        words += (
            f" and is open to it; the only larger one ({beyond:g}) is closed or kept by a taint"
        )
    multi = name == "google.com/tpu"
    return Placing(
        message=f"{words}: it can never start on the nodes there are",
        advice=f"ask for {most:g} or use a multi-host slice"
        if multi and most
        else "ask for less, or add a larger machine type",
        outlook=Outlook.BLOCKED,
        too_large=True,
    )


def _busy(asked: Mapping[str, float], nodes: Sequence[Document]) -> Placing:
    extended = [name for name in asked if "/" in name]
    what = ", ".join(shown(name, asked[name]) for name in extended or sorted(asked)) or "room"
    number_of = "a node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"
    return Placing(
        message=f"{number_of} {what}, but it is in use: it starts when other work ends",
        advice="wait; this is not an error",
    )


def _only(nodes: Sequence[Document]) -> str:
    if len(nodes) > 1:
        return f"the {len(nodes)} matching nodes are"
    return f"the only matching node ({part(nodes[0], 'metadata').get('name', '?')}) is"


def _labels(node: Document) -> Mapping[str, str]:
    return part(part(node, "metadata"), "labels")


def _has(node: Document, resource: str) -> float:
    status: Document = part(node, "status")
    return number((status.get("allocatable") or part(status, "capacity")).get(resource, 0))


def _short(asked: Mapping[str, float], node: Document) -> bool:
    return any(amount > _has(node, name) for name, amount in asked.items())


def _cordoned(node: Document) -> bool:
    return bool(part(node, "spec").get("unschedulable"))


def _refusing(spec: Document, node: Document) -> bool:
    return _cordoned(node) or bool(_taints(spec, [node]))


def _taints(spec: Document, nodes: Iterable[Document]) -> dict[str, str]:
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


def _matches(spec: Document, node: Document) -> bool:
    labels = _labels(node)
    if not part(spec, "nodeSelector").items() <= labels.items():
        return False
    affinity: Document = part(part(spec, "affinity"), "nodeAffinity")
    required: Document = part(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    terms: Sequence[Document] = parts(required, "nodeSelectorTerms")
    return not terms or any(_satisfies(term, labels) for term in terms)


def _satisfies(term: Document, labels: Mapping[str, str]) -> bool:
    return all(_holds(one, labels) for one in parts(term, "matchExpressions"))


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(str(expression.get("key")))
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
            return value is not None and number(value) > number(values[0])
        case "Lt":
            return value is not None and number(value) < number(values[0])
        case _:
            return True
