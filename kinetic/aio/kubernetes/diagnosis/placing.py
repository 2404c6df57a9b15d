"""Find why a pod has no node: compare its requests with the nodes, and check the autoscaler.

The scheduler's message isn't enough: it reports only the first mismatch of each node, and doesn't
name taints.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from kinetic._messages import shorten_middle
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook, Rule, gist, quote_message
from kinetic.aio.kubernetes.diagnosis.claims import claim_cause
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    condition,
    get_dict,
    get_list,
    labels_of,
)
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.diagnosis.nodes import (
    Refusal,
    fits,
    format_amount,
    matches,
    refusals,
    requests,
    required_labels,
)
from kinetic.aio.kubernetes.diagnosis.queues import is_gated, queue_cause
from kinetic.job_status import Reason

_MAX_NAMED = 5
"""The most nodes, or values of a label, that a message names."""

_WAIT_ADVICE = "wait; this isn't an error"
_RETURN_ADVICE = "wait for such a node, or cancel the job if that node pool is gone"


def _unschedulable(
    summary: str, advice: str | None = None, outlook: Outlook = Outlook.BLOCKED
) -> Cause:
    return Cause(summary=summary, advice=advice, reason=Reason.UNSCHEDULABLE, outlook=outlook)


def placement_cause(pod: Pod) -> Cause:
    """Return why *pod* has no node."""
    if is_gated(pod.document):
        return queue_cause(pod.facts)
    scheduled: Document = condition(pod.document, "PodScheduled", None) or {}
    is_refused = scheduled.get("status") == "False"
    message = str(scheduled.get("message") or "") or pod.last_message("FailedScheduling")
    nodes = pod.facts.nodes
    cause = claim_cause(pod, message)
    # A message about nodes counts some of them. It matters only if another node would fit.
    would_fit = nodes is None or any(fits(pod.spec, node) for node in nodes)
    if cause is not None and (would_fit or "node(s)" not in message):
        return cause
    if not (is_refused or message):
        return Cause(summary="no scheduler has looked at the pod yet")
    if gates := get_list(pod.spec, "schedulingGates"):  # such as Kueue's for topologies
        names = " and ".join(repr(gate.get("name")) for gate in gates)
        summary = f"held by scheduling gate {names}"
        advice = "wait, or find out why the controller of that gate doesn't remove it"
        outlook = Outlook.BLOCKED
        return Cause(summary=summary, advice=advice, reason=Reason.QUEUED, outlook=outlook)
    if is_refused and scheduled.get("reason") != "Unschedulable":
        summary = "the scheduler cannot place the pod"
        return quote_message(summary, message, otherwise=Rule("", reason=Reason.UNSCHEDULABLE))
    if nodes is None:
        return _with_autoscaler(pod, _cause_from_message(pod.spec, message))
    return _with_autoscaler(pod, _cause_from_nodes(pod.spec, nodes, message))


def _cause_from_message(spec: Document, message: str) -> Cause:
    """Return why no node takes the pod by the scheduler's *message*, if the nodes aren't known."""
    message, _, preemption = message.partition(" preemption: ")
    if message.startswith("no nodes available"):
        return _NO_NODE
    # The scheduler considers preemption only if stopping other pods would help.
    if "No preemption victims" in preemption or ("Insufficient" in message and not preemption):
        summary = f"all nodes that fit are in use{_request_text(spec)}: {gist(message)}"
        return _unschedulable(summary, _WAIT_ADVICE, Outlook.OPEN)
    advice = "compare its requests and tolerations with the cluster's node pools"
    return _unschedulable(f"no node takes the pod{_request_text(spec)}: {gist(message)}", advice)


def _request_text(spec: Document) -> str:
    requested = [format_amount(name, amount) for name, amount in sorted(requests(spec).items())]
    requested += [_label_text(key, values) for key, values in required_labels(spec).items()]
    return f" (it requests {', '.join(requested)})" if requested else ""


def _label_text(key: str, values: Collection[str]) -> str:
    return f"{key.removeprefix('cloud.google.com/')}={' or '.join(values)}"


_NO_NODE = _unschedulable(
    "the cluster has no node", "add a node, or a node pool that scales up from zero"
)


def _cause_from_nodes(spec: Document, nodes: Sequence[Document], message: str) -> Cause:
    """Return why none of *nodes* takes a pod of this *spec*; *message* is from the scheduler."""
    if not nodes:
        return _NO_NODE
    matching = [node for node in nodes if matches(spec, node)]
    if not matching:
        return _label_cause(spec, nodes)
    refusals_by_node = [
        (str(get_dict(node, "metadata").get("name") or "?"), refusals(spec, node))
        for node in matching
    ]
    free = [name for name, refused in refusals_by_node if not refused]
    if not free:
        return _refusal_cause(spec, refusals_by_node)
    summary = f"{_join_names(free)} can hold it; the scheduler last said: {gist(message)}"
    requested = requests(spec)
    if lacking := [name for name in requested if f"Insufficient {name}" in message]:
        needed = ", ".join(format_amount(name, requested[name]) for name in lacking)
        summary = f"it requests {needed}, in use by other pods on {_join_names(free)}"
    return _unschedulable(summary, _WAIT_ADVICE, Outlook.OPEN)


def _label_cause(spec: Document, nodes: Sequence[Document]) -> Cause:
    """Return which selected labels no node has, and which values nodes have instead."""
    node_labels = [labels_of(node) for node in nodes]
    wanted = required_labels(spec)
    missing = {
        key: values
        for key, values in wanted.items()
        if not any(present.get(key) in values for present in node_labels)
    }
    phrases: list[str] = []
    for key, values in (missing or wanted).items():
        existing = {str(present[key]) for present in node_labels if present.get(key)}
        on_nodes = f" (nodes have {_join_names(existing)})" if existing and missing else ""
        phrases.append(f"{_label_text(key, values)}{on_nodes}")
    return _unschedulable(f"no node has {' together with '.join(phrases)}")


def _refusal_cause(
    spec: Document, refusals_by_node: Sequence[tuple[str, Sequence[Refusal]]]
) -> Cause:
    """Return why the nodes that fit the pod best still refuse it."""
    smallest = min(_distance(refused) for _, refused in refusals_by_node)
    names: dict[tuple[Refusal, ...], list[str]] = {}
    for name, refused in refusals_by_node:
        if _distance(refused) == smallest:
            names.setdefault(tuple(refused), []).append(name)
    clauses = [
        f"{_join_names(nodes)} {'has' if len(nodes) == 1 else 'have'} "
        + " and ".join(refusal.text for refusal in refused)
        for refused, nodes in names.items()
    ]
    # If some node becomes usable by waiting, advise only to wait, not to change other nodes.
    temporary = [refused for refused in names if all(refusal.temporary for refusal in refused)]
    advice = dict.fromkeys(refusal.advice for refused in temporary or names for refusal in refused)
    return _unschedulable(
        f"no node takes the pod{_request_text(spec)}: {'; '.join(clauses)}",
        "; or ".join(advice),
        Outlook.OPEN if temporary else Outlook.BLOCKED,
    )


def _distance(refused: Sequence[Refusal]) -> tuple[int, int]:
    """Return how poorly a node fits a pod; a node with none of a requested resource fits worst."""
    absent = sum(refusal.text.startswith("no ") and not refusal.temporary for refusal in refused)
    return absent, len(refused)


def _join_names(names: Collection[str]) -> str:
    """Return *names* as "a, b and c": at most `_MAX_NAMED`, then how many others there are."""
    shown_names = sorted(names)
    if len(shown_names) > _MAX_NAMED:
        shown_names[_MAX_NAMED:] = [f"{len(shown_names) - _MAX_NAMED} others"]
    *first_names, last_name = shown_names
    return f"{', '.join(first_names)} and {last_name}" if first_names else last_name


# --- the autoscaler -------------------------------------------------------------------------

_TEMPORARY_PROBLEM = re.compile(
    r"max (node group size|cluster \w+|limit)|reached|in backoff|failed scale-up|not ready|quota",
    re.I,
)


def _with_autoscaler(pod: Pod, cause: Cause) -> Cause:
    """Return *cause*, extended or replaced by what the autoscaler does about *pod*."""
    events = pod.events("TriggeredScaleUp", "NotTriggerScaleUp", "FailedScaleUp")
    if not events:
        return cause
    last, message = str(events[-1].get("reason")), str(events[-1].get("message") or "")
    if last == "TriggeredScaleUp":
        groups = re.findall(r"\{\S*?([\w.-]+ \d+->\d+)", message)
        groups_text = f" ({', '.join(groups[:3])})" if groups else ""
        summary = f"a node is being added for this pod, which takes minutes{groups_text}"
        return _unschedulable(summary, _WAIT_ADVICE, Outlook.OPEN)
    failure = pod.last_message("FailedScaleUp")
    if last == "FailedScaleUp" or (failure and "backoff" in message):
        return _scale_up_failure(pod.spec, failure)
    text = shorten_middle(message.partition(": ")[2] or message, 400)
    if _TEMPORARY_PROBLEM.search(text):
        advice = "wait for other work to end, or let the node pool grow"
        cause = replace(cause, advice=advice, outlook=Outlook.OPEN)
    elif cause.outlook is not Outlook.OPEN and pod.facts.had_node:
        # The autoscaler says nothing about machines that the cloud replaces in other node pools.
        summary = f"{cause.summary}; an earlier pod had a node, which may be replaced now"
        cause = replace(cause, summary=summary, advice=_RETURN_ADVICE, outlook=Outlook.OPEN)
    elif cause.outlook is not Outlook.OPEN:
        never = "no node pool could hold this pod, so it can never start as requested"
        return replace(cause, more=[*cause.more, never], outlook=Outlook.FINAL)
    return replace(cause, more=[*cause.more, f"the autoscaler adds no node now ({text})"])


def _scale_up_failure(spec: Document, message: str) -> Cause:
    """Return why the autoscaler added no node, by the *message* of its event."""
    reason_text = message.partition(": ")[2].partition(". Pod is at risk")[0]
    text = shorten_middle(reason_text or message, 400)
    zones = re.search(r"zones? ([\w, -]+?) associated", message)
    in_zones = f" in {zones[1]}" if zones else ""
    summary = f"no node was added{in_zones}{_request_text(spec)}: {text}"
    advice = "use another zone or another machine type, or wait"
    if "quota" in text.lower():
        advice = f"have the quota of the cloud project raised, {advice}"
        return Cause(summary=summary, advice=advice, reason=Reason.QUOTA)
    return _unschedulable(summary, advice, Outlook.OPEN)
