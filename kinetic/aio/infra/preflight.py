"""Check what `up` and `pool add` need before they write, and report each problem with its fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kinetic._tasks import all_or_none
from kinetic.aio._net.google import GoogleClient, GoogleRequest, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.lookup import Namesakes, find_namesakes
from kinetic.aio.infra.plan import ENDING_STATUSES
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.resources import Document, call, query
from kinetic.aio.infra.setup import SYSTEM_MACHINES, Setup
from kinetic.aio.infra.site import Site
from kinetic.errors import AuthError, ConfigurationError

PERMISSIONS = (
    "artifactregistry.repositories.create",
    "artifactregistry.repositories.getIamPolicy",
    "artifactregistry.repositories.setIamPolicy",
    "compute.networks.create",
    "compute.networks.updatePolicy",
    "compute.routers.create",
    "compute.routers.update",
    "compute.subnetworks.create",
    "container.clusters.connect",
    "container.clusters.create",
    "container.clusters.get",
    "container.clusters.list",
    "container.clusters.update",
    "container.namespaces.create",
    "container.operations.get",
    "container.roleBindings.create",
    "container.roles.create",
    "container.serviceAccounts.create",
    "iam.serviceAccounts.actAs",
    "iam.serviceAccounts.create",
    "iam.serviceAccounts.getIamPolicy",
    "iam.serviceAccounts.setIamPolicy",
    "resourcemanager.projects.get",
    "resourcemanager.projects.getIamPolicy",
    "resourcemanager.projects.setIamPolicy",
    "serviceusage.services.enable",
    "serviceusage.services.list",
    "storage.buckets.create",
    "storage.buckets.get",
    "storage.buckets.getIamPolicy",
    "storage.buckets.setIamPolicy",
    "storage.buckets.update",
)
"""The permissions that `up` needs in a project."""

ROLES = (
    "roles/editor, roles/resourcemanager.projectIamAdmin, roles/iam.serviceAccountAdmin, "
    "roles/container.admin, roles/storage.admin, and roles/artifactregistry.admin"
)
"""Roles with these permissions: an editor can't set a policy, nor create a Role in a cluster."""


@dataclass(slots=True)
class Preflight:
    """The results of the checks: ``problems`` stop the command, ``notes`` don't.

    ``machine`` is the machine type for the cluster's own pods. ``waits_for_machines`` says that
    kinetic can't read the zone's machine types until the compute API is enabled. ``zones`` are the
    zones of the region that offer a pool's machines, the site's zone first; empty if unknown.
    """

    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    machine: str = SYSTEM_MACHINES[0]
    waits_for_machines: bool = False
    zones: tuple[str, ...] = ()


async def preflight(
    google: GoogleClient,
    site: Site,
    pools: Sequence[Pool] = (),
    setup: Setup | None = None,
    *,
    regional: bool = False,
    links_billing: bool = False,
    checks_quota: bool = True,
) -> Preflight:
    """Check what *pools* and *setup* (unless None) need; send concurrent requests that only read.

    *regional* says that the pools may be in any zone of the region. *links_billing* skips the check
    of billing, because the plan links a billing account. If *checks_quota*, the pools must be new:
    the machines of an existing pool may already use up its quota and its reservation.

    Raises:
        ConfigurationError: There are problems; the message lists all.
        Unavailable: Google can't list all clusters of the project now.
    """
    result = Preflight()
    checks: list[Coroutine[Any, Any, None]] = []
    if setup is not None:
        checks += [
            _check_project(google, site, result),
            _check_permissions(google, site, result),
            _check_cluster(google, setup, result),
        ]
        if not links_billing:
            checks.append(_check_billing(google, site, result))
    needed_nodes: Counter[Pool] = Counter()
    for pool in pools:  # pools that differ only in number and minimum share quota and reservation
        needed_nodes[replace(pool, number=1, min_nodes=0)] += max(
            pool.min_nodes,
            pool.accelerator.hosts,  # the first job needs all hosts of a slice
        )
    for pool, needed in needed_nodes.items():
        pool_site = replace(site, zone=pool.zone or site.zone)
        if pool_site.region != site.region:
            result.problems.append(
                f"all nodes of a cluster are in its region, but the zone {pool.zone} isn't in "
                f"{site.region}; name a zone of {site.region}"
            )
        if pool.reservation:
            checks.append(_check_reservation(google, pool_site, pool, needed, result))
        if checks_quota:
            checks.append(_check_quota(google, site, pool, needed, result))
        checks.append(_find_zones(google, pool_site, pool, result, regional=regional))
    await all_or_none(*checks)
    if result.problems:
        listed_problems = "\n".join(f"- {problem}" for problem in sorted(result.problems))
        raise ConfigurationError(
            f"nothing was created, because of these problems:\n{listed_problems}"
        )
    return result


@contextmanager
def _noting_refusals(
    result: Preflight, action: str, *, problem_if_absent: str = ""
) -> Generator[None]:
    """Note a refusal, unless Google refuses because an API is disabled, which `up` enables.

    If Google answers that the resource doesn't exist, report *problem_if_absent*.
    """
    try:
        yield
    except HttpError as refusal:
        if problem_if_absent and refusal.status == 404:
            result.problems.append(problem_if_absent)
        elif not is_disabled(refusal):
            result.notes.append(f"couldn't {action}: {refusal.message}")


async def _check_project(google: GoogleClient, site: Site, result: Preflight) -> None:
    with _noting_refusals(result, "check that the project isn't being deleted"):
        request = call("cloudresourcemanager", "GET", f"projects/{site.project}")
        state = str((await google.call(request)).get("state") or "ACTIVE")
        if state != "ACTIVE":
            result.problems.append(
                f"the project {site.project} is {state}; restore it at "
                "https://console.cloud.google.com/cloud-resource-manager, or use another --project"
            )


async def _check_permissions(google: GoogleClient, site: Site, result: Preflight) -> None:
    path = f"projects/{site.project}:testIamPermissions"
    body = {"permissions": [*PERMISSIONS]}
    with _noting_refusals(result, "check your permissions in the project"):
        try:
            answer = await google.call(call("cloudresourcemanager", "POST", path, body=body))
        except HttpError as refusal:
            if refusal.status not in (403, 404):
                raise
            result.problems.append(
                f"the project {site.project} doesn't exist, or you can't see it "
                f"({refusal.message}); check --project, or pass --create-project"
            )
            return
        granted = answer.get("permissions") or ()
        if missing := [permission for permission in PERMISSIONS if permission not in granted]:
            result.problems.append(
                f"you lack permissions in {site.project}: {', '.join(missing)}; ask an owner for "
                f"{ROLES}"
            )


async def _check_billing(google: GoogleClient, site: Site, result: Preflight) -> None:
    path = f"projects/{site.project}/billingInfo"
    with _noting_refusals(result, "check the project's billing account"):
        info = await google.call(call("cloudbilling", "GET", path))
        if not info.get("billingEnabled"):
            result.problems.append(
                f"{site.project} has no billing account; pass --billing-account ID, or link one at "
                f"https://console.cloud.google.com/billing/linkedaccount?project={site.project}"
            )


async def _check_cluster(google: GoogleClient, setup: Setup, result: Preflight) -> None:
    """Look for clusters of the site's name; if a Standard cluster is new, choose its machines.

    Raises:
        Unavailable: Another zone may have a cluster of this name, but Google can't list it now.
    """
    site = setup.site
    try:
        found = await find_namesakes(google, site)
    except AuthError as exc:  # `_check_permissions` reports which permission is missing
        found = Namesakes(site=site, clusters={})
        result.notes.append(str(exc))
    for location in {*found.clusters} - {setup.location}:
        result.problems.append(
            f"a cluster {site.cluster} exists in {location}; both would use the same "
            f"resource names. Use --zone {location}, or another --cluster"
        )
    cluster = found.clusters.get(setup.location)
    if cluster is None:
        found.check_complete()
    is_new = cluster is None or cluster.get("status") in ENDING_STATUSES
    if is_new and setup.shape == "standard":
        await _choose_machine(google, site, result)


def system_machines(site: Site) -> GoogleRequest:
    """Return the request that lists which of `SYSTEM_MACHINES` the zone has."""
    parent = f"projects/{site.project}/zones/{site.zone}/machineTypes"
    name_filter = " OR ".join(f'(name = "{machine}")' for machine in SYSTEM_MACHINES)
    return call("compute", "GET", parent, query=query(filter=name_filter))


async def _choose_machine(google: GoogleClient, site: Site, result: Preflight) -> None:
    """Choose a machine type of the zone for the cluster's own pods."""
    listing = google.list_items(system_machines(site), "items")
    try:
        offered = {str(machine["name"]) async for machine in listing}
    except HttpError as refusal:
        if is_disabled(refusal):
            result.waits_for_machines = True
        elif refusal.status == 404:
            result.problems.append(f"there is no zone {site.zone}; choose another --zone")
        else:
            result.notes.append(
                f"the cluster's own pods get {result.machine}, because kinetic couldn't list the "
                f"machine types of {site.zone}: {refusal.message}"
            )
        return
    if usable := [machine for machine in SYSTEM_MACHINES if machine in offered]:
        result.machine = usable[0]
    else:
        result.problems.append(
            f"{site.zone} has none of {', '.join(SYSTEM_MACHINES)} for the cluster's own pods; "
            "choose another --zone, or --autopilot"
        )


async def _check_reservation(
    google: GoogleClient, site: Site, pool: Pool, nodes: int, result: Preflight
) -> None:
    """Check that a pool's reservation has *nodes* free machines."""
    project, name = pool.reservation_parts
    path = f"projects/{project or site.project}/zones/{site.zone}/reservations/{name}"
    problem_if_absent = f"there is no reservation {name} in {site.zone}; check its name and zone"
    with _noting_refusals(
        result, f"read the reservation {name}", problem_if_absent=problem_if_absent
    ):
        answer = await google.call(call("compute", "GET", path))
        machines: Document = answer.get("specificReservation") or {}
        properties: Document = machines.get("instanceProperties") or {}
        machine, needed_machine = properties.get("machineType"), pool.accelerator.machine
        if machine not in (None, needed_machine):
            result.problems.append(
                f"the reservation {name} has the machine type {machine}, but {pool.accelerator} "
                f"needs {needed_machine}"
            )
        free = int(machines.get("count") or 0) - int(machines.get("inUseCount") or 0)
        if machines and free < nodes:
            result.problems.append(
                f"the reservation {name} has {free} free machines, but {pool.accelerator} needs "
                f"{nodes}"
            )


QUOTA_METRICS = {
    "l4": "NVIDIA_L4_GPUS",
    "t4": "NVIDIA_T4_GPUS",
    "a100": "NVIDIA_A100_GPUS",
    "a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "h100": "NVIDIA_H100_GPUS",
    "v100": "NVIDIA_V100_GPUS",
    "p100": "NVIDIA_P100_GPUS",
    "p4": "NVIDIA_P4_GPUS",
    "v5litepod": "TPU_LITE_PODSLICE_V5",
}
"""The names of accelerators' quotas in the compute API, which shows no quotas of other TPUs."""


async def _check_quota(
    google: GoogleClient, site: Site, pool: Pool, nodes: int, result: Preflight
) -> None:
    """Check the quota of a pool's accelerator for *nodes* machines."""
    accelerator = pool.accelerator
    prefix = "PREEMPTIBLE_" if accelerator.spot else ""
    path = f"projects/{site.project}/regions/{site.region}"
    with _noting_refusals(result, f"read the quotas of {site.region}"):
        answer = await google.call(call("compute", "GET", path))
        quotas = {str(entry.get("metric")): entry for entry in answer.get("quotas") or ()}
        metric = f"{prefix}{QUOTA_METRICS.get(accelerator.name, '')}"
        quota = quotas.get(metric)
        if quota is None:
            result.notes.append(
                f"kinetic can't read the quota of {accelerator} in {site.region}; see "
                "https://console.cloud.google.com/iam-admin/quotas"
            )
            return
        free = float(quota.get("limit") or 0) - float(quota.get("usage") or 0)
        needed = nodes * accelerator.chips_per_host
        if free < needed:
            result.problems.append(
                f"the quota {metric} of {site.region} has {free:g} free, but {accelerator} needs "
                f"{needed}; request more at https://console.cloud.google.com/iam-admin/quotas"
            )


async def _find_zones(
    google: GoogleClient, site: Site, pool: Pool, result: Preflight, *, regional: bool
) -> None:
    """Find the zones that have a pool's machine type.

    Report a problem if *site*'s zone lacks it or, with *regional*, all zones of the region do.
    """
    machine = pool.accelerator.machine
    path = f"projects/{site.project}/aggregated/machineTypes"
    listing = call("compute", "GET", path, query=query(filter=f'name = "{machine}"'))
    with _noting_refusals(result, f"look for zones that have {machine}"):
        zones = sorted({zone async for zone, _ in google.list_aggregated(listing, "machineTypes")})
        in_region = [
            zone for zone in zones if zone == site.zone or zone.startswith(f"{site.region}-")
        ]
        result.zones = tuple(sorted(in_region, key=lambda zone: zone != site.zone)) or result.zones
        location = site.region if regional else site.zone
        if not zones:
            result.notes.append(f"Google lists {machine} in no zone, so {location} may lack it")
        elif not in_region if regional else site.zone not in zones:
            result.problems.append(
                f"{location} has no {machine}, which {pool.accelerator} needs; these zones have "
                f"it: {', '.join(zones)}"
            )
