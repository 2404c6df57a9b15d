"""From what Kubernetes says of the hosts of one job to what its user is told. Pure.

The first host's pod decides: it claims, and its value counts. What happened to
another one is told as the reason. Neither kind of set says by itself how the
function ended; the pods of a LeaderWorkerSet do not even end, or are started
again when they do. So it counts how a pod's container ended the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kinetic.aio.kubernetes.diagnosis.causes import (
    Cause,
    Diagnosis,
    State,
    ended,
    running,
    tell,
    waiting,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.facts import Pod, Seen
from kinetic.aio.kubernetes.diagnosis.judge import held_fast, no_pod, pod_state
from kinetic.aio.kubernetes.manifests import HOSTS, JOB, Placement, job_manifest, object_name
from kinetic.aio.kubernetes.observations import End, observations
from kinetic.aio.kubernetes.tables import Entry, Table
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.job_status import JobStatus, Reason

NAME_LENGTH = 44
"""Controllers add to a set's name what tells its pods and their revisions apart, within 63."""

NODE_POOL = "cloud.google.com/gke-nodepool"
"""The label of nodes that are one slice of TPUs: two sets never share one."""

LIFE = "kinetic.dev/life"
"""The annotation that a set has in common with its pods, and with those of no other of its name."""

PORT = 8476
"""Where the first host listens for the others."""

_COUNTS = ("KINETIC_FAILURES", "KINETIC_DISRUPTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parts of a manifest: ``metadata`` of the set, and the ``pod``'s template of each host.

    ``slice`` says that the hosts are one slice of TPUs.
    """

    hosts: int
    slice: bool
    metadata: dict[str, Any]
    pod: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the set."""
        return str(self.metadata["name"])


def group_name(name: str) -> str:
    """What the set is called that carries the attempt *name*."""
    return object_name(name, longest=NAME_LENGTH)


def group_of(spec: JobSpec, at: Placement) -> Group:
    """What all hosts of *spec* have in common.

    Raises:
        ConfigurationError: As `kinetic.aio.kubernetes.manifests.job_manifest`.
    """
    accelerator = spec.resources.accelerator
    several = {**at.annotations, HOSTS: str(accelerator.hosts)}
    job = job_manifest(spec, replace(at, annotations=several))
    name = group_name(spec.name)
    pod: dict[str, Any] = job["spec"]["template"]
    for metadata in (job["metadata"], pod["metadata"]):
        metadata["labels"] = {**metadata["labels"], JOB: name}
    (container,) = pod["spec"]["containers"]
    container["env"] = [one for one in container["env"] if one["name"] not in _COUNTS]
    container["env"].append({"name": "KINETIC_HOSTS", "value": str(accelerator.hosts)})
    return Group(
        hosts=accelerator.hosts,
        slice=accelerator.kind == "tpu" and accelerator.multi_host,
        metadata={**job["metadata"], "name": name},
        pod=pod,
    )


def variable(pod: Mapping[str, Any], *added: dict[str, Any]) -> dict[str, Any]:
    """The template *pod* with more variables for its container."""
    (container,) = pod["spec"]["containers"]
    container = {**container, "env": [*container["env"], *added]}
    return {**pod, "spec": {**pod["spec"], "containers": [container]}}


HOST = "host"
"""What its one replicated job is called: the name of the Job has it."""

INDEX = "batch.kubernetes.io/job-completion-index"


def jobset_manifest(spec: JobSpec, at: Placement) -> dict[str, Any]:
    """The JobSet that carries *spec*.

    Raises:
        ConfigurationError: As `kinetic.aio.kubernetes.manifests.job_manifest`.
    """
    group = group_of(spec, at)
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    first = f"{group.name}-{HOST}-0-0.{group.name}"
    pod = variable(
        group.pod,
        {"name": "KINETIC_HOST", "valueFrom": index},
        {"name": "KINETIC_COORDINATOR", "value": f"{first}:{PORT}"},
    )
    metadata = dict(group.metadata)
    if group.slice:
        exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": NODE_POOL}
        metadata["annotations"] = {**metadata["annotations"], **exclusive}
    job = {
        "completionMode": "Indexed",
        "completions": group.hosts,
        "parallelism": group.hosts,
        "backoffLimit": 0,
        "template": pod,
    }
    own = {name: group.pod["metadata"][name] for name in ("labels", "annotations")}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "replicatedJobs": [
                {"name": HOST, "replicas": 1, "template": {"metadata": own, "spec": job}}
            ],
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,  # they have to meet before any of them is
                "subdomain": group.name,
            },
            "successPolicy": {"operator": "All"},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": at.ttl_s,
            **({"suspend": True} if at.queue else {}),
        },
    }


DOMAIN = "leaderworkerset.sigs.k8s.io"
WORKER_INDEX = f"{DOMAIN}/worker-index"
"""The label with the number of a pod's host: the leader is 0."""

TPU_PORT = {"name": "TPU_PROCESS_PORT", "value": "8471"}
"""Where libtpu listens: on slices of TPUs the controller names `PORT` unless it is told, and there
the first host listens for the others."""

NOT_IN_STATEFUL_SETS = ("activeDeadlineSeconds", "restartPolicy")


def lws_manifest(spec: JobSpec, at: Placement) -> dict[str, Any]:
    """The LeaderWorkerSet that carries *spec*.

    Raises:
        ConfigurationError: As `kinetic.aio.kubernetes.manifests.job_manifest`.
    """
    group = group_of(spec, at)
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{WORKER_INDEX}']"}}
    pod = variable(
        group.pod,
        {"name": "KINETIC_LWS", "value": group.name},
        {"name": "KINETIC_HOST", "valueFrom": index},
        {"name": "KINETIC_COORDINATOR", "value": f"$(LWS_LEADER_ADDRESS):{PORT}"},
        *((TPU_PORT,) if group.slice and TPU_PORT["name"] not in spec.environment else ()),
    )
    own = {name: value for name, value in pod["spec"].items() if name not in NOT_IN_STATEFUL_SETS}
    metadata = dict(group.metadata)
    if group.slice:
        exclusive = {f"{DOMAIN}/exclusive-topology": NODE_POOL}
        metadata["annotations"] = {**metadata["annotations"], **exclusive}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": group.hosts,
                # One host alone is of no use: its death is the death of all.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {**pod, "spec": {**own, "automountServiceAccountToken": True}},
                "workerTemplate": {**pod, "spec": own},
            },
        },
    }


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
    state: State


def host_of(pod: Document) -> int | None:
    """Return which host a pod is, if it is one of several."""
    text = str(part(part(pod, "metadata"), "labels").get(WORKER_INDEX, ""))
    return int(text) if text.isdecimal() else Pod(pod).index


def word(seen: Seen) -> Word:
    """Return what is to be told, by everything that was seen of the set and its pods."""
    verdict = judge_group(seen)
    nothing: Document = {}
    about = seen.any_job or next(iter((*seen.pods, *seen.gone)), nothing)
    (said,) = observations(Seen(job=about, name=seen.job_name), verdict)
    ended = {end.pod for end in _ends(seen) if end.ran}
    if _is_going(seen) and _alive(seen):
        ended.add(uid(seen.any_job) or seen.job_name)
    return Word(said=said, ended=frozenset(ended - {verdict.executor}))


def judge_group(seen: Seen) -> Diagnosis:
    """Judge the attempt; give what `merged` made, so that a cause outlives its pod."""
    return tell(replace(_state(seen), held=held_fast(seen)))


def _state(seen: Seen) -> State:
    alive, ends = _alive(seen), _ends(seen)
    pods = (*seen.pods, *seen.gone)
    if (end := End.of(seen.any_job)) is not None and not any(Pod(one).ran for one in pods):
        words = Cause(what=end.message, reason=end.reason, advice="")  # the advice is in them
        return waiting(words) if alive else ended(words)
    first = next((pod for pod in _pods(seen) if host_of(pod) == 0 and not _vanished(pod)), None)
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
        said = str(target.get("message") or "the set failed")
        return cause or ended(Cause(what=said, reason=Reason.LOST))
    return waiting(no_pod(seen))


def _vanished(pod: Document) -> bool:
    """Whether it was deleted before it ever ran: why, the set says, or makes another one.

    Sets and pods come by different watches, of which either may be late.
    """
    return Pod(pod).swept and not Pod(pod).ran


def _pods(seen: Seen) -> list[Document]:
    """Return all there were, in the order in which they were made."""
    pods = (*seen.gone, *seen.pods)
    return sorted(pods, key=lambda pod: str(part(pod, "metadata").get("creationTimestamp") or ""))


def _alive(seen: Seen) -> list[Document]:
    return [pod for pod in seen.pods if not Pod(pod).ended]


def _is_going(seen: Seen) -> bool:
    return seen.job is None or bool(part(seen.job, "metadata").get("deletionTimestamp"))


def _ends(seen: Seen) -> list[_End]:
    """Return which programs have ended, the earliest first."""
    found: list[_End] = []
    for document in _pods(seen):
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
    return sorted(found, key=lambda one: one.moment or "~")  # those of unknown time at last


def _before_restart(pod: Document) -> Document | None:
    """Return a pod whose container runs again as it was when that ended the first time."""
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
    """Return the first failure that is not the answer to another one."""
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
    """Whether its reason says more than that the pod was deleted."""
    return state.cause.reason not in (None, Reason.LOST, Reason.USER_ERROR)


def _going_on(
    seen: Seen, alive: Sequence[Document], first: Document | None, cause: State | None
) -> State:
    """Some pod runs, or will: what the first one does, and what keeps the others."""
    leaders = [pod for pod in alive if host_of(pod) == 0]
    if leaders:
        now = replace(pod_state(Pod(leaders[0], seen)), executor=uid(first))
    else:
        started = any(Pod(one).ran for one in alive)
        now = (running if started else waiting)(Cause(what="the first host's pod is not there"))
    if _is_going(seen):
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
    """As `Table`, of sets in place of Jobs: a set and its pods have one label in common.

    With *hints* it is told of every process that has ended, in a word of its own: one that does
    not close the attempt, but lets it be looked at. Only pods that have *label* are of these sets.
    *makers* gives kind and name of what makes the pods of the set of a name.
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
        """Return whether the set that has the name now made *pod*, by their common annotation."""
        of = entry.job or entry.seen.any_job
        lives = [part(part(one, "metadata"), "annotations").get(LIFE) for one in (of, pod)]
        return not of or lives[0] == lives[1]

    def _told(self, entry: Entry) -> Iterator[Observation]:
        pods = [pod for pod in entry.pods.values() if self._is_own(entry, pod)]
        entry.see(pods, self._makers(entry.name))
        if not self._is_known(entry):
            return
        news = word(entry.seen)
        entry.verdict, said = judge_group(entry.seen), news.said
        if self._hints:
            for who in sorted(news.ended - self._hinted.get(entry.name, frozenset())):
                yield replace(said, phase=Phase.ENDED, executor=who)
            self._hinted[entry.name] = news.ended
        before, entry.told[said.name] = entry.told.get(said.name), said
        self._note_waiting(entry, said)
        if said.phase is Phase.GONE:
            del self.entries[entry.name]
            self._hinted.pop(entry.name, None)
        if before != said:
            yield said

    def _is_known(self, entry: Entry) -> bool:
        """Whether the set was told, or has none: it is told a moment later than its pods."""
        if entry.seen.any_job:
            return True
        if not entry.pods or all(Pod(pod).ended for pod in entry.pods.values()):
            del self.entries[entry.name]
            return False
        going = (part(pod, "metadata").get("deletionTimestamp") for pod in entry.pods.values())
        return self.orphans or any(going)
