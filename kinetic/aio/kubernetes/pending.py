"""Find out and report why jobs wait, and end jobs that can never start.

Also end pods that only containers of others keep running.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from absl import logging

from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Diagnosis, Outlook
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    annotations_of,
    condition,
    get_dict,
    get_list,
    labels_of,
    uid,
)
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod, nodes_by_name
from kinetic.aio.kubernetes.diagnosis.queues import is_gated
from kinetic.aio.kubernetes.diagnosis.starting import LACKS_DRIVER
from kinetic.aio.kubernetes.manifests import QUEUE, START_TIMEOUT, Paths
from kinetic.aio.kubernetes.observations import ENDED, RANK_SEPARATOR, cause_of_end, text_of_end
from kinetic.aio.kubernetes.rights import runner_role
from kinetic.aio.kubernetes.secrets import missing_own_secret
from kinetic.aio.kubernetes.tables import Entry, Table
from kinetic.errors import AuthError, BackendError, Conflict, NotFound
from kinetic.job_status import Reason

POD_GROUP = "kueue.x-k8s.io/pod-group-name"
"""The label with the name of Kueue's Workload, on pods that Kueue holds individually."""

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
"""The API of Kueue 0.18 and later."""

MAX_NODES = 500
"""The most nodes to compare with a pod; in a larger cluster, the diagnosis quotes the scheduler."""

MAX_EVENTS = 100
"""The most events that one request returns."""

MAX_REPORTED = 1000
"""How many reports kinetic remembers, so that the log doesn't repeat them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a job may wait before kinetic does something about it.

    ``asked_s``: when to ask the API server about a job without a pod, or with a known reason to
    wait. ``slow_s``: when to ask about any other job. kinetic asks again each time that the waiting
    time has grown fourfold. ``report_s``: when to log a job's reason at the latest.
    ``hopeless_s``: how long to wait before ending a job that can never start. ``orphaned_s``: how
    long a job's Secret may be missing. ``least_s``: the shortest ``start_timeout``, because
    Kubernetes needs that long to start anything. ``rights_s``: when to repeat an inquiry for which
    a permission was missing. ``nodes_s``: how long to reuse a list of nodes. ``pause_s``: the pause
    between inquiries.
    """

    asked_s: float = 4.0
    slow_s: float = 20.0
    report_s: float = 15.0
    hopeless_s: float = 15.0
    orphaned_s: float = 300.0
    least_s: float = 2.0
    pause_s: float = 0.05
    rights_s: float = 60.0
    nodes_s: float = 30.0


class Diagnostics:
    """Ask the API server about jobs that wait; all watches of a client share one object.

    *stop* is the change to a Job's spec that ends its pods and keeps the Job. For a set, which runs
    a job on several hosts, *makers* returns kind and name of the objects that create its pods.
    ``mixed_rounds`` is that of each `Table`. ``nodes`` is what `read_nodes` last returned, the same
    object until a node changes.
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
        self.nodes: list[Document] | None = None
        self._nodes_until = 0.0
        self._unavailable_until: dict[str, float] = {}
        self._reported_texts: set[str] = set()
        self.mixed_rounds = set[str]()

    def report(self, name: str, verdict: Diagnosis) -> None:
        """Log the text of *verdict* for the job *name*, unless the same text was logged before."""
        if verdict.text in self._reported_texts:
            return
        if len(self._reported_texts) >= MAX_REPORTED:
            self._reported_texts.clear()
        self._reported_texts.add(verdict.text)
        if verdict.outlook is Outlook.OPEN:
            logging.info("%s waits: %s", name, verdict.text)
        else:
            logging.warning("%s cannot start: %s", name, verdict.text)

    async def read_facts(self, entry: Entry) -> JobFacts:
        """Read the objects that explain this job's state, such as events, nodes, and a Workload."""
        live_pods = entry.facts.live_pods
        events = await self._read_events(entry, live_pods)
        unstarted = [pod for pod in map(Pod, live_pods) if not pod.ran]
        claims, claim_events = await self._read_claims(
            [name for pod in unstarted if not pod.spec.get("nodeName") for name in pod.claims]
        )
        # A queue decides without the nodes, so they explain nothing.
        is_queued = entry.verdict is not None and entry.verdict.reason is Reason.QUEUED
        nodes = await self.read_nodes() if unstarted and not is_queued else None
        messages = (str(event.get("message")) for event in events)
        lacking = {name for message in messages for name in LACKS_DRIVER.findall(message)}
        return JobFacts(
            events=[*events, *claim_events],
            makers=self._makers(entry.name),
            # If only a new node lacks a driver, the driver may still start on that node.
            absent=[name for name in lacking if await self._is_absent(name)],
            nodes=nodes,
            hosts=await self._read_hosts(unstarted, nodes or ()),
            claims=claims,
            workload=await self._read_workload(entry.job, live_pods),
        )

    async def end(self, entry: Entry, cause: Cause) -> None:
        """Make Kubernetes end a Job that can't start, with an annotation that says why.

        A suspended Job has no deadline, and its queue may start it later, so delete it. That of a
        round stays until its items have ended, because another client would create it again.
        """
        path = f"{self._paths.jobs}/{get_dict(entry.job, 'metadata').get('name')}"
        metadata = {"uid": uid(entry.job), "annotations": {ENDED: text_of_end(cause)}}
        await self._api.call("PATCH", path, body={"metadata": metadata, "spec": self._stop})
        # A set is ended by a suspension, which must keep its reason for other clients.
        is_queued = entry.facts.suspended and "suspend" not in self._stop
        if is_queued and RANK_SEPARATOR not in entry.name:
            body = {"preconditions": {"uid": uid(entry.job)}, "propagationPolicy": "Background"}
            with suppress(NotFound, Conflict):  # it is gone, or another of its name is there
                await self._api.call("DELETE", path, body=body)

    async def end_held(self, pod: Pod, job: Document | None, *, whole: bool) -> None:
        """End *pod*, whose program has ended; if *whole*, delete its *job* with all its pods."""
        # Kubernetes would replace a pod whose program has succeeded, because its other containers
        # fail when they are stopped.
        kind, target = (self._paths.jobs, job) if whole else (self._paths.pods, pod.document)
        body = {"preconditions": {"uid": uid(target)}, "propagationPolicy": "Background"}
        path = f"{kind}/{get_dict(target, 'metadata')['name']}"
        with suppress(NotFound, Conflict):  # it is gone, or another of its name is there
            await self._api.call("DELETE", path, body=body)

    def report_held(self, pod: Pod) -> None:
        """Log once which containers hold pods of this kind, and which right a runner may lack."""
        holders = ", ".join(pod.holders)
        if holders in self._reported_texts:
            return
        self._reported_texts.add(holders)
        advice = "set KINETIC_POD_ANNOTATIONS to what keeps them out of kinetic's pods"
        if pod.spec.get("automountServiceAccountToken"):
            role = runner_role(self._paths.namespace, str(pod.spec.get("serviceAccountName")))
            advice += f", or have an administrator run `kubectl apply -f -` with this:\n{role}"
        logging.warning(
            "pod %s has ended, but containers that the cluster added continue (%s), so this client "
            "ends the pod. Without a client, it would stay: %s",
            pod.metadata.get("name"),
            holders,
            advice,
        )

    async def _read_events(self, entry: Entry, live_pods: Sequence[Document]) -> list[Document]:
        """Return events of the newest live pod, or of the objects that should have created one."""
        selectors = [f"involvedObject.uid={uid(live_pods[-1]) if live_pods else uid(entry.job)}"]
        if not live_pods and (makers := self._makers(entry.name)):
            names = dict.fromkeys(name for _, name in makers)
            selectors = [f"involvedObject.name={name}" for name in names]
        events: list[Document] = []
        for selector in selectors:
            query = {"fieldSelector": selector, "limit": str(MAX_EVENTS)}
            events += get_list(await self._try_get("events", self._paths.events, query), "items")
        return events

    async def _is_absent(self, driver: str) -> bool:
        """Return whether the cluster lacks *driver*; False if kinetic can't check."""
        try:
            await self._api.call("GET", f"/apis/storage.k8s.io/v1/csidrivers/{driver}")
        except NotFound:
            return True
        except BackendError as exc:
            logging.info("can't check whether the cluster has the driver %s: %s", driver, exc)
        return False

    async def _read_claims(
        self, names: Sequence[str]
    ) -> tuple[Sequence[Document], Sequence[Document]]:
        """Return the PersistentVolumeClaims with *names* that exist, and the events about them."""
        claims: list[Document] = []
        events: list[Document] = []
        for name in dict.fromkeys(names):
            if claim := await self._try_get("claims", f"{self._paths.claims}/{name}", {}):
                claims.append(claim)
                query = {"fieldSelector": f"involvedObject.uid={uid(claim)}"}
                found = await self._try_get("events", self._paths.events, query)
                events += get_list(found, "items")
        return claims, events

    async def _read_hosts(
        self, pods: Sequence[Pod], nodes: Sequence[Document]
    ) -> Mapping[str, Document | None]:
        """Return the nodes of *pods* that *nodes* lacks, such as new nodes, by name."""
        names = {str(pod.spec["nodeName"]) for pod in pods if pod.spec.get("nodeName")}
        hosts: dict[str, Document | None] = {}
        for name in sorted(names - nodes_by_name(nodes).keys())[:SAMPLE_SIZE]:
            query = {"fieldSelector": f"metadata.name={name}"}
            if (found := await self._try_get("nodes", self._paths.nodes, query)) is not None:
                hosts[name] = nodes_by_name(map(_reduce_node, get_list(found, "items"))).get(name)
        return hosts

    async def read_nodes(self) -> Sequence[Document] | None:
        """Return all nodes as of ``patience.nodes_s`` ago or later; None if unknown or too many."""
        now = asyncio.get_running_loop().time()
        if now >= self._nodes_until:
            found = await self._try_get("nodes", self._paths.nodes, {"limit": str(MAX_NODES)})
            is_complete = found is not None and not get_dict(found, "metadata").get("continue")
            nodes = [*map(_reduce_node, get_list(found, "items"))] if is_complete else None
            # The same object says that no node has changed.
            self.nodes = self.nodes if nodes == self.nodes else nodes
            self._nodes_until = now + self.patience.nodes_s
        return self.nodes

    async def _read_workload(
        self, job: Document | None, pods: Sequence[Document]
    ) -> Document | None:
        """Return Kueue's Workload for the Job; None if neither Job nor pods wait in a queue."""
        suspended = JobFacts(job=job).suspended
        groups = (labels_of(pod).get(POD_GROUP) for pod in pods if is_gated(pod))
        group = next((name for name in groups if name), None)
        if not (suspended or group) or QUEUE not in labels_of(job):
            return None
        query = {"labelSelector": f"kueue.x-k8s.io/job-uid={uid(job)}"}
        if not suspended:
            query = {"fieldSelector": f"metadata.name={group}"}
        path = f"{KUEUE}/namespaces/{self._paths.namespace}/workloads"
        found = await self._try_get(path, path, query)
        return next(iter(get_list(found, "items")), None)

    async def _try_get(self, collection: str, path: str, query: dict[str, str]) -> Document | None:
        """Send a GET and return the answer; None after a failure, which the diagnosis tolerates."""
        now = asyncio.get_running_loop().time()
        if now < self._unavailable_until.get(collection, 0.0):
            return None
        try:
            return await self._api.call("GET", path, query=query)
        except NotFound:
            if path == collection:  # the cluster has no such collection
                self._unavailable_until[collection] = math.inf
        except AuthError as exc:
            if collection not in self._unavailable_until:
                logging.info(
                    "kinetic explains without %s why jobs do not start: %s", collection, exc
                )
            # An administrator may grant the right meanwhile.
            self._unavailable_until[collection] = now + self.patience.rights_s
        except BackendError as exc:
            logging.info("can't explain now why jobs do not start: %s", exc)
        return None


def _reduce_node(node: Document) -> Document:
    """Return the part of *node* that the diagnosis reads."""
    kept = {
        "metadata": ("name", "labels"),
        "spec": ("taints", "unschedulable"),
        "status": ("allocatable", "capacity"),
    }
    reduced = {
        section: {key: get_dict(node, section).get(key) for key in keys}
        for section, keys in kept.items()
    }
    # The other fields of the condition change with each of the node's heartbeats.
    ready = condition(node, "Ready", None)
    reduced["status"]["conditions"] = (
        [{key: ready.get(key) for key in ("type", "status")}] if ready else []
    )
    return reduced


GROWTH = 4.0
"""The factor between the times of two inquiries about one job."""

SAMPLE_SIZE = 3
"""How many jobs to ask about for each reason to wait, because the answers would be alike."""

TICK_S = 1.0
"""Seconds between two checks of the jobs that wait."""


class PendingMonitor:
    """Ask the API server about the waiting jobs of one watch, and end jobs that can never start.

    Call *changed* after each request. If a node changes, ask again about each job whose answer was
    based on the nodes.
    """

    def __init__(self, table: Table, diagnostics: Diagnostics, changed: Callable[[], None]) -> None:
        self._table = table
        table.mixed_rounds = diagnostics.mixed_rounds
        self._diagnostics = diagnostics
        self._changed = changed
        self._ended: set[str] = set()
        self._asked: Counter[str] = Counter()
        self._hopeless: set[str] = set()

    async def work(self) -> None:
        """Check the waiting jobs every second, one after the other, until cancelled."""
        while True:
            if any(entry.answers.nodes is not None for entry in self._table.waiting.values()):
                await self._diagnostics.read_nodes()
            waits = [entry.waiting for entry in self._table.waiting.values()]
            self._asked = Counter(it.first_explanation for it in waits if it.inquiry_count)
            hopeless = (it.first_explanation for it in waits if it.hopeless_since is not None)
            self._hopeless = {*hopeless}
            for entry in [*self._table.waiting.values()]:
                if await self._check(entry):
                    self._changed()
                    await asyncio.sleep(self._diagnostics.patience.pause_s)
            await self.end_held()
            await asyncio.sleep(TICK_S)

    async def end_held(self) -> None:
        """End each pod that only other containers hold; the log names a failure."""
        for entry in [*self._table.held.values()]:
            pod = next((pod for pod in map(Pod, entry.facts.pods) if pod.holders), None)
            if pod is None:
                continue
            self._diagnostics.report_held(pod)
            try:
                whole = self._table.is_over_with(pod)
                await self._diagnostics.end_held(pod, entry.job, whole=whole)
            except BackendError as exc:
                logging.warning("can't end pod %s: %s", pod.metadata.get("name"), exc)
            else:
                self._table.held.pop(entry.name, None)

    async def _check(self, entry: Entry) -> bool:
        """Log why a job waits. Inquire about it, or end it. Return whether this sent a request."""
        verdict, wait, patience = entry.verdict, entry.waiting, self._diagnostics.patience
        if verdict is None or entry.job is None or entry.ended_job_uid or cause_of_end(entry.job):
            return False
        now = asyncio.get_running_loop().time()
        wait.since = wait.since or now
        waited = now - wait.since
        is_hopeless = verdict.outlook is Outlook.FINAL
        wait.hopeless_since = (wait.hopeless_since or now) if is_hopeless else None
        if verdict.reason is not None and (wait.inquiry_count or waited >= patience.report_s):
            self._diagnostics.report(entry.last_attempt or entry.name, verdict)
        end = _decide_end(entry, verdict, now, patience)
        # A worker that can't start does no harm to those of its round that run.
        is_alone = end is not None and not self._table.has_started_elsewhere(entry)
        if end is not None and is_alone and uid(entry.job) not in self._ended:
            await self._end(entry, end)
            return True
        has_obstacle = verdict.reason is not None or not entry.pods
        first_delay = patience.asked_s if has_obstacle else patience.slow_s
        is_due = waited >= first_delay * GROWTH**wait.inquiry_count
        known_nodes = entry.answers.nodes
        if not is_due and (known_nodes is None or known_nodes is self._diagnostics.nodes):
            return False
        if wait.inquiry_count == 0:
            text = wait.first_explanation = verdict.text
            # kinetic ends jobs that can never start. So it asks about every such job, not a sample.
            if self._asked[text] >= SAMPLE_SIZE and text not in self._hopeless:
                return False
            self._asked[text] += 1
        wait.inquiry_count += is_due
        self._table.learn(entry.name, await self._diagnostics.read_facts(entry))
        return True

    async def _end(self, entry: Entry, end: Cause) -> None:
        # End a Job only once: the watch shows the end later, and may show other changes first.
        self._ended.add(uid(entry.job))
        logging.warning("ending %s, which can't start: %s", entry.last_attempt, end.summary)
        try:
            await self._diagnostics.end(entry, end)
        except BackendError as exc:
            logging.warning("can't end %s, which can't start: %s", entry.last_attempt, exc)


def _decide_end(entry: Entry, verdict: Diagnosis, now: float, patience: Patience) -> Cause | None:
    """Return why to end a job that waits; None while it may keep waiting. No I/O."""
    wait = entry.waiting
    waited = 0.0 if wait.since is None else now - wait.since
    text = annotations_of(entry.job).get(START_TIMEOUT)
    if text is not None and waited >= max(limit := float(text), patience.least_s):
        message = f"waited longer than its start_timeout of {limit:g} s: {verdict.text}"
        return Cause(summary=message, reason=verdict.reason or Reason.UNSCHEDULABLE)
    secret = missing_own_secret(entry.job, verdict.cause.secret)
    if secret and waited >= patience.orphaned_s:
        message = (
            f"the job's Secret {secret!r} does not exist: the client was killed before it created "
            "the Secret, or the batch was over; submit the job again"
        )
        return Cause(summary=message, reason=Reason.SETUP)
    if wait.hopeless_since is not None and now - wait.hopeless_since >= patience.hopeless_s:
        return Cause(summary=verdict.text, reason=verdict.reason or Reason.SETUP)
    return None
