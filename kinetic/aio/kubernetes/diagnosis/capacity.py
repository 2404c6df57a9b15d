"""What a pod asks for, beside what the nodes have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
from kinetic.aio.kubernetes.diagnosis.quantities import is_bytes, requests, shown
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

__all__ = ["GKE", "NO_NODE", "compared", "may_hold", "other_obstacle", "unplaced"]

GKE = "cloud.google.com/"
_GPU = f"{GKE}gke-accelerator"
_ACCELERATORS = ("nvidia.com/gpu", "google.com/tpu")
_CONTROL = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
_OPEN, _BLOCKED = Outlook.OPEN, Outlook.BLOCKED
_NAMED = 5
"""Of many nodes, or of many values of a label, so many are named."""


def unplaced(message: str, advice: str = "", outlook: Outlook = _OPEN) -> Diagnosis:
    """The verdict on a pod that has no node."""
    return pending(message, advice, Reason.UNSCHEDULABLE, outlook)


NO_NODE = unplaced(
    "the cluster has no node at all: nothing can start until a node pool has nodes",
    "add a node pool, or let one grow from zero",
    _BLOCKED,
)


def _but(pattern: str, advice: str, outlook: Outlook) -> Rule:
    words = "a node is large enough, but {all}"
    return Rule(pattern, words, advice, Reason.UNSCHEDULABLE, outlook)


# What a node may refuse that has room, in the scheduler's words.
_OBSTACLES = (
    _but(r"Too many pods", "wait, or use nodes that may hold more pods", _OPEN),
    _but(
        r"node\(s\) didn't have free ports[^,.]*",
        "wait for the pod that has the host port, or ask for none",
        _OPEN,
    ),
    _but(
        r"node\(s\) didn't match pod affinity rules",
        "what the pod's affinity wants beside it does not run there: start that, or ask for none",
        _BLOCKED,
    ),
    _but(
        r"node\(s\) [^,.]*missing required label[^,.]*",
        "label the nodes, or spread by a label that they have",
        _BLOCKED,
    ),
    _but(
        r"node\(s\) [^,.]*(anti-affinity|affinity rules|topology spread)[^,.]*",
        "compare the pod's affinity and spread constraints with what else runs there",
        _OPEN,
    ),
    _but(
        r"cannot allocate all claims",
        "see the pod's ResourceClaims, and whether their devices and driver are on the nodes",
        _BLOCKED,
    ),
    _but(
        r"node\(s\) exceed max volume count",
        "wait for pods with volumes to end there, or use other nodes",
        _OPEN,
    ),
    _but(
        r"node\(s\) unavailable due to PersistentVolumeClaim with ReadWriteOncePod[^,.]*",
        "wait for the pod that has the volume",
        _OPEN,
    ),
    _but(
        r"node\(s\) [^,.]*(PersistentVolume|volume|pvc\(s\)|free storage)[^,.]*",
        "a volume can only be used where it lies: use nodes of its zone, or another volume",
        _BLOCKED,
    ),
)


def other_obstacle(said: str) -> Diagnosis | None:
    """What the scheduler says against nodes that have room: pods, ports, rules, volumes."""
    return first(_OBSTACLES, said)


def may_hold(spec: Document, nodes: Sequence[Document]) -> bool:
    """Whether people or other pods alone keep a pod of this *spec* from one of *nodes*."""
    asked = requests(spec)
    return any(
        matches(spec, node) and not short(asked, node) and not _hard(spec, node) for node in nodes
    )


def _hard(spec: Document, node: Document) -> list[str]:
    """Its taints that do not go by themselves."""
    return [text for key, text in taints(spec, [node]).items() if not is_passing(key)]


def compared(
    spec: Document, nodes: Sequence[Document], said: str, growing: bool | None
) -> Diagnosis:
    """Judge what a pod of this *spec* asks for, where the scheduler *said* no.

    *growing* is whether node pools may grow or be made; None means unknown.
    """
    if not nodes:
        return NO_NODE
    matching = [node for node in nodes if matches(spec, node)]
    if not matching:
        return _no_label(spec, nodes)
    asked = requests(spec)
    large = [node for node in matching if not short(asked, node)]
    never = Outlook.FINAL if growing is False else _BLOCKED
    if not large:
        return _too_small(spec, asked, matching, never)
    if fitting := [node for node in large if not refusing(spec, node)]:
        tight = [one for one in matching if short(asked, one) and not refusing(spec, one)]
        return _fitting(asked, fitting, said, len(tight))
    if all(_hard(spec, node) for node in large) and _open(spec, asked, matching):
        return _too_small(spec, asked, matching, never)
    return _closed(spec, large)


_OF_ACCELERATOR = (
    _GPU,
    f"{GKE}gke-accelerator-count",
    f"{GKE}gke-tpu-accelerator",
    f"{GKE}gke-tpu-topology",
    f"{GKE}gke-spot",
    "kubernetes.io/arch",
)
"""Labels that a user does not write: they follow from the accelerator of the function."""


def _no_label(spec: Document, nodes: Sequence[Document]) -> Diagnosis:
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
        words = f"no node has what the pod's affinity asks for{wanted(spec)}"
    elif unmet:
        others = {key: value for key, value in selector.items() if key not in unmet}
        near = [node for node in nodes if others.items() <= labels(node).items()] or nodes
        words = f"no node has {', '.join(_unmet(key, unmet[key], near) for key in unmet)}"
    else:
        nearest = max(nodes, key=lambda node: len(selector.items() & labels(node).items()))
        have = selector.items() & labels(nearest).items()
        lacking = selector.items() - have
        words = f"no node has {_pairs(dict(lacking))} together with {_pairs(dict(have))}"
    return unplaced(words, advice, _BLOCKED)


def _unmet(key: str, value: str, near: Sequence[Document]) -> str:
    values = sorted({str(labels(node)[key]) for node in near if key in labels(node)})
    there = f" (there {'is' if len(values) == 1 else 'are'} {_listed(values)})" if values else ""
    return f"{key.removeprefix(GKE)}={value}{there}"


def _pairs(found: Mapping[str, str]) -> str:
    return _listed([f"{key.removeprefix(GKE)}={found[key]}" for key in sorted(found)])


def _listed(words: Sequence[str]) -> str:
    if len(words) > _NAMED:
        return f"{', '.join(words[:_NAMED])} and {len(words) - _NAMED} others"
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _fitting(
    asked: Mapping[str, float], fitting: Sequence[Document], said: str, tight: int
) -> Diagnosis:
    """Nodes could carry it: are they in use, or is there something else?

    *tight* other nodes have too little in any case, and are counted as such.
    """
    told = re.findall(r"(\d+) Insufficient ([^\s,]+)", said)
    lacking = {name.rstrip("."): int(count) for count, name in told}
    obstacle = other_obstacle(said)
    if lacking and (obstacle is None or max(lacking.values()) > tight):
        names = [name for name in asked if name in lacking]
        names = [name for name in names if "/" in name] or names
        what = ", ".join(shown(name, asked[name]) for name in names) or "room"
        have = "a node has" if len(fitting) == 1 else f"{len(fitting)} nodes have"
        words = f"{have} {what}, but it is in use: it starts when other work ends"
        return unplaced(words, "wait; this is not an error")
    if obstacle is not None:
        return obstacle
    words = one_line(re.sub(r"^\S+ nodes are available: |\. no new claims.*$", "", said))
    there = f" (the scheduler said of those before: {words})" if words else ""
    return unplaced(
        f"a node that fits ({name_of(fitting[0])}) is there now: it is placed when that is seen"
        f"{there}"
    )


def _only(nodes: Sequence[Document]) -> str:
    if len(nodes) > 1:
        return f"the {len(nodes)} matching nodes are"
    return f"the only matching node ({name_of(nodes[0])}) is"


def _closed(spec: Document, large: Sequence[Document]) -> Diagnosis:
    """Some nodes are large enough, and each of them is closed to the pod."""
    free = [node for node in large if not _hard(spec, node)]
    if waiting := [node for node in free if not cordoned(node)]:
        keys = sorted({key.partition("/")[2] or key for key in taints(spec, waiting)})
        words = f"{_only(waiting)} closed for now ({', '.join(keys)})"
        return unplaced(words, "it starts when a node is well again")
    tainted = [node for node in large if node not in free]
    if not tainted:
        words = f"{_only(free)} cordoned: an operator has closed it"
        return unplaced(words, "uncordon it, or wait", _BLOCKED)
    names = sorted({text for node in tainted for text in _hard(spec, node)})
    shut = f"; {_listed([name_of(one) for one in free])} would fit, but is cordoned" if free else ""
    return unplaced(
        f"{_only(tainted)} kept for others by taint {', '.join(names)}, which the pod does not "
        f"tolerate{shut}",
        _tolerate(names),
        _BLOCKED,
    )


def _tolerate(names: Sequence[str]) -> str:
    keys = {name.partition("=")[0] for name in names}
    if keys.issubset(_CONTROL):
        return "add a node pool for work: these are the control plane's own"
    if keys.intersection(_ACCELERATORS):
        return "add the toleration (GKE adds it by itself when the accelerator is in the limits)"
    return "add the toleration, or ask for other nodes"


def _too_small(
    spec: Document, asked: Mapping[str, float], matching: Sequence[Document], never: Outlook
) -> Diagnosis:
    """More of some resource is asked for than any node open to the pod has."""
    open_nodes = _open(spec, asked, matching)
    most = {name: max(allocatable(node, name) for node in open_nodes or matching) for name in asked}
    over = [name for name in asked if asked[name] > most[name]]
    over.sort(key=lambda one: "/" not in one)
    if not over:
        every = ", ".join(shown(one, amount) for one, amount in sorted(asked.items()))
        words = f"no single node has all that the pod asks for: {every}"
        return unplaced(words, "ask for less, or add a larger machine type", _BLOCKED)
    name = over[0]
    # Documents: GKE, 'Troubleshoot GPUs': without its driver a node has no nvidia.com/gpu.
    promised = [labels(one)[_GPU] for one in matching if _GPU in labels(one)]
    if name == "nvidia.com/gpu" and not most[name] and promised:
        return unplaced(
            f"the nodes with {promised[0]} have no usable GPU yet: its driver is not ready",
            "wait some minutes while the driver is installed; if it stays, let the node pool "
            "install it (gpu-driver-version=default)",
        )
    words = (
        f"a pod asked for {' and '.join(shown(one, asked[one]) for one in over)}, the largest "
        f"matching node has {' and '.join(_amount(one, most[one]) for one in over)}"
    )
    if larger := [node for node in matching if not short(asked, node)]:
        beyond = max(allocatable(node, name) for node in larger)
        words += (
            f" and is open to it; the only larger one ({_amount(name, beyond)}) is closed or kept "
            f"by a taint ({_why_closed(spec, larger)})"
        )
    elif not open_nodes:
        largest = [node for node in matching if allocatable(node, name) == most[name]]
        words += f"; besides, it is closed to the pod ({_why_closed(spec, largest)})"
    slices = name == "google.com/tpu" and most[name]
    return unplaced(
        f"{words}: it can never start on the nodes there are",
        f"ask for {most[name]:g} or use a multi-host slice"
        if slices
        else "ask for less, or add a larger machine type",
        never,
    )


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
    told = sorted({text for node in nodes for text in _hard(spec, node)})
    words = [f"taint {', '.join(told)}"] if told else []
    words += ["cordoned"] * any(cordoned(node) for node in nodes)
    return ", ".join(words or sorted(taints(spec, nodes)))


def _amount(name: str, amount: float) -> str:
    return "none" if not amount else shown(name, amount) if is_bytes(name) else f"{amount:g}"
