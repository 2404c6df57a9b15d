"""From what Kubernetes says of a job to what its user is told: one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts
from kinetic.aio.kubernetes.diagnosis.ending import ending
from kinetic.aio.kubernetes.diagnosis.finished import (
    being_deleted,
    failed,
    gone,
    of_indexes,
    past,
    succeeded,
)
from kinetic.aio.kubernetes.diagnosis.held import held_back, is_suspended, refused_pods
from kinetic.aio.kubernetes.diagnosis.pods import Pod
from kinetic.aio.kubernetes.diagnosis.starting import present
from kinetic.aio.kubernetes.diagnosis.traces import ended_unseen
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen, pending
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["held_fast", "judge", "judge_pod"]

SHOWN = 3
"""Causes that are told of pods of many indexes which wait."""

FAILURES = "batch.kubernetes.io/job-index-failure-count"

_OWN_FINALIZERS = ("batch.kubernetes.io/job-tracking", "orphan", "foregroundDeletion")
"""Those that Kubernetes sets and removes by itself."""


def judge(seen: Seen) -> Diagnosis:
    """What is to be told of a job, by everything that was seen of it so far.

    A pod's end precedes its Job's by a second and explains it; when no other
    pod will follow it is told at once. But Jobs and pods come by different
    watches, either of which may be late. Give the result of `merged`, so that a
    cause outlives the pod it stood on.
    """
    return held_fast(seen, _judged(seen))


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
    pods = [Pod(one, seen) for one in seen.pods]
    alive = [pod for pod in pods if not pod.ended]
    over = [*(Pod(one, seen) for one in seen.gone), *(pod for pod in pods if pod.ended)]
    if is_suspended(job):
        return _parked(seen, alive, "the Job was suspended")
    if seen.spec.get("parallelism") == 0 and all(pod.swept for pod in over):
        return _parked(seen, alive, "its parallelism was set to 0")
    if condition(job, "Suspended", "False") is not None:  # what that stopped did not fail
        over = [pod for pod in over if not pod.swept]
    if not over and seen.status.get("failed"):  # before anybody looked
        trace = ended_unseen(seen, {str(pod.metadata.get("name")) for pod in alive})
        over = [trace] if trace is not None else []
    if seen.completions > 1:
        return _several(seen, alive, over)
    if alive:
        return _again(seen, present(_foremost(alive)), over)
    return _between(seen, over)


def _by_age(pods: Sequence[Document]) -> Sequence[Document]:
    """The oldest first: the API lists them by name."""

    def age(pod: Document) -> tuple[str, str]:
        metadata = part(pod, "metadata")
        return str(metadata.get("creationTimestamp") or ""), str(metadata.get("name") or "")

    return sorted(pods, key=age)


def _parked(seen: Seen, alive: Sequence[Pod], why: str) -> Diagnosis:
    """A Job that may have no pods; those that it had are being stopped."""
    held = held_back(seen)
    if not any(pod.ran for pod in alive):
        return held
    message = f"is being stopped, because {why}; then: {held.message}"
    now = present(_foremost(alive))
    return replace(now, reason=held.reason, message=message, advice=held.advice)


def _foremost(alive: Sequence[Pod]) -> Pod:
    """The pod that got furthest; one that is on its way out only if there is no other."""
    return max(alive, key=lambda pod: (not pod.leaving, pod.ran, bool(pod.spec.get("nodeName"))))


def _again(seen: Seen, now: Diagnosis, over: Sequence[Pod]) -> Diagnosis:
    """*now*, after what happened to the pods before."""
    before = [one for pod in over if (one := past(pod)).status is JobStatus.FAILED]
    before += [
        judge_pod(pod)
        for one in seen.pods
        if (pod := Pod(one, seen)).disruption and not pod.ended and pod.uid != now.executor
    ]
    if not before:
        return now
    last = before[-1]
    words = last.message.removeprefix("is being stopped: ")
    words += f" ({last.advice.partition(':')[0]})" if "fault" in last.advice else ""
    what = "another pod runs" if now.phase is Phase.RUNNING else "a new pod waits"
    told = f": {now.message}" if now.message != "running" else ""
    uncounted = _uncounted(seen, over[-1]) if over else ""
    keep = now.outlook is Outlook.FINAL or now.reason not in (None, Reason.UNSCHEDULABLE)
    return replace(
        now,
        message=f"{words}; {uncounted}{what}{told}",
        reason=now.reason if keep else last.reason,
    )


def _between(seen: Seen, over: Sequence[Pod]) -> Diagnosis:
    """No pod is there, or none that still runs: was it the last one?"""
    if not over:
        return held_back(seen)
    pod, last = over[-1], past(over[-1])
    if last.status is JobStatus.SUCCEEDED and pod.answered and pod.disruption is None:
        return _unexplained(replace(last, exit_code=None))  # whether it counts, its Job says next
    if last.status is JobStatus.SUCCEEDED or not _replaced(seen, over):
        return _unexplained(last) if pod.swept and not pod.ran else last
    held = held_back(seen)
    if held.reason is not None:
        return _again(seen, held, over)
    return replace(
        last,
        status=JobStatus.PENDING,
        phase=Phase.PENDING,
        message=f"{last.message}; {_uncounted(seen, pod)}Kubernetes starts another pod after a "
        "pause",
        advice=last.advice.replace("run it again", "wait"),
        outlook=Outlook.OPEN,
    )


def _unexplained(last: Diagnosis) -> Diagnosis:
    """Of a pod that was deleted before it ever ran: its Job is about to say that it has failed.

    It may have ended the pod itself, and only it knows why: a client has ended it, perhaps.
    """
    now = pending(last.message, last.advice, last.reason)
    return replace(now, exit_code=last.exit_code)


def _uncounted(seen: Seen, pod: Pod) -> str:
    """A word of warning where a program's own failure is repeated without end."""
    if pod.disruption is not None or _action(seen, pod) != "Ignore":
        return ""
    return "such failures are not counted, so it goes on retrying for ever; "


def _replaced(seen: Seen, over: Sequence[Pod]) -> bool:
    """Whether the Job controller makes another pod after the last of these failed."""
    actions = [_action(seen, pod) for pod in over if pod.status.get("phase") != "Succeeded"]
    if "FailJob" in actions or "FailIndex" in actions:
        return False
    counted = len(actions) - actions.count("Ignore")
    limit = seen.spec.get("backoffLimitPerIndex")
    if limit is None:
        given = seen.spec.get("backoffLimit")
        return counted <= (6 if given is None else int(given))
    told = int(part(over[-1].metadata, "annotations").get(FAILURES) or 0)
    return max(counted, told + 1 if counted else 0) <= int(limit)


def _action(seen: Seen, pod: Pod) -> str:
    """What the Job's pod failure policy says about this failure."""
    for rule in parts(part(seen.spec, "podFailurePolicy"), "rules"):
        codes = part(rule, "onExitCodes")
        for one in pod.containers if codes else ():
            code = (one.state("terminated") or {}).get("exitCode")
            inside = code in parts(codes, "values")
            named = codes.get("containerName") in (None, one.name)
            if code and named and inside == (codes.get("operator") == "In"):
                return str(rule.get("action"))
        for one in parts(rule, "onPodConditions"):
            if condition(pod.document, str(one.get("type")), str(one.get("status") or "True")):
                return str(rule.get("action"))
    return "Count"


def _several(seen: Seen, alive: Sequence[Pod], over: Sequence[Pod]) -> Diagnosis:
    """A Job of many indexes: how many run, and what is with the one that got furthest."""
    if not alive and not over:
        return held_back(seen)
    done, failures = _settled(seen, over)
    if not alive and len(done) + len(failures) >= seen.completions:
        return _all_settled(seen, done, failures)
    now = pending("more pods follow")
    if alive:
        first = _foremost(alive)
        now = _with_others(present(first), [pod for pod in alive if pod is not first])
    if alive and (refused := refused_pods(seen)) is not None:
        now = replace(
            now,
            message=f"{now.message}; no further pod is made: {refused.message}",
            reason=now.reason or refused.reason,
            advice=now.advice or refused.advice,
        )
    status = seen.status
    counts = f"{status.get('active') or len(alive)} active, {status.get('ready') or 0} ready"
    succeeded_pods = len(done) or int(status.get("succeeded") or 0)
    counts += f", {succeeded_pods} of {seen.completions} done" if succeeded_pods else ""
    counts += f", {len(failures)} failed" if failures else ""
    return replace(now, message=f"{now.message} ({counts})")


def _with_others(now: Diagnosis, others: Sequence[Pod]) -> Diagnosis:
    """*now*, with what keeps *others* from running, each cause once."""
    held: dict[str, list[Pod]] = {}
    first: Diagnosis | None = None
    for pod in others:
        one = present(pod)
        if one.phase is Phase.PENDING and one.reason is not None and one.message != now.message:
            first = first or one
            held.setdefault(one.message, []).append(pod)
    if first is None:
        return now
    told = [f"{_those(pods)}: {why}" for why, pods in [*held.items()][:SHOWN]]
    return replace(
        now,
        message="; ".join([now.message, *told]),
        reason=now.reason or first.reason,
        advice=now.advice or first.advice,
    )


def _those(pods: Sequence[Pod]) -> str:
    known = sorted(pod.index for pod in pods if pod.index is not None)
    if known:
        return f"index {', '.join(map(str, known))} waits"
    return "another pod waits" if len(pods) == 1 else f"{len(pods)} other pods wait"


_Settled = dict[int, tuple[Pod, Diagnosis]]


def _settled(seen: Seen, over: Sequence[Pod]) -> tuple[_Settled, _Settled]:
    """The indexes that are done, and those that failed and will not be tried again."""
    done: _Settled = {}
    failures: _Settled = {}
    for index in {pod.index for pod in over if pod.index is not None}:
        ends = [(pod, past(pod)) for pod in over if pod.index == index]
        good = [pair for pair in ends if pair[1].status is JobStatus.SUCCEEDED]
        if good:
            done[index] = good[0]
        elif not _replaced(seen, [pod for pod, _ in ends]):
            failures[index] = ends[-1]
    return done, failures


def _all_settled(seen: Seen, done: _Settled, failures: _Settled) -> Diagnosis:
    """All pods have ended, and the Job does not say so yet."""
    if not failures:
        return succeeded(seen, {"reason": "CompletionsReached"})
    lists = {"failedIndexes": failures, "completedIndexes": done}
    told = {name: ",".join(str(one) for one in sorted(found)) for name, found in lists.items()}
    last = failures[max(failures)][1]
    job = {**seen.any_job, "status": told}
    return replace(last, message=of_indexes(job, {}, list(failures.values())))
