"""From what Kubernetes says of the hosts of one job to what its user is told. Pure.

The first host's pod decides: it claims, and its value counts. What happened to
another one is told as the reason. Neither kind of set says by itself how the
function ended; the pods of a LeaderWorkerSet do not even end, or are started
again when they do. So it counts how a pod's container ended the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinetic.aio.clusters._job_manifest import HOSTS
from kinetic.aio.clusters._kube_job import End, by_runner, observations
from kinetic.aio.clusters._lws_manifest import WORKER_INDEX
from kinetic.aio.clusters._reasons.documents import Document, condition, part, parts, uid
from kinetic.aio.clusters._reasons.ending import ending, has_ended, ran
from kinetic.aio.clusters._reasons.finished import index_of, past, swept
from kinetic.aio.clusters._reasons.held import held_back
from kinetic.aio.clusters._reasons.starting import present
from kinetic.aio.clusters._reasons.verdict import Outlook, Seen, Verdict
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["Word", "host_of", "judge_group", "word"]

TERMINATED = (137, 143)
"""How a program ends that is asked to: a consequence, when another host has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What is to be told of an attempt.

    ``ended`` are processes of it that have ended, besides the one of ``said``:
    pods, and the set itself once it is deleted. An outcome may be there then.
    """

    said: Observation
    ended: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How the program of one pod has ended, the first time."""

    host: int
    pod: str
    moment: str
    ran: bool
    verdict: Verdict


def host_of(pod: Document) -> int | None:
    """Which host a pod is, if it is one of several."""
    text = str(part(part(pod, "metadata"), "labels").get(WORKER_INDEX, ""))
    return int(text) if text.isdecimal() else index_of(pod)


def word(seen: Seen) -> Word:
    """What is to be told, by everything that was seen of the set and its pods."""
    verdict = judge_group(seen)
    nothing: Document = {}
    about = seen.any_job or next(iter((*seen.pods, *seen.gone)), nothing)
    (said,) = observations(Seen(job=about, name=seen.job_name), verdict)
    ended = {end.pod for end in _ends(seen) if end.ran}
    if _is_going(seen) and _alive(seen):
        ended.add(uid(seen.any_job) or seen.job_name)
    return Word(said=said, ended=frozenset(ended - {verdict.executor}))


def judge_group(seen: Seen) -> Verdict:
    """Judge the attempt; give what `merged` made, so that a cause outlives its pod."""
    alive, ends = _alive(seen), _ends(seen)
    if (end := End.of(seen.any_job)) is not None and not any(map(ran, (*seen.pods, *seen.gone))):
        return _never(end, alive=bool(alive))
    first = next((pod for pod in _pods(seen) if host_of(pod) == 0 and not _vanished(pod)), None)
    own = next((one for one in ends if one.pod == uid(first)), None)
    cause = _cause(seen, ends)
    if own is not None:
        verdict = own.verdict
        if cause is not None and verdict.status is JobStatus.FAILED:
            verdict = replace(cause, executor=own.pod)
        over = seen.job is None and not alive
        return replace(verdict, phase=Phase.GONE) if over else verdict
    if alive:
        return _going_on(seen, alive, first, cause)
    if seen.job is None:
        return _gone(seen, cause)
    if (target := condition(seen.job, "Failed")) is not None:
        words = str(target.get("message") or "the set failed")
        return cause or _failed(Reason.LOST, words)
    return held_back(seen)


def _vanished(pod: Document) -> bool:
    """Whether it was deleted before it ever ran: why, the set says, or makes another one.

    Sets and pods come by different watches, of which either may be late.
    """
    return swept(pod) and not ran(pod)


def _pods(seen: Seen) -> list[Document]:
    """All there were, in the order in which they were made."""
    pods = (*seen.gone, *seen.pods)
    return sorted(pods, key=lambda pod: str(part(pod, "metadata").get("creationTimestamp") or ""))


def _alive(seen: Seen) -> list[Document]:
    return [pod for pod in seen.pods if not has_ended(pod)]


def _is_going(seen: Seen) -> bool:
    return seen.job is None or bool(part(seen.job, "metadata").get("deletionTimestamp"))


def _ends(seen: Seen) -> list[_End]:
    """Which programs have ended, the earliest first."""
    there = {uid(pod) for pod in seen.pods}
    found: list[_End] = []
    for pod in _pods(seen):
        before = _before_restart(pod)
        if before is not None or has_ended(pod):
            verdict = by_runner(ending(seen, before or pod), before or pod)
        elif uid(pod) not in there:
            verdict = past(seen, pod)
        else:
            continue
        found.append(
            _End(
                host=host_of(pod) or 0,
                pod=uid(pod),
                moment=_moment(before or pod),
                ran=ran(before or pod),
                verdict=verdict,
            )
        )
    return sorted(found, key=lambda one: one.moment or "~")  # those of unknown time at last


def _before_restart(pod: Document) -> Document | None:
    """A pod whose container runs again, as it was when that had ended the first time."""
    statuses = parts(part(pod, "status"), "containerStatuses")
    if not any(one.get("restartCount") for one in statuses):
        return None
    ends: list[dict[str, Any]] = [
        {**one, "state": one.get("lastState") or one.get("state")} for one in statuses
    ]
    codes = [part(part(one, "state"), "terminated").get("exitCode") for one in ends]
    phase = "Failed" if any(codes) else "Succeeded"
    return {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": ends}}


def _moment(pod: Document) -> str:
    statuses = parts(part(pod, "status"), "containerStatuses")
    ends = (part(part(one, "state"), "terminated").get("finishedAt") for one in statuses)
    return str(next((one for one in ends if one), ""))


def _cause(seen: Seen, ends: Sequence[_End]) -> Verdict | None:
    """The first failure that is not the answer to another one."""
    failed = [one for one in ends if one.verdict.status is JobStatus.FAILED]
    own = [one for one in failed if one.verdict.exit_code not in (None, *TERMINATED)]
    own += [one for one in failed if _is_evidence(one.verdict) and one not in own]
    if not own:
        return None
    first = own[0]
    hosts = part(part(seen.any_job, "metadata"), "annotations").get(HOSTS)
    where = f"host {first.host} of {hosts}" if hosts else f"host {first.host}"
    if hosts == "1":
        return first.verdict
    return replace(first.verdict, message=f"{where}: {first.verdict.message}")


def _is_evidence(verdict: Verdict) -> bool:
    """Whether its reason says more than that the pod was deleted."""
    return verdict.reason not in (None, Reason.LOST, Reason.USER_ERROR)


def _never(end: End, *, alive: bool) -> Verdict:
    """A client has ended it, for it could not start."""
    if alive:
        return Verdict(
            status=JobStatus.PENDING, phase=Phase.PENDING, reason=end.reason, message=end.message
        )
    return _failed(end.reason, end.message)


def _failed(reason: Reason, message: str) -> Verdict:
    return Verdict(
        status=JobStatus.FAILED,
        phase=Phase.ENDED,
        reason=reason,
        message=message,
        outlook=Outlook.FINAL,
    )


def _going_on(
    seen: Seen, alive: Sequence[Document], first: Document | None, cause: Verdict | None
) -> Verdict:
    """Some pod is there that runs, or will: what the first one does, and what keeps the others."""
    leaders = [pod for pod in alive if host_of(pod) == 0]
    if leaders:
        now = replace(present(seen, leaders[0]), executor=uid(first))
    else:
        started = any(map(ran, alive))
        now = Verdict(
            status=JobStatus.RUNNING if started else JobStatus.PENDING,
            phase=Phase.RUNNING if started else Phase.PENDING,
            message="the first host's pod is not there",
        )
    if _is_going(seen):
        return replace(now, message="is being stopped", outlook=Outlook.OPEN)
    if cause is not None:
        return replace(now, reason=cause.reason, message=cause.message, advice=cause.advice)
    if now.reason is None:
        for pod in alive:
            if (held := present(seen, pod)).reason is not None and held.phase is Phase.PENDING:
                words = f"host {host_of(pod)}: {held.message}"
                return replace(
                    now,
                    message=words,
                    reason=held.reason,
                    advice=held.advice,
                    outlook=held.outlook,
                )
    return now


def _gone(seen: Seen, cause: Verdict | None) -> Verdict:
    if cause is not None:
        return replace(cause, phase=Phase.GONE)
    return Verdict(
        status=JobStatus.NOT_FOUND,
        phase=Phase.GONE,
        message="the set of its pods was deleted",
        outlook=Outlook.FINAL,
    )
