"""Why a pod has no node: what it asks for, beside what nodes have and the autoscaler says.

The scheduler's own message counts each node under its first refusal only and names no
taint, so the request is compared with the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kinetic import accelerators
from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.causes import ABSENT, Cause, Outlook, gist, known, quoted
from kinetic.aio.kubernetes.diagnosis.documents import Document, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.diagnosis.nodes import Offer, accepted, allocatable, labels, offers
from kinetic.aio.kubernetes.diagnosis.quantities import is_bytes, requests, shown
from kinetic.aio.kubernetes.diagnosis.queues import is_gated, queued
from kinetic.job_status import Reason

_OPEN, _BLOCKED = Outlook.OPEN, Outlook.BLOCKED
_GKE = "cloud.google.com/"
_GPU = f"{_GKE}gke-accelerator"
_NAMED = 5
"""How many nodes, or values of a label, a message names."""


def _unplaced(what: str, advice: str | None = None, outlook: Outlook = _OPEN) -> Cause:
    if advice is None and outlook is _OPEN:
        advice = ""  # time alone helps
    return Cause(what=what, advice=advice, reason=Reason.UNSCHEDULABLE, outlook=outlook)


_WAIT = "wait; this is not an error"


def placing(pod: Pod) -> Cause:
    """Return why *pod* has no node."""
    if is_gated(pod.document):
        return queued(pod.seen)
    told = [one for one in conditions(pod.document) if one.get("type") == "PodScheduled"]
    last: Document = told[0] if told else {}
    if gates := [repr(one.get("name")) for one in parts(pod.spec, "schedulingGates")]:
        what = f"the pod is held by scheduling gate {', '.join(gates)}"
        advice = "the controller that owns the gate must release it"
        return Cause(what=what, advice=advice, reason=Reason.QUEUED, outlook=_BLOCKED)
    said = pod.last_said("FailedScheduling")
    if last.get("status") != "False" and not said:
        return Cause(what="no scheduler has looked at the pod yet")
    said = str(last.get("message") or "") or said
    if node := pod.status.get("nominatedNodeName"):
        what = f"the scheduler makes room for it on node {node}: it stops pods of lower priority"
        return _unplaced(what, _WAIT)
    if (found := known(ABSENT, said)) is not None:
        return found
    nodes = pod.seen.nodes
    lack = _quoted(pod.spec, said) if nodes is None else _compared(pod.spec, nodes, said)
    return _scaled(pod, lack)


def _quoted(spec: Document, told: str) -> Cause:
    """Return the scheduler's own words: the nodes are not known.

    Where stopping other pods would help, the scheduler looks for victims; otherwise it
    says that preemption is not helpful.
    """
    said, _, victims = told.partition(" preemption: ")
    if said.startswith("no nodes available"):
        return _NO_NODE
    if "No preemption victims" in victims or ("Insufficient" in said and not victims):
        what = f"what it asks for is in use{_asks(spec)}: it starts when other work ends"
        return _unplaced(f"{what} ({gist(said)})", "wait, or see what else runs there")
    advice = "compare what it asks for and tolerates with the cluster's node pools"
    return _unplaced(f"no node can take it{_asks(spec)}: {gist(said)}", advice, _BLOCKED)


def _asks(spec: Document) -> str:
    asked = requests(spec)
    told = [shown(name, asked[name]) for name in sorted(asked)]
    told += map(_label, part(spec, "nodeSelector").items())
    return f" (it asks for {', '.join(told)})" if told else ""


_NO_NODE = _unplaced(
    "the cluster has no node at all: nothing can start until a node pool has nodes",
    "add a node pool, or let one grow from zero",
    _BLOCKED,
)


def _compared(spec: Document, nodes: Sequence[Document], said: str) -> Cause:
    """Return why none of *nodes* takes a pod of this *spec*, of which the scheduler *said* so."""
    if not nodes:
        return _NO_NODE
    matching, asked = offers(spec, nodes), requests(spec)
    if not matching:
        return _no_label(spec, asked, nodes)
    free = [one for one in matching if not one.closed]
    large = [one for one in matching if not one.short]
    if fitting := [one for one in large if not one.closed]:
        return _fitting(asked, fitting, large, said)
    # Nodes without the accelerator do not count, however open they are.
    extended = [name for name in asked if "/" in name]
    able = [one for one in free if all(allocatable(one.node, name) for name in extended)]
    if large and not (able and all(one.kept for one in large)):
        return _closed(large)
    return _too_small(asked, matching, able)


_OF_ACCELERATOR = re.compile(rf"{_GKE}gke-(accelerator|tpu|spot)|kubernetes.io/arch")
"""Labels that a user does not write: they follow from the function's accelerator."""


def _no_label(spec: Document, asked: Mapping[str, float], nodes: Sequence[Document]) -> Cause:
    """Return which label no node has, and what there is instead."""
    selected = part(spec, "nodeSelector").items()
    carried = [labels(node).items() for node in nodes]
    nowhere = selected - {label for one in carried for label in one}
    lacking = nowhere or selected - max(carried, key=lambda one: len(selected & one))
    have = selected - lacking
    near = [one for one in carried if have <= one] or carried
    if not lacking:
        either = (f"{key}={' or '.join(values)}" for key, values in accepted(spec).items())
        words = " and ".join(either)
    elif nowhere:
        words = ", ".join(_label(one, near) for one in sorted(lacking))
    else:
        words = f"{_listed(map(_label, lacking))} together with {_listed(map(_label, have))}"
    over = [name for name in asked if all(asked[name] > allocatable(one, name) for one in nodes)]
    more = (
        [f"no node has {' and '.join(shown(name, asked[name]) for name in over)}"] if over else []
    )
    advice = None
    if any(_OF_ACCELERATOR.match(key) for key, _ in nowhere):
        advice = (
            "ask for an accelerator= that a node pool has (this label stands for the one that is "
            "asked for), or make such a pool"
        )
    return replace(_unplaced(f"no node has {words}", advice, _BLOCKED), more=more)


def _label(label: tuple[str, str], near: Iterable[Iterable[tuple[str, str]]] = ()) -> str:
    """Return a label for people, with the values that it has on nodes which are *near*."""
    values = {value for one in near for key, value in one if key == label[0]}
    there = f" (there {'is' if len(values) == 1 else 'are'} {_listed(values)})" if values else ""
    return f"{label[0].removeprefix(_GKE)}={label[1]}{there}"


def _listed(several: Iterable[str]) -> str:
    words = sorted(several)
    if len(words) > _NAMED:
        words[_NAMED:] = [f"{len(words) - _NAMED} others"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


_FULL = re.compile(r"Insufficient ([^\s,]+[^\s,.])")
_BESIDE = re.compile(r"Too many pods|\d+ node\(s\) (?!didn't match Pod's node aff|had untol)[^,.]*")
"""What refuses a pod on nodes that are large enough: the number of pods, ports, volumes."""


def _fitting(
    asked: Mapping[str, float], fitting: Sequence[Offer], large: Sequence[Offer], said: str
) -> Cause:
    """Return why nodes that could carry it don't: they are in use, or it is something else."""
    shut = [one.name for one in large if one.cordoned and not one.kept]
    more = [f"{_listed(shut)} would fit, but is cordoned"] if shut else []
    have = "a node has" if len(fitting) == 1 else f"{len(fitting)} nodes have"
    if lacking := [name for name in asked if name in _FULL.findall(said)]:
        extended = [name for name in lacking if "/" in name]
        what = ", ".join(shown(name, asked[name]) for name in extended or lacking)
        room = what if extended else f"room for {what}"
        what = f"{have} {room}, but it is in use: it starts when other work ends"
        return replace(_unplaced(what, _WAIT), more=more)
    if beside := _BESIDE.findall(said):
        what = f"{have} room for it, but the scheduler says: {'; '.join(beside)}"
        return replace(_unplaced(what, "wait, or use other nodes"), more=more)
    if said and not re.match(r"\d+/\d+ nodes|no nodes available", said):
        return quoted("the scheduler cannot place the pod", said, Reason.UNSCHEDULABLE)
    there = f" (the scheduler said before: {gist(said)})" if said else ""
    what = f"a node that fits ({fitting[0].name}) is there now: the scheduler will see it{there}"
    return replace(_unplaced(what), more=more)


def _closed(large: Sequence[Offer]) -> Cause:
    """Return why the nodes that are large enough are closed to the pod."""
    kept = [one for one in large if one.kept]
    cordoned = [one for one in large if one.cordoned and not one.kept]
    if waiting := [one for one in large if not one.cordoned and not one.kept]:
        why = _why(waiting)
        what = "another node is added" if "ToBeDeleted" in why else "a node is ready"
        if "memory-pressure" in why:
            what = "the node has memory again; state a memory request (memory=) to get in earlier"
        return _unplaced(f"{_only(waiting)} closed for now ({why})", f"it starts when {what}")
    if not kept:
        what = f"{_only(cordoned)} cordoned: an operator has closed it"
        return _unplaced(what, "uncordon it, or wait", _BLOCKED)
    taints = sorted({text for one in kept for text in one.kept})
    what = (
        f"{_only(kept)} kept for others by taint {', '.join(taints)}, which the pod does not "
        "tolerate"
    )
    more = [f"{_listed(one.name for one in cordoned)} would fit, but is cordoned"] * bool(cordoned)
    advice = "add the toleration, or ask for other nodes"
    if any(one.startswith(("nvidia.com/gpu", "google.com/tpu")) for one in taints):
        advice = "add the toleration (GKE adds it by itself when the accelerator is in the limits)"
    if all(one.cordoned for one in kept):
        more.append("an operator has closed it as well (cordoned)")
        advice += ", and have it uncordoned"
    return replace(_unplaced(what, advice, _BLOCKED), more=more)


def _only(nodes: Sequence[Offer]) -> str:
    one = f"the only matching node ({nodes[0].name}) is"
    return one if len(nodes) == 1 else f"the {len(nodes)} matching nodes are"


def _why(nodes: Sequence[Offer]) -> str:
    return ", ".join(sorted({text for one in nodes for text in one.closed}))


def _too_small(
    asked: Mapping[str, float], matching: Sequence[Offer], able: Sequence[Offer]
) -> Cause:
    """Return what is asked for that no node open to the pod has."""
    less = "ask for less, or add a larger machine type"
    most = {name: max(allocatable(one.node, name) for one in able or matching) for name in asked}
    over = sorted((name for name in asked if asked[name] > most[name]), key=lambda n: "/" not in n)
    if not over:
        every = ", ".join(shown(name, asked[name]) for name in sorted(asked))
        return _unplaced(f"no single node has all that the pod asks for: {every}", less, _BLOCKED)
    name = over[0]
    # Documents: GKE, 'Troubleshoot GPUs': without its driver a node has no nvidia.com/gpu.
    promised = [labels(one.node)[_GPU] for one in matching if _GPU in labels(one.node)]
    if name == "nvidia.com/gpu" and not most[name] and promised:
        return _unplaced(
            f"the nodes with {promised[0]} have no usable GPU yet: its driver is not ready",
            "wait some minutes while the driver is installed; if it stays, let the node pool "
            "install it (gpu-driver-version=default)",
        )
    wants = " and ".join(shown(one, asked[one]) for one in over)
    has = " and ".join(_amount(one, most[one]) for one in over)
    beyond = max(allocatable(one.node, name) for one in matching)
    shut = [one for one in matching if one.closed and allocatable(one.node, name) == beyond]
    more: list[str] = []
    if shut and (not able or beyond >= asked[name]):
        which = f"one with {_amount(name, beyond)}" if able else "that node"
        more = [f"{which} is closed to the pod ({_why(shut)})"]
    if name == "google.com/tpu" and most[name]:
        less = _same_slice(labels(matching[0].node), most[name])
    what = (
        f"a pod asked for {wants}, the largest matching node has {has}: it can never start on the "
        "nodes there are"
    )
    return replace(_unplaced(what, less, _BLOCKED), more=more)


def _same_slice(node: Mapping[str, str], chips: float) -> str:
    """Name the accelerator whose pods share the slice of *node*, each with *chips* of it."""
    shape = (node.get(f"{_GKE}gke-tpu-accelerator"), node.get(f"{_GKE}gke-tpu-topology"))
    for one in accelerators.catalogue():
        if (one.label, one.topology) == shape and one.chips_per_host == chips:
            fits = f"ask for accelerator={str(one)!r}, which these nodes are made for"
            return f"{fits}, or for a multi-host slice that a node pool has"
    return "ask for an accelerator= that a node pool has, such as a multi-host slice"


def _amount(name: str, amount: float) -> str:
    return "none" if not amount else shown(name, amount) if is_bytes(name) else f"{amount:g}"


# --- what the autoscaler says ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stock:
    """Why the cloud gives no machine, and what to do."""

    pattern: str
    why: str
    advice: str
    reason: Reason = Reason.UNSCHEDULABLE


_ELSEWHERE = "use another zone or another type, or wait"
_STOCK = (
    _Stock(
        r"\bip.?space|ip.?addresses|\bsubnet",
        "its network has no address left",
        "have the cluster's administrator widen the subnet, or remove nodes",
    ),
    _Stock(
        r"out.of.resources|stockout|pool.exhausted|resources? (\S+ )?exhausted"
        r"|does not have enough (resources|capacity)",
        "the cloud has none of this machine left (out of resources)",
        _ELSEWHERE,
    ),
    _Stock(
        "quota",
        "the project's quota is used up",
        f"have the quota of the cloud project raised, {_ELSEWHERE}",
        Reason.QUOTA,
    ),
    _Stock("", "the cloud refused it", f"see the quota of the project, {_ELSEWHERE}"),
)
_TEMPORARY = re.compile(
    r"max (node group size|cluster \w+|limit)|reached|in backoff|failed scale-up|quota", re.I
)


def _scaled(pod: Pod, lack: Cause) -> Cause:
    """Return the cause that results from what the pod lacks and what the autoscaler does."""
    events = pod.events("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
    if not events:
        return lack
    last, said = str(events[-1].get("reason")), str(events[-1].get("message") or "")
    if last == "TriggeredScaleUp":
        groups = re.findall(r"\{\S*?([\w.-]+ \d+->\d+)", said)
        which = f" ({', '.join(groups[:3])})" if groups else ""
        return _unplaced(f"a node is being added for this pod: it takes some minutes{which}")
    failure = pod.last_said("FailedScaleUp")
    if last == "FailedScaleUp" or (failure and "backoff" in said):
        paused = ["the autoscaler pauses before it tries again"] * (last != "FailedScaleUp")
        return _not_added(pod.spec, failure, paused)
    words = both_ends(said.partition(": ")[2] or said, 400)
    temporary = _TEMPORARY.search(words)
    may_hold = any(not one.short and not one.kept for one in offers(pod.spec, pod.seen.nodes or ()))
    if lack.outlook is _OPEN or temporary or may_hold:
        wait = "wait for other work to end, or let the node pool grow"
        advice = wait if temporary else lack.next_step
        outlook = _OPEN if temporary else lack.outlook
        more = (*lack.more, f"no node is added now ({words})")
        return replace(lack, more=more, advice=advice, outlook=outlook)
    never = "no node pool could hold this pod, so none is added: it can never start as asked"
    return replace(lack, more=(*lack.more, never), outlook=Outlook.FINAL)


def _not_added(spec: Document, said: str, more: Sequence[str]) -> Cause:
    words = both_ends(said.partition(": ")[2] or said, 400)
    stock = next(one for one in _STOCK if re.search(one.pattern, words, re.I))
    zones = re.search(r"zones? ([\w, -]+?) associated", said)
    where = f" in {zones[1]}" if zones else ""
    what = f"a node could not be added{where}{_asks(spec)}: {stock.why} ({words})"
    return Cause(what=what, more=more, advice=stock.advice, reason=stock.reason, outlook=_OPEN)
