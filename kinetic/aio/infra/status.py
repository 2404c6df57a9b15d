"""Read what exists at a site (a cluster and all it needs), its jobs, and its cost per hour.

The result names what could not be read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kinetic.aio._net.google import GoogleClient
from kinetic.aio.infra import classes, lookup
from kinetic.aio.infra import pools as node_pools
from kinetic.aio.infra import setup as setups
from kinetic.aio.infra.apply import Cloud
from kinetic.aio.infra.resources import Document, Resource
from kinetic.aio.infra.setup import Setup
from kinetic.aio.infra.site import Site
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.credentials import Access
from kinetic.aio.kubernetes.diagnosis.documents import get_dict
from kinetic.aio.kubernetes.manifests import COMPUTE_CLASS, MANAGED, NAME
from kinetic.aio.kubernetes.reflector import list_all
from kinetic.aio.kubernetes.secrets import SUBMISSION
from kinetic.aio.kubernetes.sets import NODE_POOL
from kinetic.errors import KineticError

T = TypeVar("T")

CONTROLLERS = {
    "leaderworkerset.x-k8s.io": "LeaderWorkerSet",
    "jobset.x-k8s.io": "JobSet",
    "kueue.x-k8s.io": "Kueue",
}
"""The names of controllers, by the API group that each one adds to a cluster."""

USER = "kinetic.dev/user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A resource of Google Cloud: ``exists`` is None if you can't see the resource."""

    kind: str
    name: str
    exists: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """A node pool or a ComputeClass (``kind``). ``used`` counts nodes with jobs.

    ``nodes`` and ``used`` are None if you can't see them. ``usd_per_hour`` is the cost of the nodes
    now; None if their number or price is unknown. A ComputeClass has no ``max_nodes`` and no cost:
    GKE keeps its nodes in node pools, which have a cost.
    """

    name: str
    kind: str
    machine: str
    accelerator: str
    topology: str
    min_nodes: int
    max_nodes: int | None
    nodes: int | None
    used: int | None
    spot: bool
    reservation: str
    status: str
    problem: str
    usd_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue of Kueue: a LocalQueue of the namespace, or a ClusterQueue."""

    kind: str
    name: str
    pending: int
    admitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A job or batch that has pods: how many of them run, and how many wait for a node."""

    id: str
    namespace: str
    user: str
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a site: its parts, pools, queues, jobs, and cost.

    ``state`` is the cluster's state in Google's words, ``absent``, or ``unknown``.
    ``unseen`` says what you can't see, and why. ``left`` names disks and load balancers that a
    removed cluster left behind. ``usd_per_hour`` is the current cost of all other parts in US
    dollars; buckets, images, and traffic cost by use and don't count.
    """

    project: str
    zone: str
    cluster: str
    namespace: str
    state: str
    version: str
    usd_per_hour: float
    parts: tuple[Part, ...] = ()
    pools: tuple[NodePool, ...] = ()
    controllers: tuple[str, ...] = ()
    queues: tuple[Queue, ...] = ()
    work: tuple[Work, ...] = ()
    left: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the status as ``--json`` shows it."""
        return asdict(self)


async def survey(
    google: GoogleClient,
    cloud: Cloud,
    site: Site,
    connect: Callable[[], Awaitable[Access]],
    environ: Mapping[str, str],
) -> Status:
    """Return the status of *site*; *connect* opens access to its cluster."""
    reader = _Reader(site, cloud.timeout_s)
    setup = await reader.read("the location of the cluster", lookup.setup_of(google, site))
    if setup is None:
        setup = Setup(site=site, shape="autopilot" if site.zone == site.region else "standard")
    wanted = [
        resource for resource in setups.wanted_resources(setup) if isinstance(resource, Resource)
    ]
    observed = await cloud.observe(wanted)
    unseen = [
        f"{resource.key}: {problem}"
        for resource in wanted
        if (problem := observed[resource.key].problem)
    ]
    if len(unseen) == len(wanted) and reader.error is not None:
        raise reader.error
    reader.failures += unseen
    cluster_key = f"cluster {site.cluster}"
    document, problem = observed[cluster_key].document, observed[cluster_key].problem
    cluster = document or {}
    left: list[str] = []
    if document is not None:
        await reader.read_cluster(connect)
    elif not problem:
        subject = "disks and load balancers of the cluster"
        left = await reader.read(subject, lookup.list_outliving(google, site)) or []
    pools = [reader.node_pool(pool, environ) for pool in cluster.get("nodePools") or ()]
    reader.failures += [
        f"cost of the pool {pool.name}: the price or the number of nodes is unknown"
        for pool in pools
        if pool.usd_per_hour is None
    ]
    usd_per_hour = sum(pool.usd_per_hour or 0.0 for pool in pools) + sum(
        setups.CLUSTER_USD if resource.key == cluster_key else resource.usd_per_hour or 0.0
        for resource in wanted
        if observed[resource.key].document is not None
    )
    parts: list[Part] = []
    for resource in wanted:
        found = observed[resource.key]
        exists = None if found.problem else found.document is not None
        parts.append(Part(kind=resource.kind, name=resource.name, exists=exists))
    return Status(
        **asdict(site),
        state="unknown" if problem else str(cluster.get("status", "absent")),
        version=str(cluster.get("currentMasterVersion") or ""),
        usd_per_hour=round(usd_per_hour, 4),
        parts=tuple(parts),
        pools=(*pools, *map(reader.compute_class, reader.classes)),
        controllers=reader.controllers,
        queues=reader.queues,
        work=_list_work(reader.pods or ()),
        left=tuple(left),
        unseen=tuple(reader.failures),
    )


class _Reader:
    """Reads from APIs, limits the time of each request, and collects the failures.

    ``failures`` and ``error`` describe failed requests. The other attributes come from the
    cluster's Kubernetes API; ``nodes`` or ``pods`` is None if unknown.
    """

    def __init__(self, site: Site, limit_s: float) -> None:
        self._site = site
        self._limit_s = limit_s
        self.failures: list[str] = []
        self.error: KineticError | None = None
        self.controllers: tuple[str, ...] = ()
        self.queues: tuple[Queue, ...] = ()
        self.classes: Sequence[Document] = ()
        self.nodes: Sequence[Document] | None = None
        self.pods: Sequence[Document] | None = None

    async def read(self, subject: str, request: Awaitable[T]) -> T | None:
        """Return what *request* returns; None if it fails, or takes longer than the limit."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await request
        except TimeoutError:
            self.failures.append(f"{subject}: no answer within {self._limit_s:g} s")
        except KineticError as exc:
            self.failures.append(f"{subject}: {str(exc).splitlines()[0]}")
            self.error = exc
        return None

    async def _list(
        self, subject: str, api: Api, path: str, labels: str = ""
    ) -> Sequence[Document] | None:
        listed = await self.read(subject, list_all(api, path, labels))
        return None if listed is None else listed.items

    async def read_cluster(self, connect: Callable[[], Awaitable[Access]]) -> None:
        """Read controllers, queues, classes, nodes, and pods from the cluster."""
        access = await self.read("nodes, jobs, queues, and controllers", connect())
        if access is None:
            return
        namespace, selector = f"/namespaces/{self._site.namespace}", f"{MANAGED}=kinetic"
        async with aclosing(Api(access)) as api:
            groups, self.nodes, self.pods = await asyncio.gather(
                self.read("controllers", api.call("GET", "/apis")),
                self._list("nodes", api, "/api/v1/nodes"),
                self._list("jobs of all namespaces", api, "/api/v1/pods", selector),
            )
            if self.pods is None:
                subject = f"jobs of {self._site.namespace}"
                self.pods = await self._list(subject, api, f"/api/v1{namespace}/pods", selector)
            versions = {
                str(group["name"]): str(group["preferredVersion"]["version"])
                for group in (groups or {}).get("groups") or ()
            }
            self.controllers = tuple(CONTROLLERS[name] for name in CONTROLLERS if name in versions)
            if version := versions.get("kueue.x-k8s.io"):
                root = f"/apis/kueue.x-k8s.io/{version}"
                local, shared = await asyncio.gather(
                    self._list("LocalQueues", api, f"{root}{namespace}/localqueues"),
                    self._list("ClusterQueues", api, f"{root}/clusterqueues"),
                )
                local_queues = (_queue("LocalQueue", document) for document in local or ())
                shared_queues = (_queue("ClusterQueue", document) for document in shared or ())
                self.queues = (*local_queues, *shared_queues)
            if "cloud.google.com" in versions:
                found = await self.read("ComputeClasses", classes.list_own_classes(api))
                self.classes = tuple((found or {}).values())

    def node_pool(self, document: Document, environ: Mapping[str, str]) -> NodePool:
        """Return the node pool in *document*, with its nodes and their cost."""
        summary = node_pools.summarize(document)
        nodes, used = self._count_nodes(NODE_POOL, summary["name"])
        price = node_pools.node_price(document, self._site.zone, environ)
        cost = None if price is None or nodes is None else round(nodes * price, 4)
        cost = 0.0 if nodes == 0 else cost
        return NodePool(**summary, nodes=nodes, used=used, usd_per_hour=cost)

    def compute_class(self, document: Document) -> NodePool:
        """Return the ComputeClass in *document*, with its nodes."""
        summary = classes.summarize(document)
        nodes, used = self._count_nodes(COMPUTE_CLASS, summary["name"])
        return NodePool(**summary, nodes=nodes, used=used, usd_per_hour=None)

    def _count_nodes(self, label: str, value: str) -> tuple[int | None, int | None]:
        """Return how many nodes have the label, and how many of them run jobs; None if unknown."""
        if self.nodes is None:
            return None, None
        names = {
            str(node["metadata"]["name"])
            for node in self.nodes
            if get_dict(node["metadata"], "labels").get(label) == value
        }
        if self.pods is None:
            return len(names), None
        running = (pod for pod in self.pods if _phase(pod) == "Running")
        return len(names), len(names & {get_dict(pod, "spec").get("nodeName") for pod in running})


def _queue(kind: str, document: Document) -> Queue:
    status = get_dict(document, "status")
    return Queue(
        kind=kind,
        name=str(document["metadata"]["name"]),
        pending=int(status.get("pendingWorkloads") or 0),
        admitted=int(status.get("admittedWorkloads") or 0),
    )


def _phase(pod: Document) -> str:
    return str(get_dict(pod, "status").get("phase") or "")


def _list_work(pods: Sequence[Document]) -> tuple[Work, ...]:
    """Return the jobs and batches of *pods* that haven't ended."""
    phases: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for pod in pods:
        metadata: Document = pod["metadata"]
        labels, annotations = get_dict(metadata, "labels"), get_dict(metadata, "annotations")
        name = str(labels.get(SUBMISSION) or annotations.get(NAME) or metadata["name"])
        namespace, user = str(metadata.get("namespace") or ""), str(labels.get(USER) or "")
        phases[name, namespace, user][_phase(pod)] += 1
    return tuple(
        Work(
            id=name,
            namespace=namespace,
            user=user,
            running=counts["Running"],
            waiting=counts["Pending"],
        )
        for (name, namespace, user), counts in sorted(phases.items())
        if counts["Running"] or counts["Pending"]
    )
