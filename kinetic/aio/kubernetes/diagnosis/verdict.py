"""A verdict on a job or a pod of it, and the objects it is based on."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, uid
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason


class Outlook(enum.Enum):
    """What may still become of it."""

    OPEN = "open"
    """It runs, or time alone may let it start."""
    BLOCKED = "blocked"
    """Nothing happens until somebody changes something else: a pool, a Secret, a permission."""
    FINAL = "final"
    """It has ended, or can never start as it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is to be told of a job.

    ``phase`` is about processes: while one of them may still run it is never
    ENDED, whatever the Job's conditions say. ``status`` is what a user sees.
    ``executor`` is the uid of the pod it is about, ``message`` says what
    happened and ``advice`` what to do next; each may be empty.
    """

    status: JobStatus = JobStatus.PENDING
    phase: Phase = Phase.PENDING
    reason: Reason | None = None
    exit_code: int | None = None
    executor: str = ""
    message: str = ""
    advice: str = ""
    outlook: Outlook = Outlook.OPEN

    @property
    def definite(self) -> bool:
        """Whether waiting is in vain: it has ended, or can never start."""
        return self.outlook is Outlook.FINAL

    @property
    def text(self) -> str:
        """Message and advice as one paragraph."""
        return f"{self.message}; {self.advice}" if self.advice else self.message

    def ended(
        self, executor: str = "", exit_code: int | None = None, status: JobStatus = JobStatus.FAILED
    ) -> Diagnosis:
        """The verdict on what has ended because of it."""
        return replace(
            self,
            status=status,
            phase=Phase.ENDED,
            outlook=Outlook.FINAL,
            executor=executor,
            exit_code=exit_code,
        )


def pending(
    message: str, advice: str = "", reason: Reason | None = None, outlook: Outlook = Outlook.OPEN
) -> Diagnosis:
    """The verdict on what waits."""
    return Diagnosis(message=message, advice=advice, reason=reason, outlook=outlook)


def running(
    message: str,
    advice: str = "",
    reason: Reason | None = None,
    outlook: Outlook = Outlook.OPEN,
    exit_code: int | None = None,
) -> Diagnosis:
    """The verdict on what runs, or may run."""
    return replace(
        pending(message, advice, reason, outlook),
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
        exit_code=exit_code,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything known of one job, as the API returned it.

    ``nodes`` None means that they are not known. ``workload`` is Kueue's object
    for the Job, ``namespace`` the Namespace. ``gone`` and ``earlier`` are the
    last versions of pods and of the Job that are there no more: `merged` keeps
    them, for the cause of an end is often deleted a second later; ``scenes`` are
    the nodes as they were when a pod was first said to be disrupted, by its uid.
    ``growing`` is whether node pools may grow or be made: False makes a request
    that no node can hold one that never will be held, None means unknown.
    ``makers`` are kind and name of what makes the pods, where the Job is a set
    that leaves it to others: what went wrong is told of them. ``absent`` are
    storage drivers that the cluster doesn't have.
    """

    job: Document | None = None
    pods: Sequence[Document] = ()
    events: Sequence[Document] = ()
    nodes: Sequence[Document] | None = None
    workload: Document | None = None
    namespace: Document | None = None
    gone: Sequence[Document] = ()
    earlier: Document | None = None
    scenes: Mapping[str, Document] = field(default_factory=dict[str, Document])
    growing: bool | None = None
    name: str = ""
    makers: Sequence[tuple[str, str]] = ()
    absent: Collection[str] = ()

    @property
    def any_job(self) -> Document:
        """The Job, or how it was when it was last there."""
        return self.job or self.earlier or {}

    @property
    def spec(self) -> Document:
        """What was asked for by the Job."""
        return part(self.any_job, "spec")

    @property
    def status(self) -> Document:
        """What Kubernetes says of the Job."""
        return part(self.any_job, "status")

    @property
    def completions(self) -> int:
        """Of how many pods the Job wants success."""
        return int(self.spec.get("completions") or 1)

    @property
    def job_name(self) -> str:
        """The Job's name, wherever it is written down."""
        return self.name or str(part(self.any_job, "metadata").get("name", ""))

    def about(self, document: Document | None, *reasons: str) -> list[Document]:
        """Events on a pod (for None: the Job, or its makers) with one of *reasons*, in order.

        Events outlive their objects: those of another uid, or (where no uid tells)
        older than the object, are of one that had the same name.
        """
        metadata: Document = part(document if document is not None else self.any_job, "metadata")
        named: Sequence[tuple[str, str]] = [("Pod", metadata.get("name") or "")]
        own, born = metadata.get("uid"), str(metadata.get("creationTimestamp") or "")[:19]
        if document is None:
            named = self.makers or [("Job", metadata.get("name") or self.job_name)]
            own = None if self.makers else own  # of makers no more is known than their names
        found: list[Document] = []
        for event in self.events:
            target = subject(event)
            if (target.get("kind"), target.get("name")) not in named:
                continue
            moment, other = _moment(event)[:19], target.get("uid")
            alike = other == own if other and own else not (born and moment) or moment >= born
            if alike and (not reasons or event.get("reason") in reasons):
                said = str(event.get("message") or event.get("note") or "")
                said = said.removeprefix("(combined from similar events): ")
                found.append({**event, "message": said})
        return sorted(found, key=_moment)  # stable: without times the order stays


def subject(event: Document) -> Document:
    """Kind, name and uid of what an event is about."""
    return event.get("involvedObject") or part(event, "regarding")


def _moment(event: Document) -> str:
    """When it was last seen, as ISO 8601 text; empty when that is not said."""
    found = (
        part(event, "series").get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event.get("firstTimestamp")
        or part(event, "metadata").get("creationTimestamp")
    )
    return str(found or "").removesuffix("Z")


def merged(before: Seen, now: Seen) -> Seen:
    """What is known after *now*: as it is, with the last versions of what has gone since."""
    present = {uid(pod) for pod in now.pods}
    left = {uid(pod): pod for pod in (*before.gone, *before.pods)}
    told = {_identity(event) for event in now.events}
    same = now.job is None or before.any_job == {} or uid(now.job) == uid(before.any_job)
    now = replace(
        now,
        pods=[_as_first_asked(left.get(uid(pod)), pod) for pod in now.pods],
        events=(*(one for one in before.events if _identity(one) not in told), *now.events),
        nodes=now.nodes if now.nodes is not None else before.nodes,
        workload=now.workload or before.workload,
        namespace=now.namespace or before.namespace,
        growing=now.growing if now.growing is not None else before.growing,
        name=now.name or before.name,
        gone=tuple(pod for key, pod in left.items() if key not in present) if same else (),
        earlier=(before.job or before.earlier) if same else None,
    )
    return replace(now, scenes={**_scenes(now), **before.scenes} if same else {})


def _as_first_asked(before: Document | None, now: Document) -> Document:
    """*now*, deleted when that was asked first: its node asks again at the end."""
    first, asked = part(before, "metadata"), ("deletionTimestamp", "deletionGracePeriodSeconds")
    if not first.get("deletionTimestamp"):
        return now
    kept = {key: first[key] for key in asked if key in first}
    return {**now, "metadata": {**part(now, "metadata"), **kept}}


def _scenes(now: Seen) -> dict[str, Document]:
    nodes = {part(node, "metadata").get("name"): node for node in now.nodes or ()}
    disrupted = (pod for pod in now.pods if condition(pod, "DisruptionTarget"))
    hosts = {uid(pod): part(pod, "spec").get("nodeName") for pod in disrupted}
    return {pod: nodes[host] for pod, host in hosts.items() if host in nodes}


def _identity(event: Document) -> tuple[object, ...]:
    if own := part(event, "metadata").get("uid"):
        return (own,)
    target = subject(event)
    return (target.get("kind"), target.get("name"), event.get("reason"), event.get("message"))
