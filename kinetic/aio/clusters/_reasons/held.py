"""A Job that has no pod: suspended, queued, left to another controller, or refused its pods."""

from __future__ import annotations

import re

from kinetic._words import one_line
from kinetic.aio.clusters._reasons.admission import refusal
from kinetic.aio.clusters._reasons.documents import Document, condition, conditions, part, parts
from kinetic.aio.clusters._reasons.verdict import Outlook, Seen, Verdict
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["held_back", "is_suspended", "refused_request"]

_QUEUE = "kueue.x-k8s.io/queue-name"
_CONTROLLER = "kubernetes.io/job-controller"


def is_suspended(job: Document) -> bool:
    """Whether it may have no pods now."""
    return bool(part(job, "spec").get("suspend")) or condition(job, "Suspended") is not None


def held_back(seen: Seen) -> Verdict:
    """Judge a Job that is not over and has no pod."""
    job = seen.any_job
    spec: Document = part(job, "spec")
    if is_suspended(job):
        return _suspended(seen)
    attempts = seen.about(None, "FailedCreate", "SuccessfulCreate")
    if attempts and attempts[-1].get("reason") == "FailedCreate":
        found = refusal(str(attempts[-1].get("message") or ""))
        return _pending(found.message, found.reason, found.advice, found.outlook)
    if spec.get("managedBy") not in (None, _CONTROLLER) and not any(conditions(job)):
        return _pending(
            f"the Job is left to controller {spec['managedBy']!r}, which has done nothing yet: "
            "its status is empty and there is no event",
            Reason.QUEUED,
            "see whether that controller runs, or do not set managedBy",
            Outlook.BLOCKED,
        )
    if spec.get("parallelism") == 0:
        return _pending(
            "parallelism is 0, so nothing will run", Reason.QUEUED, "raise it", Outlook.BLOCKED
        )
    if part(job, "status").get("failed"):
        return _pending("a pod failed and is gone; Kubernetes makes another one after a pause")
    return _pending("no pod has been made yet")


def _pending(
    message: str,
    reason: Reason | None = None,
    advice: str = "",
    outlook: Outlook = Outlook.OPEN,
) -> Verdict:
    return Verdict(
        status=JobStatus.PENDING,
        phase=Phase.PENDING,
        reason=reason,
        message=message,
        advice=advice,
        outlook=outlook,
    )


def _suspended(seen: Seen) -> Verdict:
    labels = part(part(seen.any_job, "metadata"), "labels")
    if seen.workload is None and _QUEUE not in labels:
        return _pending(
            "the Job is suspended: its pods are made only after it is resumed",
            Reason.QUEUED,
            "resume it, or see which controller suspended it",
            Outlook.BLOCKED,
        )
    workload: Document = seen.workload or {}
    spec: Document = part(workload, "spec")
    queue = spec.get("queueName") or labels.get(_QUEUE) or "?"
    return _queued(str(queue), workload)


def _queued(queue: str, workload: Document) -> Verdict:
    """By the Workload that Kueue keeps for the Job: the Job itself says only "suspended"."""
    if part(workload, "spec").get("active") is False:
        return _pending(
            f"its Workload in queue {queue!r} is deactivated",
            Reason.QUEUED,
            "set active again, or submit again",
            Outlook.BLOCKED,
        )
    found = [one for one in conditions(workload) if one.get("type") == "QuotaReserved"]
    reserved: Document = found[0] if found else {}
    said, why = str(reserved.get("message") or ""), reserved.get("reason")
    if reserved.get("status") == "True":
        return _pending(_checks(queue, workload), Reason.QUEUED, "wait; this is not an error")
    if why == "ExceedsMaxQuota" or "maximum capacity" in said:
        return _pending(
            f"queue {queue!r} can never hold it: {one_line(_cause(said), 300)}",
            Reason.QUOTA,
            "ask for less, or have the queue's quota raised",
            Outlook.FINAL,
        )
    if why in ("Misconfigured", "Inadmissible") or "doesn't exist" in said or "inactive" in said:
        return _pending(
            f"queue {queue!r} cannot take it: {one_line(_cause(said), 300)}",
            Reason.QUEUED,
            "correct the queue's name, or have an administrator mend the queue",
            Outlook.BLOCKED,
        )
    evicted = condition(workload, "Evicted")
    before = f"it was taken back by the queue ({evicted.get('reason')}) and " if evicted else ""
    return _pending(
        f"{before}waiting in queue {queue!r}{_needed(said)}",
        Reason.QUEUED,
        "wait; this is not an error",
    )


def _needed(said: str) -> str:
    """What the queue lacks, as far as it says so."""
    found = re.search(
        r"quota for (?P<what>\S+) in flavor (?P<flavor>[^,\s]+)(?:, (?P<more>\S+) more needed)?",
        said,
    )
    if not found:
        return f": {one_line(_cause(said), 300)}" if said else ": others are before it"
    names = {"google.com/tpu": "TPU chips", "nvidia.com/gpu": "GPUs", "cpu": "CPUs"}
    what = names.get(found["what"], found["what"])
    if not found["more"]:
        return f": its quota of {what} (flavor {found['flavor']}) is in use"
    return f": {found['more']} more {what} of quota needed (flavor {found['flavor']})"


def _cause(said: str) -> str:
    return said.partition(": ")[2] or said


def _checks(queue: str, workload: Document) -> str:
    """Its quota is there; what else must agree?"""
    checks = parts(part(workload, "status"), "admissionChecks")
    open_checks = [str(one.get("name")) for one in checks if one.get("state") != "Ready"]
    if open_checks:
        return f"queue {queue!r} has reserved its quota and waits for {', '.join(open_checks)}"
    return f"queue {queue!r} has admitted it; it is about to be resumed"


def refused_request(answer: Document) -> Verdict:
    """Judge the API server's refusal (a ``Status`` object) to create a Job: nothing is there."""
    found = refusal(str(answer.get("message") or answer.get("reason") or ""))
    return Verdict(
        status=JobStatus.FAILED,
        phase=Phase.GONE,
        reason=found.reason,
        message=found.message,
        advice=found.advice,
        outlook=found.outlook,
    )
