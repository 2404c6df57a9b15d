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
from kinetic.aio.kubernetes.diagnosis.documents import part
from kinetic.aio.kubernetes.manifests import COMPUTE_CLASS, MANAGED, NAME
from kinetic.aio.kubernetes.reflector import listing
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

    ``state`` is Google's word for the cluster, ``absent``, or ``unknown``.
    ``usd_per_hour`` is what all known parts cost now, in US dollars, without buckets, images, and
    traffic, which cost by use. ``unseen`` names the parts that you can't see, and why; other fields
    don't include them. ``left`` names disks and load balancers that a removed cluster left behind;
    ``usd_per_hour`` doesn't include their cost.
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
class _Inside:
    """The answers of the cluster's Kubernetes API; None for an answer that is missing."""

    controllers: tuple[str, ...] = ()
    queues: tuple[Queue, ...] = ()
    classes: Sequence[Document] = ()
    nodes: Sequence[Document] | None = None
    pods: Sequence[Document] | None = None


class _Looks:
    """Limits the time of each look (a request for one part), and collects failures."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.failed: list[str] = []
        self.error: KineticError | None = None

    async def at(self, what: str, look: Awaitable[T]) -> T | None:
        """Return what *look* returns; None if it fails, or takes longer than the limit."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await look
        except TimeoutError:
            self.failed.append(f"{what}: no answer within {self._limit_s:g} s")
        except KineticError as exc:
            self.failed.append(f"{what}: {str(exc).splitlines()[0]}")
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
    looks = _Looks(cloud.look_s)
    setup = await looks.at("the place of the cluster", lookup.setup_of(google, site))
    if setup is None:
        setup = Setup(site=site, shape="autopilot" if site.zone == site.region else "standard")
    wanted = [one for one in setups.wanted(setup) if isinstance(one, Resource)]
    seen = await cloud.observe(wanted)
    unseen = [f"{one.key}: {seen[one.key].problem}" for one in wanted if seen[one.key].problem]
    if len(unseen) == len(wanted) and looks.error is not None:
        raise looks.error
    looks.failed += unseen
    key = f"cluster {site.cluster}"
    cluster = seen[key].document
    inside = _Inside()
    if cluster is not None:
        inside = await _inside(site, connect, looks)
    pools = tuple(
        _pool(one, site, environ, inside) for one in (cluster or {}).get("nodePools") or ()
    )
    made = tuple(_class(one, inside) for one in inside.classes)
    looks.failed += [
        f"cost of the pool {one.name}: the price or the number of nodes is unknown"
        for one in pools
        if one.usd_per_hour is None
    ]
    fixed = sum(
        setups.CLUSTER_USD if one.key == key else one.usd_per_hour or 0.0
        for one in wanted
        if seen[one.key].document is not None
    )
    state = str(cluster.get("status")) if cluster else "absent"
    left: list[str] = []
    if cluster is None and not seen[key].problem:
        what = "disks and load balancers of the cluster"
        left = await looks.at(what, lookup.outliving(google, site)) or []
    return Status(
        project=site.project,
        zone=site.zone,
        cluster=site.cluster,
        namespace=site.namespace,
        state="unknown" if seen[key].problem else state,
        version=str((cluster or {}).get("currentMasterVersion") or ""),
        usd_per_hour=round(fixed + sum(one.usd_per_hour or 0.0 for one in pools), 4),
        parts=tuple(
            Part(
                kind=one.kind,
                name=one.name,
                exists=None if seen[one.key].problem else seen[one.key].document is not None,
            )
            for one in wanted
        ),
        pools=(*pools, *made),
        controllers=inside.controllers,
        queues=inside.queues,
        work=_work(inside.pods or ()),
        left=tuple(left),
        unseen=tuple(looks.failed),
    )


async def _inside(site: Site, connect: Callable[[], Awaitable[Access]], looks: _Looks) -> _Inside:
    access = await looks.at("nodes, jobs, queues, and controllers", connect())
    if access is None:
        return _Inside()
    api = Api(access)
    try:
        groups, nodes, pods = await asyncio.gather(
            looks.at("controllers", api.call("GET", "/apis")),
            looks.at("nodes", listing(api, "/api/v1/nodes", "")),
            looks.at("jobs of all namespaces", listing(api, "/api/v1/pods", f"{MANAGED}=kinetic")),
        )
        if pods is None:
            own = listing(api, f"/api/v1/namespaces/{site.namespace}/pods", f"{MANAGED}=kinetic")
            pods = await looks.at(f"jobs of {site.namespace}", own)
        versions = {
            str(one["name"]): str(one["preferredVersion"]["version"])
            for one in (groups or {}).get("groups") or ()
        }
        queues: tuple[Queue, ...] = ()
        if version := versions.get("kueue.x-k8s.io"):
            queues = await _queues(api, site, f"/apis/kueue.x-k8s.io/{version}", looks)
        made: Mapping[str, Document] = {}
        if "cloud.google.com" in versions:
            made = await looks.at("ComputeClasses", classes.found(api)) or {}
    finally:
        await api.aclose()
    return _Inside(
        controllers=tuple(name for group, name in CONTROLLERS.items() if group in versions),
        queues=queues,
        classes=tuple(made.values()),
        nodes=None if nodes is None else nodes.items,
        pods=None if pods is None else pods.items,
    )


async def _queues(api: Api, site: Site, root: str, looks: _Looks) -> tuple[Queue, ...]:
    own = f"{root}/namespaces/{site.namespace}/localqueues"
    local, shared = await asyncio.gather(
        looks.at("LocalQueues", listing(api, own, "")),
        looks.at("ClusterQueues", listing(api, f"{root}/clusterqueues", "")),
    )
    found: list[Queue] = []
    for kind, queues in (("LocalQueue", local), ("ClusterQueue", shared)):
        for one in queues.items if queues else ():
            status = part(one, "status")
            made = Queue(
                kind=kind,
                name=str(one["metadata"]["name"]),
                pending=int(status.get("pendingWorkloads") or 0),
                admitted=int(status.get("admittedWorkloads") or 0),
            )
            found.append(made)
    return tuple(found)


def _pool(document: Document, site: Site, environ: Mapping[str, str], inside: _Inside) -> NodePool:
    shown = node_pools.described(document)
    nodes, used = _counts(inside, NODE_POOL, shown["name"])
    price = node_pools.node_price(document, site.zone, environ)
    cost = None if price is None or nodes is None else round(nodes * price, 4)
    cost = 0.0 if nodes == 0 else cost
    return NodePool(**shown, nodes=nodes, used=used, usd_per_hour=cost)


def _class(document: Document, inside: _Inside) -> NodePool:
    shown = classes.described(document)
    nodes, used = _counts(inside, COMPUTE_CLASS, shown["name"])
    return NodePool(**shown, nodes=nodes, used=used, usd_per_hour=None)


def _counts(inside: _Inside, label: str, value: str) -> tuple[int | None, int | None]:
    """Return how many nodes have the label, and how many of them run jobs."""
    if inside.nodes is None:
        return None, None
    own = {
        str(one["metadata"]["name"])
        for one in inside.nodes
        if part(one["metadata"], "labels").get(label) == value
    }
    if inside.pods is None:
        return len(own), None
    return len(own), len(own & {_node(pod) for pod in inside.pods if _phase(pod) == "Running"})


def _node(pod: Document) -> str:
    return str(part(pod, "spec").get("nodeName") or "")


def _phase(pod: Document) -> str:
    return str(part(pod, "status").get("phase") or "")


def _work(pods: Sequence[Document]) -> tuple[Work, ...]:
    """Return the jobs and batches of *pods* that haven't ended."""
    running, waiting = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for pod in pods:
        about: Document = pod["metadata"]
        labels, notes = part(about, "labels"), part(about, "annotations")
        name = str(labels.get(SUBMISSION) or notes.get(NAME) or about["name"])
        key = (name, str(about.get("namespace") or ""), str(labels.get(USER) or ""))
        running[key] += _phase(pod) == "Running"
        waiting[key] += _phase(pod) == "Pending"
    return tuple(
        Work(id=key[0], namespace=key[1], user=key[2], running=count, waiting=waiting[key])
        for key, count in sorted(running.items())
        if count or waiting[key]
    )
