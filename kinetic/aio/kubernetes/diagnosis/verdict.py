"""A verdict on a job or a pod of it, and the objects it is based on."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, uid
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["Diagnosis", "Outlook", "Seen", "merged", "pending", "running"]


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

    def after(self, earlier: str) -> Diagnosis:
        """The same verdict, told after what happened *earlier*."""
        return replace(self, message=f"{earlier}; {self.message}" if self.message else earlier)

    def failed(self, executor: str = "", exit_code: int | None = None) -> Diagnosis:
        """The verdict on what has ended because of it."""
        return replace(
            self,
            status=JobStatus.FAILED,
            phase=Phase.ENDED,
            outlook=Outlook.FINAL,
            executor=executor,
            exit_code=exit_code,
        )


def pending(
    message: str,
    advice: str = "",
    reason: Reason | None = None,
    outlook: Outlook = Outlook.OPEN,
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
    that leaves it to others: what went wrong is told of them.
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
        named = [("Pod", metadata.get("name") or "")]
        if document is None:
            named = [*self.makers] or [("Job", metadata.get("name") or self.job_name)]
            if self.makers:  # of which no more is known than that they came after the set
                metadata = {"creationTimestamp": metadata.get("creationTimestamp")}
        found = [
            _plain(event)
            for event in self.events
            if (not reasons or event.get("reason") in reasons)
            and any(_is_about(event, kind, name, metadata) for kind, name in named)
        ]
        return sorted(found, key=_moment)  # stable: without times the order stays


def _is_about(event: Document, kind: str, name: object, metadata: Document) -> bool:
    target: Document = event.get("involvedObject") or part(event, "regarding")
    if target.get("kind") != kind or target.get("name") != name:
        return False
    uids = target.get("uid"), metadata.get("uid")
    if all(uids):
        return uids[0] == uids[1]  # whatever the clocks say
    born, moment = metadata.get("creationTimestamp"), _moment(event)
    return not (born and moment) or moment[:19] >= str(born)[:19]


def _plain(event: Document) -> Document:
    """With its own words: those of many that are alike are told with a preface."""
    said = str(event.get("message") or event.get("note") or "")
    return {**event, "message": said.removeprefix("(combined from similar events): ")}


def _moment(event: Document) -> str:
    """When it was last seen, as ISO 8601 text; empty when that is not said."""
    series: Document = part(event, "series")
    fields = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        part(event, "metadata").get("creationTimestamp"),
    )
    return str(next((moment for moment in fields if moment), "")).removesuffix("Z")


def merged(before: Seen, now: Seen) -> Seen:
    """What is known after *now*: as it is, with the last versions of what has gone since."""
    present = {uid(pod) for pod in now.pods}
    left = {uid(pod): pod for pod in (*before.gone, *before.pods)}
    gone = tuple(pod for key, pod in left.items() if key not in present)
    same = now.job is None or before.any_job == {} or uid(now.job) == uid(before.any_job)
    return replace(
        now,
        pods=[_as_first_asked(left.get(uid(pod)), pod) for pod in now.pods],
        events=_together(before.events, now.events),
        nodes=now.nodes if now.nodes is not None else before.nodes,
        workload=now.workload or before.workload,
        namespace=now.namespace or before.namespace,
        gone=gone if same else (),
        earlier=(before.job or before.earlier) if same else None,
        scenes=_scenes(before, now) if same else {},
        growing=now.growing if now.growing is not None else before.growing,
        name=now.name or before.name,
    )


_ASKED = ("deletionTimestamp", "deletionGracePeriodSeconds")


def _as_first_asked(before: Document | None, now: Document) -> Document:
    """*now*, deleted when that was asked first: its node asks again at the end."""
    first = part(before, "metadata")
    if not first.get("deletionTimestamp"):
        return now
    asked = {key: first[key] for key in _ASKED if key in first}
    return {**now, "metadata": {**part(now, "metadata"), **asked}}


def _scenes(before: Seen, now: Seen) -> dict[str, Document]:
    found = dict(before.scenes)
    nodes = {
        str(part(node, "metadata").get("name")): node
        for node in (now.nodes if now.nodes is not None else before.nodes) or ()
    }
    for pod in now.pods:
        name = part(pod, "spec").get("nodeName")
        if name in nodes and condition(pod, "DisruptionTarget") is not None:
            found.setdefault(uid(pod), nodes[str(name)])
    return found


def _together(before: Iterable[Document], now: Sequence[Document]) -> tuple[Document, ...]:
    """Those of *now*, after the ones that are no longer told."""
    told = {_event(event) for event in now}
    return (*(event for event in before if _event(event) not in told), *now)


def _event(event: Document) -> tuple[object, ...]:
    metadata: Document = part(event, "metadata")
    target: Document = event.get("involvedObject") or part(event, "regarding")
    if metadata.get("uid"):
        return (metadata["uid"],)
    return (target.get("kind"), target.get("name"), event.get("reason"), event.get("message"))
