"""Describe the node pool that an accelerator needs, and read what an existing pool offers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kinetic.accelerators import GPUS, Accelerator, catalogue, parse
from kinetic.aio.infra.resources import Resource, resource
from kinetic.aio.infra.setup import MACHINE_USD, SYSTEM_POOL, node_body, pool_body
from kinetic.aio.infra.site import Site, is_gkes_pool, is_our_pool
from kinetic.aio.kubernetes.compute_classes import class_name
from kinetic.errors import ConfigurationError
from kinetic.prices import price_of

MAX_EXTRA_NODES = 10
"""Maximum nodes of a pool beyond its minimum, unless the pool is a slice of several hosts."""

MAX_PODS_PER_TPU_NODE = "15"
"""Maximum number of pods on a TPU node; low, as GKE reserves addresses for each pod."""

EXTRA_NETWORKS = frozenset(
    {"a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g", "a4x-maxgpu-4g-metal"}
)
"""Machine types whose GPUs need additional networks, which a plain pool lacks."""

MAX_NAME_LENGTH = 39
"""Maximum number of characters in a node pool's name; Google allows 40."""

RESERVATION_PATH = re.compile(r"(?:projects/([^/]+)/)?reservations/([^/]+)(?:/.*)?")
"""The form of a reservation's name with its project, or with a block of the reservation."""

SYSTEM_POOLS = (SYSTEM_POOL, "default-pool")
"""The pools for the cluster's own pods: kinetic's, and keras-kinetic's."""

RESERVATION = "compute.googleapis.com/reservation-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A node pool that a cluster should have.

    The pool always has at least ``min_nodes`` nodes. A TPU slice of several hosts fills a whole
    pool, so the minimum is 0 or the number of hosts. ``number`` distinguishes equal slices.
    ``zone`` is a zone of the cluster's region; empty: the cluster's zone.
    """

    accelerator: Accelerator
    min_nodes: int = 0
    reservation: str = ""
    number: int = 1
    zone: str = ""

    def __post_init__(self) -> None:
        accelerator = self.accelerator
        if accelerator.kind == "cpu":
            raise ConfigurationError(
                "a CPU job needs no pool: the cluster makes nodes for it; name a GPU or TPU"
            )
        if accelerator.spot and self.reservation:
            raise ConfigurationError(
                f"a spot pool can't use the reservation {self.reservation!r}; leave out --spot or "
                "--reservation"
            )
        if accelerator.machine in EXTRA_NETWORKS:
            raise ConfigurationError(
                f"{accelerator} needs {accelerator.machine}, whose GPUs need additional networks; "
                "create the pool as Google's documentation of GPUDirect says, and kinetic will use "
                "it"
            )
        if accelerator.multi_host and self.min_nodes not in (0, accelerator.hosts):
            raise ConfigurationError(
                f"a pool of {accelerator} is one slice of {accelerator.hosts} hosts, so its "
                f"minimum is 0 or {accelerator.hosts}, not {self.min_nodes}; add another pool for "
                "another slice"
            )

    @property
    def name(self) -> str:
        """Return a name from accelerator, reservation, and number; equal pools have one name."""
        number = str(self.number) if self.number > 1 else ""
        parts = [class_name(self.accelerator), self.reservation_parts[1], number]
        name = "-".join(part for part in parts if part)
        if len(name) <= MAX_NAME_LENGTH:
            return name
        digest = hashlib.sha256(f"{name} {self.reservation}".encode()).hexdigest()[:6]
        return f"{name[: MAX_NAME_LENGTH - 7].rstrip('-')}-{digest}"

    @property
    def reservation_parts(self) -> tuple[str, str]:
        """Return the reservation's project (empty: the cluster's project) and its short name."""
        match = RESERVATION_PATH.fullmatch(self.reservation)
        return (match[1] or "", match[2]) if match else ("", self.reservation)

    def slices(self, count: int) -> tuple[Pool, ...]:
        """Return pools for *count* slices, this one first.

        Raises:
            ConfigurationError: *count* exceeds 1, but a slice is one node; one pool has many nodes.
        """
        if count > 1 and not self.accelerator.multi_host:
            raise ConfigurationError(
                f"a slice of {self.accelerator} is one host, and one pool can have many hosts; "
                f"use --min-nodes {count} instead of --slices {count}"
            )
        return tuple(replace(self, number=number) for number in range(1, count + 1))

    @property
    def policy_suffix(self) -> str:
        """Return the end of the name of a tpu7x slice's placement policy; empty for other pools."""
        accelerator = self.accelerator
        needs_policy = accelerator.name == "tpu7x" and accelerator.multi_host
        return f"-tpu7x-{accelerator.topology}" if needs_policy else ""


def reference(site: Site, name: str) -> Resource:
    """Return a resource with which to read or remove the pool *name*, but not to create it."""
    parent = f"projects/{site.project}/locations/{site.zone}/clusters/{site.cluster}/nodePools"
    return resource("node pool", name, "container", parent, {})


def pool_resources(
    site: Site, pools: Iterable[Pool], environ: Mapping[str, str]
) -> tuple[Resource, ...]:
    """Return the resources of *pools*, and before them the placement policies that they need.

    *environ* may name a file of prices (KINETIC_PRICES).
    """
    resources: dict[str, Resource] = {}
    for pool in pools:
        needs = [f"cluster {site.cluster}"]
        if pool.policy_suffix:
            topology = pool.accelerator.topology or ""
            placement = placement_policy(site, f"{site.prefix}{pool.policy_suffix}", topology)
            resources[placement.key] = placement
            needs.append(placement.key)
        base, wanted = reference(site, pool.name), body(site, pool)
        usd = _node_usd(pool.accelerator, site.zone, environ)
        minimum_usd = None if usd is None else usd * pool.min_nodes
        resources[base.key] = replace(
            base,
            create=replace(base.create, body={"nodePool": wanted}),
            wanted_fields={"autoscaling": {"totalMinNodeCount": pool.min_nodes}},
            update=replace(
                base.create,
                path=f"{base.read.path}:setAutoscaling",
                body={"autoscaling": wanted["autoscaling"]},
            ),
            needs=tuple(needs),
            usd_per_hour=minimum_usd if pool.min_nodes else 0.0,
            description=_describe(pool, usd),
        )
    return tuple(resources.values())


def _describe(pool: Pool, node_usd: float | None) -> str:
    accelerator = pool.accelerator
    parts = (
        f"{pool.min_nodes} to {_max_nodes(pool)} {accelerator.machine}",
        f"in {pool.zone}" if pool.zone else "",
        f"one slice of {accelerator.hosts} hosts" if accelerator.multi_host else "",
        "spot" if accelerator.spot else "",
        f"reservation {pool.reservation}" if pool.reservation else "",
        "price unknown" if node_usd is None else f"${node_usd:.3f}/h for each node",
    )
    return ", ".join(part for part in parts if part)


def _node_usd(accelerator: Accelerator, zone: str, environ: Mapping[str, str]) -> float | None:
    """Return what one node costs per hour in US dollars; None if unknown."""
    price = price_of(accelerator, zone, environ)
    return None if price is None else price.usd_per_hour / accelerator.hosts


def placement_policy(site: Site, name: str, topology: str = "") -> Resource:
    """Return the placement policy *name*; creating it needs *topology*, other requests don't."""
    parent = f"projects/{site.project}/regions/{site.region}/resourcePolicies"
    workload = {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology}
    policy_body = {"name": name, "description": site.description, "workloadPolicy": workload}
    return resource("placement policy", name, "compute", parent, policy_body)


def _max_nodes(pool: Pool) -> int:
    accelerator = pool.accelerator
    return accelerator.hosts if accelerator.multi_host else pool.min_nodes + MAX_EXTRA_NODES


def body(site: Site, pool: Pool) -> dict[str, Any]:
    """Return the `NodePool` that creates *pool*, in the form of GKE's API."""
    accelerator = pool.accelerator
    config: dict[str, Any] = {}
    fields: dict[str, Any] = {"locations": [pool.zone or site.zone]}
    if accelerator.kind == "gpu":
        gpus = {
            "acceleratorType": GPUS[accelerator.name].label,
            "acceleratorCount": str(accelerator.chips_per_host),
            # By default, GKE's REST API installs no driver.
            "gpuDriverInstallationConfig": {"gpuDriverVersion": "LATEST"},
        }
        config |= {"accelerators": [gpus], "gvnic": {"enabled": True}}
    else:
        fields["maxPodsConstraint"] = {"maxPodsPerNode": MAX_PODS_PER_TPU_NODE}
        if pool.policy_suffix:
            fields["placementPolicy"] = {"policyName": f"{site.prefix}{pool.policy_suffix}"}
        elif accelerator.multi_host:
            fields["placementPolicy"] = {"type": "COMPACT", "tpuTopology": accelerator.topology}
    if accelerator.spot:
        config["spot"] = True
    if pool.reservation:
        config["reservationAffinity"] = {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": RESERVATION,
            "values": [pool.reservation],
        }
    node = node_body(site, accelerator.machine, **config)
    limits = {"min_nodes": pool.min_nodes, "max_nodes": _max_nodes(pool)}
    return pool_body(site, pool.name, node, **limits, **fields)


def keep_reason(document: Mapping[str, Any]) -> str:
    """Return why `remove_pool` refuses a pool, and what to do; empty if it accepts the pool."""
    name = str(document["name"])
    if is_gkes_pool(document):
        return f"GKE made the node pool {name} for pods, and removes it when its nodes are idle"
    if not is_our_pool(document):
        config: Mapping[str, Any] = document.get("config") or {}
        return (
            f"kinetic didn't make the node pool {name} of {config.get('machineType')}: its "
            "nodes lack the label kinetic=true; remove it with the tool that made it"
        )
    if name in SYSTEM_POOLS:
        return f"the node pool {name} runs the cluster's own pods; only `kinetic down` removes it"
    return ""


def is_autopilot(cluster: Mapping[str, Any]) -> bool:
    """Return whether *cluster* is an Autopilot cluster."""
    autopilot: Mapping[str, Any] = cluster.get("autopilot") or {}
    return bool(autopilot.get("enabled"))


def existing(cluster: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a cluster's node pools by name; none for Autopilot, whose pools belong to GKE."""
    pools = () if is_autopilot(cluster) else cluster.get("nodePools") or ()
    return {str(document["name"]): document for document in pools}


def foreign(cluster: Mapping[str, Any]) -> list[str]:
    """Return the names of the node pools that neither kinetic nor GKE made."""
    return [
        name
        for name, document in existing(cluster).items()
        if not (is_our_pool(document) or is_gkes_pool(document))
    ]


def node_price(document: Mapping[str, Any], zone: str, environ: Mapping[str, str]) -> float | None:
    """Return what one node of a pool costs per hour in US dollars; None if unknown."""
    config: Mapping[str, Any] = document.get("config") or {}
    placement: Mapping[str, Any] = document.get("placementPolicy") or {}
    machine, topology = config.get("machineType"), placement.get("tpuTopology")
    if machine in MACHINE_USD and not config.get("accelerators"):
        return MACHINE_USD[machine]
    gpus = {
        (gpu["acceleratorType"], str(gpu["acceleratorCount"]))
        for gpu in config.get("accelerators") or ()
    }
    for candidate in catalogue():
        matches = (
            (candidate.label, str(candidate.chips_per_host)) in gpus
            if gpus
            else topology in (None, candidate.topology)
        )
        if candidate.machine == machine and matches:
            accelerator = parse(str(candidate), spot=bool(config.get("spot")))
            return _node_usd(accelerator, zone, environ)
    return None


def minimum_usd(document: Mapping[str, Any], zone: str, environ: Mapping[str, str]) -> float | None:
    """Return what the minimum of a pool's nodes costs per hour in US dollars; None if unknown."""
    if not (nodes := summarize(document)["min_nodes"]):
        return 0.0
    price = node_price(document, zone, environ)
    return None if price is None else nodes * price


def summarize(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a node pool offers, in the fields that `kinetic pool list` shows."""
    config: Mapping[str, Any] = document.get("config") or {}
    scaling: Mapping[str, Any] = document.get("autoscaling") or {}
    placement: Mapping[str, Any] = document.get("placementPolicy") or {}
    gpus = config.get("accelerators") or ()
    affinity: Mapping[str, Any] = config.get("reservationAffinity") or {}
    return {
        "name": str(document.get("name")),
        "kind": "node pool",
        "machine": str(config.get("machineType") or ""),
        "accelerator": ", ".join(
            f"{gpu['acceleratorType']} x{gpu['acceleratorCount']}" for gpu in gpus
        ),
        "topology": placement.get("tpuTopology") or "",
        "min_nodes": int(scaling.get("totalMinNodeCount") or scaling.get("minNodeCount") or 0),
        "max_nodes": int(scaling.get("totalMaxNodeCount") or scaling.get("maxNodeCount") or 0),
        "spot": bool(config.get("spot")),
        "reservation": ", ".join(affinity.get("values") or ()),
        "status": str(document.get("status") or ""),
        "problem": document.get("statusMessage")
        or "; ".join(
            str(condition.get("message")) for condition in document.get("conditions") or ()
        ),
    }
