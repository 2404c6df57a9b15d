"""Offer `kinetic up`, `down`, `pool`, and `status` as coroutines."""

from __future__ import annotations

import os
from typing import Any

from kinetic.aio.infra.apply import READ_TIMEOUT_S
from kinetic.aio.infra.controllers import Controller
from kinetic.aio.infra.infrastructure import Infrastructure, Planned
from kinetic.aio.infra.plan import Plan
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.resources import Tell, silent
from kinetic.aio.infra.setup import Shape
from kinetic.aio.infra.site import Site
from kinetic.aio.infra.status import Status, survey_target
from kinetic.configuration import Target
from kinetic.errors import ConfigurationError


async def up(
    site: Site,
    *,
    shape: Shape = "standard",
    pools: tuple[Pool, ...] = (),
    public_endpoint: bool = False,
    create_project: bool = False,
    parent: str = "",
    billing_account: str = "",
    controllers: tuple[Controller, ...] = (),
    preview: bool = False,
    tell: Tell = silent,
) -> Plan:
    """Create what jobs need on Google Cloud; create only the missing parts.

    Args:
        site: Project, zone, cluster, and namespace.
        shape: ``standard`` (a zonal cluster with node pools) or ``autopilot`` (a regional one).
        pools: Node pools to create; default: none. GKE makes nodes for jobs even without pools.
        public_endpoint: Also open the control plane's IP address; default: only its DNS name.
        create_project: Create the project if it doesn't exist; default: False. `down` keeps it.
        parent: ``organizations/ID`` or ``folders/ID`` of a project to create; default: none.
        billing_account: The ID of a billing account to link to the project; default: no change.
        controllers: Controllers to install; `read_controller` reads their files; default: none.
        preview: Plan and change nothing; default: False.
        tell: Receives one line about each step.

    Returns:
        The plan that was carried out. If kinetic has to create the project or enable its APIs
        first, it may use other machine types.

    Raises:
        ConfigurationError: A requirement, such as a permission, isn't met; the message lists all.
        Refused: A name is taken, or Google refuses a step or lacks capacity (see `add_pool`).
        Unavailable: Google can't list the clusters of all zones now.
        AuthError: Credentials or rights are missing.

    Cancelled: created resources stay; run `up` again to continue, or `down` to remove them.

    Example::

        site = Site(project="my-project", zone="us-central1-a", cluster="kinetic-cluster")
        await infra.up(site, pools=(Pool(accelerator=accelerators.parse("tpu-v6e-8")),))
    """
    async with Infrastructure(site, tell=tell) as infrastructure:
        planned = await infrastructure.plan_up(
            shape=shape,
            pools=pools,
            public_endpoint=public_endpoint,
            create_project=create_project,
            parent=parent,
            billing_account=billing_account,
            controllers=controllers,
        )
        return await _carry_out(infrastructure, planned, preview=preview)


async def down(
    site: Site, *, force_destroy: bool = False, preview: bool = False, tell: Tell = silent
) -> Plan:
    """Remove what `up` created: only resources that have kinetic's names and labels.

    If another location has a cluster of the same name, what both use stays.

    Args:
        site: Project, zone, and cluster.
        force_destroy: Remove the buckets with all results; default: False.
        preview: Plan and change nothing; default: False.
        tell: Receives one line about each step.

    Returns:
        The plan that was carried out, with the resources that stay and the reasons.

    Raises:
        ConfigurationError: The cluster is in another location; nothing was removed.
        Unavailable: Google can't list the clusters of all zones now; nothing was removed.
        Refused: Google refuses a step.
        AuthError: Credentials or rights are missing.

    Cancelled: removed resources stay removed; run `down` again to continue.
    """
    async with Infrastructure(site, tell=tell) as infrastructure:
        planned = await infrastructure.plan_down(force_destroy=force_destroy)
        return await _carry_out(infrastructure, planned, preview=preview)


async def add_pool(
    site: Site,
    pool: Pool,
    *,
    slices: int = 1,
    fixed: bool = False,
    preview: bool = False,
    tell: Tell = silent,
) -> Plan:
    """Add nodes for an accelerator to the site's cluster; succeed if the pool exists already.

    If the cluster has no ComputeClasses, or the pool has a minimum, a reservation, a zone, or
    several hosts, this adds a node pool. Otherwise this adds a ComputeClass, from which GKE makes
    nodes on demand.

    Args:
        site: Project, zone, and cluster.
        pool: The pool to add.
        slices: How many slices of several hosts to add, each in a separate pool; default: 1.
        fixed: Add a node pool even if a ComputeClass would suffice; default: False.
        preview: Plan and change nothing; default: False.
        tell: Receives one line about each step.

    Raises:
        NotFound: The cluster doesn't exist.
        ConfigurationError: The cluster is in another location; a quota or a reservation is too
            small; jobs of this accelerator use a ComputeClass already; the cluster is Autopilot
            and a class can't replace the pool; or it is regional and the pool has no zone.
        Refused: Google refuses the pool. If the zone has no capacity, ``answer["zonesAvailable"]``
            lists zones with capacity: pass one as the pool's ``zone``.

    Cancelled: the pool may exist; run `add_pool` again to continue, or `remove_pool`.
    """
    async with Infrastructure(site, tell=tell) as infrastructure:
        planned = await infrastructure.plan_pool(pool, slices=slices, fixed=fixed)
        return await _carry_out(infrastructure, planned, preview=preview)


async def remove_pool(site: Site, name: str, *, preview: bool = False, tell: Tell = silent) -> Plan:
    """Remove a node pool or a ComputeClass that kinetic created.

    Jobs that run on a removed node pool are lost, or retried elsewhere. The nodes of a removed
    ComputeClass stay until they are idle.

    Raises:
        NotFound: The cluster, or a pool of that name, doesn't exist.
        ConfigurationError: The cluster is in another location.
        Refused: kinetic didn't create the pool or class, or the cluster needs it.

    Cancelled: the removal may continue; run `remove_pool` again to wait for its end.
    """
    async with Infrastructure(site, tell=tell) as infrastructure:
        planned = await infrastructure.plan_pool_removal(name)
        return await _carry_out(infrastructure, planned, preview=preview)


async def _carry_out(infrastructure: Infrastructure, planned: Planned, *, preview: bool) -> Plan:
    if not preview:
        await infrastructure.apply(planned)
    return planned.plan


async def list_pools(site: Site, *, tell: Tell = silent) -> list[dict[str, Any]]:
    """Return node pools and ComputeClasses of the site's cluster: machine, limits, and state.

    *tell* receives a line if ComputeClasses can't be listed.

    Raises:
        NotFound: The cluster doesn't exist.
    """
    async with Infrastructure(site, tell=tell) as infrastructure:
        return await infrastructure.list_pools()


async def update_credentials(site: Site, *, username: str, token: str, tell: Tell = silent) -> None:
    """Keep Docker Hub credentials for builds in Secret Manager; builds then log in with them.

    The service account for builds can read them. Other accounts can read them only if the project
    lets them read all secrets.

    Args:
        site: Project, zone, and cluster.
        username: Your name at Docker Hub.
        token: An access token of Docker Hub.
        tell: Receives one line about each step.

    Raises:
        NotFound: `up` hasn't made the builds' service account.
        AuthError: Credentials or rights are missing.

    Cancelled: run `update_credentials` again; each run adds a version of both secrets.
    """
    async with Infrastructure(site, tell=tell) as infrastructure:
        await infrastructure.keep_credentials(username, token)


async def status(site: Site | Target) -> Status:
    """Return what exists at a site, what runs there, and what it costs now.

    It changes nothing. Each request has a timeout of 30 seconds. ``unseen`` of the result names
    what kinetic can't read.

    Args:
        site: Project, zone, cluster, and namespace, or the target that `init` joined. Outside of
            Google Cloud, Kubernetes shows no costs and no limits of node pools.

    Raises:
        KineticError: kinetic can't read anything, for example without usable credentials.

    Example::

        found = await infra.status(Site(project="my-project", zone="us-central1-a", cluster="lab"))
        print(found.state, found.usd_per_hour, found.unseen)
    """
    if isinstance(site, Target):
        target = site
        if target.kube_context:
            return await survey_target(target, os.environ, READ_TIMEOUT_S)
        try:
            site = Site.of(target)
        except ConfigurationError:  # `up` can't have made a cluster with such a name
            if target.project is None:
                raise
            return await survey_target(target, os.environ, READ_TIMEOUT_S)
    async with Infrastructure(site) as infrastructure:
        return await infrastructure.status()
