"""What is known of one Job and its pods, and what the port is told of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from kinetic._words import one_line
from kinetic.aio.clusters._job_manifest import ATTEMPT, LABELS, NAME
from kinetic.aio.clusters._kube_trim import OUTCOME
from kinetic.aio.clusters._names import attempt_name
from kinetic.aio.clusters._reasons.containers import containers
from kinetic.aio.clusters._reasons.documents import Document, condition, part, parts, uid
from kinetic.aio.clusters._reasons.ending import has_ended
from kinetic.aio.clusters._reasons.finished import past
from kinetic.aio.clusters._reasons.judge import judge, judge_pod
from kinetic.aio.clusters._reasons.verdict import Outlook, Seen, Verdict
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import JobStatus, Reason

__all__ = [
    "ENDED",
    "End",
    "Facts",
    "by_runner",
    "judged",
    "name_of",
    "observations",
    "owner",
    "owner_name",
    "settled",
]

ENDED = "kinetic.dev/ended"
"""The annotation with why a client ended a Job that could not start; every observer reads it."""


_COUNTS = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was asked for beside jobs and pods, because a state needed an explanation."""

    events: Sequence[Document] = ()
    nodes: Sequence[Document] | None = None
    workload: Document | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a client ends a Job that could not start."""

    reason: Reason
    message: str

    def to_text(self) -> str:
        """As the annotation carries it."""
        return json.dumps({"reason": self.reason.value, "message": self.message})

    @staticmethod
    def of(job: Document | None) -> End | None:
        """What the annotation of *job* says."""
        text = part(part(job, "metadata"), "annotations").get(ENDED)
        if not text:
            return None
        try:
            found = json.loads(str(text))
            return End(reason=Reason(found["reason"]), message=str(found["message"]))
        except (ValueError, KeyError, TypeError):
            return End(reason=Reason.LOST, message=one_line(str(text)))


def owner(pod: Document) -> str:
    """The uid of the Job that made *pod*."""
    return str(_controller(pod).get("uid") or "")


def owner_name(pod: Document) -> str:
    """The name of the Job that made *pod*."""
    return str(_controller(pod).get("name") or "")


def _controller(pod: Document) -> Document:
    nobody: Document = {}
    owners = parts(part(pod, "metadata"), "ownerReferences")
    return next((one for one in owners if one.get("controller")), nobody)


def judged(seen: Seen) -> Verdict:
    """What is to be told of the Job, also where a client has ended it."""
    verdict = judge(seen)
    end = End.of(seen.any_job)
    if end is None or any(_started(pod) for pod in (*seen.pods, *seen.gone)):
        return verdict
    alive = [pod for pod in seen.pods if not has_ended(pod)]
    if verdict.phase is Phase.GONE or verdict.status is JobStatus.SUCCEEDED:
        return verdict
    return replace(
        verdict,
        status=JobStatus.PENDING if alive else JobStatus.FAILED,
        phase=Phase.PENDING if alive else Phase.ENDED,
        reason=end.reason,
        exit_code=None,
        executor="",
        message=end.message,
        advice="",
        outlook=Outlook.OPEN if alive else Outlook.FINAL,
    )


def _started(pod: Document) -> bool:
    """Whether its program surely ran: a kubelet says "unknown" of one that it never started."""
    states = [part(one.status, "state") for one in containers(pod) if not one.init]
    return any("running" in state or part(state, "terminated").get("startedAt") for state in states)


def settled(seen: Seen, verdict: Verdict) -> bool:
    """Whether nothing will change any more but that it is removed."""
    over = condition(seen.job, "Complete") or condition(seen.job, "Failed")
    return over is not None and verdict.phase is Phase.ENDED


def observations(seen: Seen, verdict: Verdict) -> list[Observation]:
    """The port's words: one for each attempt, the one that *verdict* is about at the end.

    The Job replaces a pod that was disrupted. That one carries the number of
    the next attempt, in its annotations; the name and the labels of that are
    told, as they were ordered but for the number.
    """
    about = _about((seen.any_job, *seen.pods, *seen.gone))
    labels = _labels(about)
    first = _number(labels.get(ATTEMPT))
    if first is None:
        name = str(part(about, "annotations").get(NAME) or seen.job_name)
        last = next(reversed([*seen.gone, *seen.pods]), None)
        return [_observation(about, labels, name, by_runner(verdict, last))]
    pods = {first + _starts_before(pod): pod for pod in (*seen.gone, *seen.pods)}
    now = _current(seen, verdict, pods, first)
    verdict = by_runner(verdict, pods.get(now))
    there = {uid(pod) for pod in seen.pods}
    told = {
        number: by_runner(judge_pod(seen, pod) if uid(pod) in there else past(seen, pod), pod)
        for number, pod in pods.items()
        if number != now  # that is what the verdict says
    }
    found: list[Observation] = []
    name = str(part(about, "annotations").get(NAME) or seen.job_name)
    for number in (*sorted(told), now):
        said = verdict if number == now else told[number]
        whose = {**labels, ATTEMPT: str(number)}
        found.append(_observation(about, whose, attempt_name(name, first, number), said))
    return found


def by_runner(verdict: Verdict, pod: Document | None) -> Verdict:
    """*verdict*, with the reason of the outcome that the runner in *pod* committed itself."""
    if verdict.status is not JobStatus.FAILED or verdict.executor != uid(pod):
        return verdict
    ends = (one.state("terminated") or {} for one in containers(pod or {}) if not one.init)
    told = next((str(end[OUTCOME]) for end in ends if end.get(OUTCOME)), "")
    if told == Reason.DEADLINE.value:
        words = "the function ran longer than its timeout"
        return replace(verdict, reason=Reason.DEADLINE, message=words, advice="raise timeout=")
    known = told in {one.value for one in Reason}
    return replace(verdict, reason=Reason(told)) if known else verdict


def name_of(document: Document) -> str:
    """The name of the attempt that a Job was made for, or that a pod carries out."""
    about = part(document, "metadata")
    name = str(part(about, "annotations").get(NAME) or about.get("name") or "")
    first = _number(_labels(about).get(ATTEMPT))
    return name if first is None else attempt_name(name, first, first + _starts_before(document))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _starts_before(pod: Document) -> int:
    """How many pods of its Job failed before this one, for whatever reason."""
    annotations = part(part(pod, "metadata"), "annotations")
    return sum(_number(str(annotations.get(key))) or 0 for key in _COUNTS)


def _current(seen: Seen, verdict: Verdict, pods: Mapping[int, Document], first: int) -> int:
    """The attempt that the verdict on the whole Job is about."""
    if not pods:
        return first
    alive = any(not has_ended(pod) for pod in seen.pods)
    if verdict.phase is Phase.PENDING and not alive:
        return max(pods) + 1  # its pod is about to be made
    named = (number for number, pod in pods.items() if uid(pod) == verdict.executor)
    return next(named, max(pods))


def _observation(
    about: Document, labels: Mapping[str, str], name: str, verdict: Verdict
) -> Observation:
    created = str(about.get("creationTimestamp") or "")
    return Observation(
        name=name,
        phase=verdict.phase,
        labels=labels,
        # What waits is no process yet.
        executor="" if verdict.phase is Phase.PENDING else verdict.executor,
        exit_code=verdict.exit_code,
        reason=verdict.reason,
        message=verdict.text,
        created_at=created.replace("Z", "+00:00"),
    )


def _about(documents: Iterable[Document]) -> Document:
    """The metadata of the first that carries the job's name."""
    found = [part(one, "metadata") for one in documents]
    named = (one for one in found if NAME in part(one, "annotations"))
    return next(named, found[0] if found else {})


def _labels(about: Document) -> Mapping[str, str]:
    text = part(about, "annotations").get(LABELS)
    if text:
        try:
            found: Any = json.loads(str(text))
        except ValueError:
            found = None
        if isinstance(found, dict):
            return cast("dict[str, str]", found)
    return {key: str(value) for key, value in part(about, "labels").items()}
