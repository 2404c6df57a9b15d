"""Why a pod has no node: what it asks, beside what the nodes have and the autoscaler says.

The scheduler's own message counts each node under its first refusal only and
names no taint, so the request is compared with the nodes themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kinetic import accelerators
from kinetic._messages import both_ends, one_line
from kinetic.aio.kubernetes.diagnosis.causes import ABSENT, cause, explained
from kinetic.aio.kubernetes.diagnosis.documents import Document, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.held import is_gated, queued
from kinetic.aio.kubernetes.diagnosis.nodes import Offer, allocatable, labels, offers, wanted
from kinetic.aio.kubernetes.diagnosis.pods import Pod
from kinetic.aio.kubernetes.diagnosis.quantities import is_bytes, requests, shown
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

_OPEN, _BLOCKED = Outlook.OPEN, Outlook.BLOCKED
_GKE = "cloud.google.com/"
_GPU = f"{_GKE}gke-accelerator"
_NAMED = 5
"""Of many nodes, or of many values of a label, so many are named."""


def _unplaced(message: str, advice: str = "", outlook: Outlook = _OPEN) -> Diagnosis:
    """The verdict on a pod that has no node."""
    return pending(message, advice, Reason.UNSCHEDULABLE, outlook)


_NO_NODE = _unplaced(
    "the cluster has no node at all: nothing can start until a node pool has nodes",
    "add a node pool, or let one grow from zero",
    _BLOCKED,
)

_CLAIM = r'persistentvolumeclaim "?(?P<name>[^\s"]+)"?'

# Of ``REASON: the scheduler's words``, and the node that it has in mind.
_REFUSALS = (
    Rule(
        _CLAIM + r' bound to non-existent persistentvolume "?(?P<volume>[^\s"]+)"?',
        "PersistentVolumeClaim {name!r} is bound to volume {volume!r}, which does not exist any "
        "more",
        "delete the claim and make it again; what was on the volume is gone",
    ),
    Rule(
        _CLAIM + " is being deleted",
        "PersistentVolumeClaim {name!r} is being deleted",
        "make it again, or use another one",
    ),
    Rule(
        "controller to create the " + _CLAIM,
        "PersistentVolumeClaim {name!r}, of an ephemeral volume, is not made yet",
        "see the events of the pod: does its StorageClass exist, does a quota forbid it?",
    ),
    *ABSENT,
    Rule(
        "unbound immediate PersistentVolumeClaims",
        "the pod's PersistentVolumeClaim{claims} is not bound to a volume yet",
        "see the claim: does its StorageClass exist, is there such a volume?",
    ),
    Rule(
        "didn't find available persistent volumes to bind",
        "there is no volume for the pod's PersistentVolumeClaim{claims} on any node that fits",
        "make such a volume, or use a StorageClass that makes them",
    ),
    Rule(
        "^SchedulerError: (?P<said>.*)$",
        "the scheduler could not place the pod: {said}",
        "it is tried again; tell the cluster's administrator if it stays",
        Reason.UNSCHEDULABLE,
    ),
    Rule(
        r"^nominated (?P<node>\S+)",
        "place is being made for it on node {node}: pods of lower priority are being stopped there",
        "wait; this is not an error",
        Reason.UNSCHEDULABLE,
        _OPEN,
    ),
)


def placing(pod: Pod) -> Diagnosis:
    """Judge a pod that has no node."""
    if is_gated(pod.document):
        return queued(pod.seen)
    told = [one for one in conditions(pod.document) if one.get("type") == "PodScheduled"]
    last: Document = told[0] if told else {}
    gates = _names(parts(pod.spec, "schedulingGates"), "name")
    if gates or last.get("reason") == "SchedulingGated":
        words = f"the pod is held by scheduling gate {gates or 'that it does not name'}"
        advice = "the controller that owns the gate must release it"
        return pending(words, advice, Reason.QUEUED, _BLOCKED)
    said = pod.last_said("FailedScheduling")
    if last.get("status") != "False" and not said:
        return _unseen(pod)
    said = str(last.get("message") or "") or said
    text = f"nominated {pod.status.get('nominatedNodeName') or ''}\n{last.get('reason')}: {said}"
    claims = _claims(pod)
    if (found := first(_REFUSALS, text, claims=f" {claims}" if claims else "")) is not None:
        return found
    if pod.seen.nodes is None:
        return _scaled(pod, _by_words(pod.spec, said))
    return _scaled(pod, _compared(pod.spec, pod.seen.nodes, said, pod.seen.growing))


def _unseen(pod: Pod) -> Diagnosis:
    """No scheduler has said a word about it: whose silence is that?"""
    scheduler = str(pod.spec.get("schedulerName") or "default-scheduler")
    if scheduler != "default-scheduler":
        words = f"no scheduler called {scheduler!r} has looked at the pod: there is no condition "
        advice = "correct schedulerName, or start that scheduler"
        return _unplaced(f"{words}and no event", advice, _BLOCKED)
    silence = "no scheduler has looked at the pod yet"
    fields = ("resourceClaimName", "resourceClaimTemplateName", "name")
    if names := _names(parts(pod.spec, "resourceClaims"), *fields):
        said = pod.last_said("FailedResourceClaimCreation")
        words = f"{silence}: it waits for ResourceClaim {names}, which may not exist"
        words = f"ResourceClaim {names} cannot be made: {one_line(said)}" if said else words
        return pending(words, "create what is named, or correct the name", Reason.SETUP, _BLOCKED)
    if claims := _claims(pod):
        silence += f", or it waits for a volume to be made for PersistentVolumeClaim {claims}"
    return pending(silence)


def _names(several: Iterable[Document], *fields: str) -> str:
    """The names of *several*, each by the first of *fields* that it has."""
    names = (next((one[key] for key in fields if one.get(key)), None) for one in several)
    return ", ".join(repr(str(name)) for name in names)


def _claims(pod: Pod) -> str:
    """The names of the pod's claims, with what was last said about one of them."""
    named = [
        part(one, "persistentVolumeClaim").get("claimName")
        or f"{pod.metadata.get('name')}-{one.get('name')}"
        for one in parts(pod.spec, "volumes")
        if "persistentVolumeClaim" in one or "ephemeral" in one
    ]
    told = ""
    for event in pod.seen.events:
        target = event.get("involvedObject") or part(event, "regarding")
        ours = target.get("kind") == "PersistentVolumeClaim" and target.get("name") in named
        if ours and event.get("reason") in _OF_CLAIMS:
            told = f" ({target.get('name')}: {one_line(str(event.get('message')))})"
    return f"{', '.join(repr(str(name)) for name in named)}{told}"


_OF_CLAIMS = ("ProvisioningFailed", "FailedBinding", "ExternalProvisioning")


# What a node may refuse that has room, by what the clause of the scheduler's words contains.
_TIME_HELPS = {
    "Too many pods": "wait, or use nodes that may hold more pods",
    "free ports": "wait for the pod that has the host port, or ask for none",
    "max volume count": "wait for pods with volumes to end there, or use other nodes",
    "ReadWriteOncePod": "wait for the pod that has the volume",
    r"anti-affinity|topology spread constraints(?! \(miss)": "compare the pod's affinity and "
    "spread constraints with what else runs there",
}
_TIME_DOES_NOT = {
    "missing required label": "label the nodes, or spread by a label that they have",
    "pod affinity": "what the pod's affinity wants beside it does not run there: start that, or "
    "ask for none",
    "allocate all claims": "see the pod's ResourceClaims, and whether their devices and driver "
    "are on the nodes",
    r"volume|pvc\(s\)|free storage": "a volume can only be used where it lies: use nodes of its "
    "zone, or another volume",
}
_OBSTACLES = [
    Rule(
        rf"(?<=\d |: )[^,.:\d]*({words})[^,.]*",
        "a node is large enough, but {all}",
        advice,
        Reason.UNSCHEDULABLE,
        outlook,
    )
    for outlook, table in ((_OPEN, _TIME_HELPS), (_BLOCKED, _TIME_DOES_NOT))
    for words, advice in table.items()
]


def _compared(
    spec: Document, nodes: Sequence[Document], said: str, growing: bool | None
) -> Diagnosis:
    """Judge what a pod of this *spec* asks for, where the scheduler *said* no.

    *growing* is whether node pools may grow or be made; None means unknown.
    """
    if not nodes:
        return _NO_NODE
    matching, asked = offers(spec, nodes), requests(spec)
    if not matching:
        return _no_label(spec, nodes)
    free = [one for one in matching if not one.closed]
    large = [one for one in matching if not one.short]
    if fitting := [one for one in large if not one.closed]:
        found = _fitting(asked, fitting, said, len(free) - len(fitting))
        shut = [one.name for one in large if one.cordoned and not one.kept]
        other = f"; {_listed(shut)} would fit, but is cordoned" if shut else ""
        return replace(found, message=found.message + other)
    # Nodes without the accelerator do not count, however open they are.
    extended = [name for name in asked if "/" in name]
    able = [one for one in free if all(allocatable(one.node, name) for name in extended)]
    if large and not (able and all(one.kept for one in large)):
        return _closed(large)
    return _too_small(asked, matching, able, Outlook.FINAL if growing is False else _BLOCKED)


_OF_ACCELERATOR = re.compile(rf"{_GKE}gke-(accelerator|tpu|spot)|kubernetes.io/arch")
"""Labels that a user does not write: they follow from the accelerator of the function."""


def _no_label(spec: Document, nodes: Sequence[Document]) -> Diagnosis:
    """No node carries the labels: which one is it, and what is there instead?"""
    selected = part(spec, "nodeSelector").items()
    carried = [labels(node).items() for node in nodes]
    nowhere = selected - {label for one in carried for label in one}
    lacking = nowhere or selected - max(carried, key=lambda one: len(selected & one))
    have = selected - lacking
    near = [one for one in carried if have <= one] or carried
    if not lacking:
        words = f"what the pod's affinity asks for ({', '.join(wanted(spec))})"
    elif nowhere:
        words = ", ".join(_label(one, near) for one in sorted(lacking))
    else:
        words = f"{_listed(map(_label, lacking))} together with {_listed(map(_label, have))}"
    asked = requests(spec)
    over = [name for name in asked if all(asked[name] > allocatable(one, name) for one in nodes)]
    if over:
        words += f"; besides, none has {' and '.join(shown(name, asked[name]) for name in over)}"
    advice = "ask for what a node pool has, or make such a pool"
    if any(_OF_ACCELERATOR.match(key) for key, _ in nowhere):
        advice = (
            "ask for an accelerator= that a node pool has (this label stands for the one that is "
            "asked for), or make such a pool"
        )
    return _unplaced(f"no node has {words}", advice, _BLOCKED)


def _label(label: tuple[str, str], near: Iterable[Iterable[tuple[str, str]]] = ()) -> str:
    """A label as one says it, with the values that it has on nodes which are *near*."""
    values = {value for one in near for key, value in one if key == label[0]}
    there = f" (there {'is' if len(values) == 1 else 'are'} {_listed(values)})" if values else ""
    return f"{label[0].removeprefix(_GKE)}={label[1]}{there}"


def _listed(several: Iterable[str]) -> str:
    words = sorted(several)
    if len(words) > _NAMED:
        words[_NAMED:] = [f"{len(words) - _NAMED} others"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


_COUNTED = re.compile(r"\d+/\d+ nodes|no nodes available")
"""How the scheduler begins when it has looked at nodes."""


def _fitting(
    asked: Mapping[str, float], fitting: Sequence[Offer], said: str, tight: int
) -> Diagnosis:
    """Nodes could carry it: are they in use, or is there something else?

    *tight* other nodes have too little in any case, and are counted as such.
    """
    told = re.findall(r"(\d+) Insufficient ([^\s,]+[^\s,.])", said)
    lacking = {name: int(count) for count, name in told}
    obstacle = first(_OBSTACLES, said)
    if lacking and (obstacle is None or max(lacking.values()) > tight):
        names = [name for name in asked if name in lacking]
        extended = [name for name in names if "/" in name]
        what = ", ".join(shown(name, asked[name]) for name in extended or names)
        what = what if extended or not what else f"room for {what}"
        have = "a node has" if len(fitting) == 1 else f"{len(fitting)} nodes have"
        words = f"{have} {what or 'room'}, but it is in use: it starts when other work ends"
        return _unplaced(words, "wait; this is not an error")
    if obstacle is None and said and not _COUNTED.match(said):
        what, otherwise = "the scheduler cannot place the pod", "see what the message names"
        return explained((), said, what, otherwise, Reason.UNSCHEDULABLE)
    words = f"a node that fits ({fitting[0].name}) is there now: it is placed when that is seen"
    there = f" (the scheduler said of those before: {cause(said)})" if said else ""
    return obstacle or _unplaced(f"{words}{there}")


def _closed(large: Sequence[Offer]) -> Diagnosis:
    """Some nodes are large enough, and each of them is closed to the pod."""
    kept = [one for one in large if one.kept]
    cordoned = [one for one in large if one.cordoned and not one.kept]
    if waiting := [one for one in large if not one.cordoned and not one.kept]:
        words = f"{_only(waiting)} closed for now ({_why(waiting)})"
        going = all("ToBeDeleted" in _why([one]) for one in waiting)
        what = "another node is added" if going else "a node is ready"
        if "memory-pressure" in _why(waiting):
            what = "the node has memory again; one with a memory request (memory=) is let in before"
        return _unplaced(words, f"it starts when {what}")
    if not kept:
        words = f"{_only(cordoned)} cordoned: an operator has closed it"
        return _unplaced(words, "uncordon it, or wait", _BLOCKED)
    taints = sorted({text for one in kept for text in one.kept})
    words = f"{_only(kept)} kept for others by taint {', '.join(taints)}, which the pod does not "
    other = f"; {_listed(one.name for one in cordoned)} would fit, but is cordoned"
    advice = "add the toleration, or ask for other nodes"
    if any(one.startswith(("nvidia.com/gpu", "google.com/tpu")) for one in taints):
        advice = "add the toleration (GKE adds it by itself when the accelerator is in the limits)"
    elif all(one.startswith("node-role.kubernetes.io/") for one in taints):
        advice = "add a node pool for work: these are the control plane's own"
    words += f"tolerate{other if cordoned else ''}"
    if all(one.cordoned for one in kept):
        words += "; besides, an operator has closed it (cordoned)"
        advice += ", and have it uncordoned"
    return _unplaced(words, advice, _BLOCKED)


def _only(nodes: Sequence[Offer]) -> str:
    one = f"the only matching node ({nodes[0].name}) is"
    return one if len(nodes) == 1 else f"the {len(nodes)} matching nodes are"


def _why(nodes: Sequence[Offer]) -> str:
    return ", ".join(sorted({text for one in nodes for text in one.closed}))


def _too_small(
    asked: Mapping[str, float], matching: Sequence[Offer], able: Sequence[Offer], never: Outlook
) -> Diagnosis:
    """More of some resource is asked for than any node open to the pod has."""
    less = "ask for less, or add a larger machine type"
    most = {name: max(allocatable(one.node, name) for one in able or matching) for name in asked}
    over = [name for name in asked if asked[name] > most[name]]
    over.sort(key=lambda one: "/" not in one)  # accelerators come first
    if not over:
        every = ", ".join(shown(name, asked[name]) for name in sorted(asked))
        words = f"no single node has all that the pod asks for: {every}"
        return _unplaced(words, less, never)
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
    words = f"a pod asked for {wants}, the largest matching node has {has}"
    beyond = max(allocatable(one.node, name) for one in matching)
    shut = [one for one in matching if one.closed and allocatable(one.node, name) == beyond]
    if shut and (not able or beyond >= asked[name]):
        which = f"one with {_amount(name, beyond)}" if able else "besides, it"
        words += f"; {which} is closed to the pod ({_why(shut)})"
    if name == "google.com/tpu" and most[name]:
        less = _same_slice(labels(matching[0].node), most[name])
    return _unplaced(f"{words}: it can never start on the nodes there are", less, never)


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


def _by_words(spec: Document, told: str) -> Diagnosis:
    """The nodes are not known: all there is are the scheduler's words.

    Where removing other pods would help, it looks for victims; on the other
    nodes preemption is "not helpful".
    """
    said, _, victims = told.partition(" preemption: ")
    if said.startswith("no nodes available"):
        return _NO_NODE
    obstacle, lacking = first(_OBSTACLES, said), "Insufficient" in said
    passes = lacking or (obstacle is not None and obstacle.outlook is _OPEN)
    if "No preemption victims" in victims or (passes and not victims):
        what = "what it asks for is in use" if lacking or obstacle is None else "no node has place"
        words = f"{what}{_asks(spec)}: it starts when other work ends ({cause(said)})"
        return _unplaced(words, "wait, or see what else runs there")
    advice = "compare what it asks for and tolerates with the cluster's node pools"
    if obstacle is not None and not passes:
        advice = obstacle.advice
    return _unplaced(f"no node can take it{_asks(spec)}: {cause(said)}", advice, _BLOCKED)


def _asks(spec: Document) -> str:
    asked = requests(spec)
    told = [shown(name, asked[name]) for name in sorted(asked)]
    told += map(_label, part(spec, "nodeSelector").items())
    return f" (it asks for {', '.join(told)})" if told else ""


_TEMPORARY = re.compile(
    r"max (node group size|cluster \w+|limit)|reached|in backoff|failed scale-up|quota", re.I
)


def _scaled(pod: Pod, found: Diagnosis) -> Diagnosis:
    """*found*, in the light of what the cluster autoscaler said last."""
    events = pod.events("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
    if not events:
        return found
    last, said = str(events[-1].get("reason")), str(events[-1].get("message") or "")
    if last == "TriggeredScaleUp":
        groups = re.findall(r"\{\S*?([\w.-]+ \d+->\d+)", said)
        which = f" ({', '.join(groups[:3])})" if groups else ""
        return _unplaced(f"a node is being added for this pod: it takes some minutes{which}")
    failure, paused = pod.last_said("FailedScaleUp"), ""
    if last != "FailedScaleUp" and failure and "backoff" in said:
        paused = "; the autoscaler pauses before it tries again"
        last, said = "FailedScaleUp", failure
    words = both_ends(said.partition(": ")[2] or said, 400)
    if last == "FailedScaleUp":
        zones, asks = re.search(r"zones? ([\w, -]+?) associated", said), _asks(pod.spec)
        where = f" in {zones[1]}" if zones else ""
        failed = f"a node could not be added{where}{asks}"
        facts = {"failed": failed, "where": where, "asks": asks, "words": words, "paused": paused}
        return first(_NOT_ADDED, words, **facts) or found
    temporary = _TEMPORARY.search(words)
    may_hold = any(not one.short and not one.kept for one in offers(pod.spec, pod.seen.nodes or ()))
    if found.outlook is _OPEN or temporary or may_hold:
        wait = "wait for other work to end, or let the node pool grow"
        return replace(
            found,
            message=f"{found.message}; no node is added now ({words})",
            advice=wait if "max" in words or not found.advice else found.advice,
            outlook=_OPEN if temporary else found.outlook,
        )
    never = "no node pool could hold this pod, so none is added: it can never start as asked"
    return replace(found, message=f"{found.message}; {never}", outlook=Outlook.FINAL)


_ELSEWHERE = "use another zone or another type, or wait"
_waits = partial(Rule, reason=Reason.UNSCHEDULABLE, outlook=_OPEN)

# Why the cloud gave no machine.
_NOT_ADDED = (
    _waits(
        r"\bip.?space|ip.?addresses|\bsubnet",
        "{failed}: its network has no address left ({words}){paused}",
        "have the cluster's administrator widen the subnet, or remove nodes",
    ),
    _waits(
        r"out.of.resources|stockout|pool.exhausted|resources? (\S+ )?exhausted"
        r"|does not have enough (resources|capacity)",
        "the cloud has none of this machine left{where} (out of resources), so no node can be "
        "added{asks}{paused}",
        _ELSEWHERE,
    ),
    _waits(
        "quota",
        "{failed}: the project's quota is used up ({words}){paused}",
        f"have the quota of the cloud project raised, {_ELSEWHERE}",
        reason=Reason.QUOTA,
    ),
    _waits("", "{failed}: {words}{paused}", f"see the quota of the project, {_ELSEWHERE}"),
)
