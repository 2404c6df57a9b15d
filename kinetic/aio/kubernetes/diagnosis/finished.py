"""A Job that is over: done, failed, or deleted.

The Job's own reason is a consequence. The cause is with its pods, of which the
last version counts when they are there no more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.ending import (
    answered,
    disrupted,
    ending,
    has_ended,
    lost_node,
    ran,
    removal,
)
from kinetic.aio.kubernetes.diagnosis.held import held_back
from kinetic.aio.kubernetes.diagnosis.starting import obstacle
from kinetic.aio.kubernetes.diagnosis.traces import ended_unseen, fell_again, never_began
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = [
    "being_deleted",
    "failed",
    "gone",
    "index_of",
    "of_indexes",
    "past",
    "succeeded",
    "swept",
]


def past(seen: Seen, pod: Document) -> Diagnosis:
    """How a pod ended that has ended or is there no more."""
    if has_ended(pod):
        last = ending(seen, pod)
        if last.reason is Reason.LOST and swept(pod) and not ran(pod):
            return _never_started(seen, pod, last)
        if last.reason is not Reason.DEADLINE or ran(pod):
            return last
        held = obstacle(seen, pod)
        words = f"{last.message} before the program ever ran: {held.message}"
        return replace(
            last, reason=held.reason or last.reason, message=words, advice=_too_late(held)
        )
    why = removal(seen, pod)
    if _without_node(seen, pod) and (why is None or why.reason is Reason.LOST):
        why = lost_node(
            "the node was removed from the cluster under the pod; what the program did is unknown"
        )
    words = why.message if why else "the pod is gone, and how its program ended was not seen"
    told = Diagnosis(
        status=JobStatus.FAILED,
        phase=Phase.ENDED,
        reason=why.reason if why else Reason.LOST,
        executor=uid(pod),
        message=words,
        advice=why.advice if why else "run it again",
        outlook=Outlook.FINAL,
    )
    swept_early = told.reason is Reason.LOST and swept(pod) and not ran(pod)
    return _never_started(seen, pod, told) if swept_early else told


def _never_started(seen: Seen, pod: Document, last: Diagnosis) -> Diagnosis:
    """A pod that was deleted while something kept it from starting: that would do so again."""
    held = obstacle(seen, pod)
    if held.reason is None or held.outlook is Outlook.OPEN:
        return last
    return replace(
        last, message=f"{last.message}; until then {held.message}", advice=_too_late(held)
    )


def _without_node(seen: Seen, pod: Document) -> bool:
    """Whether its node is there no more; a node that was never seen may be a new one."""
    name = part(pod, "spec").get("nodeName")
    there = {part(one, "metadata").get("name") for one in seen.nodes or ()}
    return bool(name and there) and name not in there


def index_of(pod: Document) -> int | None:
    """The pod's index in its Job, if it has one."""
    metadata: Document = part(pod, "metadata")
    key = "batch.kubernetes.io/job-completion-index"
    text = str({**part(metadata, "labels"), **part(metadata, "annotations")}.get(key))
    return int(text) if text.isdecimal() else None


def _indexes(text: object) -> list[int]:
    """``0,2-4`` as numbers."""
    found: list[int] = []
    for span in str(text or "").split(","):
        first, _, last = span.partition("-")
        if first.isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found


def _listed(numbers: Sequence[int]) -> str:
    *first, last = [str(one) for one in numbers] or [""]
    return f"{', '.join(first)} and {last}" if first else last


_SHOWN = 5
"""Of many indexes so many are named."""


def _named(indexes: Sequence[int]) -> str:
    told = ", ".join(f"index {one}" for one in indexes[:_SHOWN])
    return told + (f" and {len(indexes) - _SHOWN} others" if len(indexes) > _SHOWN else "")


def _many(job: Document) -> bool:
    return (part(job, "spec").get("completions") or 1) > 1


def succeeded(seen: Seen, done: Document) -> Diagnosis:
    """Judge a Job whose success is certain: *done* is the condition that says so."""
    job = seen.any_job
    verdicts = [(pod, past(seen, pod)) for pod in (*seen.gone, *seen.pods) if has_ended(pod)]
    good = [one for _, one in verdicts if one.status is JobStatus.SUCCEEDED]
    spec: Document = part(job, "spec")
    complete = _indexes(part(job, "status").get("completedIndexes"))
    message = good[-1].message if good and not _many(job) else "succeeded"
    if done.get("reason") == "SuccessPolicy":
        others = [one for one in range(spec.get("completions") or 0) if one not in complete]
        stopped = f", index {_listed(others)} was stopped (it did not fail)" if others else ""
        message = f"succeeded: index {_listed(complete)} was enough{stopped}"
    elif _many(job):
        message = f"succeeded, all {spec['completions']} indexes"
    elif good and (bad := [one for _, one in verdicts if one.status is JobStatus.FAILED]):
        starts = "1 failed attempt" if len(bad) == 1 else f"{len(bad)} failed attempts"
        message = f"{message}, after {starts} (the last: {bad[-1].message})"
    if condition(job, "Suspended", "False") is not None:
        message = f"was suspended and resumed; {message}"
    if not seen.pods:
        message += "; its pod and log were removed since, which is no loss of the job"
    return Diagnosis(
        status=JobStatus.SUCCEEDED,
        phase=Phase.ENDED,
        exit_code=0,
        executor=good[-1].executor if good else _unheard(seen),
        message=message,
        outlook=Outlook.FINAL,
    )


def _unheard(seen: Seen) -> str:
    """The pod that must have succeeded, though its own end is yet to be told: the last, of one."""
    late = [pod for pod in (*seen.gone, *seen.pods) if not has_ended(pod)]
    return uid(late[-1]) if late and not _many(seen.any_job) else ""


def failed(seen: Seen, target: Document) -> Diagnosis:
    """Judge a Job whose failure is certain: *target* is the condition that says so."""
    cause = _cause(seen, target)
    alive = [pod for pod in seen.pods if not has_ended(pod)]
    if not alive:
        return cause
    running = any(ran(pod) for pod in alive)
    return replace(  # what is being stopped may still commit what it has done
        cause,
        status=JobStatus.RUNNING if running else JobStatus.PENDING,
        phase=Phase.RUNNING if running else Phase.PENDING,
        message=f"is being stopped: {cause.message}",
        outlook=Outlook.OPEN,
    )


def _cause(seen: Seen, target: Document) -> Diagnosis:
    if _ending_namespace(seen):
        return _cancelled(f"the namespace {_namespace(seen)!r} was deleted, with the Job in it")
    if target.get("reason") == "DeadlineExceeded":
        return _out_of_time(seen)
    left = [_as_it_fell(pod) for pod in seen.gone]
    pods = [*left, *(pod for pod in seen.pods if has_ended(pod))]
    bad = [(pod, one) for pod in pods if (one := past(seen, pod)).status is JobStatus.FAILED]
    wanted = _indexes(part(seen.any_job, "status").get("failedIndexes"))
    own = [pair for pair in bad if index_of(pair[0]) in wanted] if wanted else []
    own = own or [pair for pair in bad if not swept(pair[0])] or bad
    own = own or [(pod, one) for pod in seen.pods if (one := ending(seen, pod)).exit_code]
    own = own or [(pod, _stopped_well(seen, pod)) for pod in pods if answered(pod)]
    if not own:  # the last pod is on its way out, and that is what its Job failed of
        leaving = [pod for pod in seen.pods if part(pod, "metadata").get("deletionTimestamp")]
        own = [(pod, past(seen, pod)) for pod in leaving]
    if not own:
        trace = ended_unseen(seen)
        return ending(seen, trace) if trace is not None else _unseen(seen, target)
    own.sort(key=lambda pair: str(part(pair[0], "metadata").get("creationTimestamp") or ""))
    last = own[-1][1]
    if _many(seen.any_job):
        return replace(last, message=of_indexes(seen.any_job, target, own))
    code = last.exit_code
    if target.get("reason") == "PodFailurePolicy":
        means = f"exit code {code} means" if code else "by its policy that means"
        if "has condition" in str(target.get("message")):
            means = "by the Job's policy that means"
        means += " 'do not retry', so the Job failed at once"
        return replace(last, message=f"{last.message}; {means}")
    if starts := _starts(own[-1][0]):
        return replace(last, message=f"failed in each of {starts} starts; the last: {last.message}")
    tries = len(own)
    if tries > 1:
        same = {one.exit_code for _, one in own} == {code} and code is not None
        each = f", each with exit code {code}" if same else ""
        return replace(last, message=f"failed in {tries} attempts{each}; the last: {last.message}")
    return last


def _stopped_well(seen: Seen, pod: Document) -> Diagnosis:
    """A program that answered a deletion with exit code 0, which its Job counts as a failure."""
    why = removal(seen, pod)
    return replace(
        ending(seen, pod),
        status=JobStatus.FAILED,
        reason=why.reason if why else Reason.LOST,
        message=why.message if why else "somebody deleted the pod while it ran",
        advice=why.advice if why else "run it again",
    )


def _as_it_fell(pod: Document) -> Document:
    """A pod that its failed Job deleted while its program ran again: as the start before ended."""
    if has_ended(pod) or not part(pod, "metadata").get("deletionTimestamp") or not _starts(pod):
        return pod
    statuses = [
        {**one, "state": one.get("lastState") or one.get("state")}
        for one in parts(part(pod, "status"), "containerStatuses")
    ]
    metadata = {**part(pod, "metadata"), "deletionTimestamp": None}
    status = {**part(pod, "status"), "phase": "Failed", "containerStatuses": statuses}
    return {**pod, "metadata": metadata, "status": status}


def _starts(pod: Document) -> int:
    """How often its program was started, if its failure did not end the pod."""
    if part(pod, "spec").get("restartPolicy") == "Never":
        return 0
    statuses = parts(part(pod, "status"), "containerStatuses")
    restarts = max((int(one.get("restartCount") or 0) for one in statuses), default=0)
    return restarts + 1 if restarts else 0


def swept(pod: Document) -> bool:
    """Whether the pod was stopped because of others: by its Job, or by hand."""
    deleted = part(pod, "metadata").get("deletionTimestamp")
    statuses = parts(part(pod, "status"), "containerStatuses")
    ends = [part(part(one, "state"), "terminated") for one in statuses]
    by_signal = all(
        one.get("exitCode") in (None, 0, 137, 143) and one.get("reason") != "OOMKilled"
        for one in ends
    )
    return bool(deleted) and (by_signal or answered(pod)) and not disrupted(pod)


def _unseen(seen: Seen, target: Document) -> Diagnosis:
    """No pod was seen: what is left is the Job's own word."""
    if target.get("reason") == "BackoffLimitExceeded" and fell_again(seen):
        return Diagnosis(
            status=JobStatus.FAILED,
            phase=Phase.ENDED,
            reason=Reason.USER_ERROR,
            message="the program failed each time it was started; the pod is gone, and its exit "
            "code with it",
            advice="see its log, if one was kept",
            outlook=Outlook.FINAL,
        )
    said = str(target.get("message") or "")
    code = re.search(r"exit code (\d+)", said)
    policy = target.get("reason") == "PodFailurePolicy" and code is not None
    words = (
        f"the program ended with exit code {code[1]}, which means 'do not retry'"
        if policy and code is not None
        else f"the Job failed ({target.get('reason')}), and its pods are gone"
    )
    return Diagnosis(
        status=JobStatus.FAILED,
        phase=Phase.ENDED,
        reason=Reason.USER_ERROR if policy else Reason.LOST,
        exit_code=int(code[1]) if code is not None else None,
        message=words,
        advice="see its log, if one was kept",
        outlook=Outlook.FINAL,
    )


def _out_of_time(seen: Seen) -> Diagnosis:
    limit = part(seen.any_job, "spec").get("activeDeadlineSeconds")
    message = f"the Job's time limit{f' of {limit} s' if limit else ''} passed"
    pods = [*seen.gone, *seen.pods]
    last = past(seen, pods[-1]) if pods else None
    advice = "give it more time (timeout=)"
    reason = Reason.DEADLINE
    trace = never_began(seen) if not pods else None
    if not pods and (held := held_back(seen)).reason is not None:
        message += f" before any pod could be made: {held.message}"
        advice, reason = _too_late(held), held.reason or reason
    elif trace is not None:
        asked = part(trace, "spec").get("containers")  # else the nodes do not tell either
        held = obstacle(seen if asked else replace(seen, nodes=None), trace)
        message += f" before the program ever ran: {held.message}"
        advice, reason = _too_late(held), held.reason or reason
    elif pods and not any(ran(pod) for pod in pods):
        held = obstacle(seen, pods[-1])
        message += f" before the program ever ran: {held.message}"
        advice, reason = _too_late(held), held.reason or reason
    elif pods and not ran(pods[-1]):
        message += f" while a new pod waited: {obstacle(seen, pods[-1]).message}"
    elif pods and (ends := _own_ends(seen, pods)):
        message += f"; {len(ends)} of its starts had failed by then, the last: {ends[-1].message}"
    else:
        message += "; the program was stopped"
        if last is not None and last.exit_code == 137:
            message += ": it did not react to SIGTERM and was killed after its grace"
    return Diagnosis(
        status=JobStatus.FAILED,
        phase=Phase.ENDED,
        reason=reason,
        exit_code=last.exit_code if last is not None else None,
        executor=last.executor if last is not None else "",
        message=message,
        advice=advice,
        outlook=Outlook.FINAL,
    )


def _too_late(held: Diagnosis) -> str:
    """What to do about what *held* a Job back whose time is over: nothing is tried again."""
    if held.outlook is Outlook.OPEN or not held.advice:
        return "give it more time (timeout=)"
    return f"{held.advice.partition(';')[0]}, then submit it again"


def _own_ends(seen: Seen, pods: Sequence[Document]) -> list[Diagnosis]:
    """Failures of the program before the one that the end of its time made."""
    ended = [pod for pod in pods if has_ended(pod) and not swept(pod)]
    return [one for pod in ended if (one := ending(seen, pod)).status is JobStatus.FAILED]


def of_indexes(job: Document, target: Document, bad: Sequence[tuple[Document, Diagnosis]]) -> str:
    """Which indexes of a Job failed, and what of the others."""
    status: Document = part(job, "status")
    spec: Document = part(job, "spec")
    failures, complete = (
        _indexes(status.get("failedIndexes")),
        _indexes(status.get("completedIndexes")),
    )
    told = {index_of(pod): one.message for pod, one in bad}
    causes = {one: [index for index in failures if told.get(index) == one] for one in told.values()}
    unknown = [index for index in failures if index not in told]
    words = "; ".join(f"{_named(of)} failed for good: {one}" for one, of in causes.items() if of)
    words += f"; {_named(unknown)} failed, too" if words and unknown else ""
    words = words or f"failed in {len(bad)} attempts; the last: {bad[-1][1].message}"
    if complete:
        words += f"; {_listed(complete)} succeeded"
    others = [
        one for one in range(spec.get("completions") or 0) if one not in (*failures, *complete)
    ]
    if target.get("reason") == "MaxFailedIndexesExceeded":
        most = spec.get("maxFailedIndexes")
        stopped = f"; {_named(others)} did not come to an end" if others else ""
        words = f"more than {most} of the indexes failed, so the Job was stopped{stopped}; {words}"
    return words


def _cancelled(
    message: str,
    *,
    phase: Phase = Phase.ENDED,
    status: JobStatus = JobStatus.NOT_FOUND,
    executor: str = "",
    exit_code: int | None = None,
    advice: str = "submit again if that was not meant",
) -> Diagnosis:
    ended = phase in (Phase.ENDED, Phase.GONE)
    return Diagnosis(
        status=status,
        phase=phase,
        reason=Reason.CANCELLED,
        exit_code=exit_code,
        executor=executor,
        message=message,
        advice=advice,
        outlook=Outlook.FINAL if ended else Outlook.OPEN,
    )


def _namespace(seen: Seen) -> str:
    metadata: Document = part(seen.any_job, "metadata")
    return str(metadata.get("namespace") or "")


def _ending_namespace(seen: Seen) -> bool:
    namespace = seen.namespace
    phase = part(namespace, "status").get("phase")
    return phase == "Terminating" or bool(part(namespace, "metadata").get("deletionTimestamp"))


def being_deleted(seen: Seen) -> Diagnosis:
    """Judge a Job that is on its way out before it was over."""
    alive = [pod for pod in seen.pods if not has_ended(pod)]
    if seen.pods and not alive:
        return replace(_deleted(replace(seen, gone=seen.pods)), phase=Phase.ENDED)
    running = any(ran(pod) for pod in alive)
    finalizers = parts(part(seen.any_job, "metadata"), "finalizers")
    stays = ", its pods stay" if "orphan" in finalizers else ", as soon as its pods are gone"
    return _cancelled(
        f"the Job is being deleted by somebody{stays}",
        phase=Phase.RUNNING if running else Phase.PENDING,
        status=JobStatus.RUNNING if running else JobStatus.PENDING,
        executor=uid(alive[-1]) if alive else "",
    )


def gone(seen: Seen) -> Diagnosis:
    """Judge a Job that is not there: removed after its end, deleted, or never made."""
    if seen.pods:
        return _orphan(seen, seen.pods[-1])
    if not seen.any_job and not seen.gone:
        name = f" {seen.job_name!r}" if seen.job_name else ""
        return Diagnosis(
            status=JobStatus.NOT_FOUND,
            phase=Phase.GONE,
            message=f"there is no Job{name}",
            outlook=Outlook.FINAL,
        )
    job = seen.any_job
    if done := condition(job, "Complete") or condition(job, "SuccessCriteriaMet"):
        before = succeeded(replace(seen, pods=seen.gone), done)
        return replace(
            before,
            phase=Phase.GONE,
            message=f"{before.message}; {_removed(job)}, which is not a loss",
        )
    if target := condition(job, "Failed") or condition(job, "FailureTarget"):
        before = _cause(seen, target)
        all_swept = all(swept(pod) for pod in seen.gone) and bool(seen.gone)
        if before.reason is not Reason.LOST or not all_swept:
            return replace(
                before, phase=Phase.GONE, message=f"{before.message}; {_removed(job)} since"
            )
        words = f"the whole namespace {_namespace(seen)!r} was deleted with the Job in it"
        return _cancelled(f"{words}, or first its pod and then the Job", phase=Phase.GONE)
    return _deleted(seen)


def _removed(job: Document) -> str:
    ttl = part(job, "spec").get("ttlSecondsAfterFinished")
    return (
        f"removed by its own time-to-live of {ttl} s" if ttl is not None else "the Job was removed"
    )


def _deleted(seen: Seen) -> Diagnosis:
    """Before it was over."""
    if _ending_namespace(seen):
        return _cancelled(
            f"the namespace {_namespace(seen)!r} was deleted, with the Job in it", phase=Phase.GONE
        )
    if not any(ran(pod) for pod in seen.gone):
        return _cancelled("the Job was deleted before it ever ran", phase=Phase.GONE)
    last = past(seen, seen.gone[-1])
    words = "the Job was deleted by somebody while it ran"
    if last.exit_code == 137:
        words += "; the program did not react to SIGTERM and was killed after its grace"
    return _cancelled(
        words, phase=Phase.GONE, executor=last.executor, exit_code=last.exit_code
    )  # fmt: skip


def _orphan(seen: Seen, pod: Document) -> Diagnosis:
    """The Job is gone, a pod of it is not."""
    leaving = bool(part(pod, "metadata").get("deletionTimestamp"))
    if has_ended(pod):
        last = ending(seen, pod)
        if leaving and last.status is not JobStatus.SUCCEEDED:
            done = _deleted(replace(seen, gone=(pod,)))
            return replace(done, phase=Phase.ENDED)
        return replace(
            last,
            message=f"the Job was deleted, its pod ran on: {last.message}",
            advice="delete the pod when its log is not needed",
        )
    running = ran(pod)
    if leaving:
        when = "while it ran" if running else "before it ever ran"
        return _cancelled(
            f"the Job was deleted by somebody {when}; its pod is being stopped",
            phase=Phase.RUNNING if running else Phase.PENDING,
            executor=uid(pod),
        )
    words = "the Job object is gone, but its pod still runs, and costs"
    if not running:
        held = obstacle(seen, pod).message
        words = f"the Job object is gone, but its pod is there and waits to start: {held}"
    return _cancelled(
        words,
        phase=Phase.RUNNING if running else Phase.PENDING,
        executor=uid(pod),
        advice="delete the pod",
    )
