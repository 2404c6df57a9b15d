"""What is asked about jobs that do not start: events, nodes, queues; and how one is ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from absl import logging

from kinetic.aio.clusters._api import Api
from kinetic.aio.clusters._kube_job import ENDED, End, Facts
from kinetic.aio.clusters._kube_paths import Paths
from kinetic.aio.clusters._kube_table import Entry
from kinetic.aio.clusters._reasons.documents import Document, condition, part, parts, uid
from kinetic.aio.clusters._reasons.ending import has_ended
from kinetic.aio.clusters._reasons.held import is_gated
from kinetic.aio.clusters._reasons.verdict import Outlook, Verdict
from kinetic.errors import AuthError, BackendError, NotFound
from kinetic.job_status import Reason

__all__ = ["Inquiry", "Patience"]

QUEUE = "kueue.x-k8s.io/queue-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
"""The label with the name of their Workload, on pods that Kueue holds one by one."""

WORKLOADS = ("v1beta2", "v1beta1")
NODES_S = 60.0
NODES = 500
"""A cluster with more nodes than these is judged by the scheduler's words alone."""

EVENTS = 100
TOLD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a job may wait before something is done about it.

    ``asked_s``: more is asked about one that has a reason to wait, and after
    ``slow_s`` about any; again after four times as long, and so on.
    ``told_s``: it is reported at the latest then. ``hopeless_s``: it is ended
    when it was seen to wait in vain for so long. ``orphaned_s``: so long its
    Secret may take to be made. ``least_s``: no ``start_timeout`` is shorter,
    for Kubernetes takes that long to start anything. ``rights_s``: what may not
    be asked is asked again after that: somebody may have granted it.
    """

    asked_s: float = 4.0
    slow_s: float = 20.0
    told_s: float = 15.0
    hopeless_s: float = 15.0
    orphaned_s: float = 300.0
    least_s: float = 2.0
    pause_s: float = 0.05
    rights_s: float = 60.0


class Inquiry:
    """Asks the API server about what waits; one for all watches of a cluster's client.

    *stop* is what to change in the spec of a Job, so that its pods are ended and it stays.
    *makers* gives kind and name of what makes its pods, where it does not do that itself.
    """

    def __init__(
        self,
        api: Api,
        paths: Paths,
        patience: Patience,
        *,
        stop: Mapping[str, Any] | None = None,
        makers: Callable[[str], Sequence[tuple[str, str]]] = lambda name: (),
    ) -> None:
        self.patience = patience
        self._makers = makers
        self._stop = {"activeDeadlineSeconds": 1} if stop is None else stop
        self._api = api
        self._paths = paths
        self._nodes: list[Document] | None = None
        self._nodes_until = 0.0
        self._closed_until: dict[str, float] = {}
        self._told: dict[str, None] = {}

    def report(self, name: str, verdict: Verdict) -> None:
        """Say once what keeps jobs from starting: others with the same words are not named."""
        if verdict.text in self._told:
            return
        if len(self._told) >= TOLD:
            self._told.clear()
        self._told[verdict.text] = None
        if verdict.outlook is Outlook.OPEN:
            logging.info("%s waits: %s", name, verdict.text)
        else:
            logging.warning("%s cannot start: %s", name, verdict.text)

    async def facts(self, entry: Entry) -> Facts:
        """What jobs and pods alone do not say about this one."""
        alive = [pod for pod in entry.seen.pods if not has_ended(pod)]
        verdict = entry.verdict
        unplaced = [pod for pod in alive if not part(pod, "spec").get("nodeName")]
        wanted = unplaced and verdict is not None and verdict.reason is Reason.UNSCHEDULABLE
        return Facts(
            events=await self._events(entry, alive),
            nodes=await self._all_nodes() if wanted else None,
            workload=await self._workload(entry.job, alive),
        )

    async def scene(self, pod: Document) -> Document | None:
        """The node of a pod that is thrown out: was it closed, or is it lost?"""
        name = part(pod, "spec").get("nodeName")
        found = await self._allowed("nodes", f"{self._paths.nodes}/{name}", {})
        return None if found is None else _slim(found)

    async def end(self, entry: Entry, end: End) -> None:
        """Make Kubernetes end a Job that waits in vain, with a note that says why."""
        job = entry.job
        name = str(part(job, "metadata").get("name"))
        metadata = {"uid": uid(job), "annotations": {ENDED: end.to_text()}}
        change = {"metadata": metadata, "spec": self._stop}
        await self._api.call(
            "PATCH",
            f"{self._paths.jobs}/{name}",
            body=change,
            content_type="application/merge-patch+json",
        )

    async def _events(self, entry: Entry, alive: Sequence[Document]) -> list[Document]:
        """Those of the pod that is there, else of what should have made one."""
        selectors = [f"involvedObject.uid={uid(alive[-1]) if alive else uid(entry.job)}"]
        if not alive and (makers := self._makers(entry.name)):
            names = dict.fromkeys(name for _, name in makers)
            selectors = [f"involvedObject.name={name}" for name in names]
        told: list[Document] = []
        for selector in selectors:
            query = {"fieldSelector": selector, "limit": str(EVENTS)}
            found = await self._allowed("events", self._paths.events, query)
            told += parts(found, "items")
        return told

    async def _all_nodes(self) -> list[Document] | None:
        now = asyncio.get_running_loop().time()
        if now >= self._nodes_until:
            found = await self._allowed("nodes", self._paths.nodes, {"limit": str(NODES)})
            whole = found is not None and not part(found, "metadata").get("continue")
            self._nodes = [_slim(one) for one in parts(found, "items")] if whole else None
            self._nodes_until = now + NODES_S
        return self._nodes

    async def _workload(self, job: Document | None, alive: Sequence[Document]) -> Document | None:
        """Kueue's object for the Job, if the Job or its pods wait in one of its queues."""
        suspended = part(job, "spec").get("suspend") or condition(job, "Suspended") is not None
        groups = [
            part(part(pod, "metadata"), "labels").get(GROUP) for pod in alive if is_gated(pod)
        ]
        group = next((name for name in groups if name), None)
        if not (suspended or group) or QUEUE not in part(part(job, "metadata"), "labels"):
            return None
        query = {"labelSelector": f"kueue.x-k8s.io/job-uid={uid(job)}"}
        if not suspended:
            query = {"fieldSelector": f"metadata.name={group}"}
        for version in WORKLOADS:
            path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{self._paths.namespace}/workloads"
            found = await self._allowed(path, path, query)
            if found is not None:
                return next(iter(parts(found, "items")), None)
        return None

    async def _allowed(self, what: str, path: str, query: dict[str, str]) -> Document | None:
        """An answer, or None where there is none to be had: reasons are only worded worse then."""
        now = asyncio.get_running_loop().time()
        if now < self._closed_until.get(what, 0.0):
            return None
        try:
            return await self._api.call("GET", path, query=query)
        except NotFound:
            if path == what:  # there is no such collection
                self._closed_until[what] = math.inf
        except AuthError as exc:
            if what not in self._closed_until:
                logging.info("jobs that do not start are explained without %s: %s", what, exc)
            self._closed_until[what] = now + self.patience.rights_s
        except BackendError as exc:
            logging.info("jobs that do not start are not explained now: %s", exc)
        return None


def _slim(node: Document) -> Document:
    metadata, spec, status = (part(node, name) for name in ("metadata", "spec", "status"))
    return {
        "metadata": {key: metadata[key] for key in ("name", "labels") if key in metadata},
        "spec": {key: spec[key] for key in ("taints", "unschedulable") if key in spec},
        "status": {
            key: status[key] for key in ("allocatable", "capacity", "conditions") if key in status
        },
    }
