"""Decide the state of a job on several hosts from its set and pods. No I/O.

A set is a LeaderWorkerSet or a JobSet. It has one pod for each host. The pod of the first host,
number 0, decides: it claims the attempt, and its result counts. If another host failed first, that
failure becomes the job's reason. A set doesn't say how the function ended, and a LeaderWorkerSet
may start an ended pod again. So this module uses the first end of each pod's container.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kinetic.aio.kubernetes.diagnosis.causes import (
    Cause,
    Diagnosis,
    ended_state,
    running_state,
    waiting_state,
)
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    age_key,
    annotations_of,
    condition,
    get_dict,
    get_list,
    labels_of,
    uid,
)
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod
from kinetic.aio.kubernetes.diagnosis.judge import pod_state, why_no_pod
from kinetic.aio.kubernetes.manifests import HOSTS, JOB, RANK
from kinetic.aio.kubernetes.observations import cause_of_end, observations
from kinetic.aio.kubernetes.sets import LIFE, WORKER_INDEX
from kinetic.aio.kubernetes.tables import Entry, Table
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import JobStatus, Reason

TERMINATED = (137, 143)
"""Exit codes of a program that was asked to end, as happens after another host failed."""


def host_of(pod: Document) -> int | None:
    """Return the host number of *pod*; None if the pod has none."""
    labels, annotations = labels_of(pod), annotations_of(pod)
    found = (labels.get(WORKER_INDEX), annotations.get(RANK), labels.get(RANK))
    return next((int(text) for value in found if (text := str(value)).isdecimal()), None)


def observation_of(facts: JobFacts, verdict: Diagnosis) -> Observation:
    """Return the observation of the attempt that the set in *facts* runs."""
    no_document: Document = {}
    job = facts.current_or_last_job or next(iter((*facts.pods, *facts.deleted_pods)), no_document)
    (observation,) = observations(JobFacts(job=job, name=facts.job_name), verdict)
    return observation


def judge_group(facts: JobFacts) -> Diagnosis:
    """Decide the attempt's state by the first host's end, else by the live pods, else by the set.

    Pass the result of `merge_facts`, which also has deleted pods.
    """
    alive, ends = facts.live_pods, _ends(facts)
    ran = any(Pod(pod).ran for pod in facts.every_pod)
    if (end_cause := cause_of_end(facts.current_or_last_job)) is not None and not ran:
        return waiting_state(cause=end_cause) if alive else ended_state(cause=end_cause)
    # Of a pod that was deleted before it ran, the set says why, or creates another.
    started = [pod for pod in facts.every_pod if Pod(pod).ran or not Pod(pod).deleted]
    leaders = [pod for pod in started if host_of(pod) == 0]
    leader = min(leaders, key=age_key, default=None)
    state = next((end for pod, end in ends if pod.uid == uid(leader)), None)
    cause = _first_failure(facts, [end for _, end in ends])
    if state is not None:
        if cause is not None and state.status is JobStatus.FAILED:
            state = replace(cause, executor=state.executor)
        is_gone = facts.job is None and not alive
        return replace(state, phase=Phase.GONE) if is_gone else state
    if alive:
        return _unfinished_state(facts, alive, leader, cause)
    if facts.job is None:
        deleted = Cause(summary="the set of its pods was deleted")
        state = cause or ended_state(cause=deleted, status=JobStatus.NOT_FOUND)
        return replace(state, phase=Phase.GONE)
    if (failed_condition := condition(facts.job, "Failed")) is not None:
        message = str(failed_condition.get("message") or "the set failed")
        return cause or ended_state(cause=Cause(summary=message, reason=Reason.LOST))
    return waiting_state(cause=why_no_pod(facts))


def _ends(facts: JobFacts) -> list[tuple[Pod, Diagnosis]]:
    """Return the first end of each pod whose program has ended, the earliest first."""
    found: list[tuple[Pod, Diagnosis]] = []
    for document in sorted(facts.every_pod, key=age_key):
        restarted = _pod_at_first_end(document)
        pod = Pod(restarted or document, facts)
        if restarted is not None or pod.ended or pod.gone:
            found.append((pod, replace(pod_state(pod), host=host_of(document) or 0)))
    # Unknown times sort last.
    return sorted(found, key=lambda end: str(end[0].end.get("finishedAt") or "~"))


def _pod_at_first_end(pod: Document) -> Document | None:
    """If a container was restarted, return the pod at the time of the container's first end."""
    statuses = get_list(get_dict(pod, "status"), "containerStatuses")
    if not any(status.get("restartCount") for status in statuses):
        return None
    ends: list[dict[str, Any]] = [
        {**status, "state": status.get("lastState") or status.get("state")} for status in statuses
    ]
    codes = [get_dict(get_dict(end, "state"), "terminated").get("exitCode") for end in ends]
    phase = "Failed" if any(codes) else "Succeeded"
    return {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": ends}}


def _first_failure(facts: JobFacts, ends: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the first failure that isn't a consequence of another; None if there is none."""
    failed = [end for end in ends if end.status is JobStatus.FAILED]
    primary = [end for end in failed if end.exit_code not in (None, *TERMINATED)]
    # The reasons LOST and USER_ERROR may be a consequence; all others name a cause.
    primary += [end for end in failed if end.reason not in (Reason.LOST, Reason.USER_ERROR)]
    if not primary:
        return None
    first, hosts = primary[0], annotations_of(facts.current_or_last_job).get(HOSTS)
    if hosts == "1":
        return first
    host = f"host {first.host} of {hosts}" if hosts else f"host {first.host}"
    return replace(first, lead=(host, *first.lead))


def _unfinished_state(
    facts: JobFacts, alive: Sequence[Document], leader: Document | None, cause: Diagnosis | None
) -> Diagnosis:
    """Return the state of a set that has not ended: the first host's state."""
    leaders = [pod for pod in alive if host_of(pod) == 0]
    if leaders:
        state = replace(pod_state(Pod(leaders[0], facts)), executor=uid(leader))
    else:
        build = running_state if any(Pod(pod).ran for pod in alive) else waiting_state
        state = build(cause=Cause(summary="the first host's pod is not there"))
    if facts.is_gone_or_deleting:
        return replace(state, lead=("is being stopped",), cause=Cause())
    if cause is not None:
        return replace(state, lead=cause.lead, cause=cause.cause, host=cause.host)
    # The first host may wait for another one, which says why it doesn't run yet.
    for pod in alive if state.cause.reason is None else ():
        waiting = pod_state(Pod(pod, facts))
        if waiting.cause.reason is not None and waiting.phase is Phase.PENDING:
            lead = (f"host {host_of(pod)}", *waiting.lead)
            return replace(state, lead=lead, cause=waiting.cause)
    return state


class GroupTable(Table):
    """A `Table` of sets instead of Jobs.

    A set's pods have a label with the set's name. Only pods that have *label* belong to this
    kind of set.
    """

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self._label = label

    def _job_name(self, document: Document, *, pods: bool) -> str:
        labels = labels_of(document)
        if pods and self._label and self._label not in labels:
            return ""
        return str((labels.get(JOB) if pods else get_dict(document, "metadata").get("name")) or "")

    def is_over_with(self, pod: Pod) -> bool:
        """Return True: a table holds a pod only if its whole set is over."""
        return True

    def _is_own(self, entry: Entry, pod: Document) -> bool:
        """Return whether the present set of this name made *pod*."""
        current_set = entry.job or entry.facts.current_or_last_job
        life = annotations_of(current_set).get(LIFE)
        return not current_set or annotations_of(pod).get(LIFE) == life

    def _changes(self, entry: Entry) -> Iterator[Observation]:
        """Yield the set's state if it changed since the last one that clients got."""
        pods = [pod for pod in entry.pods.values() if self._is_own(entry, pod)]
        entry.update_facts(pods)
        if not self._is_known(entry):
            return
        entry.verdict = judge_group(entry.facts)
        observation = observation_of(entry.facts, entry.verdict)
        previous = entry.reported.get(observation.name)
        entry.reported[observation.name] = observation
        self._note_waiting(entry, observation)
        if entry.verdict.is_over:
            self._note_held(entry)
        if observation.phase is Phase.GONE:
            del self.entries[entry.name]
        if previous != observation:
            yield observation

    def _is_known(self, entry: Entry) -> bool:
        """Return whether the set was seen, or had pods that may still run.

        If the set wasn't seen and all its pods have ended, remove *entry*.
        """
        if entry.facts.current_or_last_job:
            return True
        if all(Pod(pod).ended for pod in entry.pods.values()):
            del self.entries[entry.name]
            return False
        return entry.has_orphans(reports_orphans=self.reports_orphans)
