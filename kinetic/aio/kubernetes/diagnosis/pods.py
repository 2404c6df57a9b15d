"""One pod as facts: what was asked for, what its containers did, what was done to it.

Of one that nobody saw, as much of it as the events tell that outlive it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.verdict import Seen, subject

START_ERRORS = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
"""Reasons of a container's end that say that its program never began."""

_NOTICE = "cloud.google.com/impending-node-termination"
_SPOT = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")
_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container: its part of the pod's spec beside its status."""

    name: str
    spec: Document
    status: Document
    init: bool = False
    pod_limits: Document = field(default_factory=dict[str, Any])

    @property
    def sidecar(self) -> bool:
        """Whether it stays beside the program and its own end means nothing."""
        return self.init and self.spec.get("restartPolicy") == "Always"

    def state(self, kind: str) -> Document | None:
        """What is said of the state *kind*, if it is in it now."""
        found: Document | None = part(self.status, "state").get(kind)
        return found

    @property
    def last(self) -> Document | None:
        """How it ended the last time, if it was started again since."""
        found: Document | None = part(self.status, "lastState").get("terminated")
        return found

    @property
    def ended(self) -> Document | None:
        """How it ended: now, or the time before if it waits to be started again."""
        waits = self.state("waiting") is not None
        return self.state("terminated") or (self.last if waits else None)

    @property
    def exit_code(self) -> int | None:
        """That of its end, if it has ended."""
        return (self.ended or {}).get("exitCode")

    @property
    def unmade(self) -> bool:
        """Whether its node never had its image, and gave it an end only because the pod has one."""
        unknown = (self.ended or {}).get("reason") == "ContainerStatusUnknown"
        return unknown and self.status.get("imageID") == ""

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return int(self.status.get("restartCount") or 0)

    def limit(self, resource: str) -> str:
        """Its limit of *resource* as it was written; empty if there is none."""
        return str(part(part(self.spec, "resources"), "limits").get(resource, ""))

    def pod_limit(self, resource: str) -> str:
        """The limit of *resource* that all containers of the pod share, if it has one."""
        return str(self.pod_limits.get(resource, ""))


class Pod:
    """A pod, by its last version and by what else was *seen*."""

    def __init__(self, document: Document, seen: Seen | None = None) -> None:
        self.document, self.seen = document, seen or Seen()
        self.metadata, self.spec = part(document, "metadata"), part(document, "spec")
        self.status, self.uid = part(document, "status"), uid(document)

    @property
    def index(self) -> int | None:
        """Its index in its Job, if it has one."""
        given = {**part(self.metadata, "labels"), **part(self.metadata, "annotations")}
        text = str(given.get(_INDEX))
        return int(text) if text.isdecimal() else None

    @cached_property
    def containers(self) -> Sequence[Container]:
        """All of them, init containers first."""
        found: list[Container] = []
        for init, kind in ((True, "initContainers"), (False, "containers")):
            told = parts(self.status, "initContainerStatuses" if init else "containerStatuses")
            statuses = {one.get("name"): one for one in told}
            named = {one.get("name"): one for one in parts(self.spec, kind)}
            found += [
                Container(
                    name=str(name),
                    spec=named.get(name) or {},
                    status=statuses.get(name) or {},
                    init=init,
                    pod_limits=part(part(self.spec, "resources"), "limits"),
                )
                for name in {**named, **statuses}
            ]
        return found

    @property
    def programs(self) -> Sequence[Container]:
        """Those that do the work: the first is the one that counts."""
        return [one for one in self.containers if not one.init]

    @property
    def bad(self) -> Container | None:
        """The one that made the pod fail: the first of them to end badly."""
        bad = [one for one in self.containers if not one.sidecar and one.exit_code]
        return min(
            bad, key=lambda one: str((one.ended or {}).get("finishedAt") or "~"), default=None
        )

    @property
    def ended(self) -> bool:
        """Whether none of its programs runs, or will run, any more."""
        if self.status.get("phase") in ("Succeeded", "Failed"):
            return True
        if not self.status.get("containerStatuses"):
            return False  # by far the most, and this is asked often
        policy = self.spec.get("restartPolicy", "Always")
        ends = [one.state("terminated") for one in self.programs]
        return policy in ("Never", "OnFailure") and all(
            end is not None and (policy == "Never" or not end.get("exitCode")) for end in ends
        )

    @property
    def ran(self) -> bool:
        """Whether a program of it was ever started."""
        return any(
            one.state("running") is not None
            or (one.ended or {}).get("reason") not in (None, *START_ERRORS)
            for one in self.programs
            if not one.unmade
        )

    @property
    def runs(self) -> bool:
        """Whether a program of it runs now."""
        return any(one.state("running") is not None for one in self.programs)

    @property
    def kept_from_ending(self) -> str:
        """The container that did not end by itself when its program had ended well; else empty."""
        others = self.programs[1:] if [one.exit_code for one in self.programs[:1]] == [0] else ()
        return next((one.name for one in others if one.exit_code in (None, 137, 143)), "")

    @property
    def starts(self) -> int:
        """How often its program was started, if its failure did not end the pod."""
        again = max((one.restarts for one in self.programs), default=0)
        return again + 1 if again and self.spec.get("restartPolicy") != "Never" else 0

    @property
    def leaving(self) -> bool:
        """Whether somebody has deleted it."""
        return bool(self.metadata.get("deletionTimestamp"))

    @property
    def disruption(self) -> Document | None:
        """Kubernetes' own word that the platform ended it."""
        return condition(self.document, "DisruptionTarget")

    @property
    def end(self) -> Document:
        """How it ended: the container that made it fail, else its program."""
        one = self.bad or next(iter(self.programs), None)
        return (one.ended if one is not None else None) or {}

    @property
    def answered(self) -> bool:
        """Whether its program ended in its own way after somebody had the pod deleted."""
        try:
            until = datetime.fromisoformat(self.metadata["deletionTimestamp"])
            asked = until - timedelta(seconds=int(self.metadata["deletionGracePeriodSeconds"]))
            since = datetime.fromisoformat(self.end["finishedAt"]) >= asked
        except (KeyError, ValueError, TypeError):  # of some that is not told
            return False
        return since and self.end.get("reason") not in ("OOMKilled", *START_ERRORS)

    @property
    def stopped(self) -> bool:
        """Whether its end may be the answer to a request to stop, by exit code or moment."""
        code, reason = self.end.get("exitCode"), self.end.get("reason")
        by_signal = code in (137, 143) and reason in (None, "Error")
        return self.bad is None or self.bad.unmade or by_signal or self.answered

    @property
    def swept(self) -> bool:
        """Whether it was stopped because of others: by its Job, or by hand."""
        return self.leaving and self.stopped and self.disruption is None

    @cached_property
    def node(self) -> Document | None:
        """Its node: as it was when the pod was first said to be disrupted, else as it is."""
        name = self.spec.get("nodeName")
        found = (one for one in self.seen.nodes or () if part(one, "metadata").get("name") == name)
        return self.seen.scenes.get(self.uid) or next(found, None)

    @property
    def without_node(self) -> bool:
        """Whether it names a node that is not among those there are."""
        name = self.spec.get("nodeName")
        there = {part(one, "metadata").get("name") for one in self.seen.nodes or ()}
        return bool(name and there) and name not in there

    @property
    def on_spot(self) -> bool:
        """Whether it is on a machine that the cloud may take back, or asks for one."""
        labels = part(part(self.node, "metadata"), "labels")
        return any(key in part(self.spec, "nodeSelector") or key in labels for key in _SPOT)

    @property
    def taken_back(self) -> bool:
        """Whether the cloud has given notice of its node's end (documents: GKE, Spot VMs)."""
        taints = parts(part(self.node, "spec"), "taints")
        return any(one.get("key") == _NOTICE for one in taints)

    def events(self, *reasons: str) -> list[Document]:
        """Those on it with one of *reasons*, in order."""
        return self.seen.about(self.document, *reasons)

    def last_said(self, *reasons: str) -> str:
        """The words of the last such event; empty if there is none."""
        found = self.events(*reasons)
        return str(found[-1].get("message") or "") if found else ""


_LAST = 2
"""So many of the pods that the Job made last count: the one that is there, and its elder."""


def unseen(seen: Seen, known: Collection[str] = ()) -> list[Pod]:
    """The last pods of the Job but those *known* by name, the oldest first.

    Each with the status that its events tell of: an end, or that its program was never started.
    """
    born = part(seen.any_job, "metadata").get("creationTimestamp")
    template = part(part(seen.spec, "template"), "spec")
    # Where nobody knows what was asked for, the nodes do not tell either.
    where = seen if template.get("containers") else replace(seen, nodes=None)
    found: list[Pod] = []
    for name in _names(seen):
        metadata = {"name": name, "creationTimestamp": born}  # or a bit later
        told = seen.about({"metadata": metadata})
        uids = (subject(event).get("uid") for event in told)
        metadata["uid"] = next((one for one in uids if one), None)
        status = _status(told)
        if name in known or status is None:
            continue
        node = {"nodeName": "?"} if any(one.get("reason") == "Scheduled" for one in told) else {}
        spec = {**template, **node, "restartPolicy": "Never"}
        found.append(Pod({"metadata": metadata, "spec": spec, "status": status}, where))
    return found


def _names(seen: Seen) -> list[str]:
    """The pods that events tell of, the oldest first: by their making, if that is told."""
    made = [str(one["message"]).rpartition(" ")[2] for one in seen.about(None, "SuccessfulCreate")]
    if made:
        return [*dict.fromkeys(made)][-_LAST:]
    prefix = f"{seen.job_name}-"
    named = dict.fromkeys(_pod_of(one) for one in seen.events)
    # Those of a Job whose name begins alike have more parts in theirs.
    return [one for one in named if one.startswith(prefix) and "-" not in one.removeprefix(prefix)]


def _pod_of(event: Document) -> str:
    target = subject(event)
    return str(target.get("name") or "") if target.get("kind") == "Pod" else ""


def _status(told: Sequence[Document]) -> dict[str, Any] | None:
    """What the status of the pod that events have *told* of must have been, as far as they say."""
    for event in reversed(told):
        reason, said = event.get("reason"), str(event["message"])
        again = reason == "BackOff" and "restarting failed" in said
        if again or reason in ("Evicted", "Preempting"):
            return {"phase": "Failed", "reason": reason, "message": said}
        kinds = {"Preempted": "PreemptionByScheduler"}
        if said.startswith("Marking for deletion"):
            kinds["TaintManagerEviction"] = "DeletionByTaintManager"
        if reason in kinds:
            by = {"type": "DisruptionTarget", "status": "True", "reason": kinds[reason]}
            return {"phase": "Failed", "conditions": [by]}
    began = not told or any(one.get("reason") == "Started" for one in told)
    return None if began else {"phase": "Pending"}
