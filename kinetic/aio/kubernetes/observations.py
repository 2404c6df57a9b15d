"""Turn the diagnosis of a Job into observations, one for each of its attempts. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kinetic._labels import ATTEMPT, KIND, WORKER
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Diagnosis, ended_state, waiting_state
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    annotations_of,
    condition,
    get_dict,
    get_list,
    labels_of,
    uid,
)
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod, failures_before
from kinetic.aio.kubernetes.diagnosis.judge import judge, pod_state
from kinetic.aio.kubernetes.manifests import LABELS, NAME, RANK
from kinetic.aio.kubernetes.trimming import receipt_of
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import JobStatus, Reason

ENDED = "kinetic.dev/ended"
"""The annotation that says why a client ended a Job that could not start. All clients read it."""


def text_of_end(cause: Cause) -> str:
    """Return the value of the annotation `ENDED` for a Job that *cause* keeps from starting."""
    return json.dumps({"reason": str(cause.reason), "message": cause.summary})


def cause_of_end(job: Document | None) -> Cause | None:
    """Return why a client ended *job*, by its annotation; None if no client did."""
    if not (text := annotations_of(job).get(ENDED)):
        return None
    found = json.loads(text)
    # The message contains the advice.
    return Cause(summary=found["message"], reason=Reason(found["reason"]), advice="")


def controller(pod: Document) -> Document:
    """Return the reference to the Job that made *pod*; an orphaned pod has none."""
    no_owner: Document = {}
    owners = get_list(get_dict(pod, "metadata"), "ownerReferences")
    return next((owner for owner in owners if owner.get("controller")), no_owner)


def judge_job(facts: JobFacts) -> Diagnosis:
    """Decide the state of the job, also if a client ended its Job because it could not start."""
    verdict = judge(facts)
    cause = cause_of_end(facts.current_or_last_job)
    if cause is None or any(Pod(pod).ran for pod in facts.every_pod):
        return verdict
    if verdict.status is JobStatus.SUCCEEDED:
        return verdict
    if facts.live_pods:
        return waiting_state(cause=cause)
    end = ended_state(cause=cause)
    return replace(end, phase=Phase.GONE) if verdict.phase is Phase.GONE else end


def has_job_ended(facts: JobFacts, verdict: Diagnosis) -> bool:
    """Return whether the Job has ended, so that only its deletion can change the observations."""
    end_condition = condition(facts.job, "Complete") or condition(facts.job, "Failed")
    return end_condition is not None and verdict.phase is Phase.ENDED


def _is_last(facts: JobFacts, verdict: Diagnosis) -> bool:
    """Return whether no pod of the Job can still run, and the Job creates no further pod."""
    if verdict.phase not in (Phase.ENDED, Phase.GONE):
        return False
    if verdict.status is JobStatus.SUCCEEDED or has_job_ended(facts, verdict):
        return True
    return facts.is_gone_or_deleting


def observations(facts: JobFacts, verdict: Diagnosis) -> list[Observation]:
    """Return an observation for each attempt; *verdict* is about the last attempt.

    The Job's first pod makes the first attempt. The Job replaces a disrupted pod, and the new pod
    is another attempt. The new pod's annotations give its number, which is part of the
    observation's name and labels.

    If *facts* are about one rank of a round, return an observation for each worker of this rank.
    """
    documents = [facts.current_or_last_job, *facts.pods, *facts.deleted_pods]
    document = next((found for found in documents if NAME in annotations_of(found)), documents[0])
    labels: Mapping[str, str] = json.loads(annotations_of(document).get(LABELS) or "{}")
    name = str(annotations_of(document).get(NAME) or facts.job_name)
    is_worker = labels.get(KIND) == WORKER
    first = 0 if is_worker else 1
    is_final = _is_last(facts, verdict)
    pods = {first + failures_before(pod): pod for pod in facts.every_pod}
    current = _current_attempt(facts, verdict, pods, first)
    found: list[Observation] = []
    for number in (*sorted(pods.keys() - {current}), current):
        pod = pods.get(number)
        is_current = number == current
        state = verdict if is_current or pod is None else pod_state(Pod(pod, facts))
        attempt_name, attempt_labels = name, labels
        if is_worker:
            job_uid = uid(facts.current_or_last_job) or str(controller(document).get("uid") or "")
            attempt_name = f"{name}.{job_uid}.{facts.name.rpartition(RANK_SEPARATOR)[2]}.{number}"
        elif number > first:
            attempt_name, attempt_labels = f"{name}-{number}", {**labels, ATTEMPT: str(number)}
        last = is_final and is_current
        # The Job was created for its first attempt, each later one has waited since its pod exists.
        created = document if number == first or pod is None else pod
        found.append(_observation(created, attempt_labels, attempt_name, state, pod, last=last))
    return found


RANK_SEPARATOR = "/"
"""What no Job has in its name."""


def rank_entry(job_name: str, rank: int | str) -> str:
    """Return the name under which a table keeps one rank of a round."""
    return f"{job_name}{RANK_SEPARATOR}{rank}"


def name_of(document: Document) -> str:
    """Return the name of the attempt or round of a Job, or of the attempt or worker of a pod."""
    object_name = get_dict(document, "metadata").get("name")
    name = str(annotations_of(document).get(NAME) or object_name or "")
    if (rank := labels_of(document).get(RANK)) and labels_of(document).get(KIND) == WORKER:
        return f"{name}.{controller(document).get('uid')}.{rank}.{failures_before(document)}"
    failures = failures_before(document)
    return f"{name}-{1 + failures}" if failures else name


def _current_attempt(
    facts: JobFacts, verdict: Diagnosis, pods: Mapping[int, Document], first: int
) -> int:
    """Return the number of the attempt that *verdict*, on the whole Job, is about."""
    if not pods:
        return first
    last = max(pods)
    # If a pod never started, a client may have ended its Job, which the Job's next state says.
    if verdict.phase is Phase.PENDING and not facts.live_pods and Pod(pods[last]).ran:
        return last + 1  # the Job is about to create its pod
    matching = (number for number, pod in pods.items() if uid(pod) == verdict.executor)
    return next(matching, last)


def _observation(
    document: Document,
    labels: Mapping[str, str],
    name: str,
    verdict: Diagnosis,
    pod: Document | None,
    *,
    last: bool,
) -> Observation:
    created = str(get_dict(document, "metadata").get("creationTimestamp") or "")
    return Observation(
        name=name,
        phase=verdict.phase,
        labels=labels,
        # A pod that waits has no process yet.
        executor="" if verdict.phase is Phase.PENDING else verdict.executor,
        exit_code=verdict.exit_code,
        reason=verdict.reason,
        message=verdict.text,
        host=verdict.host,
        created_at=created.replace("Z", "+00:00"),
        last=last,
        receipt=receipt_of(pod),
        disruptions=0 if pod is None else Pod(pod).disruptions_before,
    )


def unstarted_ends(
    reported: Mapping[str, Observation], current: Iterable[Observation], verdict: Diagnosis
) -> list[Observation]:
    """Return an end for each reported attempt that got no pod before its Job ended."""
    unstarted = reported.keys() - {observation.name for observation in current}
    return [
        replace(
            reported[name],
            phase=Phase.ENDED,
            executor="",
            reason=verdict.reason,
            message=verdict.text,
            last=True,
        )
        for name in unstarted
        if reported[name].phase is not Phase.ENDED
    ]


def is_news(before: Observation | None, now: Observation) -> bool:
    """Return whether to report *now* after *before*.

    An end is reported once. A later observation of the same end is reported only if it says that
    no further attempt follows.
    """
    if before is None or now.phase is not before.phase:
        return True
    if now.last and not before.last:  # a client waits for no further attempt then
        return True
    return now.phase not in (Phase.ENDED, Phase.GONE) and now != before
