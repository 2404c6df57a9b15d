"""Find why Kueue holds a job. Its Workload has the reason; the Job only says "suspended"."""

from __future__ import annotations

import re

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts
from kinetic.aio.kubernetes.diagnosis.facts import Seen
from kinetic.job_status import Reason

QUEUE = "kueue.x-k8s.io/queue-name"
_GATE = "kueue.x-k8s.io/admission"


def is_gated(pod: Document) -> bool:
    """Return whether Kueue holds this pod individually, instead of its whole Job or set."""
    return any(one.get("name") == _GATE for one in parts(part(pod, "spec"), "schedulingGates"))


_STUCK = {
    "Misconfigured": "correct the queue's name (KINETIC_QUEUE), or have it created",
    "NoMatchingFlavor": "request an accelerator= that a flavor of the queue has",
    "Suspended": "ask the queue's administrator to start it again",
    "Inadmissible": "correct the queue's name (KINETIC_QUEUE), or ask its administrator",
}
"""Advice for reasons that Kueue 0.18 and later reports, and for which waiting doesn't help."""

_NO_FLAVOR = re.compile(r"couldn't assign flavors to pod set [^\s:]+: ")


def queued(seen: Seen) -> Cause:
    """Return why Kueue holds the job."""
    workload: Document = seen.workload or {}
    labels = part(part(seen.any_job, "metadata"), "labels")
    queue = f"queue {str(part(workload, 'spec').get('queueName') or labels.get(QUEUE) or '?')!r}"
    evicted: Document = condition(workload, "Evicted") or {}
    if not workload:
        what = f"waiting in {queue}; its Workload, which has the reason, was not found"
        return _held(what, "wait, or check that Kueue runs and has that queue", Outlook.OPEN)
    if part(workload, "spec").get("active") is False:
        what = f"its Workload in {queue} is deactivated{_message(evicted)}"
        return _held(what, "set its Workload active again, or submit it again")
    reserved: Document = condition(workload, "QuotaReserved", None) or {}
    if reserved.get("status") == "True":
        return _checked(queue, workload)
    why = str(reserved.get("reason"))
    if why == "ExceedsMaxQuota":
        what = f"{queue} can never hold it{_message(reserved)}"
        return Cause(what=what, reason=Reason.QUOTA, outlook=Outlook.FINAL)
    if why in _STUCK:
        return _held(f"{queue} cannot take it{_message(reserved)}", _STUCK[why])
    again = f"the queue evicted it ({evicted.get('reason')}{_message(evicted)}), and it is "
    because = _message(reserved) or ": others are before it"
    return _held(f"{again if evicted else ''}waiting in {queue}{because}", None, Outlook.OPEN)


def _held(what: str, advice: str | None, outlook: Outlook = Outlook.BLOCKED) -> Cause:
    return Cause(what=what, advice=advice, reason=Reason.QUEUED, outlook=outlook)


def _message(by: Document) -> str:
    """Return the message of a condition or check, without the prefix of each pod set."""
    text = both_ends(_NO_FLAVOR.sub("", str(by.get("message") or "")), 300)
    return f": {text}" if text else ""


def _checked(queue: str, workload: Document) -> Cause:
    """Return which admission checks hold a workload whose quota is already reserved."""
    checks = parts(part(workload, "status"), "admissionChecks")
    left = [one for one in checks if one.get("state") != "Ready"]
    if refused := next((one for one in left if one.get("state") == "Rejected"), None):
        what = (
            f"admission check {refused.get('name')!r} of {queue} has refused it{_message(refused)}"
        )
        return _held(what, "read the check's message, or ask the queue's administrator")
    awaited = ", ".join(f"{one.get('name')}{_message(one)}" for one in left)
    progress = (
        f"has reserved its quota and waits for {awaited}" if left else "is about to resume it"
    )
    return _held(f"{queue} {progress}", None, Outlook.OPEN)
