"""Decide the state of a job on several hosts from its set and pods. No I/O.

The pod of the first host, number 0, decides: it claims the attempt, and its result counts. If
another host failed first, that failure becomes the reason. Neither kind of set says how the
function ended. The pods of a LeaderWorkerSet may never end, or are started again after their end.
So this module uses the first end of each pod's container.
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
    ended,
    running,
    waiting,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, age, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.facts import Pod, Seen
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
    moment: str
    ran: bool
    state: State


def host_of(pod: Document) -> int | None:
    """Return the number of the host that *pod* is; None if the pod has no number."""
    text = str(part(part(pod, "metadata"), "labels").get(WORKER_INDEX, ""))
    return int(text) if text.isdecimal() else Pod(pod).index


def observation_of(seen: Seen, verdict: Diagnosis) -> Observation:
    """Return the observation of the attempt that the set in *seen* runs."""
    none: Document = {}
    about = seen.any_job or next(iter((*seen.pods, *seen.gone)), none)
    (observation,) = observations(Seen(job=about, name=seen.job_name), verdict)
    return observation


def ended_processes(seen: Seen, verdict: Diagnosis) -> frozenset[str]:
    """Return the uids of pods that ended, and of the set if it is deleted while pods run.

    The pod of *verdict* isn't among them. After each such end, the store may have an outcome.
    """
    ended = {end.pod for end in _ends(seen) if end.ran}
    if seen.going and seen.alive:
        ended.add(uid(seen.any_job) or seen.job_name)
    return frozenset(ended - {verdict.executor})


def judge_group(seen: Seen) -> Diagnosis:
    """Decide the attempt's state. Pass the result of `merged`, which also has deleted pods."""
    return describe(_state(seen))


def _state(seen: Seen) -> State:
    alive, ends = seen.alive, _ends(seen)
    ran = any(Pod(one).ran for one in seen.every_pod)
    if (end := End.of(seen.any_job)) is not None and not ran:
        why = Cause(what=end.message, reason=end.reason, advice="")  # the message has the advice
        return waiting(why) if alive else ended(why)
    leaders = [pod for pod in seen.every_pod if host_of(pod) == 0 and not _vanished(pod)]
    first = min(leaders, key=age, default=None)
    own = next((one for one in ends if one.pod == uid(first)), None)
    cause = _cause(seen, ends)
    if own is not None:
        state = own.state
        if cause is not None and state.status is JobStatus.FAILED:
            state = replace(cause, executor=own.pod)
        over = seen.job is None and not alive
        return replace(state, phase=Phase.GONE) if over else state
    if alive:
        return _going_on(seen, alive, first, cause)
    if seen.job is None:
        gone = Cause(what="the set of its pods was deleted")
        state = cause or ended(gone, status=JobStatus.NOT_FOUND)
        return replace(state, phase=Phase.GONE)
    if (target := condition(seen.job, "Failed")) is not None:
        message = str(target.get("message") or "the set failed")
        return cause or ended(Cause(what=message, reason=Reason.LOST))
    return waiting(why_no_pod(seen))


def _vanished(pod: Document) -> bool:
    """Return whether *pod* was deleted before it ran: the set says why, or creates another pod.

    Sets and pods come by different watches, either of which may be late.
    """
    return Pod(pod).deleted and not Pod(pod).ran


def _ends(seen: Seen) -> list[_End]:
    """Return the first end of each pod's program that has ended, the earliest first."""
    found: list[_End] = []
    for document in sorted(seen.every_pod, key=age):
        restarted = _before_restart(document)
        pod = Pod(restarted or document, seen)
        if restarted is None and not (pod.ended or pod.gone):
            continue
        found.append(
            _End(
                host=host_of(document) or 0,
                pod=pod.uid,
                moment=_moment(pod.document),
                ran=pod.ran,
                state=pod_state(pod),
            )
        )
    return sorted(found, key=lambda one: one.moment or "~")  # those of unknown time come last


def _before_restart(pod: Document) -> Document | None:
    """If a container was restarted, return the pod at the time of the container's first end."""
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


def _cause(seen: Seen, ends: Sequence[_End]) -> State | None:
    """Return the first failure that isn't a consequence of another one."""
    failed = [one for one in ends if one.state.status is JobStatus.FAILED]
    own = [one for one in failed if one.state.exit_code not in (None, *TERMINATED)]
    own += [one for one in failed if _is_evidence(one.state) and one not in own]
    if not own:
        return None
    first = own[0]
    hosts = part(part(seen.any_job, "metadata"), "annotations").get(HOSTS)
    if hosts == "1":
        return first.state
    where = f"host {first.host} of {hosts}" if hosts else f"host {first.host}"
    return replace(first.state, lead=(where, *first.state.lead), host=first.host)


def _is_evidence(state: State) -> bool:
    """Return whether the reason of *state* says more than that the pod was deleted."""
    return state.cause.reason not in (None, Reason.LOST, Reason.USER_ERROR)


def _going_on(
    seen: Seen, alive: Sequence[Document], first: Document | None, cause: State | None
) -> State:
    """Return the state of a group that has not ended: the first host's state.

    The text also has the reason why other hosts don't run yet.
    """
    leaders = [pod for pod in alive if host_of(pod) == 0]
    if leaders:
        now = replace(pod_state(Pod(leaders[0], seen)), executor=uid(first))
    else:
        started = any(Pod(one).ran for one in alive)
        now = (running if started else waiting)(Cause(what="the first host's pod is not there"))
    if seen.going:
        return replace(now, lead=("is being stopped",), cause=Cause())
    if cause is not None:
        return replace(now, lead=cause.lead, cause=cause.cause, host=cause.host)
    if now.cause.reason is None:
        for pod in alive:
            held = pod_state(Pod(pod, seen))
            if held.cause.reason is not None and held.phase is Phase.PENDING:
                return replace(now, lead=(f"host {host_of(pod)}", *held.lead), cause=held.cause)
    return now


class GroupTable(Table):
    """A `Table` of sets instead of Jobs.

    A set and its pods share a label with their name. Only pods that have *label* belong to this
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

    def _name(self, document: Document, *, pods: bool) -> str:
        metadata = part(document, "metadata")
        labels = part(metadata, "labels")
        if pods and self._label and self._label not in labels:
            return ""
        return str((labels.get(JOB) if pods else metadata.get("name")) or "")

    def _is_own(self, entry: Entry, pod: Document) -> bool:
        """Return whether the present set of this name made *pod*."""
        of = entry.job or entry.seen.any_job
        lives = [part(part(one, "metadata"), "annotations").get(LIFE) for one in (of, pod)]
        return not of or lives[0] == lives[1]

    def _changes(self, entry: Entry) -> Iterator[Observation]:
        pods = [pod for pod in entry.pods.values() if self._is_own(entry, pod)]
        entry.see(pods, self._makers(entry.name))
        if not self._is_known(entry):
            return
        entry.verdict = judge_group(entry.seen)
        now = observation_of(entry.seen, entry.verdict)
        if self._hints:
            ended = ended_processes(entry.seen, entry.verdict)
            for who in sorted(ended - self._hinted.get(entry.name, frozenset())):
                yield replace(now, phase=Phase.ENDED, executor=who)
            self._hinted[entry.name] = ended
        before, entry.reported[now.name] = entry.reported.get(now.name), now
        self._note_waiting(entry, now)
        if now.phase is Phase.GONE:
            del self.entries[entry.name]
            self._hinted.pop(entry.name, None)
        if before != now:
            yield now

    def _is_known(self, entry: Entry) -> bool:
        """Return whether the set was seen or no longer exists; its pods may be seen before it."""
        if entry.seen.any_job:
            return True
        if all(Pod(pod).ended for pod in entry.pods.values()):
            del self.entries[entry.name]
            return False
        return self.orphans or any(Pod(pod).terminating for pod in entry.pods.values())
