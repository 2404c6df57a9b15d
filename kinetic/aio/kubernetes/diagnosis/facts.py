"""Facts about one job and its pods, as the API returned them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property

from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    annotations_of,
    condition,
    get_dict,
    get_list,
    labels_of,
    uid,
)
from kinetic.aio.kubernetes.manifests import CONTAINER, FAILURE_COUNTS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Everything known of one job, as the API returned it.

    ``nodes`` is None if the nodes are not known. ``hosts`` has nodes that kinetic read by name,
    because ``nodes`` lacks them; None represents a node that doesn't exist. ``claims`` has the
    PersistentVolumeClaims of waiting pods. ``workload`` is Kueue's object for the Job.
    ``deleted_pods`` and ``deleted_job`` are the last versions of pods and of the Job that no longer
    exist. `merge_facts` keeps them, because Kubernetes often deletes a pod soon after it failed.
    ``makers`` has kind and name of each object that creates pods of a set; a set runs a job on
    several hosts. ``absent`` has storage drivers that the cluster lacks. ``waits`` has each pod
    that never ran, by its uid, as it last waited. `merge_facts` keeps it, because the end of a pod
    hides what it waited for. ``had_node`` says whether any pod for this job was ever on a node.
    """

    job: Document | None = None
    pods: Sequence[Document] = ()
    events: Sequence[Document] = ()
    nodes: Sequence[Document] | None = None
    hosts: Mapping[str, Document | None] = field(default_factory=dict[str, "Document | None"])
    claims: Sequence[Document] = ()
    workload: Document | None = None
    deleted_pods: Sequence[Document] = ()
    deleted_job: Document | None = None
    name: str = ""
    makers: Sequence[tuple[str, str]] = ()
    absent: Collection[str] = ()
    waits: Mapping[str, Document] = field(default_factory=dict[str, Document])
    had_node: bool = False

    @property
    def current_or_last_job(self) -> Document:
        """The Job, or its last version if it was deleted."""
        return self.job or self.deleted_job or {}

    @property
    def spec(self) -> Document:
        """The Job's specification."""
        return get_dict(self.current_or_last_job, "spec")

    @property
    def job_name(self) -> str:
        """The Job's name."""
        return self.name or str(get_dict(self.current_or_last_job, "metadata").get("name", ""))

    @property
    def every_pod(self) -> Sequence[Document]:
        """All pods; pods that no longer exist come first."""
        return (*self.deleted_pods, *self.pods)

    @property
    def live_pods(self) -> Sequence[Document]:
        """The pods that exist and haven't ended: a program in them runs, or will run."""
        return [pod for pod in self.pods if not Pod(pod).ended]

    @property
    def is_gone_or_deleting(self) -> bool:
        """Whether the Job doesn't exist, or its deletion was requested."""
        return self.job is None or bool(get_dict(self.job, "metadata").get("deletionTimestamp"))

    @property
    def suspended(self) -> bool:
        """Whether the Job is suspended: Kubernetes gives it no pods until it is resumed."""
        suspended = condition(self.current_or_last_job, "Suspended") is not None
        return suspended or bool(self.spec.get("suspend"))

    def events_about(self, document: Document | None, *reasons: str) -> list[Document]:
        """Return events about a pod or, for None, about the Job or its makers, oldest first.

        With *reasons*, return only events with one of these reasons.
        """
        makers = self.makers if document is None else ()
        metadata = get_dict(document or self.current_or_last_job, "metadata")
        created = str(metadata.get("creationTimestamp") or "")[:19]
        found: list[Document] = []
        for event in self.events:
            target = get_dict(event, "involvedObject")
            # Events outlive their objects: skip those about an earlier object of the same name.
            if makers:  # kinetic knows only kind and name of a maker
                is_match = (target.get("kind"), target.get("name")) in makers
                is_match = is_match and _last_seen_time(event)[:19] >= created
            else:
                same_uid = metadata.get("uid") in (None, target.get("uid", metadata.get("uid")))
                is_match = same_uid and target.get("name") == metadata.get("name")
            if is_match and (not reasons or event.get("reason") in reasons):
                message = str(event.get("message") or "")
                message = message.removeprefix("(combined from similar events): ")
                found.append({**event, "message": message})
        return sorted(found, key=_last_seen_time)  # stable: events without a time keep their order


def _last_seen_time(event: Document) -> str:
    """Return when the event was last seen, as ISO 8601 text, or an empty text."""
    found = (
        get_dict(event, "series").get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event.get("firstTimestamp")
        or get_dict(event, "metadata").get("creationTimestamp")
    )
    return str(found or "").removesuffix("Z")


def merge_facts(before: JobFacts, now: JobFacts) -> JobFacts:
    """Return *now* with what only *before* has: events, nodes, and objects deleted since then."""
    present = {uid(pod) for pod in now.pods}
    previous = {uid(pod): pod for pod in before.every_pod}
    known = {_event_key(event) for event in now.events}
    is_same_job = now.job is None or uid(before.current_or_last_job) in ("", uid(now.job))
    return replace(
        now,
        pods=[_with_first_deletion_time(previous.get(uid(pod)), pod) for pod in now.pods],
        events=(*(event for event in before.events if _event_key(event) not in known), *now.events),
        nodes=now.nodes if now.nodes is not None else before.nodes,
        hosts=now.hosts if now.nodes is not None else now.hosts or before.hosts,
        claims=now.claims or before.claims,
        workload=now.workload or before.workload,
        name=now.name or before.name,
        deleted_pods=[pod for key, pod in previous.items() if is_same_job and key not in present],
        deleted_job=(before.job or before.deleted_job) if is_same_job else None,
        waits=_waits(before.waits if is_same_job else {}, now.pods),
        had_node=before.had_node or now.had_node or any(map(_had_node, now.pods)),
    )


def _had_node(pod: Document) -> bool:
    """Return whether *pod* has a node, or replaces one that had one."""
    return bool(get_dict(pod, "spec").get("nodeName")) or failures_before(pod) > 0


def failures_before(pod: Document) -> int:
    """Return how many pods of the same index failed before *pod*, for any reason."""
    counts = [str(annotations_of(pod).get(key)) for key in FAILURE_COUNTS]
    return sum(int(count) for count in counts if count.isdecimal())


def _waits(before: Mapping[str, Document], pods: Sequence[Document]) -> Mapping[str, Document]:
    """Return *before* with the *pods* that wait, and without those that run."""
    kept = {**before}
    for pod in pods:
        phase = get_dict(pod, "status").get("phase")
        if phase == "Pending" and not get_dict(pod, "metadata").get("deletionTimestamp"):
            kept[uid(pod)] = pod
        elif phase == "Running":
            kept.pop(uid(pod), None)
    return kept


def nodes_by_name(nodes: Iterable[Document]) -> dict[str, Document]:
    """Return *nodes* by name."""
    return {str(get_dict(node, "metadata").get("name")): node for node in nodes}


def _with_first_deletion_time(before: Document | None, now: Document) -> Document:
    """Return the pod *now* with its first deletion time."""
    # The node requests deletion again when the pod has ended, which changes this time.
    first, keys = get_dict(before, "metadata"), ("deletionTimestamp", "deletionGracePeriodSeconds")
    if not first.get("deletionTimestamp"):
        return now
    kept = {key: first[key] for key in keys if key in first}
    return {**now, "metadata": {**get_dict(now, "metadata"), **kept}}


def _event_key(event: Document) -> tuple[object, ...]:
    """Return a key that all versions of one event share."""
    if event_uid := get_dict(event, "metadata").get("uid"):
        return (event_uid,)
    target = get_dict(event, "involvedObject")
    return (target.get("kind"), target.get("name"), event.get("reason"), event.get("message"))


OUTCOME = "kinetic"
"""The field that `trim` adds to a container's end: the reason in the outcome of the attempt."""

START_ERRORS = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
"""Reasons of a container's end that mean that its program never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container: its parts of the pod's spec and status."""

    name: str
    spec: Document
    status: Document
    init: bool = False

    def state(self, kind: str) -> Document | None:
        """The container's state *kind* (waiting, running, terminated), if it is in this state."""
        found: Document | None = get_dict(self.status, "state").get(kind)
        return found

    @property
    def end(self) -> Document | None:
        """The container's end or, while it waits for a restart, its last end; else None."""
        last: Document | None = get_dict(self.status, "lastState").get("terminated")
        waits = self.state("waiting") is not None
        return self.state("terminated") or (last if waits else None)

    @property
    def never_started(self) -> bool:
        """Whether the container never started, although the node reported that it ended."""
        unknown = (self.end or {}).get("reason") == "ContainerStatusUnknown"
        return unknown and self.status.get("imageID") == ""

    @property
    def is_sidecar(self) -> bool:
        """Whether Kubernetes starts the container before the program, and restarts it."""
        return self.init and self.spec.get("restartPolicy") == "Always"

    @property
    def memory(self) -> str:
        """The container's memory limit as written, or an empty text."""
        return str(get_dict(get_dict(self.spec, "resources"), "limits").get("memory", ""))


_SPOT = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")


_NO_FACTS = JobFacts()


class Pod:
    """The last version of a pod, with all other *facts* about its job."""

    def __init__(self, document: Document, facts: JobFacts | None = None) -> None:
        self.document, self.facts = document, facts or _NO_FACTS
        self.metadata, self.spec = get_dict(document, "metadata"), get_dict(document, "spec")
        self.status, self.uid = get_dict(document, "status"), uid(document)

    @cached_property
    def containers(self) -> Sequence[Container]:
        """All containers, init containers (such as GKE's sidecar for buckets) first."""
        found: list[Container] = []
        for init, kind in ((True, "initContainer"), (False, "container")):
            statuses = {it.get("name"): it for it in get_list(self.status, f"{kind}Statuses")}
            specs = {spec.get("name"): spec for spec in get_list(self.spec, f"{kind}s")}
            for name in {**specs, **statuses}:
                spec: Document = specs.get(name) or {}
                status: Document = statuses.get(name) or {}
                found.append(Container(name=str(name), spec=spec, status=status, init=init))
        return found

    @cached_property
    def programs(self) -> Sequence[Container]:
        """The container that runs the function, which alone decides the pod's state."""
        containers = [container for container in self.containers if not container.init]
        if len(containers) < 2:
            return containers
        # Controllers of the cluster may have added others. Without kinetic's name, it is the first.
        return [found for found in containers if found.name == CONTAINER] or containers[:1]

    @property
    def added(self) -> Sequence[Container]:
        """The containers beside the program; Kubernetes waits for their end, as for the program."""
        return [found for found in self.containers if not (found.init or found in self.programs)]

    @property
    def ended(self) -> bool:
        """Whether the pod's program doesn't run, and won't run; other containers don't matter."""
        if self.status.get("phase") in ("Succeeded", "Failed"):
            return True
        if not self.status.get("containerStatuses"):
            return False  # a shortcut for most pods, because this runs often
        never = self.spec.get("restartPolicy") == "Never"
        return never and all(program.state("terminated") is not None for program in self.programs)

    @property
    def succeeded(self) -> bool:
        """Whether the program ended with 0, even if a container beside it makes the pod fail."""
        phase = self.status.get("phase")
        ended_well = self.ended and self.end.get("exitCode") == 0
        return phase == "Succeeded" or (ended_well and (phase != "Failed" or bool(self.added)))

    @property
    def holders(self) -> Sequence[str]:
        """The names of containers that hold the pod although its program has ended."""
        phase = self.status.get("phase")
        if not self.ended or self.terminating or phase == "Succeeded":
            return ()
        if phase == "Failed":  # beside a program that succeeded, they make the Job replace the pod
            return [container.name for container in self.added] if self.succeeded else []
        return [it.name for it in self.added if it.state("terminated") is None]

    @property
    def gone(self) -> bool:
        """Whether the pod no longer exists."""
        return any(self.uid == uid(pod) for pod in self.facts.deleted_pods)

    @property
    def ran(self) -> bool:
        """Whether a program of the pod ever started."""
        return any(
            program.state("running") is not None
            or (program.end is not None and program.end.get("reason") not in START_ERRORS)
            for program in self.programs
            if not program.never_started
        )

    @property
    def runs(self) -> bool:
        """Whether a program of the pod runs now."""
        return any(program.state("running") is not None for program in self.programs)

    @property
    def terminating(self) -> bool:
        """Whether the deletion of the pod was requested: one without a node disappears then."""
        gone_at_once = self.gone and not self.spec.get("nodeName")
        return gone_at_once or bool(self.metadata.get("deletionTimestamp"))

    @property
    def disruption(self) -> Document | None:
        """The condition by which the platform or Kueue ended the pod; None if it has none."""
        kueue = condition(self.document, "TerminationTarget")
        return condition(self.document, "DisruptionTarget") or kueue

    @property
    def disruptions_before(self) -> int:
        """How many earlier pods of the same index the platform has ended."""
        count = str(annotations_of(self.document).get(FAILURE_COUNTS[1]) or "")
        return int(count) if count.isdecimal() else 0

    @property
    def was_suspended(self) -> bool:
        """Whether the pod's Job was suspended after it had created the pod, as Kueue does."""
        resumed: Document = condition(self.facts.current_or_last_job, "Suspended", "False") or {}
        born = str(self.metadata.get("creationTimestamp") or "")
        return self.facts.suspended or str(resumed.get("lastTransitionTime") or "") > born

    @property
    def was_disrupted(self) -> bool:
        """Whether a later pod of the same index says that the platform has ended this one."""
        later = (Pod(pod).disruptions_before for pod in self.facts.every_pod)
        return any(count > self.disruptions_before for count in later)

    @property
    def claims(self) -> Sequence[str]:
        """The names of the PersistentVolumeClaims that the pod mounts."""
        volumes = get_list(self.spec, "volumes")
        sources = (get_dict(volume, "persistentVolumeClaim") for volume in volumes)
        return [str(source["claimName"]) for source in sources if source.get("claimName")]

    @property
    def failed_container(self) -> Container | None:
        """The failed program or, if no program ran, the failed init container; else None."""
        for found in reversed(self.programs if self.ran else self.containers):
            # Kubernetes restarts a sidecar after any exit code.
            if (found.end or {}).get("exitCode") and not found.is_sidecar:
                return found
        return None

    @property
    def end(self) -> Document:
        """The end of the failed container, else of the first program; empty if it hasn't ended."""
        container = self.failed_container or next(iter(self.programs), None)
        return (container.end if container is not None else None) or {}

    @property
    def ended_on_request(self) -> bool:
        """Whether the program ended after the pod's deletion was requested, as if in response."""
        try:
            deletion_time = datetime.fromisoformat(self.metadata["deletionTimestamp"])
            grace = timedelta(seconds=int(self.metadata["deletionGracePeriodSeconds"]))
            requested_at = deletion_time - grace  # Kubernetes adds the grace period to the time
            ended_after = datetime.fromisoformat(self.end["finishedAt"]) >= requested_at
        except (KeyError, ValueError, TypeError):  # a pod may lack any of these fields
            return False
        return ended_after and self.end.get("reason") not in ("OOMKilled", *START_ERRORS)

    @property
    def may_have_been_stopped(self) -> bool:
        """Whether a request to stop may have caused the pod's end, by exit code or time."""
        code, reason = self.end.get("exitCode"), self.end.get("reason")
        by_signal = code in (137, 143) and reason in (None, "Error")
        failed = self.failed_container
        return failed is None or failed.never_started or by_signal or self.ended_on_request

    @property
    def deleted(self) -> bool:
        """Whether the pod's Job or a user deleted the pod, and not the platform."""
        return self.terminating and self.may_have_been_stopped and self.disruption is None

    @cached_property
    def node(self) -> Document | None:
        """The pod's node, if the node is known."""
        name = str(self.spec.get("nodeName") or "")
        if name in self.facts.hosts:
            return self.facts.hosts[name]
        return nodes_by_name(self.facts.nodes or ()).get(name)

    @property
    def node_removed(self) -> bool:
        """Whether the pod's node no longer exists; False if the nodes aren't known."""
        name = self.spec.get("nodeName")
        is_known = bool(self.facts.nodes) or name in self.facts.hosts
        return bool(name) and is_known and self.node is None

    @property
    def node_silent(self) -> bool:
        """Whether the pod's node doesn't respond, so that the containers' status is out of date."""
        # Of a pod that the node never started, only the node's own condition says so.
        if self.status.get("phase") == "Unknown" or condition(self.node, "Ready", "Unknown"):
            return True
        # Only the controller that watches nodes marks a pod as not ready without a reason.
        unready = condition(self.document, "Ready", "False")
        return unready is not None and not unready.get("reason")

    @property
    def on_spot(self) -> bool:
        """Whether the pod's machine is a spot machine, which the cloud may take back."""
        labels = {**labels_of(self.node), **get_dict(self.spec, "nodeSelector")}
        return any(key in labels for key in _SPOT)

    @property
    def node_ending(self) -> bool:
        """Whether the cloud has announced the end of the pod's node (GKE, "Spot VMs")."""
        notice = "cloud.google.com/impending-node-termination"
        taints = get_list(get_dict(self.node, "spec"), "taints")
        return any(taint.get("key") == notice for taint in taints)

    def events(self, *reasons: str) -> list[Document]:
        """Return the events about the pod with one of *reasons*, the oldest first."""
        return self.facts.events_about(self.document, *reasons)

    def last_message(self, *reasons: str) -> str:
        """Return the message of the pod's last event with one of *reasons*, or an empty text."""
        found = self.events(*reasons)
        return str(found[-1].get("message") or "") if found else ""
