"""A Job that has no pod: suspended, queued, left to another controller, or refused its pods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.admission import refusal
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.quantities import NAMES
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen, pending
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

_QUEUE = "kueue.x-k8s.io/queue-name"
_GATE = "kueue.x-k8s.io/admission"
_CONTROLLER = "kubernetes.io/job-controller"
_REFUSED = ("FailedCreate", "JobCreationFailed")
"""What controllers call it that the API server refused them a pod; a JobSet's, a Job."""


def is_suspended(job: Document) -> bool:
    """Whether it may have no pods now."""
    return bool(part(job, "spec").get("suspend")) or condition(job, "Suspended") is not None


def is_gated(pod: Document) -> bool:
    """Whether Kueue holds this pod, and not the whole that it belongs to."""
    return any(one.get("name") == _GATE for one in parts(part(pod, "spec"), "schedulingGates"))


def _waits(message: str, advice: str, outlook: Outlook = Outlook.BLOCKED) -> Diagnosis:
    return pending(message, advice, Reason.QUEUED, outlook)


def held_back(seen: Seen) -> Diagnosis:
    """Judge a Job that is not over and has no pod."""
    spec, status = seen.spec, seen.status
    if is_suspended(seen.any_job):
        if seen.workload is not None or _QUEUE in _labels(seen):
            return queued(seen)
        return _waits(
            "the Job is suspended: its pods are made only after it is resumed",
            "resume it, or see which controller suspended it",
        )
    if (refused := refused_pods(seen)) is not None:
        return refused
    controller = spec.get("managedBy")
    if controller not in (None, _CONTROLLER) and not conditions(seen.any_job):
        return _waits(
            f"the Job is left to controller {controller!r}, which has done nothing yet: its status "
            "is empty and there is no event",
            "see whether that controller runs, or do not set managedBy",
        )
    if spec.get("parallelism") == 0:
        return _waits("parallelism is 0, so nothing will run", "raise it")
    if status.get("failed"):
        return pending("a pod failed and is gone; Kubernetes makes another one after a pause")
    unseen = "" if status else ": the Job controller has not looked at it yet"
    return pending(f"no pod has been made yet{unseen}")


def _labels(seen: Seen) -> Document:
    return part(part(seen.any_job, "metadata"), "labels")


def refused_pods(seen: Seen) -> Diagnosis | None:
    """Why the API server did not make the last pod, if it did not."""
    attempts = seen.about(None, *_REFUSED, "SuccessfulCreate")
    if not attempts or attempts[-1].get("reason") not in _REFUSED:
        return None
    return refusal(str(attempts[-1].get("message") or ""))


def refused_request(answer: Document) -> Diagnosis:
    """Judge the API server's refusal (a ``Status`` object) to create a Job: nothing is there.

    Words that no rule knows are about the Job itself, unless its creation is forbidden (403).
    """
    unknown = Outlook.BLOCKED if answer.get("code") == 403 else Outlook.FINAL
    found = refusal(str(answer.get("message") or answer.get("reason") or ""), unknown)
    return replace(found, status=JobStatus.FAILED, phase=Phase.GONE)


_NO_ERROR = "wait; this is not an error"
_UNFIT = re.compile(
    r"doesn't exist|does not exist|inactive|is stopped|didn't satisfy LimitRange"
    r"|resource validation failed|doesn't match node affinity|untolerated taint"
)
_LACK = re.compile(
    r"insufficient (?P<unused>unused )?quota (?:in cohort )?for (?P<what>\S+) in flavor "
    r"(?P<flavor>[^,\s]+)(?:, (?P<more>\S+) more needed)?"
)


def queued(seen: Seen) -> Diagnosis:
    """Judge what Kueue holds, by its Workload: the Job itself says only "suspended"."""
    workload: Document = seen.workload or {}
    named = part(workload, "spec").get("queueName") or _labels(seen).get(_QUEUE)
    queue = f"queue {str(named or '?')!r}"
    evicted: Document = condition(workload, "Evicted") or {}
    if part(workload, "spec").get("active") is False:
        words = f"its Workload in {queue} is deactivated{_told(evicted, ' ({})')}"
        return _waits(words, "set active again, or submit again")
    if not workload:
        return _waits(
            f"waiting in {queue}; why, stands on its Workload, which was not seen",
            "wait, or see whether Kueue runs and knows that queue",
            Outlook.OPEN,
        )
    found = [one for one in conditions(workload) if one.get("type") == "QuotaReserved"]
    reserved: Document = found[0] if found else {}
    if reserved.get("status") == "True":
        return _checks(queue, parts(part(workload, "status"), "admissionChecks"))
    said, why = str(reserved.get("message") or ""), reserved.get("reason")
    lacks = [*_LACK.finditer(said)]
    if why == "ExceedsMaxQuota" or ("maximum capacity" in said and _never_fits(lacks)):
        words = f"{queue} can never hold it{_told(reserved)}"
        advice = "ask for less, or have the queue's quota raised"
        return pending(words, advice, Reason.QUOTA, Outlook.FINAL)
    unfit = _UNFIT.search(said) and not any(one["unused"] for one in lacks)
    if why in ("Misconfigured", "Inadmissible") or unfit:
        return _waits(
            f"{queue} cannot take it{_told(reserved)}",
            "correct the queue's name, or have an administrator mend the queue",
        )
    needed = [
        f"{one['more']} more {_name(one['what'])} of quota needed (flavor {one['flavor']})"
        for one in lacks
        if one["more"]
    ]
    because = f": {'; '.join(dict.fromkeys(needed))}" if needed else _told(reserved)
    taken = _EVICTED.get(str(evicted.get("reason")), _told(evicted))
    again = f"it was taken back by the queue ({evicted.get('reason')}{taken}) and is "
    words = f"{again if evicted else ''}waiting in {queue}{because or ': others are before it'}"
    return _waits(words, _NO_ERROR, Outlook.OPEN)


_EVICTED = {
    "Preempted": ": it was preempted by work of higher priority",
    "PodsReadyTimeout": ": its pods were not ready in time",
}


def _name(resource: str) -> str:
    return NAMES.get(resource, resource).removeprefix("of ")


def _told(by: Document, shape: str = ": {}") -> str:
    """The words of a condition or a check, without what they begin with for every pod set."""
    said = str(by.get("message") or "")
    words = both_ends(re.sub(r"^couldn't assign flavors to pod set \S+: ", "", said), 300)
    return shape.format(words) if words else ""


def _never_fits(lacks: Sequence[re.Match[str]]) -> bool:
    """Whether some resource is beyond every flavor that was tried, and not only in use there."""
    unused = {one["what"] for one in lacks if one["unused"]}
    return not lacks or any(one["what"] not in unused for one in lacks)


def _checks(queue: str, checks: Sequence[Document]) -> Diagnosis:
    """Its quota is there; what else must agree?"""
    left = [one for one in checks if one.get("state") != "Ready"]
    if refused := next((one for one in left if one.get("state") == "Rejected"), None):
        words = f"admission check {refused.get('name')!r} of {queue} has refused it{_told(refused)}"
        return _waits(words, "see the check's own message, or ask the queue's administrator")
    awaited = ", ".join(f"{one.get('name')}{_told(one, ' ({})')}" for one in left)
    words = "has admitted it; it is about to be resumed"
    words = f"has reserved its quota and waits for {awaited}" if left else words
    return _waits(f"{queue} {words}", _NO_ERROR, Outlook.OPEN)
