"""What a pod asks for, beside what the nodes have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.documents import Document, part
from kinetic.aio.kubernetes.diagnosis.nodes import (
    allocatable,
    cordoned,
    is_passing,
    labels,
    matches,
    name_of,
    refusing,
    satisfies_affinity,
    short,
    taints,
    wanted,
)
from kinetic.aio.kubernetes.diagnosis.quantities import requests, shown
from kinetic.aio.kubernetes.diagnosis.rules import Finding
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook
from kinetic.job_status import Reason

__all__ = ["GKE", "NO_NODE", "Placing", "compared", "other_obstacle"]

GKE = "cloud.google.com/"
_ACCELERATORS = ("nvidia.com/gpu", "google.com/tpu")
_CONTROL = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
_NAMED = 5
"""Of many nodes, or of many values of a label, so many are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing(Finding):
    """Why it waits for a node, and whether time may bring one.

    ``passing`` is what people or other pods may end, with the nodes and the
    request as they are.
    """

    reason: Reason | None = Reason.UNSCHEDULABLE
    outlook: Outlook = Outlook.OPEN
    too_large: bool = False
    passing: bool = False


NO_NODE = Placing(
    message="the cluster has no node at all: nothing can start until a node pool has nodes",
    advice="add a node pool, or let one grow from zero",
    outlook=Outlook.BLOCKED,
)

# What a node may refuse that has room, in the scheduler's words.
_OBSTACLES: tuple[tuple[str, str, Outlook], ...] = (
    (
        r"Too many pods",
        "wait, or use nodes that may hold more pods",
        Outlook.OPEN,
    ),
    (
        r"node\(s\) didn't have free ports[^,.]*",
        "wait for the pod that has the host port, or ask for none",
        Outlook.OPEN,
    ),
    (
        r"node\(s\) didn't match pod affinity rules",
        "what the pod's affinity wants beside it does not run there: start that, or ask for none",
        Outlook.BLOCKED,
    ),
    (
        r"node\(s\) [^,.]*missing required label[^,.]*",
        "label the nodes, or spread by a label that they have",
        Outlook.BLOCKED,
    ),
    (
        r"node\(s\) [^,.]*(anti-affinity|affinity rules|topology spread)[^,.]*",
        "compare the pod's affinity and spread constraints with what else runs there",
        Outlook.OPEN,
    ),
    (
        r"cannot allocate all claims",
        "see the pod's ResourceClaims, and whether their devices and driver are on the nodes",
        Outlook.BLOCKED,
    ),
    (
        r"node\(s\) exceed max volume count",
        "wait for pods with volumes to end there, or use other nodes",
        Outlook.OPEN,
    ),
    (
        r"node\(s\) unavailable due to PersistentVolumeClaim with ReadWriteOncePod[^,.]*",
        "wait for the pod that has the volume",
        Outlook.OPEN,
    ),
    (
        r"node\(s\) [^,.]*(PersistentVolume|[Vv]olume|pvc\(s\)|free storage)[^,.]*",
        "a volume can only be used where it lies: use nodes of its zone, or another volume",
        Outlook.BLOCKED,
    ),
)


def other_obstacle(said: str) -> Placing | None:
    """What the scheduler says against nodes that have room: pods, ports, rules, volumes."""
    for pattern, advice, outlook in _OBSTACLES:
        if found := re.search(pattern, said):
            return Placing(
                message=f"a node is large enough, but {found[0].strip()}",
                advice=advice,
                outlook=outlook,
                passing=True,
            )
    return None


def compared(spec: Document, nodes: Sequence[Document], said: str) -> Placing:
    """Judge what a pod of this *spec* asks for, where the scheduler *said* no."""
    if not nodes:
        return NO_NODE
    matching = [node for node in nodes if matches(spec, node)]
    if not matching:
        return _no_label(spec, nodes)
    asked = requests(spec)
    large = [node for node in matching if not short(asked, node)]
    if not large:
        return _too_small(spec, asked, matching)
    if fitting := [node for node in large if not refusing(spec, node)]:
        tight = [one for one in matching if short(asked, one) and not refusing(spec, one)]
        return _fitting(asked, fitting, said, len(tight))
    return _closed(spec, asked, matching, large)


_OF_ACCELERATOR = (
    f"{GKE}gke-accelerator",
    f"{GKE}gke-accelerator-count",
    f"{GKE}gke-tpu-accelerator",
    f"{GKE}gke-tpu-topology",
    f"{GKE}gke-spot",
    "kubernetes.io/arch",
)
"""Labels that a user does not write: they follow from the accelerator of the function."""


def _no_label(spec: Document, nodes: Sequence[Document]) -> Placing:
    """No node carries the labels: which one is it, and what is there instead?"""
    selector: Mapping[str, str] = part(spec, "nodeSelector")
    unmet = {
        key: value
        for key, value in selector.items()
        if not any(labels(node).get(key) == value for node in nodes)
    }
    advice = "ask for what a node pool has, or make such a pool"
    if any(key in _OF_ACCELERATOR for key in unmet):
        advice = (
            "ask for an accelerator= that a node pool has (this label stands for the one that is "
            "asked for), or make such a pool"
        )
    selected = [node for node in nodes if selector.items() <= labels(node).items()]
    if selected and not any(satisfies_affinity(spec, node) for node in selected):
        return Placing(
            message=f"no node has what the pod's affinity asks for{wanted(spec)}",
            advice=advice,
            outlook=Outlook.BLOCKED,
        )
    told: list[str] = []
    for key, value in (unmet or selector).items():
        others = {k: v for k, v in selector.items() if k not in unmet}
        near = [node for node in nodes if others.items() <= labels(node).items()] or nodes
        values = sorted({str(labels(node)[key]) for node in near if key in labels(node)})
        verb = "is" if len(values) == 1 else "are"
        there = f" (there {verb} {_listed(values)})" if values and unmet else ""
        told.append(f"{key.removeprefix(GKE)}={value}{there}")
    message = f"no node has {', '.join(told)}"
    if not unmet:
        nearest = max(nodes, key=lambda node: len(selector.items() & labels(node).items()))
        lacking = dict(selector.items() - labels(nearest).items())
        have = dict(selector.items() & labels(nearest).items())
        message = f"no node has {_pairs(lacking)} together with {_pairs(have)}"
    return Placing(
        message=message,
        advice=advice,
        outlook=Outlook.BLOCKED,
    )


def _pairs(found: Mapping[str, str]) -> str:
    return _listed([f"{key.removeprefix(GKE)}={found[key]}" for key in sorted(found)])


def _listed(words: Sequence[str]) -> str:
    if len(words) > _NAMED:
        return f"{', '.join(words[:_NAMED])} and {len(words) - _NAMED} others"
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _fitting(
    asked: Mapping[str, float], fitting: Sequence[Document], said: str, tight: int
) -> Placing:
    """Nodes could carry it: are they in use, or is there something else?

    *tight* other nodes have too little in any case, and are counted as such.
    """
    told = re.findall(r"(\d+) Insufficient ([^\s,]+)", said)
    lacking = {name.rstrip("."): int(count) for count, name in told}
    obstacle = other_obstacle(said)
    if lacking and (obstacle is None or max(lacking.values()) > tight):
        return _busy(asked, fitting, [name for name in asked if name in lacking])
    if obstacle is not None:
        return obstacle
    words = one_line(re.sub(r"^\S+ nodes are available: |\. no new claims.*$", "", said))
    there = f" (the scheduler said of those before: {words})" if words else ""
    return Placing(
        message=f"a node that fits ({name_of(fitting[0])}) is there now: it is placed when that is "
        f"seen{there}"
    )


def _busy(asked: Mapping[str, float], nodes: Sequence[Document], lacking: Sequence[str]) -> Placing:
    extended = [name for name in asked if "/" in name]
    names = [name for name in extended if name in lacking] or lacking or extended or sorted(asked)
    what = ", ".join(shown(name, asked[name]) for name in names) or "room"
    number_of = "a node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"
    return Placing(
        message=f"{number_of} {what}, but it is in use: it starts when other work ends",
        advice="wait; this is not an error",
    )


def _only(nodes: Sequence[Document]) -> str:
    if len(nodes) > 1:
        return f"the {len(nodes)} matching nodes are"
    return f"the only matching node ({name_of(nodes[0])}) is"


def _closed(
    spec: Document,
    asked: Mapping[str, float],
    matching: Sequence[Document],
    large: Sequence[Document],
) -> Placing:
    """Some nodes are large enough, and each of them is closed to the pod."""
    kept = {name_of(node): taints(spec, [node]) for node in large}
    hard = {
        name: [text for key, text in found.items() if not is_passing(key)]
        for name, found in kept.items()
    }
    free = [node for node in large if not hard[name_of(node)]]
    if waiting := [node for node in free if not cordoned(node)]:
        keys = sorted(
            {key.partition("/")[2] or key for one in waiting for key in kept[name_of(one)]}
        )
        return Placing(
            message=f"{_only(waiting)} closed for now ({', '.join(keys)})",
            advice="it starts when a node is well again",
        )
    if not free and _open(spec, asked, matching):
        return _too_small(spec, asked, matching)
    shut = f"{_only(free)} cordoned: an operator has closed it" if free else ""
    tainted = [node for node in large if node not in free]
    if not tainted:
        return Placing(
            message=shut, advice="uncordon it, or wait", outlook=Outlook.BLOCKED, passing=True
        )
    names = sorted({text for node in tainted for text in hard[name_of(node)]})
    words = (
        f"{_only(tainted)} kept for others by taint {', '.join(names)}, which the "
        "pod does not tolerate"
    )
    if free:
        shut = f"; {_listed([name_of(one) for one in free])} would fit, but is cordoned"
    return Placing(
        message=words + shut,
        advice=_tolerate(names),
        outlook=Outlook.BLOCKED,
        passing=bool(free),
    )


def _tolerate(names: Sequence[str]) -> str:
    keys = {name.partition("=")[0] for name in names}
    if keys.issubset(_CONTROL):
        return "add a node pool for work: these are the control plane's own"
    if keys.intersection(_ACCELERATORS):
        return "add the toleration (GKE adds it by itself when the accelerator is in the limits)"
    return "add the toleration, or ask for other nodes"


def _too_small(spec: Document, asked: Mapping[str, float], matching: Sequence[Document]) -> Placing:
    """More of some resource is asked for than any node open to the pod has."""
    open_nodes = _open(spec, asked, matching)
    pool = open_nodes or matching
    most = {name: max(allocatable(node, name) for node in pool) for name in asked}
    over = [name for name in asked if asked[name] > most[name]]
    over.sort(key=lambda one: "/" not in one)
    if not over:
        return Placing(
            message="no single node has all that the pod asks for: "
            + ", ".join(shown(one, amount) for one, amount in sorted(asked.items())),
            advice="ask for less, or add a larger machine type",
            outlook=Outlook.BLOCKED,
        )
    name = over[0]
    words = (
        f"a pod asked for {' and '.join(shown(one, asked[one]) for one in over)}, the largest "
        f"matching node has {' and '.join(_amount(one, most[one]) for one in over)}"
    )
    larger = [node for node in matching if not short(asked, node)]
    if larger:
        beyond = max(allocatable(node, name) for node in larger)
        words += (
            f" and is open to it; the only larger one ({_amount(name, beyond)}) is closed or kept "
            f"by a taint ({_why_closed(spec, larger)})"
        )
    elif not open_nodes:
        largest = [node for node in matching if allocatable(node, name) == most[name]]
        words += f"; besides, it is closed to the pod ({_why_closed(spec, largest)})"
    if kind := _without_driver(name, most[name], matching):
        return Placing(
            message=f"the nodes with {kind} have no usable GPU yet: its driver is not ready",
            advice="wait some minutes while the driver is installed; if it stays, let the node "
            "pool install it (gpu-driver-version=default)",
            outlook=Outlook.OPEN,
        )
    multi = name == "google.com/tpu"
    return Placing(
        message=f"{words}: it can never start on the nodes there are",
        advice=f"ask for {most[name]:g} or use a multi-host slice"
        if multi and most[name]
        else "ask for less, or add a larger machine type",
        outlook=Outlook.BLOCKED,
        too_large=True,
    )


def _without_driver(name: str, most: float, nodes: Sequence[Document]) -> str:
    """The GPU that the nodes' label promises, where the nodes have none to give.

    Documents: GKE, 'Troubleshoot GPUs': without its driver a node has no nvidia.com/gpu.
    """
    if name != "nvidia.com/gpu" or most:
        return ""
    return next((labels(one)[_GPU] for one in nodes if _GPU in labels(one)), "")


_GPU = "cloud.google.com/gke-accelerator"


def _open(
    spec: Document, asked: Mapping[str, float], matching: Sequence[Document]
) -> list[Document]:
    """Nodes that would take the pod, and have some of each accelerator that it asks for."""
    extended = [name for name in asked if "/" in name]
    return [
        node
        for node in matching
        if not refusing(spec, node) and all(allocatable(node, name) for name in extended)
    ]


def _why_closed(spec: Document, nodes: Sequence[Document]) -> str:
    found = taints(spec, nodes)
    told = sorted(text for key, text in found.items() if not is_passing(key))
    words = [f"taint {', '.join(told)}"] if told else []
    words += ["cordoned"] * any(cordoned(node) for node in nodes)
    return ", ".join(words or sorted(found))


def _amount(name: str, amount: float) -> str:
    if not amount:
        return "none"
    if name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
        return shown(name, amount)
    return f"{amount:g}"
