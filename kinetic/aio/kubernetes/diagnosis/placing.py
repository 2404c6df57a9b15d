"""Find why a pod has no node: compare its requests with the nodes, and check the autoscaler.

The scheduler's message isn't enough: it reports only the first mismatch of each node, and doesn't
name taints.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook, gist, quoted
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.diagnosis.nodes import Refusal, labels, matches, refusals, selected
from kinetic.aio.kubernetes.diagnosis.quantities import requests, shown
from kinetic.aio.kubernetes.diagnosis.queues import is_gated, queued
from kinetic.job_status import Reason

_NAMED = 5
"""The most nodes, or values of a label, that a message names."""

_WAIT = "wait; this isn't an error"


def _unplaced(what: str, advice: str | None = None, outlook: Outlook = Outlook.BLOCKED) -> Cause:
    return Cause(what=what, advice=advice, reason=Reason.UNSCHEDULABLE, outlook=outlook)


def placing(pod: Pod) -> Cause:
    """Return why *pod* has no node."""
    if is_gated(pod.document):
        return queued(pod.seen)
    last: Document = condition(pod.document, "PodScheduled", None) or {}
    refused = last.get("status") == "False"
    message = str(last.get("message") or "") or pod.last_message("FailedScheduling")
    if not (refused or message):
        return Cause(what="no scheduler has looked at the pod yet")
    if refused and last.get("reason") != "Unschedulable":
        what = "the scheduler cannot place the pod"
        return quoted(what, message, reason=Reason.UNSCHEDULABLE)
    nodes = pod.seen.nodes
    lack = _quoted(pod.spec, message) if nodes is None else _compared(pod.spec, nodes, message)
    return _scaled(pod, lack)


def _quoted(spec: Document, message: str) -> Cause:
    """Return a cause that quotes the scheduler, for the case that the nodes aren't known."""
    message, _, preemption = message.partition(" preemption: ")
    if message.startswith("no nodes available"):
        return _NO_NODE
    # The scheduler considers preemption only if stopping other pods would help.
    if "No preemption victims" in preemption or ("Insufficient" in message and not preemption):
        what = f"all nodes that fit are in use{_asks(spec)}: {gist(message)}"
        return _unplaced(what, _WAIT, Outlook.OPEN)
    advice = "compare its requests and tolerations with the cluster's node pools"
    return _unplaced(f"no node takes the pod{_asks(spec)}: {gist(message)}", advice)


def _asks(spec: Document) -> str:
    asked = [shown(name, amount) for name, amount in sorted(requests(spec).items())]
    asked += [_label(key, values) for key, values in selected(spec).items()]
    return f" (it requests {', '.join(asked)})" if asked else ""


def _label(key: str, values: Collection[str]) -> str:
    return f"{key.removeprefix('cloud.google.com/')}={' or '.join(values)}"


_NO_NODE = _unplaced(
    "the cluster has no node", "add a node, or a node pool that scales up from zero"
)


def _compared(spec: Document, nodes: Sequence[Document], message: str) -> Cause:
    """Return why none of *nodes* takes a pod of this *spec*; *message* is from the scheduler."""
    if not nodes:
        return _NO_NODE
    matching = [node for node in nodes if matches(spec, node)]
    if not matching:
        return _no_label(spec, nodes)
    found = [(_name(node), refusals(spec, node)) for node in matching]
    free = [name for name, refused in found if not refused]
    if not free:
        return _refused(spec, found)
    lacking = [name for name in requests(spec) if f"Insufficient {name}" in message]
    if lacking:
        needed = ", ".join(shown(name, requests(spec)[name]) for name in lacking)
        what = f"it requests {needed}, in use by other pods on {_listed(free)}"
        return _unplaced(what, _WAIT, Outlook.OPEN)
    what = f"{_listed(free)} can hold it; the scheduler last said: {gist(message)}"
    return _unplaced(what, _WAIT, Outlook.OPEN)


def _name(node: Document) -> str:
    return str(part(node, "metadata").get("name") or "?")


def _no_label(spec: Document, nodes: Sequence[Document]) -> Cause:
    """Return which label no node has, and its values on the nodes."""
    carried = [labels(node) for node in nodes]
    wanted = selected(spec)
    nowhere = {
        key: values
        for key, values in wanted.items()
        if not any(one.get(key) in values for one in carried)
    }
    phrases: list[str] = []
    for key, values in (nowhere or wanted).items():
        there = {one[key] for one in carried if key in one}
        have = f" (nodes have {_listed(there)})" if there and nowhere else ""
        phrases.append(f"{_label(key, values)}{have}")
    return _unplaced(f"no node has {' together with '.join(phrases)}")


def _refused(spec: Document, found: Sequence[tuple[str, Sequence[Refusal]]]) -> Cause:
    """Return why the nodes that fit the pod best still refuse it."""
    least = min(_distance(refused) for _, refused in found)
    names: defaultdict[tuple[Refusal, ...], list[str]] = defaultdict(list)
    for name, refused in found:
        if _distance(refused) == least:
            names[tuple(refused)].append(name)
    clauses = [
        f"{_listed(nodes)} {'has' if len(nodes) == 1 else 'have'} "
        + " and ".join(one.text for one in refused)
        for refused, nodes in names.items()
    ]
    # If some node becomes usable by waiting, advise only to wait, not to change other nodes.
    soon = [refused for refused in names if all(one.temporary for one in refused)]
    advice = dict.fromkeys(one.advice for refused in soon or names for one in refused)
    return _unplaced(
        f"no node takes the pod{_asks(spec)}: {'; '.join(clauses)}",
        "; or ".join(advice),
        Outlook.OPEN if soon else Outlook.BLOCKED,
    )


def _distance(refused: Sequence[Refusal]) -> tuple[int, int]:
    """Return how poorly a node fits a pod; a node with none of a requested resource fits worst."""
    without = sum(one.text.startswith("no ") and not one.temporary for one in refused)
    return without, len(refused)


def _listed(several: Collection[str]) -> str:
    names = sorted(several)
    if len(names) > _NAMED:
        names[_NAMED:] = [f"{len(names) - _NAMED} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


# --- the autoscaler -------------------------------------------------------------------------

_PASSES = re.compile(
    r"max (node group size|cluster \w+|limit)|reached|in backoff|failed scale-up|quota", re.I
)


def _scaled(pod: Pod, lack: Cause) -> Cause:
    """Return why *pod* has no node: *lack*, and what the autoscaler does about it."""
    events = pod.events("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
    if not events:
        return lack
    last, message = str(events[-1].get("reason")), str(events[-1].get("message") or "")
    if last == "TriggeredScaleUp":
        groups = re.findall(r"\{\S*?([\w.-]+ \d+->\d+)", message)
        which = f" ({', '.join(groups[:3])})" if groups else ""
        what = f"a node is being added for this pod, which takes minutes{which}"
        return _unplaced(what, "", Outlook.OPEN)
    failure = pod.last_message("FailedScaleUp")
    if last == "FailedScaleUp" or (failure and "backoff" in message):
        return _not_added(pod.spec, failure)
    text = both_ends(message.partition(": ")[2] or message, 400)
    if _PASSES.search(text):
        advice = "wait for other work to end, or let the node pool grow"
        lack = replace(lack, advice=advice, outlook=Outlook.OPEN)
    elif lack.outlook is not Outlook.OPEN:
        never = "no node pool could hold this pod, so it can never start as requested"
        return replace(lack, more=[*lack.more, never], outlook=Outlook.FINAL)
    return replace(lack, more=[*lack.more, f"the autoscaler adds no node now ({text})"])


def _not_added(spec: Document, message: str) -> Cause:
    text = both_ends(message.partition(": ")[2].partition(". Pod is at risk")[0] or message, 400)
    zones = re.search(r"zones? ([\w, -]+?) associated", message)
    where = f" in {zones[1]}" if zones else ""
    what = f"no node was added{where}{_asks(spec)}: {text}"
    advice = "use another zone or another type, or wait"
    if "quota" in text.lower():
        advice = f"have the quota of the cloud project raised, {advice}"
        return Cause(what=what, advice=advice, reason=Reason.QUOTA)
    return _unplaced(what, advice, Outlook.OPEN)
