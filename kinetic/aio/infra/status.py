"""Read what exists at a site (a cluster and all it needs), its jobs, and its cost per hour.

The result names what could not be read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    """A resource of Google Cloud: ``exists`` is None if it can't be seen."""

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
    ``usd_per_hour`` is what all known parts cost now, in US dollars, without buckets, images, and
    traffic, which cost by use. ``unseen`` says what you can't see, and why. ``left`` names disks
    and load balancers that a removed cluster left behind. ``usd_per_hour`` includes neither.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterState:
    """The answers of the cluster's Kubernetes API. ``nodes`` or ``pods`` is None if unknown."""

    controllers: tuple[str, ...] = ()
    queues: tuple[Queue, ...] = ()
    classes: Sequence[Document] = ()
    nodes: Sequence[Document] | None = None
    pods: Sequence[Document] | None = None


class _Reader:
    """Sends requests, limits the time of each, and collects their failures."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.failures: list[str] = []
        self.error: KineticError | None = None

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


async def survey(
    google: GoogleClient,
    cloud: Cloud,
    site: Site,
    connect: Callable[[], Awaitable[Access]],
    environ: Mapping[str, str],
) -> Status:
    """Return the status of *site*; *connect* opens access to its cluster."""
    reader = _Reader(cloud.timeout_s)
    setup = await reader.read("the place of the cluster", lookup.setup_of(google, site))
    if setup is None:
        setup = Setup(site=site, shape="autopilot" if site.zone == site.region else "standard")
    wanted = [
        resource for resource in setups.wanted_resources(setup) if isinstance(resource, Resource)
    ]
    observed = await cloud.observe(wanted)
    unseen = [
        f"{resource.key}: {observed[resource.key].problem}"
        for resource in wanted
        if observed[resource.key].problem
    ]
    if len(unseen) == len(wanted) and reader.error is not None:
        raise reader.error
    reader.failures += unseen
    cluster_key = f"cluster {site.cluster}"
    cluster = observed[cluster_key].document
    cluster_state = _ClusterState()
    if cluster is not None:
        cluster_state = await _read_cluster_state(site, connect, reader)
    pools = tuple(
        _node_pool(document, site, environ, cluster_state)
        for document in (cluster or {}).get("nodePools") or ()
    )
    class_pools = tuple(
        _compute_class(document, cluster_state) for document in cluster_state.classes
    )
    reader.failures += [
        f"cost of the pool {pool.name}: the price or the number of nodes is unknown"
        for pool in pools
        if pool.usd_per_hour is None
    ]
    fixed_usd = sum(
        setups.CLUSTER_USD if resource.key == cluster_key else resource.usd_per_hour or 0.0
        for resource in wanted
        if observed[resource.key].document is not None
    )
    state = str(cluster.get("status")) if cluster else "absent"
    left: list[str] = []
    if cluster is None and not observed[cluster_key].problem:
        subject = "disks and load balancers of the cluster"
        left = await reader.read(subject, lookup.list_outliving(google, site)) or []
    return Status(
        project=site.project,
        zone=site.zone,
        cluster=site.cluster,
        namespace=site.namespace,
        state="unknown" if observed[cluster_key].problem else state,
        version=str((cluster or {}).get("currentMasterVersion") or ""),
        usd_per_hour=round(fixed_usd + sum(pool.usd_per_hour or 0.0 for pool in pools), 4),
        parts=tuple(
            Part(
                kind=resource.kind,
                name=resource.name,
                exists=None
                if observed[resource.key].problem
                else observed[resource.key].document is not None,
            )
            for resource in wanted
        ),
        pools=(*pools, *class_pools),
        controllers=cluster_state.controllers,
        queues=cluster_state.queues,
        work=_list_work(cluster_state.pods or ()),
        left=tuple(left),
        unseen=tuple(reader.failures),
    )


async def _read_cluster_state(
    site: Site, connect: Callable[[], Awaitable[Access]], reader: _Reader
) -> _ClusterState:
    access = await reader.read("nodes, jobs, queues, and controllers", connect())
    if access is None:
        return _ClusterState()
    api = Api(access)
    try:
        groups, nodes, pods = await asyncio.gather(
            reader.read("controllers", api.call("GET", "/apis")),
            reader.read("nodes", list_all(api, "/api/v1/nodes", "")),
            reader.read(
                "jobs of all namespaces", list_all(api, "/api/v1/pods", f"{MANAGED}=kinetic")
            ),
        )
        if pods is None:
            own_pods = list_all(
                api, f"/api/v1/namespaces/{site.namespace}/pods", f"{MANAGED}=kinetic"
            )
            pods = await reader.read(f"jobs of {site.namespace}", own_pods)
        versions = {
            str(group["name"]): str(group["preferredVersion"]["version"])
            for group in (groups or {}).get("groups") or ()
        }
        queues: tuple[Queue, ...] = ()
        if version := versions.get("kueue.x-k8s.io"):
            queues = await _queues(api, site, f"/apis/kueue.x-k8s.io/{version}", reader)
        compute_classes: Mapping[str, Document] = {}
        if "cloud.google.com" in versions:
            compute_classes = (
                await reader.read("ComputeClasses", classes.list_own_classes(api)) or {}
            )
    finally:
        await api.aclose()
    return _ClusterState(
        controllers=tuple(name for group, name in CONTROLLERS.items() if group in versions),
        queues=queues,
        classes=tuple(compute_classes.values()),
        nodes=None if nodes is None else nodes.items,
        pods=None if pods is None else pods.items,
    )


async def _queues(api: Api, site: Site, root: str, reader: _Reader) -> tuple[Queue, ...]:
    queues_path = f"{root}/namespaces/{site.namespace}/localqueues"
    local, shared = await asyncio.gather(
        reader.read("LocalQueues", list_all(api, queues_path, "")),
        reader.read("ClusterQueues", list_all(api, f"{root}/clusterqueues", "")),
    )
    found: list[Queue] = []
    for kind, queues in (("LocalQueue", local), ("ClusterQueue", shared)):
        for document in queues.items if queues else ():
            status = get_dict(document, "status")
            queue = Queue(
                kind=kind,
                name=str(document["metadata"]["name"]),
                pending=int(status.get("pendingWorkloads") or 0),
                admitted=int(status.get("admittedWorkloads") or 0),
            )
            found.append(queue)
    return tuple(found)


def _node_pool(
    document: Document, site: Site, environ: Mapping[str, str], cluster_state: _ClusterState
) -> NodePool:
    summary = node_pools.summarize(document)
    nodes, used = _count_nodes(cluster_state, NODE_POOL, summary["name"])
    price = node_pools.node_price(document, site.zone, environ)
    cost = None if price is None or nodes is None else round(nodes * price, 4)
    cost = 0.0 if nodes == 0 else cost
    return NodePool(**summary, nodes=nodes, used=used, usd_per_hour=cost)


def _compute_class(document: Document, cluster_state: _ClusterState) -> NodePool:
    summary = classes.summarize(document)
    nodes, used = _count_nodes(cluster_state, COMPUTE_CLASS, summary["name"])
    return NodePool(**summary, nodes=nodes, used=used, usd_per_hour=None)


def _count_nodes(
    cluster_state: _ClusterState, label: str, value: str
) -> tuple[int | None, int | None]:
    """Return how many nodes have the label, and how many of them run jobs; None if unknown."""
    if cluster_state.nodes is None:
        return None, None
    names = {
        str(node["metadata"]["name"])
        for node in cluster_state.nodes
        if get_dict(node["metadata"], "labels").get(label) == value
    }
    if cluster_state.pods is None:
        return len(names), None
    return len(names), len(
        names & {_node_name(pod) for pod in cluster_state.pods if _phase(pod) == "Running"}
    )


def _node_name(pod: Document) -> str:
    return str(get_dict(pod, "spec").get("nodeName") or "")


def _phase(pod: Document) -> str:
    return str(get_dict(pod, "status").get("phase") or "")


def _list_work(pods: Sequence[Document]) -> tuple[Work, ...]:
    """Return the jobs and batches of *pods* that haven't ended."""
    running, waiting = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for pod in pods:
        metadata: Document = pod["metadata"]
        labels, annotations = get_dict(metadata, "labels"), get_dict(metadata, "annotations")
        name = str(labels.get(SUBMISSION) or annotations.get(NAME) or metadata["name"])
        key = (name, str(metadata.get("namespace") or ""), str(labels.get(USER) or ""))
        running[key] += _phase(pod) == "Running"
        waiting[key] += _phase(pod) == "Pending"
    return tuple(
        Work(id=key[0], namespace=key[1], user=key[2], running=count, waiting=waiting[key])
        for key, count in sorted(running.items())
        if count or waiting[key]
    )
