"""Why a pod has no node: what it asks, beside what the nodes have and the autoscaler says.

The scheduler's own message counts each node under its first refusal only and
names no taint, so the request is compared with the nodes themselves.
"""

from __future__ import annotations

import re
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.capacity import (
    GKE,
    NO_NODE,
    Placing,
    compared,
    other_obstacle,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.quantities import requests, shown
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook, Seen
from kinetic.job_status import Reason

__all__ = ["Placing", "awaited_volume", "placing"]

_TEMPORARY = re.compile(
    r"max (node group size|cluster \w+|limit)|reached|in backoff|failed scale-up|quota", re.I
)
_STOCK = re.compile(
    r"out.of.resources|stockout|pool.exhausted|resources? (\S+ )?exhausted"
    r"|does not have enough (resources|capacity)",
    re.IGNORECASE,
)
_ADDRESSES = re.compile(r"\bip.?space|ip.?addresses|\bsubnet", re.IGNORECASE)


def placing(seen: Seen, pod: Document) -> Placing:
    """Judge a pod that the scheduler has looked at and given no node."""
    said, reason = _said(seen, pod)
    if (found := _by_claim(seen, pod, said)) is not None:
        return found
    if reason == "SchedulerError":
        return Placing(
            message=f"the scheduler could not place the pod: {one_line(said) or 'it says no more'}",
            advice="it is tried again; tell the cluster's administrator if it stays",
            outlook=Outlook.BLOCKED,
        )
    if chosen := part(pod, "status").get("nominatedNodeName"):
        return Placing(
            message=f"place is being made for it on node {chosen}: pods of lower priority are "
            "being stopped there",
            advice="wait; this is not an error",
        )
    spec: Document = part(pod, "spec")
    found = _by_words(spec, said) if seen.nodes is None else compared(spec, seen.nodes, said)
    return _scaled(seen, pod, found)


def _said(seen: Seen, pod: Document) -> tuple[str, str]:
    """The scheduler's words and its reason: of the pod's condition, else of the last event."""
    told = [one for one in conditions(pod) if one.get("type") == "PodScheduled"]
    words = str(told[0].get("message") or "") if told else ""
    if not words and (events := seen.about(pod, "FailedScheduling")):
        words = str(events[-1].get("message") or "")
    return words, str(told[0].get("reason") or "") if told else ""


def _by_claim(seen: Seen, pod: Document, said: str) -> Placing | None:
    """What is amiss with a volume, or another claim, before any node is considered."""
    names, told = _claims(seen, pod)
    facts = {"claims": f" {names}" if names else "", "because": f" ({told})" if told else ""}
    found = first(_CLAIMS, said, **facts)
    if found is None:
        return None
    return Placing(
        message=found.message, advice=found.advice, outlook=found.outlook, reason=Reason.SETUP
    )


def _claims(seen: Seen, pod: Document) -> tuple[str, str]:
    """The names of the pod's claims, and what was last said about one of them."""
    owner = part(pod, "metadata").get("name")
    named = [
        str(part(one, "persistentVolumeClaim").get("claimName") or f"{owner}-{one.get('name')}")
        for one in parts(part(pod, "spec"), "volumes")
        if "persistentVolumeClaim" in one or "ephemeral" in one
    ]
    told = [
        f"{target.get('name')}: {one_line(str(event.get('message')))}"
        for event in seen.events
        if (target := event.get("involvedObject") or part(event, "regarding")).get("kind")
        == "PersistentVolumeClaim"
        and event.get("reason") in ("ProvisioningFailed", "FailedBinding", "ExternalProvisioning")
        and target.get("name") in named
    ]
    return ", ".join(repr(name) for name in named), told[-1] if told else ""


def awaited_volume(seen: Seen, pod: Document) -> str:
    """The claim that the scheduler waits for, with a node in mind, before it says anything."""
    names, said = _claims(seen, pod)
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


def _by_words(spec: Document, told: str) -> Placing:
    """The nodes are not known: all there is are the scheduler's words.

    Where removing other pods would help, it looks for victims; on the other
    nodes preemption is "not helpful".
    """
    said, _, victims = told.partition(" preemption: ")
    if said.startswith("no nodes available"):
        return NO_NODE
    words = one_line(re.sub(r"^\S+ nodes are available: |\. no new claims.*$", "", said), 400)
    asks = _asks(spec)
    obstacle = other_obstacle(said)
    lacking = "Insufficient" in said
    waits = lacking or (obstacle is not None and obstacle.outlook is Outlook.OPEN)
    if "No preemption victims" in victims or (waits and not victims):
        what = "what it asks for is in use" if lacking or obstacle is None else "no node has place"
        return Placing(
            message=f"{what}{asks}: it starts when other work ends ({words})",
            advice="wait, or see what else runs there",
        )
    return Placing(
        message=f"no node can take it{asks}: {words}",
        advice="compare what it asks for with the cluster's node pools",
        outlook=Outlook.BLOCKED,
    )


def _asks(spec: Document) -> str:
    asked = requests(spec)
    selector = [f"{k.removeprefix(GKE)}={v}" for k, v in part(spec, "nodeSelector").items()]
    wanted = ", ".join([*(shown(name, asked[name]) for name in sorted(asked)), *selector])
    return f" (it asks for {wanted})" if wanted else ""


def _scaled(seen: Seen, pod: Document, found: Placing) -> Placing:
    """*found*, in the light of what the cluster autoscaler said last."""
    events = seen.about(pod, "TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
    if not events and found.too_large and seen.growing is False:
        return replace(found, outlook=Outlook.FINAL)
    if not events:
        return found
    last = events[-1]
    said = str(last.get("message") or "")
    words = one_line(said.partition(": ")[2] or said, 400)
    failures = [one for one in events if one.get("reason") == "FailedScaleUp"]
    if failures and last is not failures[-1] and "backoff" in said:
        said = str(failures[-1].get("message") or "")
        words = one_line(said.partition(": ")[2] or said, 400)
        tried = _not_added(said, words, _asks(part(pod, "spec")))
        return replace(
            tried, message=f"{tried.message}; the autoscaler pauses before it tries again"
        )
    if last.get("reason") == "FailedScaleUp":
        return _not_added(said, words, _asks(part(pod, "spec")))
    if last.get("reason") == "TriggeredScaleUp":
        groups = re.findall(r"\{\S*?([\w.-]+) (\d+->\d+)", said)
        which = f" ({', '.join(f'{name} {grows}' for name, grows in groups[:3])})" if groups else ""
        return Placing(message=f"a node is being added for this pod: it takes some minutes{which}")
    temporary = _TEMPORARY.search(words)
    if found.outlook is Outlook.OPEN or found.passing or temporary:
        return Placing(
            message=f"{found.message}; no node is added now ({words})",
            advice=found.advice or "wait for other work to end, or let the node pool grow",
            outlook=Outlook.OPEN if temporary else found.outlook,
        )
    return Placing(
        message=f"{found.message}; no node pool could hold this pod, so none is added: it can "
        "never start as asked",
        advice=found.advice,
        outlook=Outlook.FINAL,
    )


def _not_added(said: str, words: str, asks: str) -> Placing:
    """Why the cloud gave no machine."""
    zones = re.search(r"zones? ([\w, -]+?) associated", said)
    where = f" in {zones[1]}" if zones else ""
    if _ADDRESSES.search(words):
        return Placing(
            message=f"a node could not be added{where}{asks}: its network has no address left "
            f"({words})",
            advice="have the cluster's administrator widen the subnet, or remove nodes",
        )
    if _STOCK.search(words):
        return Placing(
            message=f"the cloud has none of this machine left{where} (out of resources), so "
            f"no node can be added{asks}",
            advice="use another zone or another type, or wait",
        )
    if "quota" in words.lower():
        return Placing(
            message=f"a node could not be added{where}{asks}: the project's quota is used up "
            f"({words})",
            advice="have the quota of the cloud project raised, use another zone or type, or wait",
            reason=Reason.QUOTA,
        )
    return Placing(
        message=f"a node could not be added{where}{asks}: {words}",
        advice="see the quota of the project, use another zone or type, or wait",
    )
