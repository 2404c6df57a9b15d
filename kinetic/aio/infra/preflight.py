"""Check a setup's preconditions before the first write, and report each problem with its fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kinetic._tasks import all_or_none
from kinetic.aio._net.google import GoogleClient, is_disabled
from kinetic.aio._net.http import HttpError
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.resources import Document, call, query
from kinetic.aio.infra.setup import SYSTEM_MACHINES, Setup
from kinetic.aio.infra.site import Site
from kinetic.errors import ConfigurationError

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
    "container.operations.get",
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

ROLES = "roles/editor, roles/resourcemanager.projectIamAdmin, and roles/iam.serviceAccountAdmin"


@dataclass(slots=True)
class Preflight:
    """The results of the checks: ``problems`` stop `up`, ``notes`` don't.

    ``machine`` is a machine type for system pods that the zone offers. ``zones`` are the zones of
    the region that offer the pool's machines, the site's zone first; empty if unknown.
    """

    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    machine: str = SYSTEM_MACHINES[0]
    zones: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise if there are problems.

        Raises:
            ConfigurationError: There are problems; the message lists all.
        """
        if self.problems:
            many = "\n".join(f"- {one}" for one in self.problems)
            raise ConfigurationError(f"nothing was created, because this is missing:\n{many}")


async def preflight(
    google: GoogleClient,
    site: Site,
    pools: Sequence[Pool] = (),
    setup: Setup | None = None,
    *,
    regional: bool = False,
    links: bool = False,
) -> Preflight:
    """Check everything that a *setup* and new *pools* need, concurrently and with reads only.

    The pools must be new: the machines of an existing pool may already use up its quota and its
    reservation. *regional* says that the pools may be in any zone of the region. *links* says that
    the plan links a billing account, so this doesn't check billing.
    """
    found = Preflight()
    checks: list[Callable[[GoogleClient, Setup, Preflight], Awaitable[None]]] = [
        _project,
        _permissions,
        *([] if links else [_billing]),
        _machines,
        _elsewhere,
    ]
    work: list[Coroutine[Any, Any, None]] = []
    if setup is not None:
        work += [_guarded(check, google, setup, found) for check in checks]
    nodes: Counter[Pool] = Counter()
    for pool in pools:
        nodes[replace(pool, number=1, min_nodes=0)] += pool.first_nodes
    for pool, needed in nodes.items():
        at = replace(site, zone=pool.zone or site.zone)
        if at.region != site.region:
            found.problems.append(
                f"the nodes of a cluster are in its region, {site.region}, and {pool.zone} isn't; "
                "name another zone of it"
            )
        work += [
            _reservation(google, at, pool, needed, found),
            _quota(google, site, pool, needed, found),
            _machine(google, at, pool, found, regional=regional),
        ]
    await all_or_none(*work)
    found.problems.sort()
    return found


async def _guarded(
    check: Callable[[GoogleClient, Setup, Preflight], Awaitable[None]],
    google: GoogleClient,
    setup: Setup,
    found: Preflight,
) -> None:
    try:
        await check(google, setup, found)
    except HttpError as refusal:
        if not is_disabled(refusal):
            what = (check.__doc__ or "").partition("\n")[0].rstrip(".").lower()
            found.notes.append(f"couldn't {what}: {refusal.message}")


async def _project(google: GoogleClient, setup: Setup, found: Preflight) -> None:
    """Check that the project isn't being deleted."""
    project = setup.site.project
    read = call(api="cloudresourcemanager", method="GET", path=f"projects/{project}")
    try:
        state = str((await google.call(read)).get("state") or "ACTIVE")
    except HttpError as refusal:
        if refusal.status not in (403, 404):
            raise
        return  # the check of permissions reports this
    if state != "ACTIVE":
        found.problems.append(
            f"the project {project} is {state}; restore it at "
            "https://console.cloud.google.com/cloud-resource-manager, or use another --project"
        )


async def _permissions(google: GoogleClient, setup: Setup, found: Preflight) -> None:
    """Check your permissions in the project."""
    project = setup.site.project
    asked = call(
        api="cloudresourcemanager",
        method="POST",
        path=f"projects/{project}:testIamPermissions",
        body={"permissions": [*PERMISSIONS]},
    )
    try:
        held = (await google.call(asked)).get("permissions") or ()
    except HttpError as refusal:
        if refusal.status not in (403, 404):
            raise
        found.problems.append(
            f"the project {project} doesn't exist, or you may not see it ({refusal.message}); "
            "check --project, or pass --create-project"
        )
        return
    if missing := [one for one in PERMISSIONS if one not in held]:
        found.problems.append(
            f"permissions in {project}: {', '.join(missing)}; ask an owner for {ROLES}"
        )


async def _billing(google: GoogleClient, setup: Setup, found: Preflight) -> None:
    """Check the project's billing account."""
    project = setup.site.project
    path = f"projects/{project}/billingInfo"
    info = await google.call(call(api="cloudbilling", method="GET", path=path))
    if not info.get("billingEnabled"):
        found.problems.append(
            f"{project} has no billing account; pass --billing-account ID, or link one at "
            f"https://console.cloud.google.com/billing/linkedaccount?project={project}"
        )


async def _machines(google: GoogleClient, setup: Setup, found: Preflight) -> None:
    """Choose a machine type for the system pods that the zone has."""
    site = setup.site
    if setup.shape == "autopilot":
        return
    parent = f"projects/{site.project}/zones/{site.zone}/machineTypes"
    wanted = " OR ".join(f'(name = "{one}")' for one in SYSTEM_MACHINES)
    listing = call(api="compute", method="GET", path=parent, query=query(filter=wanted))
    try:
        there = {str(one["name"]) async for one in google.pages(listing, "items")}
    except HttpError as refusal:
        if refusal.status != 404:
            raise
        found.problems.append(f"there is no zone {site.zone}; choose another --zone")
        return
    choice = next((one for one in SYSTEM_MACHINES if one in there), None)
    if choice is None:
        found.problems.append(
            f"{site.zone} has none of {', '.join(SYSTEM_MACHINES)} for the cluster's own pods; "
            "choose another --zone, or --autopilot"
        )
    found.machine = choice or found.machine


async def _elsewhere(google: GoogleClient, setup: Setup, found: Preflight) -> None:
    """Look for a cluster of that name in another place."""
    site = setup.site
    path = f"projects/{site.project}/locations/-/clusters"
    answer = await google.call(call(api="container", method="GET", path=path))
    for one in answer.get("clusters") or ():
        if one.get("name") == site.cluster and one.get("location") != setup.location:
            found.problems.append(
                f"a cluster {site.cluster} exists in {one['location']}; both would use the same "
                f"resource names. Use --zone {one['location']}, or another --cluster"
            )
    if missing := answer.get("missingZones"):
        found.notes.append(f"Google couldn't list the clusters of {', '.join(missing)}")


async def _reservation(
    google: GoogleClient, site: Site, pool: Pool, nodes: int, found: Preflight
) -> None:
    """Check that a pool's reservation has *nodes* free machines."""
    if not pool.reservation:
        return
    owner, name = pool.reserved
    path = f"projects/{owner or site.project}/zones/{site.zone}/reservations/{name}"
    try:
        answer = await google.call(call(api="compute", method="GET", path=path))
    except HttpError as refusal:
        if refusal.status != 404:
            found.notes.append(f"couldn't read the reservation {name}: {refusal.message}")
        else:
            found.problems.append(
                f"there is no reservation {name} in {site.zone}; check its name and zone"
            )
        return
    specific: Document = answer.get("specificReservation") or {}
    properties: Document = specific.get("instanceProperties") or {}
    machine = properties.get("machineType")
    wanted = pool.accelerator
    if machine and machine != wanted.machine:
        found.problems.append(
            f"the reservation {name} is of {machine}, but {wanted} needs {wanted.machine}"
        )
    free = int(specific.get("count") or 0) - int(specific.get("inUseCount") or 0)
    if specific and free < nodes:
        found.problems.append(
            f"the reservation {name} has {free} free machines, but {wanted} needs {nodes}"
        )


QUOTAS = {
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
"""Quotas that a region of the compute API shows; it doesn't show those of other TPUs."""


async def _quota(
    google: GoogleClient, site: Site, pool: Pool, nodes: int, found: Preflight
) -> None:
    """Check the quota of a pool's accelerator for *nodes* machines."""
    wanted = pool.accelerator
    metric = QUOTAS.get(wanted.name, "")
    if wanted.spot:
        metric = f"PREEMPTIBLE_{metric}" if metric else ""
    path = f"projects/{site.project}/regions/{site.region}"
    try:
        answer = await google.call(call(api="compute", method="GET", path=path))
    except HttpError as refusal:
        if not is_disabled(refusal):
            found.notes.append(f"couldn't read the quotas of {site.region}: {refusal.message}")
        return
    quotas = {str(one.get("metric")): one for one in answer.get("quotas") or ()}
    quota = quotas.get(metric)
    if quota is None:
        found.notes.append(
            f"the quota of {wanted} in {site.region} isn't visible here; see "
            "https://console.cloud.google.com/iam-admin/quotas"
        )
        return
    free = float(quota.get("limit") or 0) - float(quota.get("usage") or 0)
    needed = nodes * wanted.chips_per_host
    if free < needed:
        found.problems.append(
            f"the quota {metric} of {site.region} has {free:g} free, but {wanted} needs "
            f"{needed}; ask for more at https://console.cloud.google.com/iam-admin/quotas"
        )


async def _machine(
    google: GoogleClient, site: Site, pool: Pool, found: Preflight, *, regional: bool
) -> None:
    """Find the zones that have a pool's machine type."""
    machine = pool.accelerator.machine
    listing = call(
        api="compute",
        method="GET",
        path=f"projects/{site.project}/aggregated/machineTypes",
        query=query(filter=f'name = "{machine}"'),
    )
    try:
        every = sorted({zone async for zone, _ in google.aggregated(listing, "machineTypes")})
    except HttpError as refusal:
        if not is_disabled(refusal):
            found.notes.append(f"couldn't look for zones that have {machine}: {refusal.message}")
        return
    here = [one for one in every if one == site.zone or one.startswith(f"{site.region}-")]
    found.zones = tuple(sorted(here, key=lambda one: one != site.zone)) or found.zones
    place = site.region if regional else site.zone
    if not every:
        found.notes.append(f"Google lists {machine} in no zone, so {place} may lack it")
    elif not here if regional else site.zone not in every:
        found.problems.append(
            f"{place} has no {machine}, which {pool.accelerator} needs; these zones do: "
            f"{', '.join(every)}"
        )
