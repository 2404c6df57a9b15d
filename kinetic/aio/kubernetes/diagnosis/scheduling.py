"""Why a pod has no node: what it asks, beside what the nodes have and the autoscaler says.

The scheduler's own message counts each node under its first refusal only and
names no taint, so the request is compared with the nodes themselves.
"""

from __future__ import annotations

import re
from dataclasses import replace

from kinetic._messages import both_ends, one_line
from kinetic.aio.kubernetes.diagnosis.capacity import (
    GKE,
    NO_NODE,
    compared,
    may_hold,
    other_obstacle,
    unplaced,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.pods import Pod
from kinetic.aio.kubernetes.diagnosis.quantities import requests, shown
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook
from kinetic.job_status import Reason

__all__ = ["awaited_volume", "placing"]


def placing(pod: Pod) -> Diagnosis:
    """Judge a pod that the scheduler has looked at and given no node."""
    told = [one for one in conditions(pod.document) if one.get("type") == "PodScheduled"]
    said = str(told[0].get("message") or "") if told else ""
    said = said or pod.last_said("FailedScheduling")
    names, because = _claims(pod)
    facts = {"claims": f" {names}" if names else "", "because": f" ({because})" if because else ""}
    if (found := first(_CLAIMS, said, **facts)) is not None:
        return found
    if told and told[0].get("reason") == "SchedulerError":
        return unplaced(
            f"the scheduler could not place the pod: {one_line(said) or 'it says no more'}",
            "it is tried again; tell the cluster's administrator if it stays",
            Outlook.BLOCKED,
        )
    if chosen := pod.status.get("nominatedNodeName"):
        return unplaced(
            f"place is being made for it on node {chosen}: pods of lower priority are being "
            "stopped there",
            "wait; this is not an error",
        )
    if pod.seen.nodes is None:
        return _scaled(pod, _by_words(pod.spec, said))
    return _scaled(pod, compared(pod.spec, pod.seen.nodes, said, pod.seen.growing))


def _claims(pod: Pod) -> tuple[str, str]:
    """The names of the pod's claims, and what was last said about one of them."""
    named = [
        part(one, "persistentVolumeClaim").get("claimName")
        or f"{pod.metadata.get('name')}-{one.get('name')}"
        for one in parts(pod.spec, "volumes")
        if "persistentVolumeClaim" in one or "ephemeral" in one
    ]
    failures = ("ProvisioningFailed", "FailedBinding", "ExternalProvisioning")
    told = ""
    for event in pod.seen.events:
        target = event.get("involvedObject") or part(event, "regarding")
        ours = target.get("kind") == "PersistentVolumeClaim" and target.get("name") in named
        if ours and event.get("reason") in failures:
            told = f"{target.get('name')}: {one_line(str(event.get('message')))}"
    return ", ".join(repr(str(name)) for name in named), told


def awaited_volume(pod: Pod) -> str:
    """The claim that the scheduler waits for, with a node in mind, before it says anything."""
    names, said = _claims(pod)
    return f"{names}{f' ({said})' if said else ''}" if names else ""


_CLAIM = r'persistentvolumeclaim "?(?P<name>[^\s"]+)"?'
_NONE_SUCH = "create it or correct the name"
_ABSENT = "{name!r} does not exist in the namespace"

_CLAIMS = (
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
        r'controller to create the persistentvolumeclaim "(?P<name>[^"]+)"',
        "PersistentVolumeClaim {name!r}, of an ephemeral volume, is not made yet",
        "see the events of the pod: does its StorageClass exist, does a quota forbid it?",
    ),
    Rule(_CLAIM + " not found", f"PersistentVolumeClaim {_ABSENT}", _NONE_SUCH),
    Rule(
        r'resourceclaim\S* "?(?P<name>[^\s"]+)"? not found', f"ResourceClaim {_ABSENT}", _NONE_SUCH
    ),
    Rule(
        r'(?P<kind>storageclass)\S* "?(?P<name>[^\s"]+)"? not found',
        f"{{kind}} {_ABSENT}",
        _NONE_SUCH,
    ),
    Rule(
        "unbound immediate PersistentVolumeClaims",
        "a PersistentVolumeClaim of the pod{claims} is not bound to a volume yet{because}",
        "see the claim: does its StorageClass exist, is there such a volume?",
    ),
    Rule(
        "didn't find available persistent volumes to bind",
        "there is no volume for the pod's PersistentVolumeClaim{claims} on any node that fits",
        "make such a volume, or use a StorageClass that makes them",
    ),
)


def _by_words(spec: Document, told: str) -> Diagnosis:
    """The nodes are not known: all there is are the scheduler's words.

    Where removing other pods would help, it looks for victims; on the other
    nodes preemption is "not helpful".
    """
    said, _, victims = told.partition(" preemption: ")
    if said.startswith("no nodes available"):
        return NO_NODE
    words = both_ends(re.sub(r"^\S+ nodes are available: |\. no new claims.*$", "", said), 400)
    asks = _asks(spec)
    obstacle = other_obstacle(said)
    lacking = "Insufficient" in said
    waits = lacking or (obstacle is not None and obstacle.outlook is Outlook.OPEN)
    if "No preemption victims" in victims or (waits and not victims):
        what = "what it asks for is in use" if lacking or obstacle is None else "no node has place"
        return unplaced(
            f"{what}{asks}: it starts when other work ends ({words})",
            "wait, or see what else runs there",
        )
    return unplaced(
        f"no node can take it{asks}: {words}",
        "compare what it asks for with the cluster's node pools",
        Outlook.BLOCKED,
    )


def _asks(spec: Document) -> str:
    asked = requests(spec)
    selector = [f"{k.removeprefix(GKE)}={v}" for k, v in part(spec, "nodeSelector").items()]
    wanted = ", ".join([*(shown(name, asked[name]) for name in sorted(asked)), *selector])
    return f" (it asks for {wanted})" if wanted else ""


_TEMPORARY = re.compile(
    r"max (node group size|cluster \w+|limit)|reached|in backoff|failed scale-up|quota", re.I
)


def _scaled(pod: Pod, found: Diagnosis) -> Diagnosis:
    """*found*, in the light of what the cluster autoscaler said last."""
    events = pod.events("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
    if not events:
        return found
    last = str(events[-1].get("reason"))
    said = str(events[-1].get("message") or "")
    failure = pod.last_said("FailedScaleUp")
    if last == "FailedScaleUp" or (failure and "backoff" in said):
        tried = _not_added(failure, _asks(pod.spec))
        paused = "" if last == "FailedScaleUp" else "; the autoscaler pauses before it tries again"
        return replace(tried, message=f"{tried.message}{paused}")
    if last == "TriggeredScaleUp":
        groups = re.findall(r"\{\S*?([\w.-]+) (\d+->\d+)", said)
        which = f" ({', '.join(f'{name} {grows}' for name, grows in groups[:3])})" if groups else ""
        return unplaced(f"a node is being added for this pod: it takes some minutes{which}")
    words = both_ends(said.partition(": ")[2] or said, 400)
    temporary = _TEMPORARY.search(words)
    if found.outlook is Outlook.OPEN or temporary or may_hold(pod.spec, pod.seen.nodes or ()):
        return replace(
            found,
            message=f"{found.message}; no node is added now ({words})",
            advice=found.advice or "wait for other work to end, or let the node pool grow",
            outlook=Outlook.OPEN if temporary else found.outlook,
        )
    return replace(
        found,
        message=f"{found.message}; no node pool could hold this pod, so none is added: it can "
        "never start as asked",
        outlook=Outlook.FINAL,
    )


_ELSEWHERE = "use another zone or type, or wait"

# Why the cloud gave no machine.
_NOT_ADDED = (
    Rule(
        r"\bip.?space|ip.?addresses|\bsubnet",
        "a node could not be added{where}{asks}: its network has no address left ({words})",
        "have the cluster's administrator widen the subnet, or remove nodes",
        Reason.UNSCHEDULABLE,
        Outlook.OPEN,
    ),
    Rule(
        r"out.of.resources|stockout|pool.exhausted|resources? (\S+ )?exhausted"
        r"|does not have enough (resources|capacity)",
        "the cloud has none of this machine left{where} (out of resources), so no node can be "
        "added{asks}",
        "use another zone or another type, or wait",
        Reason.UNSCHEDULABLE,
        Outlook.OPEN,
    ),
    Rule(
        "quota",
        "a node could not be added{where}{asks}: the project's quota is used up ({words})",
        f"have the quota of the cloud project raised, {_ELSEWHERE}",
        Reason.QUOTA,
        Outlook.OPEN,
    ),
    Rule(
        "",
        "a node could not be added{where}{asks}: {words}",
        f"see the quota of the project, {_ELSEWHERE}",
        Reason.UNSCHEDULABLE,
        Outlook.OPEN,
    ),
)


def _not_added(said: str, asks: str) -> Diagnosis:
    zones = re.search(r"zones? ([\w, -]+?) associated", said)
    words = both_ends(said.partition(": ")[2] or said, 400)
    where = f" in {zones[1]}" if zones else ""
    found = first(_NOT_ADDED, words, asks=asks, where=where, words=words)
    return found or NO_NODE
