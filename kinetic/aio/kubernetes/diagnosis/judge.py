"""From what Kubernetes says of a job to what its user is told: one pure function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts
from kinetic.aio.kubernetes.diagnosis.ending import ending, removal
from kinetic.aio.kubernetes.diagnosis.finished import Course, End, held_up, past, until_then
from kinetic.aio.kubernetes.diagnosis.held import held_back, is_suspended, refused_pods
from kinetic.aio.kubernetes.diagnosis.pods import Pod, unseen
from kinetic.aio.kubernetes.diagnosis.starting import NATIVE, obstacle, present
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen, pending
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

_SHOWN = 5
"""Of many indexes so many are named."""

_CAUSES = 3
"""So many are told of pods of many indexes which wait."""

_OWN_FINALIZERS = ("batch.kubernetes.io/job-tracking", "orphan", "foregroundDeletion")
"""Those that Kubernetes sets and removes by itself."""

_KILLED = "did not react to SIGTERM and was killed after its grace"


def judge(seen: Seen) -> Diagnosis:
    """What is to be told of a job, by everything that was seen of it so far.

    A pod's end precedes its Job's by a second and explains it; when no other
    pod will follow it is told at once. But Jobs and pods come by different
    watches, either of which may be late. Give the result of `merged`, so that a
    cause outlives the pod it stood on.
    """
    verdict = held_fast(seen, _judged(seen))
    there = seen.job is not None or seen.pods
    return verdict if there else replace(verdict, phase=Phase.GONE)


def judge_pod(pod: Pod) -> Diagnosis:
    """What is to be told of one pod: evidence about it, whatever becomes of its Job."""
    return ending(pod) if pod.ended else present(pod)


def held_fast(seen: Seen, verdict: Diagnosis) -> Diagnosis:
    """*verdict*, with what is deleted and cannot go, for somebody has not let go of it."""
    owner = seen.makers[0][0] if seen.makers else "Job"
    idle = [("Pod", pod) for pod in seen.pods if not Pod(pod).runs]
    for kind, one in [(owner, seen.job), *idle]:
        metadata = part(one, "metadata")
        held = [name for name in parts(metadata, "finalizers") if name not in _OWN_FINALIZERS]
        if held and metadata.get("deletionTimestamp"):
            patch = '{"metadata":{"finalizers":null}}'
            advice = (
                f"whoever set finalizer {held[0]!r} must remove it; if nothing will: kubectl patch "
                f"{kind.lower()} {metadata.get('name')} --type=merge -p '{patch}'"
            )
            words = f"the {kind} is deleted and stays, held by finalizer {held[0]!r}"
            return replace(
                verdict,
                message=f"{verdict.message}; {words}",
                advice=f"{verdict.advice}; {advice}" if verdict.advice else advice,
            )
    return verdict


def _judged(seen: Seen) -> Diagnosis:
    course, job = Course(seen), seen.any_job
    if done := condition(job, "Complete") or condition(job, "SuccessCriteriaMet"):
        return _succeeded(course, done)
    if target := condition(job, "Failed") or condition(job, "FailureTarget"):
        return _failed(course, target)
    if seen.job is None or part(job, "metadata").get("deletionTimestamp"):
        return _succeeded(course, {}) if _gone_at_once(course) else _deleted(course)
    if is_suspended(job):
        return _parked(course, "the Job was suspended")
    if seen.spec.get("parallelism") == 0 and all(pod.swept for pod, _ in course.over):
        return _parked(course, "its parallelism was set to 0")
    return _going_on(course)


def _gone_at_once(course: Course) -> bool:
    """Whether it was removed when all its pods had succeeded, before it could say so."""
    well = [pod for pod, _ in course.settled[0] if not (pod.swept or pod.answered)]
    at_once = course.seen.spec.get("ttlSecondsAfterFinished") == 0 and not course.alive
    return at_once and len(well) >= course.seen.completions


def _parked(course: Course, why: str) -> Diagnosis:
    """A Job that may have no pods; those that it had are being stopped."""
    held = held_back(course.seen)
    for _, last in [(pod, one) for pod, one in course.bad if not pod.swept][-1:]:
        held = replace(held, message=f"{held.message}; before that: {last.message}")
    if not any(pod.ran for pod in course.alive):
        return held
    message = f"is being stopped, because {why}; then: {held.message}"
    now = _foremost(course.alive)
    return replace(now, reason=held.reason, message=message, advice=held.advice)


def _foremost(alive: Sequence[Pod]) -> Diagnosis:
    """Of the pod that got furthest; one that is on its way out only if there is no other."""
    return present(
        max(alive, key=lambda pod: (not pod.leaving, pod.ran, bool(pod.spec.get("nodeName"))))
    )


def _going_on(course: Course) -> Diagnosis:
    """A Job that is not over, by its own word: what runs or waits, after what happened before."""
    seen, alive, (done, failures) = course.seen, course.alive, course.settled
    if not alive and not course.over:
        return held_back(seen)
    if not alive and len(done) + len(failures) >= seen.completions:
        well = len(done) >= seen.completions
        verdict = _succeeded(course, {}) if well else _failed(course, {})
        pod, _ = (done if well else failures)[-1]
        if not pod.swept or (pod.ran and not (well and pod.answered)):
            return verdict
        # Somebody deleted the pod. What that counts as, the Job says next: it may have done that
        # itself, for a reason that only it knows.
        return pending(verdict.message, verdict.advice, verdict.reason)
    now, status = _foremost(alive) if alive else held_back(seen), seen.status
    if alive and all(pod.leaving for pod in alive):
        pods = [*(pod for pod, _ in course.bad), alive[-1]]
        if course.replaced(pods):
            now = replace(now, advice="wait: Kubernetes makes another pod when it has ended")
    if not course.several:
        return _after(course, now)
    now = _after(course, _with_others(course, now) if alive else now)
    counts = f"{status.get('active') or len(alive)} active, {status.get('ready') or 0} ready"
    succeeded = len(done) or int(status.get("succeeded") or 0)
    counts += f", {succeeded} of {seen.completions} done" if succeeded else ""
    counts += f", {len(failures)} failed" if failures else ""
    return replace(now, message=f"{now.message} ({counts})")


def _after(course: Course, now: Diagnosis) -> Diagnosis:
    """*now*, after what happened to the pods before."""
    others = [pod for pod in course.alive if pod.disruption and pod.uid != now.executor]
    before = [*course.bad, *((pod, judge_pod(pod)) for pod in others)]
    if not before:
        return now
    pod, last = before[-1]
    words = last.message.removeprefix("is being stopped: ")
    if course.several and pod.index is not None:
        words = f"index {pod.index}: {words}"
    words += f" ({last.advice.partition(':')[0]})" if now.advice and "fault" in last.advice else ""
    if pod.disruption is None and course.action(pod) == "Ignore":
        words += "; such failures are not counted, so it goes on retrying for ever"
    what = "another pod runs" if now.phase is Phase.RUNNING else "a new pod waits"
    runs = now.message.startswith("running")
    what += now.message.removeprefix("running") if runs else f": {now.message}"
    if not course.alive and now.reason is None:
        what = "Kubernetes starts another pod after a pause"
        now = replace(now, executor=last.executor, exit_code=last.exit_code)
    keep = now.outlook is Outlook.FINAL or now.reason not in (None, Reason.UNSCHEDULABLE)
    return replace(
        now,
        message=f"{words}; {what}",
        reason=now.reason if keep else last.reason,
        advice=now.advice or last.advice.replace("run it again", "wait"),
    )


def _with_others(course: Course, now: Diagnosis) -> Diagnosis:
    """*now*, with what keeps other pods from running or from being made, each cause once."""
    held: dict[str, tuple[Diagnosis, list[Pod]]] = {}
    for pod in course.alive:
        one = present(pod)
        if one.phase is Phase.PENDING and one.reason is not None and one.message not in now.message:
            held.setdefault(one.message, (one, []))[1].append(pod)
    told: list[tuple[str, Diagnosis]] = []
    for one, pods in [*held.values()][:_CAUSES]:
        known = sorted(pod.index for pod in pods if pod.index is not None)
        who = _named(known) if known else f"{len(pods)} of the other pods"
        told.append((f"{who} wait{'s' if len(pods) == 1 else ''}", one))
    if (refused := refused_pods(course.seen)) is not None:
        told.append(("no further pod is made", refused))
    if not told:
        return now
    return replace(
        now,
        message="; ".join([now.message, *(f"{who}: {one.message}" for who, one in told)]),
        reason=now.reason or told[0][1].reason,
        advice=now.advice or told[0][1].advice,
    )


def _succeeded(course: Course, done: Document) -> Diagnosis:
    """Judge a Job whose success is certain: *done* is the condition that says so."""
    seen, several = course.seen, course.several
    good = [one for _, one in course.over if one.status is JobStatus.SUCCEEDED]
    bad = [(pod, one) for pod, one in course.bad if pod.ended]
    message = good[-1].message if good else "succeeded"
    if done.get("reason") == "SuccessPolicy":
        complete, failures = course.indexes
        others = sorted({*range(seen.completions)}.difference(complete, failures))
        message = f"succeeded: {_named(complete)} {_were(complete)} enough"
        message += f"; {_of_indexes(course, bad, '')}" if failures else ""
        message += f"; {_named(others)} {_were(others)} stopped and did not fail" if others else ""
    elif several:
        message = f"succeeded, all {seen.completions} indexes"
    elif good and bad:
        attempts = "1 failed attempt" if len(bad) == 1 else f"{len(bad)} failed attempts"
        message += f", after {attempts} (the last: {bad[-1][1].message})"
    if condition(seen.any_job, "Suspended", "False") is not None:
        message = f"was suspended and resumed; {message}"
    if seen.job is None:
        message += f"; {_removed(seen)}, which is not a loss"
    elif not seen.pods:
        message += "; its pod and log were removed since, which is no loss of the job"
    # The pod that must have succeeded may be told later than its Job: the last, of one.
    late = [] if several else [pod.uid for pod in course.pods if not pod.ended]
    who = [one.executor for one in good] or late or [""]
    return pending(message).ended(who[-1], 0, JobStatus.SUCCEEDED)


def _removed(seen: Seen) -> str:
    ttl = seen.spec.get("ttlSecondsAfterFinished")
    return "the Job was removed" if ttl is None else f"removed by its own time-to-live of {ttl} s"


def _failed(course: Course, target: Document) -> Diagnosis:
    """Judge a Job whose failure is certain: *target* is the condition that says so."""
    seen, cause = course.seen, _cause(course, target)
    if cause.reason is Reason.LOST:
        cause = _with_namespace(seen) or cause
    if course.alive:  # what is being stopped may still commit what it has done
        return course.still(replace(cause, message=f"is being stopped: {cause.message}"))
    if seen.job is not None:
        return cause
    if cause.reason is Reason.LOST and course.pods and all(pod.swept for pod in course.pods):
        name = part(seen.any_job, "metadata").get("namespace") or ""
        words = f"the whole namespace {name!r} was deleted with the Job in it"
        return _cancelled(f"{words}, or first its pod and then the Job")
    return replace(cause, message=f"{cause.message}; {_removed(seen)} since")


def _cause(course: Course, target: Document) -> Diagnosis:
    """The Job's own reason is a consequence: the cause is with its pods."""
    why, said = target.get("reason"), one_line(str(target.get("message") or ""))
    if why == "DeadlineExceeded":
        return _out_of_time(course)
    own = _failures(course)
    if not own:
        found = re.search(r"exit code (\d+)", said)
        words = f"the Job failed ({why})" + ("" if course.there else ", and its pods are gone")
        told = pending(f"{words}: {said}" if said else words, "see its log, if one was kept")
        reason = Reason.USER_ERROR if found else Reason.LOST
        return replace(told, reason=reason).ended(exit_code=int(found[1]) if found else None)
    pod, last = own[-1]
    code, message, advice = last.exit_code, last.message, last.advice
    if pod.starts and why != "PodFailurePolicy":
        message = f"failed in each of {pod.starts} starts; the last: {message}"
    elif len(own) > 1 and why != "PodFailurePolicy" and not course.several:
        message, advice = _of_attempts(own)
    if pod.disruption is not None and course.action(pod) == "Count":
        advice += "; what the platform ends counts against backoffLimit here: raise it"
    if course.several:
        message = _of_indexes(course, own, message)
    if why == "PodFailurePolicy":
        by_code = code and "has condition" not in said
        means = f"exit code {code} means" if by_code else "by the Job's policy that means"
        message += f"; {means} 'do not retry', so the Job failed at once"
    if why == "MaxFailedIndexesExceeded":
        others = sorted({*range(course.seen.completions)}.difference(*course.indexes))
        stopped = f"; {_named(others)} did not come to an end" if others else ""
        most = f"more than {course.seen.spec.get('maxFailedIndexes')} of the indexes failed"
        message = f"{most}, so the Job was stopped{stopped}; {message}"
    return replace(last, message=message, advice=advice)


def _of_attempts(own: Sequence[End]) -> tuple[str, str]:
    """What several attempts at the same thing ended of, and what to do: they may differ."""
    pod, last = own[-1]
    before = [(pod, one) for pod, one in own if one.message != last.message]
    if before:
        told = "; ".join(dict.fromkeys(one.message for _, one in before))
        by_itself = [one.advice for pod, one in before if pod.disruption is None]
        advice = "; ".join(dict.fromkeys([last.advice, *by_itself]))
        return (
            f"failed in {len(own)} attempts; the last: {last.message}; before that: {told}",
            advice,
        )
    if pod.disruption is not None or last.reason is Reason.LOST:
        return f"failed in {len(own)} attempts, each of them so: {last.message}", last.advice
    same = last.exit_code is not None and {one.exit_code for _, one in own} == {last.exit_code}
    each = f", each with exit code {last.exit_code}" if same else ""
    return f"failed in {len(own)} attempts{each}; the last: {last.message}", last.advice


def _failures(course: Course) -> list[End]:
    """The pods that the Job failed of, by the strongest evidence that there is of any."""
    bad, (_, wanted) = course.bad, course.indexes
    return (
        [pair for pair in bad if pair[0].index in wanted]
        or [pair for pair in bad if not pair[0].swept]
        or bad
        or [(pod, one) for pod in course.there if (one := ending(pod)).exit_code]
        # A program that answered a deletion with exit code 0, which its Job counts as a failure;
        # or the last pod is on its way out, and that is what its Job failed of.
        or [
            (pod, why.ended(pod.uid, 0 if pod.ended else None))
            for pod in course.pods
            if (pod.answered if pod.ended else pod.leaving) and (why := removal(pod))
        ]
    )


def _of_indexes(course: Course, bad: Sequence[End], otherwise: str) -> str:
    """Which indexes of a Job failed, and which did not; *otherwise* where none is told."""
    complete, failures = course.indexes
    told = {pod.index: one.message for pod, one in bad}
    if len(told) == 1 and not failures:  # its Job ended before it had counted that
        failures = [index for index in told if index is not None]
    causes = {one: [index for index in failures if told.get(index) == one] for one in told.values()}
    unknown = [index for index in failures if index not in told]
    words = "; ".join(f"{_named(of)} failed for good: {one}" for one, of in causes.items() if of)
    words += f"; {_named(unknown)} failed, too" if words and unknown else ""
    done = f"; {_named(complete)} succeeded" if complete else ""
    return (words or otherwise) + done


def _named(indexes: Sequence[int]) -> str:
    told = [str(one) for one in indexes[:_SHOWN]]
    more = len(indexes) - _SHOWN
    last = f"{more} others" if more > 0 else told.pop()
    return f"index {', '.join(told)} and {last}" if told else f"index {last}"


def _were(indexes: Sequence[int]) -> str:
    return "was" if len(indexes) == 1 else "were"


def _out_of_time(course: Course) -> Diagnosis:
    """The Job's time was over: what did it do until then?"""
    limit, held = course.seen.spec.get("activeDeadlineSeconds"), held_back(course.seen)
    message = f"the Job's time limit{f' of {limit} s' if limit else ''} passed"
    end = pending(message, "give it more time (timeout=)", Reason.DEADLINE)
    traces = [] if held.reason else [pod for pod in unseen(course.seen) if not pod.ended]
    pod = next(reversed(course.pods or traces), None)
    last = past(pod) if pod is not None and course.pods else end
    own = [(pod, one) for pod, one in course.bad if pod.ended and not pod.swept]
    if pod is not None and not pod.ran:
        held = last if pod.ended and not pod.swept else obstacle(pod)
        before = " while a new pod waited" if course.ran else " before the program ever ran"
        late = held_up(end, before, held)
        earlier = [one for other, one in course.bad if other is not pod and not other.swept]
        for one in earlier[-1:]:
            words = f"{late.message}; before that: {one.message}"
            late = replace(late, message=words, advice=f"{late.advice}; {one.advice}")
        end = replace(late, reason=end.reason) if course.ran else late
    elif pod is None and held.reason:
        end = held_up(end, " before any pod could be made", held)
    elif own:
        starts = sum(max(pod.starts - 1, 1) for pod, _ in own)
        words = f"{starts} of its starts had failed by then, the last: {own[-1][1].message}"
        advice = f"{own[-1][1].advice}; more time alone (timeout=) does not help"
        end = replace(end, message=f"{message}; {words}", advice=advice)
    elif pod is not None and (beside := pod.kept_from_ending):
        words = f"its program had ended with exit code 0, but container {beside!r} ran on"
        end = replace(end, message=f"{message}; {words}", advice=NATIVE)
    else:
        killed = f": it {_KILLED}" if last.exit_code == 137 else ""
        end = replace(end, message=f"{message}; the program was stopped{killed}")
    if course.several:
        end = replace(end, message=_of_indexes(course, [], end.message))
    return end.ended(last.executor, last.exit_code)


def _cancelled(message: str, advice: str = "submit again if that was not meant") -> Diagnosis:
    return pending(message, advice, Reason.CANCELLED).ended(status=JobStatus.NOT_FOUND)


def _with_namespace(seen: Seen) -> Diagnosis | None:
    """The end of a Job whose namespace ends."""
    going = part(seen.namespace, "metadata").get("deletionTimestamp")
    if not going and part(seen.namespace, "status").get("phase") != "Terminating":
        return None
    name = part(seen.any_job, "metadata").get("namespace") or ""
    return _cancelled(f"the namespace {name!r} was deleted, with the Job in it")


def _deleted(course: Course) -> Diagnosis:
    """Judge a Job that is on its way out, or gone, before it was over; or that was never made."""
    seen, alive = course.seen, course.alive
    if not seen.any_job and not course.pods:
        words = f"there is no Job {seen.job_name!r}" if seen.job_name else "there is no Job"
        return replace(_cancelled(words, ""), reason=None)
    going = seen.job is not None and (alive or not course.there)
    if alive and not going and not alive[-1].leaving:
        does = "still runs, and costs"
        if not alive[-1].ran:
            does = f"is there and waits to start: {obstacle(alive[-1]).message}"
        words = f"the Job object is gone, but its pod {does}"
        return course.still(_cancelled(words, "delete the pod"))
    when = "by somebody while it ran" if course.ran else "before it ever ran"
    words = "the Job is being deleted by somebody" if going else f"the Job was deleted {when}"
    told = _with_namespace(seen) or _cancelled(words)
    if alive and alive[-1].leaving:
        node, does = alive[-1].spec.get("nodeName"), "its pod is being stopped"
        if condition(alive[-1].node, "Ready", "Unknown"):
            does = f"its pod cannot go, for its node {node!r} does not answer"
            mend = f"bring that node back or delete it, or force-delete the pod; {told.advice}"
            told = replace(told, advice=mend)
        told = replace(told, message=f"{told.message}; {does}")
    if alive or going:
        return course.still(told)
    for pod in (course.there or course.pods)[-1:]:
        last, more = past(pod), ""
        well = last.status is JobStatus.SUCCEEDED and not pod.answered
        if course.there and (well or (seen.job is None and not pod.leaving)):
            words = f"the Job was deleted, its pod ran on: {last.message}"
            return replace(last, message=words, advice="delete the pod when its log is not needed")
        if last.status is JobStatus.FAILED and pod.ended and not pod.swept:
            more = f"; before that: {last.message}"
        elif not course.ran:
            return until_then(told, pod)
        elif last.exit_code == 137:
            more = f"; the program {_KILLED}"
        told = replace(told, message=told.message + more)
        return told.ended(last.executor, last.exit_code, JobStatus.NOT_FOUND)
    return told
