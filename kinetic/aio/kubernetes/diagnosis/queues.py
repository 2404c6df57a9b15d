"""Find why Kueue holds a job. Its Workload has the reason; the Job only says "suspended"."""

from __future__ import annotations

import re

from kinetic._messages import shorten_middle
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    condition,
    get_dict,
    get_list,
    labels_of,
)
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod
from kinetic.aio.kubernetes.diagnosis.nodes import parse_quantity
from kinetic.aio.kubernetes.manifests import QUEUE
from kinetic.job_status import Reason

_GATE = "kueue.x-k8s.io/admission"


def is_gated(pod: Document) -> bool:
    """Return whether Kueue holds this pod individually, instead of its whole Job or set."""
    return any(
        gate.get("name") == _GATE for gate in get_list(get_dict(pod, "spec"), "schedulingGates")
    )


_STUCK_ADVICE = {
    "Misconfigured": "correct the queue's name (KINETIC_QUEUE), or have the queue created",
    "NoMatchingFlavor": "request what a flavor of the queue has (accelerator=)",
    "Suspended": "ask the queue's administrator to start the queue again",
    "Inadmissible": "correct the queue's name (KINETIC_QUEUE), or ask its administrator",
}
"""Advice for reasons for which waiting doesn't help.

Kueue gives only the last one, unless ``UnadmittedWorkloadsObservability`` is on. Then the message
tells.
"""

_NO_FLAVOR = re.compile(r"couldn't assign flavors to pod set [^\s:]+: ")
_IN_USE = "insufficient unused quota"
_TOO_LARGE = re.compile(
    r"insufficient quota for \S+ in flavor (\S+), (?:previously considered podsets requests "
    r"\((\S+)\) \+ current podset request \((\S+)\) > maximum capacity \((\S+)\)"
    r"|request > maximum capacity \((\S+) > (\S+)\))"
)
_UNFIT = re.compile(r"doesn't match node affinity|untolerated taint|unavailable in ClusterQueue")
_STOPPED = re.compile(r"Queue \S+ is (?:inactive|stopped)")


def queue_cause(facts: JobFacts) -> Cause:
    """Return why Kueue holds the job."""
    workload: Document = facts.workload or {}
    spec, labels = get_dict(workload, "spec"), labels_of(facts.current_or_last_job)
    queue = f"queue {str(spec.get('queueName') or labels.get(QUEUE) or '?')!r}"
    evicted: Document = condition(workload, "Evicted") or {}
    has_run = any(Pod(pod).ran for pod in facts.every_pod)
    if has_run and not evicted:
        workload = {}  # it is older than the start of the pod
    stops = facts.events_about(None, "Started", "Stopped")  # Kueue's events about the Job
    if not workload and stops and stops[-1].get("reason") == "Stopped":
        evicted = stops[-1]
    before = "Kueue stopped it; " if has_run else ""
    if evicted:
        is_preempted = "preempt" in f"{evicted.get('reason')} {evicted.get('message')}".lower()
        why = "preempted it for other work" if is_preempted else f"evicted it ({evicted['reason']})"
        before = f"Kueue {why}{_message_text(evicted)}; "
    waiting = f"{before}{'it is ' if before else ''}waiting in {queue}"
    if not workload:
        summary = f"{waiting}; its Workload, which has the reason, is not known"
        advice = "wait, or check that Kueue runs and has that queue"
        return _queued_cause(summary, advice, Outlook.OPEN)
    if spec.get("active") is False:
        summary = f"its Workload in {queue} is deactivated{_message_text(evicted)}"
        return _queued_cause(summary, "set its Workload active again, or submit it again")
    reserved: Document = condition(workload, "QuotaReserved", None) or {}
    if reserved.get("status") == "True":
        return _admission_check_cause(queue, workload)
    reason = _why_unreserved(workload, reserved)
    if reason == "ExceedsMaxQuota":
        summary = f"{queue} can never hold it{_message_text(reserved)}"
        return Cause(summary=summary, reason=Reason.QUOTA, outlook=Outlook.FINAL)
    if reason in _STUCK_ADVICE:
        summary = f"{before}{queue} cannot take it{_message_text(reserved)}"
        return _queued_cause(summary, _STUCK_ADVICE[reason])
    summary = f"{waiting}{_message_text(reserved) or ': others are before it'}"
    return _queued_cause(summary, None, Outlook.OPEN)


def _why_unreserved(workload: Document, reserved: Document) -> str:
    """Return the most exact reason why *workload* has no quota, by the condition *reserved*."""
    reason, message = str(reserved.get("reason")), str(reserved.get("message") or "")
    if _TOO_LARGE.search(message):  # the reason is of one flavor, and of all pods
        return "ExceedsMaxQuota" if _never_fits(workload, message) else "WaitingForQuota"
    if reason == "Inadmissible" and _STOPPED.search(message):
        return "Suspended"
    if reason == "Pending" and _UNFIT.search(message) and _IN_USE not in message:
        return "NoMatchingFlavor"
    return reason


def _never_fits(workload: Document, message: str) -> bool:
    """Return whether the whole quota of each flavor is too small.

    Kueue's message is about all pods, but Kueue may admit a part of them.
    """
    if _IN_USE in message:
        return False
    pod_sets = get_list(get_dict(workload, "spec"), "podSets")
    count = pod_sets[0].get("count") if len(pod_sets) == 1 else None
    share = (pod_sets[0].get("minCount") or count) / count if count else 1.0
    too_large = dict[str, bool]()
    for flavor, earlier, *amounts in _TOO_LARGE.findall(message):
        request, limit = (parse_quantity(amount) for amount in amounts if amount)
        fits = parse_quantity(earlier) + request * share <= limit
        too_large[flavor] = too_large.get(flavor, False) or not fits
    return all(too_large.values())


def _queued_cause(summary: str, advice: str | None, outlook: Outlook = Outlook.BLOCKED) -> Cause:
    return Cause(summary=summary, advice=advice, reason=Reason.QUEUED, outlook=outlook)


def _message_text(source: Document) -> str:
    """Return ": " and the message of a condition or check, without pod sets; "" if it has none."""
    text = shorten_middle(_NO_FLAVOR.sub("", str(source.get("message") or "")), 300)
    return f": {text}" if text else ""


def _admission_check_cause(queue: str, workload: Document) -> Cause:
    """Return which admission checks hold *workload*, for which *queue* has reserved quota."""
    checks = get_list(get_dict(workload, "status"), "admissionChecks")
    pending = [check for check in checks if check.get("state") != "Ready"]
    if refused := next((check for check in pending if check.get("state") == "Rejected"), None):
        name = f"admission check {refused.get('name')!r} of {queue}"
        summary = f"{name} has refused it{_message_text(refused)}"
        return _queued_cause(summary, "read the check's message, or ask the queue's administrator")
    if not pending:
        return _queued_cause(f"{queue} is about to resume it", None, Outlook.OPEN)
    awaited = " and ".join(
        f"admission check {check.get('name')!r}{_message_text(check)}" for check in pending
    )
    summary = f"{queue} has reserved quota for the job, which waits for {awaited}"
    return _queued_cause(summary, None, Outlook.OPEN)
