"""Read what a cluster has and runs, and for a site (a cluster of `up`) also what it costs per hour.

The result names what could not be read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kinetic._labels import SUBMISSION, USER
from kinetic.aio._net.google import GoogleClient
from kinetic.aio._net.retry import NO_RETRIES
from kinetic.aio.infra import classes, lookup
from kinetic.aio.infra import pools as node_pools
from kinetic.aio.infra import setup as setups
from kinetic.aio.infra.apply import Cloud
from kinetic.aio.infra.namespace import Manifest, manifests
from kinetic.aio.infra.resources import Document, Resource
from kinetic.aio.infra.site import Site
from kinetic.aio.kubernetes.access import Access, open_access
from kinetic.aio.kubernetes.api import ONE_TRY, Api
from kinetic.aio.kubernetes.diagnosis.documents import condition, get_dict, labels_of
from kinetic.aio.kubernetes.manifests import COMPUTE_CLASS, MANAGED
from kinetic.aio.kubernetes.reflector import list_all
from kinetic.aio.kubernetes.sets import KINDS, NODE_POOL
from kinetic.configuration import Target
from kinetic.errors import KineticError, NotFound

T = TypeVar("T")

CONTROLLERS = {**{kind.group: kind.name for kind in KINDS.values()}, "kueue.x-k8s.io": "Kueue"}
"""The names of controllers, by the API group that each one adds to a cluster."""

POOL_LABELS = (
    NODE_POOL,
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
"""The labels by which clouds name the node pool of a node."""

DEVICES = ("google.com/tpu", "nvidia.com/gpu")
UNKNOWN_TO_KUBERNETES = (
    "costs, limits of node pools, and pools without a node: Kubernetes doesn't show them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A resource of Google Cloud, or an object of the namespace that jobs need.

    ``exists`` is None if you can't see it.
    """

    kind: str
    name: str
    exists: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """A node pool or a ComputeClass (``kind``). ``used`` counts nodes with jobs.

    ``nodes`` and ``used`` are None if you can't see them. ``usd_per_hour`` is the cost of the nodes
    now; None if their number or price is unknown. A ComputeClass has no ``max_nodes`` and no cost:
    GKE keeps its nodes in node pools, which have a cost. The kind ``nodes`` is a group of equal
    nodes of a kubeconfig's cluster, where the limits and ``spot`` are unknown.
    """

    name: str
    kind: str
    machine: str
    accelerator: str
    topology: str = ""
    min_nodes: int | None = None
    max_nodes: int | None = None
    nodes: int | None
    used: int | None
    spot: bool | None = None
    reservation: str = ""
    status: str = ""
    problem: str
    usd_per_hour: float | None = None


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
    dollars; buckets, images, and traffic cost by use and don't count. ``namesakes`` are the other
    locations that have a cluster of this name.

    For a cluster that `up` can't have made, such as one of a kubeconfig, ``state`` is ``RUNNING``
    and ``usd_per_hour`` None, because Kubernetes doesn't say more. If ``context`` names a context
    of the kubeconfig, ``cluster`` is the server's URL, and ``project`` and ``zone`` are empty.
    """

    project: str
    zone: str
    cluster: str
    namespace: str
    state: str
    version: str
    usd_per_hour: float | None
    context: str = ""
    namesakes: tuple[str, ...] = ()
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
    connect: Callable[[Site], Awaitable[Access]],
    environ: Mapping[str, str],
) -> Status:
    """Return the status of *site*; *connect* opens access to the cluster of a site."""
    reader = _Reader(site.namespace, cloud.timeout_s)
    searching = reader.read("the location of the cluster", lookup.find_namesakes(google, site))
    found_clusters = await searching or lookup.Namesakes(site=site, clusters={})
    site, namesakes = found_clusters.there, found_clusters.others
    if found_clusters.unlisted:
        reader.failures.append(
            f"clusters in {', '.join(found_clusters.unlisted)}: Google can't list them now"
        )
    wanted = [
        resource
        for resource in setups.wanted_resources(lookup.setup_at(site))
        if isinstance(resource, Resource)
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
        access = await reader.read("nodes, jobs, queues, and controllers", connect(site))
        if access is not None:
            async with aclosing(Api(access)) as api:
                await reader.read_cluster(api)
    elif not problem:
        subject = "disks and load balancers of the cluster"
        listing = lookup.list_outliving(google, site, shares_network=bool(namesakes))
        left = await reader.read(subject, listing) or []
    pools = [reader.node_pool(pool, site.zone, environ) for pool in cluster.get("nodePools") or ()]
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
        if exists is False and cluster and not site.owns(cluster):
            continue  # a cluster that `init` joined lacks what `up` makes
        parts.append(Part(kind=resource.kind, name=resource.name, exists=exists))
    return Status(
        **asdict(site),
        state="unknown" if problem else str(cluster.get("status", "absent")),
        version=str(cluster.get("currentMasterVersion") or ""),
        usd_per_hour=round(usd_per_hour, 4),
        namesakes=namesakes,
        parts=tuple(parts),
        pools=(*pools, *map(reader.compute_class, reader.classes)),
        controllers=reader.controllers,
        queues=reader.queues,
        work=_list_work(reader.pods or ()),
        left=tuple(left),
        unseen=tuple(reader.failures),
    )


async def survey_target(target: Target, environ: Mapping[str, str], limit_s: float) -> Status:
    """Return what Kubernetes says about the cluster of *target*.

    Raises:
        ConfigurationError: No such context exists.
        AuthError: The cluster refuses your credentials.
        BackendError: The cluster doesn't answer.
    """
    reader = _Reader(target.namespace, limit_s)
    access = await open_access(target, environ, NO_RETRIES)
    async with aclosing(Api(access, ONE_TRY)) as api:
        version = await api.call("GET", "/version")
        await reader.read_cluster(api)
        parts = [await reader.part(api, manifest) for manifest in manifests(target.namespace)]
    context = target.kube_context or ""
    return Status(
        project="" if context else target.project or "",
        zone="" if context else target.zone,
        cluster=access.server if context else target.cluster,
        namespace=target.namespace,
        context=context,
        state="RUNNING",
        version=str(version.get("gitVersion") or ""),
        usd_per_hour=None,
        parts=tuple(parts),
        pools=(*reader.node_groups(), *map(reader.compute_class, reader.classes)),
        controllers=reader.controllers,
        queues=reader.queues,
        work=_list_work(reader.pods or ()),
        unseen=(*reader.failures, UNKNOWN_TO_KUBERNETES),
    )


async def describe_work(
    site: Site, connect: Callable[[Site], Awaitable[Access]], limit_s: float
) -> str:
    """Return how many jobs and batches run or wait on the cluster, as text."""
    reader = _Reader(site.namespace, limit_s)
    if access := await reader.read("the cluster", connect(site)):
        async with aclosing(Api(access)) as api:
            await reader.read_pods(api)
    if reader.pods is None:
        return f"kinetic can't see the jobs on it ({'; '.join(reader.failures)})"
    return f"jobs and batches that run or wait on it: {len(_list_work(reader.pods))}"


class _Reader:
    """Reads from APIs, limits the time of each request, and collects the failures.

    ``failures`` and ``error`` describe failed requests. The other attributes come from the
    cluster's Kubernetes API; ``nodes`` or ``pods`` is None if unknown.
    """

    def __init__(self, namespace: str, limit_s: float) -> None:
        self._namespace = namespace
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

    async def read_cluster(self, api: Api) -> None:
        """Read controllers, queues, classes, nodes, and pods from the cluster."""
        groups, self.nodes, _ = await asyncio.gather(
            self.read("controllers", api.call("GET", "/apis")),
            self._list("nodes", api, "/api/v1/nodes"),
            self.read_pods(api),
        )
        versions = {
            str(group["name"]): str(group["preferredVersion"]["version"])
            for group in (groups or {}).get("groups") or ()
        }
        self.controllers = tuple(CONTROLLERS[name] for name in CONTROLLERS if name in versions)
        if version := versions.get("kueue.x-k8s.io"):
            root = f"/apis/kueue.x-k8s.io/{version}"
            local, shared = await asyncio.gather(
                self._list("LocalQueues", api, f"{root}/namespaces/{self._namespace}/localqueues"),
                self._list("ClusterQueues", api, f"{root}/clusterqueues"),
            )
            local_queues = (_queue("LocalQueue", document) for document in local or ())
            shared_queues = (_queue("ClusterQueue", document) for document in shared or ())
            self.queues = (*local_queues, *shared_queues)
        if "cloud.google.com" in versions:
            found = await self.read("ComputeClasses", classes.list_own_classes(api))
            self.classes = tuple((found or {}).values())

    async def read_pods(self, api: Api) -> None:
        """Read the pods of jobs: of all namespaces, or of one if you can't list all."""
        selector = f"{MANAGED}=kinetic"
        self.pods = await self._list("jobs of all namespaces", api, "/api/v1/pods", selector)
        if self.pods is None:
            path = f"/api/v1/namespaces/{self._namespace}/pods"
            self.pods = await self._list(f"jobs of {self._namespace}", api, path, selector)

    async def part(self, api: Api, manifest: Manifest) -> Part:
        """Return whether the object of *manifest* exists."""
        kind, name = manifest.change.kind, manifest.change.name

        async def look() -> bool:
            with suppress(NotFound):
                await api.call("GET", manifest.path)
                return True
            return False

        return Part(kind=kind, name=name, exists=await self.read(f"{kind} {name}", look()))

    def node_groups(self) -> list[NodePool]:
        """Return the nodes in groups: of one node pool, machine type, and accelerator."""
        groups: dict[tuple[str, str, str], list[Document]] = defaultdict(list)
        for node in self.nodes or ():
            labels = labels_of(node)
            pool = next((str(labels[label]) for label in POOL_LABELS if label in labels), "")
            allocatable = get_dict(get_dict(node, "status"), "allocatable")
            devices = (f"{name} x{allocatable[name]}" for name in DEVICES if name in allocatable)
            machine = str(labels.get("node.kubernetes.io/instance-type") or "")
            groups[pool, machine, ", ".join(devices)].append(node)
        return [self._node_group(*key, groups[key]) for key in sorted(groups)]

    def _node_group(
        self, name: str, machine: str, accelerator: str, nodes: Sequence[Document]
    ) -> NodePool:
        unready = [
            str(node["metadata"]["name"]) for node in nodes if condition(node, "Ready") is None
        ]
        return NodePool(
            name=name,
            kind="nodes",
            machine=machine,
            accelerator=accelerator,
            nodes=len(nodes),
            used=self._count_used({str(node["metadata"]["name"]) for node in nodes}),
            problem=f"not ready: {', '.join(unready)}" if unready else "",
        )

    def node_pool(self, document: Document, zone: str, environ: Mapping[str, str]) -> NodePool:
        """Return the node pool in *document*, with its nodes and their cost."""
        summary = node_pools.summarize(document)
        nodes, used = self._count_nodes(NODE_POOL, summary["name"])
        price = node_pools.node_price(document, zone, environ)
        cost = None if price is None or nodes is None else round(nodes * price, 4)
        cost = 0.0 if nodes == 0 else cost
        return NodePool(**summary, nodes=nodes, used=used, usd_per_hour=cost)

    def compute_class(self, document: Document) -> NodePool:
        """Return the ComputeClass in *document*, with its nodes."""
        summary = classes.summarize(document)
        nodes, used = self._count_nodes(COMPUTE_CLASS, summary["name"])
        return NodePool(**summary, nodes=nodes, used=used)

    def _count_nodes(self, label: str, value: str) -> tuple[int | None, int | None]:
        """Return how many nodes have the label, and how many of them run jobs; None if unknown."""
        if self.nodes is None:
            return None, None
        names = {
            str(node["metadata"]["name"])
            for node in self.nodes
            if labels_of(node).get(label) == value
        }
        return len(names), self._count_used(names)

    def _count_used(self, names: set[str]) -> int | None:
        """Return how many nodes of *names* run jobs; None if unknown."""
        if self.pods is None:
            return None
        running = (pod for pod in self.pods if _phase(pod) == "Running")
        return len(names & {get_dict(pod, "spec").get("nodeName") for pod in running})


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
        labels, metadata = labels_of(pod), pod["metadata"]
        name = str(labels.get(SUBMISSION) or metadata["name"])
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
