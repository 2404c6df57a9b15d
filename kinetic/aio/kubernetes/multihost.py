"""Decide the state of a job on several hosts from its set and pods. No I/O.

A set is a LeaderWorkerSet or a JobSet. It has one pod for each host. The pod of the first
host, number 0, decides: it claims the attempt, and its result counts. If another host failed first,
that failure becomes the reason. A set doesn't say how the function ended, and a LeaderWorkerSet may
start an ended pod again. So this module uses the first end of each pod's container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinetic.aio.kubernetes.diagnosis.causes import (
    Cause,
    Diagnosis,
    State,
    describe,
    ended_state,
    running_state,
    waiting_state,
)
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    age_key,
    condition,
    get_dict,
    get_list,
    uid,
)
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod
from kinetic.aio.kubernetes.diagnosis.judge import pod_state, why_no_pod
from kinetic.aio.kubernetes.manifests import HOSTS, JOB
from kinetic.aio.kubernetes.observations import End, observations
from kinetic.aio.kubernetes.sets import LIFE, WORKER_INDEX
from kinetic.aio.kubernetes.tables import Entry, Table
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import JobStatus, Reason

TERMINATED = (137, 143)
"""Exit codes of a program that was asked to end, as happens after another host failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How the program of one pod ended the first time."""

    host: int
    pod: str
    ended_at: str
    ran: bool
    state: State


def host_of(pod: Document) -> int | None:
    """Return the host number of *pod*; None if the pod has none."""
    text = str(get_dict(get_dict(pod, "metadata"), "labels").get(WORKER_INDEX, ""))
    return int(text) if text.isdecimal() else Pod(pod).index


def observation_of(facts: JobFacts, verdict: Diagnosis) -> Observation:
    """Return the observation of the attempt that the set in *facts* runs."""
    no_document: Document = {}
    job = facts.current_or_last_job or next(iter((*facts.pods, *facts.deleted_pods)), no_document)
    (observation,) = observations(JobFacts(job=job, name=facts.job_name), verdict)
    return observation


def ended_processes(facts: JobFacts, verdict: Diagnosis) -> frozenset[str]:
    """Return the uids of pods that ended, and of the set if it is deleted while pods run.

    The pod of *verdict* isn't among them. After each such end, the store may have an outcome.
    """
    uids = {end.pod for end in _ends(facts) if end.ran}
    if facts.is_gone_or_deleting and facts.live_pods:
        uids.add(uid(facts.current_or_last_job) or facts.job_name)
    return frozenset(uids - {verdict.executor})


def judge_group(facts: JobFacts) -> Diagnosis:
    """Decide the attempt's state. Pass the result of `merge_facts`, which also has deleted pods."""
    return describe(_group_state(facts))


def _group_state(facts: JobFacts) -> State:
    """Return the state by the first host's end; else by the live pods; else by the set."""
    alive, ends = facts.live_pods, _ends(facts)
    ran = any(Pod(pod).ran for pod in facts.every_pod)
    if (end := End.from_job(facts.current_or_last_job)) is not None and not ran:
        # The message already contains the advice.
        end_cause = Cause(summary=end.message, reason=end.reason, advice="")
        return waiting_state(end_cause) if alive else ended_state(end_cause)
    leaders = [
        pod for pod in facts.every_pod if host_of(pod) == 0 and not _was_deleted_unstarted(pod)
    ]
    leader = min(leaders, key=age_key, default=None)
    leader_end = next((end for end in ends if end.pod == uid(leader)), None)
    cause = _first_failure(facts, ends)
    if leader_end is not None:
        state = leader_end.state
        if cause is not None and state.status is JobStatus.FAILED:
            state = replace(cause, executor=leader_end.pod)
        is_gone = facts.job is None and not alive
        return replace(state, phase=Phase.GONE) if is_gone else state
    if alive:
        return _unfinished_state(facts, alive, leader, cause)
    if facts.job is None:
        deleted = Cause(summary="the set of its pods was deleted")
        state = cause or ended_state(deleted, status=JobStatus.NOT_FOUND)
        return replace(state, phase=Phase.GONE)
    if (failed_condition := condition(facts.job, "Failed")) is not None:
        message = str(failed_condition.get("message") or "the set failed")
        return cause or ended_state(Cause(summary=message, reason=Reason.LOST))
    return waiting_state(why_no_pod(facts))


def _was_deleted_unstarted(pod: Document) -> bool:
    """Return whether *pod* was deleted before it ran: the set says why, or creates another pod."""
    return Pod(pod).deleted and not Pod(pod).ran


def _ends(facts: JobFacts) -> list[_End]:
    """Return the first end of each pod's program that has ended, the earliest first."""
    found: list[_End] = []
    for document in sorted(facts.every_pod, key=age_key):
        restarted = _pod_at_first_end(document)
        pod = Pod(restarted or document, facts)
        if restarted is None and not (pod.ended or pod.gone):
            continue
        found.append(
            _End(
                host=host_of(document) or 0,
                pod=pod.uid,
                ended_at=_end_time(pod.document),
                ran=pod.ran,
                state=pod_state(pod),
            )
        )
    return sorted(found, key=lambda end: end.ended_at or "~")  # unknown times sort last


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


def _end_time(pod: Document) -> str:
    statuses = get_list(get_dict(pod, "status"), "containerStatuses")
    times = (
        get_dict(get_dict(status, "state"), "terminated").get("finishedAt") for status in statuses
    )
    return str(next((finished for finished in times if finished), ""))


def _first_failure(facts: JobFacts, ends: Sequence[_End]) -> State | None:
    """Return the first failure that isn't a consequence of another; None if there is none."""
    failed = [end for end in ends if end.state.status is JobStatus.FAILED]
    primary = [end for end in failed if end.state.exit_code not in (None, *TERMINATED)]
    primary += [end for end in failed if _is_informative(end.state) and end not in primary]
    if not primary:
        return None
    first = primary[0]
    hosts = get_dict(get_dict(facts.current_or_last_job, "metadata"), "annotations").get(HOSTS)
    if hosts == "1":
        return first.state
    host = f"host {first.host} of {hosts}" if hosts else f"host {first.host}"
    return replace(first.state, lead=(host, *first.state.lead), host=first.host)


def _is_informative(state: State) -> bool:
    """Return whether the reason of *state* says more than that the pod was deleted."""
    return state.cause.reason not in (None, Reason.LOST, Reason.USER_ERROR)


def _unfinished_state(
    facts: JobFacts, alive: Sequence[Document], leader: Document | None, cause: State | None
) -> State:
    """Return the state of a set that has not ended: the first host's state.

    If that state has no reason, it gets the reason why another host doesn't run yet.
    """
    leaders = [pod for pod in alive if host_of(pod) == 0]
    if leaders:
        state = replace(pod_state(Pod(leaders[0], facts)), executor=uid(leader))
    else:
        started = any(Pod(pod).ran for pod in alive)
        state = (running_state if started else waiting_state)(
            Cause(summary="the first host's pod is not there")
        )
    if facts.is_gone_or_deleting:
        return replace(state, lead=("is being stopped",), cause=Cause())
    if cause is not None:
        return replace(state, lead=cause.lead, cause=cause.cause, host=cause.host)
    if state.cause.reason is None:
        for pod in alive:
            host_state = pod_state(Pod(pod, facts))
            if host_state.cause.reason is not None and host_state.phase is Phase.PENDING:
                return replace(
                    state, lead=(f"host {host_of(pod)}", *host_state.lead), cause=host_state.cause
                )
    return state


class GroupTable(Table):
    """A `Table` of sets instead of Jobs.

    A set's pods have a label with the set's name. Only pods that have *label* belong to this
    kind of set. With *hints*, `news` also yields an observation for each process that ended. The
    attempt may not be over then, but the store may have its outcome. *makers* returns the kind and
    name of the objects that create a set's pods.
    """

    def __init__(
        self,
        *,
        label: str = "",
        hints: bool = True,
        makers: Callable[[str], Sequence[tuple[str, str]]] = lambda name: (),
    ) -> None:
        super().__init__()
        self._label = label
        self._makers = makers
        self._hints = hints
        self._hinted: dict[str, frozenset[str]] = {}

    def _job_name(self, document: Document, *, pods: bool) -> str:
        metadata = get_dict(document, "metadata")
        labels = get_dict(metadata, "labels")
        if pods and self._label and self._label not in labels:
            return ""
        return str((labels.get(JOB) if pods else metadata.get("name")) or "")

    def _is_own(self, entry: Entry, pod: Document) -> bool:
        """Return whether the present set of this name made *pod*."""
        current_set = entry.job or entry.facts.current_or_last_job
        lives = [
            get_dict(get_dict(document, "metadata"), "annotations").get(LIFE)
            for document in (current_set, pod)
        ]
        return not current_set or lives[0] == lives[1]

    def _changes(self, entry: Entry) -> Iterator[Observation]:
        """Yield an end for each process that ended (a hint), then the set's state if it changed."""
        pods = [pod for pod in entry.pods.values() if self._is_own(entry, pod)]
        entry.update_facts(pods, self._makers(entry.name))
        if not self._is_known(entry):
            return
        entry.verdict = judge_group(entry.facts)
        observation = observation_of(entry.facts, entry.verdict)
        if self._hints:
            ended_uids = ended_processes(entry.facts, entry.verdict)
            for executor in sorted(ended_uids - self._hinted.get(entry.name, frozenset())):
                yield replace(observation, phase=Phase.ENDED, executor=executor)
            self._hinted[entry.name] = ended_uids
        previous, entry.reported[observation.name] = (
            entry.reported.get(observation.name),
            observation,
        )
        self._note_waiting(entry, observation)
        if observation.phase is Phase.GONE:
            del self.entries[entry.name]
            self._hinted.pop(entry.name, None)
        if previous != observation:
            yield observation

    def _is_known(self, entry: Entry) -> bool:
        """Return whether the set was seen, or no longer exists although its pods may run.

        If the set wasn't seen and all its pods have ended, remove *entry*.
        """
        if entry.facts.current_or_last_job:
            return True
        if all(Pod(pod).ended for pod in entry.pods.values()):
            del self.entries[entry.name]
            return False
        return self.orphans or any(Pod(pod).terminating for pod in entry.pods.values())
