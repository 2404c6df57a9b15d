"""Why Kueue holds a job: its Workload says so, the Job only says "suspended"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.facts import Seen
from kinetic.aio.kubernetes.diagnosis.quantities import NAMES
from kinetic.job_status import Reason

QUEUE = "kueue.x-k8s.io/queue-name"
_GATE = "kueue.x-k8s.io/admission"


def is_gated(pod: Document) -> bool:
    """Whether Kueue holds this pod, and not the whole that it belongs to."""
    return any(one.get("name") == _GATE for one in parts(part(pod, "spec"), "schedulingGates"))


_STUCK = {
    "Misconfigured": "correct the queue's name (KINETIC_QUEUE), or have it created",
    "NoMatchingFlavor": "ask for an accelerator= that a flavor of the queue has",
    "Suspended": "ask the queue's administrator to start it again",
    "Inadmissible": "correct the queue's name (KINETIC_QUEUE), or ask its administrator",
}
"""Reasons of Kueue 0.18 and later that don't pass by themselves, and what to do."""

_NO_FLAVOR = re.compile(r"^couldn't assign flavors to pod set \S+: ")
_LACK = re.compile(r"quota (?:in cohort )?for (\S+) in flavor ([^,\s]+), (\S+) more needed")


def queued(seen: Seen) -> Cause:
    """Return why Kueue holds the job."""
    workload: Document = seen.workload or {}
    labels = part(part(seen.any_job, "metadata"), "labels")
    queue = f"queue {str(part(workload, 'spec').get('queueName') or labels.get(QUEUE) or '?')!r}"
    evicted: Document = condition(workload, "Evicted") or {}
    if not workload:
        what = f"waiting in {queue}; its Workload, which says why, was not seen"
        return _held(what, "wait, or see whether Kueue runs and knows that queue", Outlook.OPEN)
    if part(workload, "spec").get("active") is False:
        what = f"its Workload in {queue} is deactivated{_said(evicted)}"
        return _held(what, "set its Workload active again, or submit it again")
    found = [one for one in conditions(workload) if one.get("type") == "QuotaReserved"]
    reserved: Document = found[0] if found else {}
    if reserved.get("status") == "True":
        return _checked(queue, parts(part(workload, "status"), "admissionChecks"))
    why = str(reserved.get("reason"))
    if why == "ExceedsMaxQuota":
        what = f"{queue} can never hold it{_said(reserved)}"
        advice = "ask for less, or have the queue's quota raised"
        return Cause(what=what, advice=advice, reason=Reason.QUOTA, outlook=Outlook.FINAL)
    if why in _STUCK:
        return _held(f"{queue} cannot take it{_said(reserved)}", _STUCK[why])
    lacks = [*_LACK.finditer(str(reserved.get("message")))]
    needed = [
        f"{one[3]} more {NAMES.get(one[1], one[1]).removeprefix('of ')} of quota needed "
        f"(flavor {one[2]})"
        for one in lacks
    ]
    because = f": {'; '.join(dict.fromkeys(needed))}" if needed else _said(reserved)
    again = f"the queue took it back ({evicted.get('reason')}{_said(evicted)}), and it is "
    what = f"{again if evicted else ''}waiting in {queue}{because or ': others are before it'}"
    return _held(what, None, Outlook.OPEN)


def _held(what: str, advice: str | None, outlook: Outlook = Outlook.BLOCKED) -> Cause:
    return Cause(what=what, advice=advice, reason=Reason.QUEUED, outlook=outlook)


def _said(by: Document) -> str:
    """Return the words of a condition or check, without what they repeat for every pod set."""
    words = both_ends(_NO_FLAVOR.sub("", str(by.get("message") or "")), 300)
    return f": {words}" if words else ""


def _checked(queue: str, checks: Sequence[Document]) -> Cause:
    """Return what else has to agree: its quota is reserved."""
    left = [one for one in checks if one.get("state") != "Ready"]
    if refused := next((one for one in left if one.get("state") == "Rejected"), None):
        what = f"admission check {refused.get('name')!r} of {queue} has refused it{_said(refused)}"
        return _held(what, "see the check's own message, or ask the queue's administrator")
    awaited = ", ".join(f"{one.get('name')}{_said(one)}" for one in left)
    words = f"has reserved its quota and waits for {awaited}" if left else "is about to resume it"
    return _held(f"{queue} {words}", None, Outlook.OPEN)
