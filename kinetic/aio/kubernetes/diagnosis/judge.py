"""From what Kubernetes says of a job to what its user is told: one pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.ending import answered, disrupted, ending, has_ended, ran
from kinetic.aio.kubernetes.diagnosis.finished import (
    being_deleted,
    failed,
    gone,
    index_of,
    of_indexes,
    past,
    succeeded,
    swept,
)
from kinetic.aio.kubernetes.diagnosis.held import held_back, is_suspended, refused_pods
from kinetic.aio.kubernetes.diagnosis.starting import present
from kinetic.aio.kubernetes.diagnosis.traces import ended_unseen
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["held_fast", "judge", "judge_pod"]

SHOWN = 3
"""Causes that are told of pods of many indexes which wait."""

FAILURES = "batch.kubernetes.io/job-index-failure-count"


def judge(seen: Seen) -> Diagnosis:
    """What is to be told of a job, by everything that was seen of it so far.

    A pod's end precedes its Job's by a second and explains it; when no other
    pod will follow it is told at once. But Jobs and pods come by different
    watches, either of which may be late. Give the result of `merged`, so that a
    cause outlives the pod it stood on.
    """
    return held_fast(seen, _judged(seen))


def held_fast(seen: Seen, verdict: Diagnosis) -> Diagnosis:
    """*verdict*, with what is deleted and cannot go, for somebody has not let go of it."""
    owner = seen.makers[0][0] if seen.makers else "Job"
    ended = [("Pod", pod) for pod in seen.pods if has_ended(pod)]
    held = [
        (kind, metadata.get("name"), name)
        for kind, one in [(owner, seen.job), *ended]
        if (metadata := part(one, "metadata")).get("deletionTimestamp")
        for name in parts(metadata, "finalizers")
        if name not in _OWN_FINALIZERS
    ]
    if not held:
        return verdict
    kind, name, finalizer = held[0]
    patch = '{"metadata":{"finalizers":null}}'
    advice = (
        f"whoever set finalizer {finalizer!r} must remove it; if nothing will: "
        f"kubectl patch {kind.lower()} {name} --type=merge -p '{patch}'"
    )
    return replace(
        verdict,
        message=f"{verdict.message}; the {kind} is deleted and stays, held by finalizer "
        f"{finalizer!r}",
        advice=f"{verdict.advice}; {advice}" if verdict.advice else advice,
    )


_OWN_FINALIZERS = ("batch.kubernetes.io/job-tracking", "orphan", "foregroundDeletion")
"""Those that Kubernetes sets and removes by itself."""


def _judged(seen: Seen) -> Diagnosis:
    if len(seen.pods) > 1 or len(seen.gone) > 1:
        seen = replace(seen, pods=_by_age(seen.pods), gone=_by_age(seen.gone))
    job = seen.job
    if job is None:
        return gone(seen)
    if done := condition(job, "Complete") or condition(job, "SuccessCriteriaMet"):
        return succeeded(seen, done)
    if target := condition(job, "Failed") or condition(job, "FailureTarget"):
        return failed(seen, target)
    if part(job, "metadata").get("deletionTimestamp"):
        return being_deleted(seen)
    alive = [pod for pod in seen.pods if not has_ended(pod)]
    over = [*seen.gone, *(pod for pod in seen.pods if has_ended(pod))]
    if is_suspended(job):
        return _parked(seen, alive, "the Job was suspended")
    if part(job, "spec").get("parallelism") == 0 and all(swept(pod) for pod in over):
        return _parked(seen, alive, "its parallelism was set to 0")
    if condition(job, "Suspended", "False") is not None:  # what that stopped did not fail
        over = [pod for pod in over if not swept(pod)]
    if not over and part(job, "status").get("failed"):  # before anybody looked
        trace = ended_unseen(seen, {str(part(pod, "metadata").get("name")) for pod in alive})
        over = [trace] if trace is not None else []
    if _completions(job) > 1:
        return _several(seen, alive, over)
    if alive:
        return _again(seen, present(seen, _foremost(alive)), over)
    return _between(seen, over)


def _by_age(pods: Sequence[Document]) -> Sequence[Document]:
    """The oldest first: the API lists them by name."""

    def age(pod: Document) -> tuple[str, str]:
        metadata = part(pod, "metadata")
        return str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or "")

    return sorted(pods, key=age)


def judge_pod(seen: Seen, pod: Document) -> Diagnosis:
    """What is to be told of one pod: evidence about it, whatever becomes of its Job."""
    return ending(seen, pod) if has_ended(pod) else present(seen, pod)


def _parked(seen: Seen, alive: Sequence[Document], why: str) -> Diagnosis:
    """A Job that may have no pods; those that it had are being stopped."""
    held = held_back(seen)
    if not any(ran(pod) for pod in alive):
        return held
    now = present(seen, _foremost(alive))
    message = f"is being stopped, because {why}; then: {held.message}"
    return replace(now, reason=held.reason, message=message, advice=held.advice)


def _completions(job: Document) -> int:
    spec: Document = part(job, "spec")
    return int(spec.get("completions") or 1)


def _foremost(alive: Sequence[Document]) -> Document:
    """The pod that got furthest; one that is on its way out only if there is no other."""

    def rank(pod: Document) -> tuple[bool, bool, bool]:
        leaving = bool(part(pod, "metadata").get("deletionTimestamp"))
        placed = bool(part(pod, "spec").get("nodeName"))
        return (not leaving, ran(pod), placed)

    return max(alive, key=rank)


def _again(seen: Seen, now: Diagnosis, over: Sequence[Document]) -> Diagnosis:
    """*now*, after what happened to the pods before."""
    before = [one for pod in over if (one := past(seen, pod)).status is JobStatus.FAILED]
    lost = [
        judge_pod(seen, pod)
        for pod in seen.pods
        if not has_ended(pod) and disrupted(pod) and uid(pod) != now.executor
    ]
    before += lost
    if not before:
        return now
    last = before[-1]
    words = last.message.removeprefix("is being stopped: ")
    words += f" ({last.advice.partition(':')[0]})" if "fault" in last.advice else ""
    what = "another pod runs" if now.phase is Phase.RUNNING else "a new pod waits"
    told = now.message if now.message != "running" else ""
    uncounted = _uncounted(seen.any_job, over[-1]) if over else ""
    message = f"{words}; {uncounted}{what}" + (f": {told}" if told else "")
    keep = now.outlook is Outlook.FINAL or now.reason not in (None, Reason.UNSCHEDULABLE)
    return replace(now, message=message, reason=now.reason if keep else last.reason)


def _between(seen: Seen, over: Sequence[Document]) -> Diagnosis:
    """No pod is there, or none that still runs: was it the last one?"""
    if not over:
        return held_back(seen)
    last = past(seen, over[-1])
    if last.status is JobStatus.SUCCEEDED and answered(over[-1]) and not disrupted(over[-1]):
        return _unexplained(replace(last, exit_code=None))  # whether it counts, its Job says next
    if last.status is JobStatus.SUCCEEDED or not _replaced(seen.any_job, over):
        return _unexplained(last) if swept(over[-1]) and not ran(over[-1]) else last
    held = held_back(seen)
    if held.reason is not None:
        return _again(seen, held, over)
    words = "Kubernetes starts another pod after a pause"
    return replace(
        last,
        status=JobStatus.PENDING,
        phase=Phase.PENDING,
        message=f"{last.message}; {_uncounted(seen.any_job, over[-1])}{words}",
        advice=last.advice.replace("run it again", "wait"),
        outlook=Outlook.OPEN,
    )


def _unexplained(last: Diagnosis) -> Diagnosis:
    """Of a pod that was deleted before it ever ran: its Job is about to say that it has failed.

    It may have ended the pod itself, and only it knows why: a client has ended it, perhaps.
    """
    return replace(
        last, status=JobStatus.PENDING, phase=Phase.PENDING, executor="", outlook=Outlook.OPEN
    )


def _uncounted(job: Document, pod: Document) -> str:
    """A word of warning where a program's own failure is repeated without end."""
    policy: Document = part(part(job, "spec"), "podFailurePolicy")
    if disrupted(pod) or _action(policy, pod) != "Ignore":
        return ""
    return "such failures are not counted, so it goes on retrying for ever; "


def _replaced(job: Document, over: Sequence[Document]) -> bool:
    """Whether the Job controller makes another pod after the last of these failed."""
    spec: Document = part(job, "spec")
    counted = 0
    for pod in over:
        if part(pod, "status").get("phase") == "Succeeded":
            continue
        action = _action(part(spec, "podFailurePolicy"), pod)
        if action in ("FailJob", "FailIndex"):
            return False
        counted += action != "Ignore"
    limit = spec.get("backoffLimitPerIndex")
    if limit is None:
        given = spec.get("backoffLimit")
        limit = 6 if given is None else given
    else:
        annotations = part(part(over[-1], "metadata"), "annotations")
        counted = max(counted, int(annotations.get(FAILURES) or 0) + 1 if counted else 0)
    return counted <= int(limit)


def _action(policy: Document, pod: Document) -> str:
    """What the Job's pod failure policy says about this failure."""
    status: Document = part(pod, "status")
    ends = [
        (part(part(one, "state"), "terminated"), one.get("name"))
        for field in ("initContainerStatuses", "containerStatuses")
        for one in status.get(field) or ()
    ]
    for rule in parts(policy, "rules"):
        codes: Document = part(rule, "onExitCodes")
        wanted = codes.get("containerName")
        for end, name in ends:
            code = end.get("exitCode")
            if not codes or not code or wanted not in (None, name):
                continue
            inside = code in (parts(codes, "values"))
            if inside == (codes.get("operator") == "In"):
                return str(rule.get("action"))
        for one in parts(rule, "onPodConditions"):
            if condition(pod, str(one.get("type")), str(one.get("status") or "True")):
                return str(rule.get("action"))
    return "Count"


def _several(seen: Seen, alive: Sequence[Document], over: Sequence[Document]) -> Diagnosis:
    """A Job of many indexes: how many run, and what is with the one that got furthest."""
    if not alive and not over:
        return held_back(seen)
    total = _completions(seen.any_job)
    done, failures = _settled(seen, over)
    if not alive and len(done) + len(failures) >= total:
        return _all_settled(seen, done, failures)
    status: Document = part(seen.any_job, "status")
    if not alive:
        now = Diagnosis(status=JobStatus.PENDING, phase=Phase.PENDING, message="more pods follow")
    else:
        first = _foremost(alive)
        now = _with_others(seen, present(seen, first), [pod for pod in alive if pod is not first])
    if alive and (refused := refused_pods(seen)) is not None:
        now = replace(
            now,
            message=f"{now.message}; no further pod is made: {refused.message}",
            reason=now.reason or refused.reason,
            advice=now.advice or refused.advice,
        )
    counts = f"{status.get('active') or len(alive)} active, {status.get('ready') or 0} ready"
    succeeded_pods = len(done) or int(status.get("succeeded") or 0)
    counts += f", {succeeded_pods} of {total} done" if succeeded_pods else ""
    counts += f", {len(failures)} failed" if failures else ""
    return replace(now, message=f"{now.message} ({counts})")


def _with_others(seen: Seen, now: Diagnosis, others: Sequence[Document]) -> Diagnosis:
    """*now*, with what keeps *others* from running, each cause once."""
    held: dict[str, list[int | None]] = {}
    first: Diagnosis | None = None
    for pod in others:
        one = present(seen, pod)
        if one.phase is Phase.PENDING and one.reason is not None and one.message != now.message:
            first = first or one
            held.setdefault(one.message, []).append(index_of(pod))
    if first is None:
        return now
    told = [f"{_those(who)}: {why}" for why, who in [*held.items()][:SHOWN]]
    return replace(
        now,
        message="; ".join([now.message, *told]),
        reason=now.reason or first.reason,
        advice=now.advice or first.advice,
    )


def _those(indexes: Sequence[int | None]) -> str:
    known = sorted(one for one in indexes if one is not None)
    if known:
        return f"index {', '.join(map(str, known))} waits"
    return "another pod waits" if len(indexes) == 1 else f"{len(indexes)} other pods wait"


def _settled(
    seen: Seen, over: Sequence[Document]
) -> tuple[dict[int, Diagnosis], dict[int, tuple[Document, Diagnosis]]]:
    """The indexes that are done, and those that failed and will not be tried again."""
    done: dict[int, Diagnosis] = {}
    failures: dict[int, tuple[Document, Diagnosis]] = {}
    for index in {one for pod in over if (one := index_of(pod)) is not None}:
        pods = [pod for pod in over if index_of(pod) == index]
        ends = [past(seen, pod) for pod in pods]
        good = [one for one in ends if one.status is JobStatus.SUCCEEDED]
        if good:
            done[index] = good[0]
        elif not _replaced(seen.any_job, pods):
            failures[index] = (pods[-1], ends[-1])
    return done, failures


def _all_settled(
    seen: Seen, done: Mapping[int, Diagnosis], failures: Mapping[int, tuple[Document, Diagnosis]]
) -> Diagnosis:
    """All pods have ended, and the Job does not say so yet."""
    if not failures:
        return succeeded(seen, {"reason": "CompletionsReached"})
    lists = {"failedIndexes": failures, "completedIndexes": done}
    told = {name: ",".join(str(one) for one in sorted(found)) for name, found in lists.items()}
    job = {**seen.any_job, "status": told}
    last = failures[max(failures)][1]
    return replace(last, message=of_indexes(job, {}, list(failures.values())))
