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
    "NoMatchingFlavor": "request an accelerator= that a flavor of the queue has",
    "Suspended": "ask the queue's administrator to start the queue again",
    "Inadmissible": "correct the queue's name (KINETIC_QUEUE), or ask its administrator",
}
"""Advice for reasons that Kueue 0.18 and later reports, and for which waiting doesn't help."""

_NO_FLAVOR = re.compile(r"couldn't assign flavors to pod set [^\s:]+: ")


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
    again = "Kueue stopped it; it is " if has_run else ""
    if evicted:
        is_preempted = "preempt" in f"{evicted.get('reason')} {evicted.get('message')}".lower()
        why = "preempted it for other work" if is_preempted else f"evicted it ({evicted['reason']})"
        again = f"Kueue {why}{_message_text(evicted)}; it is "
    if not workload:
        summary = f"{again}waiting in {queue}; its Workload, which has the reason, is not known"
        advice = "wait, or check that Kueue runs and has that queue"
        return _queued_cause(summary, advice, Outlook.OPEN)
    if spec.get("active") is False:
        summary = f"its Workload in {queue} is deactivated{_message_text(evicted)}"
        return _queued_cause(summary, "set its Workload active again, or submit it again")
    reserved: Document = condition(workload, "QuotaReserved", None) or {}
    if reserved.get("status") == "True":
        return _admission_check_cause(queue, workload)
    reason = str(reserved.get("reason"))
    if reason == "ExceedsMaxQuota":
        summary = f"{queue} can never hold it{_message_text(reserved)}"
        return Cause(summary=summary, reason=Reason.QUOTA, outlook=Outlook.FINAL)
    if reason in _STUCK_ADVICE:
        summary = f"{queue} cannot take it{_message_text(reserved)}"
        return _queued_cause(summary, _STUCK_ADVICE[reason])
    summary = f"{again}waiting in {queue}{_message_text(reserved) or ': others are before it'}"
    return _queued_cause(summary, None, Outlook.OPEN)


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
