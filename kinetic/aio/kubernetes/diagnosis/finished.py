"""A Job that is over: done, failed, or deleted.

The Job's own reason is a consequence. The cause is with its pods, of which the
last version counts when they are there no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts
from kinetic.aio.kubernetes.diagnosis.ending import ending, removal
from kinetic.aio.kubernetes.diagnosis.held import held_back
from kinetic.aio.kubernetes.diagnosis.pods import Pod
from kinetic.aio.kubernetes.diagnosis.rules import Rule
from kinetic.aio.kubernetes.diagnosis.starting import obstacle
from kinetic.aio.kubernetes.diagnosis.traces import ended_unseen, fell_again, never_began
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen, pending, running
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["being_deleted", "failed", "gone", "of_indexes", "past", "succeeded"]


def past(pod: Pod) -> Diagnosis:
    """How a pod ended that has ended or is there no more."""
    if pod.ended:
        last = ending(pod)
    else:
        why = removal(pod)
        unknown = "the pod is gone, and how its program ended was not seen"
        last = (why or pending(unknown, "run it again", Reason.LOST)).ended(pod.uid)
    if pod.ran:
        return last
    if last.reason is Reason.LOST and pod.swept:
        held = obstacle(pod)  # what kept it from starting would do so again
        if held.reason is None or held.outlook is Outlook.OPEN:
            return last
        words = f"{last.message}; until then {held.message}"
        return replace(last, message=words, advice=_too_late(held))
    if last.reason is Reason.DEADLINE and pod.ended:
        held = obstacle(pod)
        words = f"{last.message} before the program ever ran: {held.message}"
        why_not = held.reason or last.reason
        return replace(last, reason=why_not, message=words, advice=_too_late(held))
    return last


def _too_late(held: Diagnosis) -> str:
    """What to do about what *held* a Job back whose time is over: nothing is tried again."""
    if held.outlook is Outlook.OPEN or not held.advice:
        return "give it more time (timeout=)"
    return f"{held.advice.partition(';')[0]}, then submit it again"


_SHOWN = 5
"""Of many indexes so many are named."""


def _indexes(text: object) -> list[int]:
    """``0,2-4`` as numbers."""
    found: list[int] = []
    for span in str(text or "").split(","):
        first, _, last = span.partition("-")
        if first.isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found


def _listed(numbers: Sequence[int]) -> str:
    *others, last = [str(one) for one in numbers] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _named(indexes: Sequence[int]) -> str:
    told = ", ".join(f"index {one}" for one in indexes[:_SHOWN])
    return told + (f" and {len(indexes) - _SHOWN} others" if len(indexes) > _SHOWN else "")


def _pods(seen: Seen) -> list[Pod]:
    return [Pod(one, seen) for one in (*seen.gone, *seen.pods)]


def succeeded(seen: Seen, done: Document) -> Diagnosis:
    """Judge a Job whose success is certain: *done* is the condition that says so."""
    pods = _pods(seen)
    verdicts = [past(pod) for pod in pods if pod.ended]
    good = [one for one in verdicts if one.status is JobStatus.SUCCEEDED]
    bad = [one for one in verdicts if one.status is JobStatus.FAILED]
    several = seen.completions > 1
    message = good[-1].message if good and not several else "succeeded"
    if done.get("reason") == "SuccessPolicy":
        complete = _indexes(seen.status.get("completedIndexes"))
        others = [one for one in range(seen.completions) if one not in complete]
        stopped = f", index {_listed(others)} was stopped (it did not fail)" if others else ""
        message = f"succeeded: index {_listed(complete)} was enough{stopped}"
    elif several:
        message = f"succeeded, all {seen.completions} indexes"
    elif good and bad:
        starts = "1 failed attempt" if len(bad) == 1 else f"{len(bad)} failed attempts"
        message = f"{message}, after {starts} (the last: {bad[-1].message})"
    if condition(seen.any_job, "Suspended", "False") is not None:
        message = f"was suspended and resumed; {message}"
    if not seen.pods:
        message += "; its pod and log were removed since, which is no loss of the job"
    # The pod that must have succeeded may be told later than its Job: the last, of one.
    late = [pod.uid for pod in pods if not pod.ended and not several]
    return Diagnosis(
        status=JobStatus.SUCCEEDED,
        phase=Phase.ENDED,
        exit_code=0,
        executor=good[-1].executor if good else next(reversed(late), ""),
        message=message,
        outlook=Outlook.FINAL,
    )


def failed(seen: Seen, target: Document) -> Diagnosis:
    """Judge a Job whose failure is certain: *target* is the condition that says so."""
    cause = _cause(seen, target)
    alive = [pod for one in seen.pods if not (pod := Pod(one, seen)).ended]
    if not alive:
        return cause
    now = running("") if any(pod.ran for pod in alive) else pending("")
    return replace(  # what is being stopped may still commit what it has done
        cause,
        status=now.status,
        phase=now.phase,
        message=f"is being stopped: {cause.message}",
        outlook=Outlook.OPEN,
    )


def _cause(seen: Seen, target: Document) -> Diagnosis:
    why = target.get("reason")
    if (ending_namespace := _with_namespace(seen)) is not None:
        return ending_namespace
    if why == "DeadlineExceeded":
        return _out_of_time(seen)
    own = _failures(seen)
    if not own:
        trace = ended_unseen(seen)
        return ending(trace) if trace is not None else _unseen(seen, target)
    own.sort(key=lambda pair: str(pair[0].metadata.get("creationTimestamp") or ""))
    last_pod, last = own[-1]
    code = last.exit_code
    if seen.completions > 1:
        return replace(last, message=of_indexes(seen.any_job, target, own))
    if why == "PodFailurePolicy":
        means = f"exit code {code} means" if code else "by its policy that means"
        if "has condition" in str(target.get("message")):
            means = "by the Job's policy that means"
        words = f"{last.message}; {means} 'do not retry', so the Job failed at once"
        return replace(last, message=words)
    if last_pod.starts:
        each = f"failed in each of {last_pod.starts} starts"
    elif len(own) > 1:
        same = {one.exit_code for _, one in own} == {code} and code is not None
        each = f"failed in {len(own)} attempts{f', each with exit code {code}' if same else ''}"
    else:
        return last
    return replace(last, message=f"{each}; the last: {last.message}")


def _failures(seen: Seen) -> list[tuple[Pod, Diagnosis]]:
    """The pods that the Job failed of, by the strongest evidence that there is of any."""
    gone = [_as_it_fell(Pod(one, seen)) for one in seen.gone]
    there = [Pod(one, seen) for one in seen.pods]
    pods = [*gone, *(pod for pod in there if pod.ended)]
    bad = [(pod, one) for pod in pods if (one := past(pod)).status is JobStatus.FAILED]
    wanted = _indexes(seen.status.get("failedIndexes"))
    return (
        [pair for pair in bad if pair[0].index in wanted]
        or [pair for pair in bad if not pair[0].swept]
        or bad
        or [(pod, one) for pod in there if (one := ending(pod)).exit_code]
        or [(pod, _stopped_well(pod)) for pod in pods if pod.answered]
        # The last pod is on its way out, and that is what its Job failed of.
        or [(pod, past(pod)) for pod in there if pod.leaving]
    )


def _stopped_well(pod: Pod) -> Diagnosis:
    """A program that answered a deletion with exit code 0, which its Job counts as a failure."""
    why = removal(pod)
    deleted = pending("somebody deleted the pod while it ran", "run it again", Reason.LOST)
    return (why or deleted).ended(pod.uid, ending(pod).exit_code)


def _as_it_fell(pod: Pod) -> Pod:
    """A pod that its failed Job deleted while its program ran again: as the start before ended."""
    if pod.ended or not pod.leaving or not pod.starts:
        return pod
    statuses = [
        {**one, "state": one.get("lastState") or one.get("state")}
        for one in parts(pod.status, "containerStatuses")
    ]
    metadata = {**pod.metadata, "deletionTimestamp": None}
    status = {**pod.status, "phase": "Failed", "containerStatuses": statuses}
    return Pod({**pod.document, "metadata": metadata, "status": status}, pod.seen)


def _unseen(seen: Seen, target: Document) -> Diagnosis:
    """No pod was seen: what is left is the Job's own word."""
    advice, why = "see its log, if one was kept", target.get("reason")
    if why == "BackoffLimitExceeded" and fell_again(seen):
        return pending(
            "the program failed each time it was started; the pod is gone, and its exit code with "
            "it",
            advice,
            Reason.USER_ERROR,
        ).ended()
    code = _CODE.apply(str(target.get("message") or ""), {})
    exit_code = int(code.message) if code is not None else None
    if why == "PodFailurePolicy" and exit_code is not None:
        words = f"the program ended with exit code {exit_code}, which means 'do not retry'"
        return pending(words, advice, Reason.USER_ERROR).ended(exit_code=exit_code)
    words = f"the Job failed ({why}), and its pods are gone"
    return pending(words, advice, Reason.LOST).ended(exit_code=exit_code)


_CODE = Rule(r"exit code (?P<code>\d+)", "{code}")


def _out_of_time(seen: Seen) -> Diagnosis:
    limit = seen.spec.get("activeDeadlineSeconds")
    message = f"the Job's time limit{f' of {limit} s' if limit else ''} passed"
    advice, reason = "give it more time (timeout=)", Reason.DEADLINE
    pods = _pods(seen)
    last = past(pods[-1]) if pods else pending("")
    if not any(pod.ran for pod in pods):
        before = "before any pod could be made"
        held = held_back(seen)
        if awaited := pods[-1] if pods else never_began(seen) if held.reason is None else None:
            held, before = obstacle(awaited), "before the program ever ran"
        if pods or held.reason is not None or before.endswith("ran"):
            message += f" {before}: {held.message}"
            advice, reason = _too_late(held), held.reason or reason
        else:
            message += "; the program was stopped"
    elif not pods[-1].ran:
        message += f" while a new pod waited: {obstacle(pods[-1]).message}"
    elif own := [one for pod in pods if (one := _own_end(pod)) is not None]:
        message += f"; {len(own)} of its starts had failed by then, the last: {own[-1].message}"
    else:
        message += "; the program was stopped"
        if last.exit_code == 137:
            message += ": it did not react to SIGTERM and was killed after its grace"
    return pending(message, advice, reason).ended(last.executor, last.exit_code)


def _own_end(pod: Pod) -> Diagnosis | None:
    """A failure of the program before the one that the end of its time made."""
    found = ending(pod) if pod.ended and not pod.swept else None
    return found if found is not None and found.status is JobStatus.FAILED else None


def of_indexes(job: Document, target: Document, bad: Sequence[tuple[Pod, Diagnosis]]) -> str:
    """Which indexes of a Job failed, and what of the others."""
    status, spec = part(job, "status"), part(job, "spec")
    failures = _indexes(status.get("failedIndexes"))
    complete = _indexes(status.get("completedIndexes"))
    told = {pod.index: one.message for pod, one in bad}
    causes = {one: [index for index in failures if told.get(index) == one] for one in told.values()}
    unknown = [index for index in failures if index not in told]
    words = "; ".join(f"{_named(of)} failed for good: {one}" for one, of in causes.items() if of)
    words += f"; {_named(unknown)} failed, too" if words and unknown else ""
    words = words or f"failed in {len(bad)} attempts; the last: {bad[-1][1].message}"
    if complete:
        words += f"; {_listed(complete)} succeeded"
    if target.get("reason") != "MaxFailedIndexesExceeded":
        return words
    every = range(spec.get("completions") or 0)
    others = [one for one in every if one not in (*failures, *complete)]
    stopped = f"; {_named(others)} did not come to an end" if others else ""
    most = spec.get("maxFailedIndexes")
    return f"more than {most} of the indexes failed, so the Job was stopped{stopped}; {words}"


def _cancelled(
    message: str, phase: Phase = Phase.ENDED, executor: str = "", exit_code: int | None = None
) -> Diagnosis:
    over = phase in (Phase.ENDED, Phase.GONE)
    return Diagnosis(
        status=JobStatus.NOT_FOUND,
        phase=phase,
        reason=Reason.CANCELLED,
        exit_code=exit_code,
        executor=executor,
        message=message,
        advice="submit again if that was not meant",
        outlook=Outlook.FINAL if over else Outlook.OPEN,
    )


def _with_namespace(seen: Seen) -> Diagnosis | None:
    """The end of a Job whose namespace ends."""
    going = part(seen.namespace, "metadata").get("deletionTimestamp")
    if not going and part(seen.namespace, "status").get("phase") != "Terminating":
        return None
    name = str(part(seen.any_job, "metadata").get("namespace") or "")
    return _cancelled(f"the namespace {name!r} was deleted, with the Job in it")


def being_deleted(seen: Seen) -> Diagnosis:
    """Judge a Job that is on its way out before it was over."""
    alive = [pod for one in seen.pods if not (pod := Pod(one, seen)).ended]
    if seen.pods and not alive:
        return replace(_deleted(replace(seen, gone=seen.pods)), phase=Phase.ENDED)
    now = running("") if any(pod.ran for pod in alive) else pending("")
    finalizers = parts(part(seen.any_job, "metadata"), "finalizers")
    stays = ", its pods stay" if "orphan" in finalizers else ", as soon as its pods are gone"
    words = f"the Job is being deleted by somebody{stays}"
    executor = alive[-1].uid if alive else ""
    return replace(_cancelled(words, now.phase, executor), status=now.status)


def gone(seen: Seen) -> Diagnosis:
    """Judge a Job that is not there: removed after its end, deleted, or never made."""
    if seen.pods:
        return _orphan(Pod(seen.pods[-1], seen))
    job = seen.any_job
    if not job and not seen.gone:
        name = f" {seen.job_name!r}" if seen.job_name else ""
        return Diagnosis(
            status=JobStatus.NOT_FOUND,
            phase=Phase.GONE,
            message=f"there is no Job{name}",
            outlook=Outlook.FINAL,
        )
    ttl = seen.spec.get("ttlSecondsAfterFinished")
    removed = (
        f"removed by its own time-to-live of {ttl} s" if ttl is not None else "the Job was removed"
    )
    if done := condition(job, "Complete") or condition(job, "SuccessCriteriaMet"):
        before = succeeded(replace(seen, pods=seen.gone), done)
        words = f"{before.message}; {removed}, which is not a loss"
        return replace(before, phase=Phase.GONE, message=words)
    if target := condition(job, "Failed") or condition(job, "FailureTarget"):
        before = _cause(seen, target)
        all_swept = bool(seen.gone) and all(Pod(pod, seen).swept for pod in seen.gone)
        if before.reason is not Reason.LOST or not all_swept:
            return replace(before, phase=Phase.GONE, message=f"{before.message}; {removed} since")
        name = part(job, "metadata").get("namespace") or ""
        words = f"the whole namespace {name!r} was deleted with the Job in it"
        return _cancelled(f"{words}, or first its pod and then the Job", Phase.GONE)
    return _deleted(seen)


def _deleted(seen: Seen) -> Diagnosis:
    """Before it was over."""
    if (with_namespace := _with_namespace(seen)) is not None:
        return replace(with_namespace, phase=Phase.GONE)
    pods = [Pod(one, seen) for one in seen.gone]
    if not any(pod.ran for pod in pods):
        return _cancelled("the Job was deleted before it ever ran", Phase.GONE)
    last = past(pods[-1])
    words = "the Job was deleted by somebody while it ran"
    if last.exit_code == 137:
        words += "; the program did not react to SIGTERM and was killed after its grace"
    return _cancelled(words, Phase.GONE, last.executor, last.exit_code)


def _orphan(pod: Pod) -> Diagnosis:
    """The Job is gone, *pod* of it is not."""
    if pod.ended:
        last = ending(pod)
        if pod.leaving and last.status is not JobStatus.SUCCEEDED:
            return replace(_deleted(replace(pod.seen, gone=(pod.document,))), phase=Phase.ENDED)
        words = f"the Job was deleted, its pod ran on: {last.message}"
        return replace(last, message=words, advice="delete the pod when its log is not needed")
    now = running("") if pod.ran else pending("")
    if pod.leaving:
        when = "while it ran" if pod.ran else "before it ever ran"
        words = f"the Job was deleted by somebody {when}; its pod is being stopped"
        return _cancelled(words, now.phase, pod.uid)
    words = "the Job object is gone, but its pod still runs, and costs"
    if not pod.ran:
        held = obstacle(pod).message
        words = f"the Job object is gone, but its pod is there and waits to start: {held}"
    return replace(_cancelled(words, now.phase, pod.uid), advice="delete the pod")
