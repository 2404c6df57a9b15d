"""A Job that has no pod: suspended, queued, left to another controller, or refused its pods."""

from __future__ import annotations

import re

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.admission import refusal
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen, pending
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["held_back", "is_gated", "is_suspended", "queued", "refused_pods", "refused_request"]

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


def held_back(seen: Seen) -> Diagnosis:
    """Judge a Job that is not over and has no pod."""
    job = seen.any_job
    spec: Document = part(job, "spec")
    if is_suspended(job):
        return _suspended(seen)
    attempts = seen.about(None, *_REFUSED, "SuccessfulCreate")
    if attempts and attempts[-1].get("reason") in _REFUSED:
        found = refusal(str(attempts[-1].get("message") or ""))
        return found.pending
    if spec.get("managedBy") not in (None, _CONTROLLER) and not any(conditions(job)):
        return pending(
            f"the Job is left to controller {spec['managedBy']!r}, which has done nothing yet: "
            "its status is empty and there is no event",
            Reason.QUEUED,
            "see whether that controller runs, or do not set managedBy",
            Outlook.BLOCKED,
        )
    if spec.get("parallelism") == 0:
        return pending(
            "parallelism is 0, so nothing will run", Reason.QUEUED, "raise it", Outlook.BLOCKED
        )
    if part(job, "status").get("failed"):
        return pending("a pod failed and is gone; Kubernetes makes another one after a pause")
    if not part(job, "status"):
        return pending("no pod has been made yet: the Job controller has not looked at it yet")
    return pending("no pod has been made yet")


def refused_pods(seen: Seen) -> Diagnosis | None:
    """Why the API server did not make the last pod, if it did not."""
    attempts = seen.about(None, "FailedCreate", "SuccessfulCreate")
    if not attempts or attempts[-1].get("reason") != "FailedCreate":
        return None
    found = refusal(str(attempts[-1].get("message") or ""))
    return found.pending


def _suspended(seen: Seen) -> Diagnosis:
    labels = part(part(seen.any_job, "metadata"), "labels")
    if seen.workload is None and _QUEUE not in labels:
        return pending(
            "the Job is suspended: its pods are made only after it is resumed",
            Reason.QUEUED,
            "resume it, or see which controller suspended it",
            Outlook.BLOCKED,
        )
    return queued(seen)


def queued(seen: Seen) -> Diagnosis:
    """Judge what Kueue holds, by as much as is known of its Workload."""
    labels = part(part(seen.any_job, "metadata"), "labels")
    workload: Document = seen.workload or {}
    queue = part(workload, "spec").get("queueName") or labels.get(_QUEUE) or "?"
    return _queued(str(queue), workload)


def _queued(queue: str, workload: Document) -> Diagnosis:
    """By the Workload that Kueue keeps for the Job: the Job itself says only "suspended"."""
    evicted = condition(workload, "Evicted")
    if part(workload, "spec").get("active") is False:
        because = f" ({one_line(_of(evicted), 300)})" if evicted and _of(evicted) else ""
        return pending(
            f"its Workload in queue {queue!r} is deactivated{because}",
            Reason.QUEUED,
            "set active again, or submit again",
            Outlook.BLOCKED,
        )
    if not workload:
        return pending(
            f"waiting in queue {queue!r}; why, stands on its Workload, which was not seen",
            Reason.QUEUED,
            "wait, or see whether Kueue runs and knows that queue",
        )
    found = [one for one in conditions(workload) if one.get("type") == "QuotaReserved"]
    reserved: Document = found[0] if found else {}
    said, why = _of(reserved), reserved.get("reason")
    if reserved.get("status") == "True":
        return _checks(queue, workload)
    if why == "ExceedsMaxQuota" or _never_fits(said):
        return pending(
            f"queue {queue!r} can never hold it: {one_line(_cause(said), 300)}",
            Reason.QUOTA,
            "ask for less, or have the queue's quota raised",
            Outlook.FINAL,
        )
    if why in ("Misconfigured", "Inadmissible") or (
        _UNFIT.search(said) and "insufficient unused quota" not in said
    ):
        return pending(
            f"queue {queue!r} cannot take it: {one_line(_cause(said), 300)}",
            Reason.QUEUED,
            "correct the queue's name, or have an administrator mend the queue",
            Outlook.BLOCKED,
        )
    return pending(
        f"{_taken_back(evicted)}waiting in queue {queue!r}{_needed(said)}",
        Reason.QUEUED,
        "wait; this is not an error",
    )


def _of(told: Document) -> str:
    return str(told.get("message") or "")


_UNFIT = re.compile(
    r"doesn't exist|does not exist|inactive|is stopped|didn't satisfy LimitRange"
    r"|resource validation failed|doesn't match node affinity|untolerated taint"
)
_LACK = re.compile(
    r"insufficient (?P<unused>unused )?quota (?:in cohort )?for (?P<what>\S+) in flavor "
    r"(?P<flavor>[^,\s]+)(?:, (?P<more>\S+) more needed)?"
)


def _never_fits(said: str) -> bool:
    """Whether some resource is beyond every flavor that was tried, and not only in use there."""
    if "maximum capacity" not in said:
        return False
    lacks = [*_LACK.finditer(said)]
    beyond = {one["what"] for one in lacks if not one["unused"]}
    return not lacks or any(
        all(not one["unused"] for one in lacks if one["what"] == what) for what in beyond
    )


_EVICTIONS = {
    "Preempted": "it was preempted by work of higher priority",
    "PodsReadyTimeout": "its pods were not ready in time",
    "AdmissionCheck": "an admission check was withdrawn",
    "ClusterQueueStopped": "the queue was stopped",
    "LocalQueueStopped": "the queue was stopped",
    "NodeFailures": "a node failed",
}


def _taken_back(evicted: Document | None) -> str:
    if not evicted:
        return ""
    reason = str(evicted.get("reason"))
    words = _EVICTIONS.get(reason)
    return f"it was taken back by the queue ({reason}{f': {words}' if words else ''}) and is "


def _needed(said: str) -> str:
    """What the queue lacks, as far as it says so."""
    lacks = [one for one in _LACK.finditer(said) if one["unused"] or one["more"]]
    if not lacks and (found := _LACK.search(said)):
        lacks = [found]
    if not lacks:
        return f": {one_line(_cause(said), 300)}" if said else ": others are before it"
    return ": " + "; ".join(dict.fromkeys(_lack(one) for one in lacks[:3]))


def _lack(found: re.Match[str]) -> str:
    names = {"google.com/tpu": "TPU chips", "nvidia.com/gpu": "GPUs", "cpu": "CPUs"}
    what = names.get(found["what"], found["what"])
    if not found["more"]:
        return f"its quota of {what} (flavor {found['flavor']}) is in use"
    return f"{found['more']} more {what} of quota needed (flavor {found['flavor']})"


def _cause(said: str) -> str:
    return re.sub(r"^couldn't assign flavors to pod set \S+: ", "", said)


def _checks(queue: str, workload: Document) -> Diagnosis:
    """Its quota is there; what else must agree?"""
    checks = parts(part(workload, "status"), "admissionChecks")
    refused = [one for one in checks if one.get("state") == "Rejected"]
    if refused:
        said = one_line(_of(refused[0]), 300)
        return pending(
            f"admission check {refused[0].get('name')!r} of queue {queue!r} has refused it"
            + (f": {said}" if said else ""),
            Reason.QUEUED,
            "see the check's own message, or ask the queue's administrator",
            Outlook.BLOCKED,
        )
    told = [
        f"{one.get('name')}{f' ({one_line(_of(one))})' if _of(one) else ''}"
        for one in checks
        if one.get("state") != "Ready"
    ]
    words = (
        f"has reserved its quota and waits for {', '.join(told)}"
        if told
        else ("has admitted it; it is about to be resumed")
    )
    return pending(f"queue {queue!r} {words}", Reason.QUEUED, "wait; this is not an error")


def refused_request(answer: Document) -> Diagnosis:
    """Judge the API server's refusal (a ``Status`` object) to create a Job: nothing is there."""
    found = refusal(str(answer.get("message") or answer.get("reason") or ""))
    return Diagnosis(
        status=JobStatus.FAILED,
        phase=Phase.GONE,
        reason=found.reason,
        message=found.message,
        advice=found.advice,
        outlook=found.outlook,
    )
