"""Plan and make changes to one site (a cluster and all that it needs) through Google's APIs."""

from __future__ import annotations

import base64
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

from kinetic.aio._net.google import GoogleClient, GoogleRequest
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.images.docker_hub import TOKEN, USERNAME
from kinetic.aio.infra import classes as compute_classes
from kinetic.aio.infra import lookup
from kinetic.aio.infra import namespace as in_cluster
from kinetic.aio.infra import pools as node_pools
from kinetic.aio.infra import setup as setups
from kinetic.aio.infra.apply import READ_TIMEOUT_S, Cloud, refusal_error
from kinetic.aio.infra.controllers import Controller, install
from kinetic.aio.infra.controllers import plan_install as plan_controller
from kinetic.aio.infra.plan import Plan, additions, removals
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.preflight import Preflight, preflight, system_machines
from kinetic.aio.infra.resources import (
    Action,
    Change,
    Document,
    Observed,
    Policy,
    Resource,
    Tell,
    call,
    silent,
)
from kinetic.aio.infra.setup import Setup, Shape
from kinetic.aio.infra.site import Site
from kinetic.aio.infra.status import Status, describe_work, survey
from kinetic.aio.kubernetes.access import Access, open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.compute_classes import class_name
from kinetic.configuration import resolve
from kinetic.errors import BackendError, ConfigurationError, KineticError, NotFound, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, with the resources and objects that `Infrastructure.apply` creates or removes for it.

    ``prerequisites`` are the project and its link to a billing account. ``plan_rest`` plans the
    other resources after `Infrastructure.apply` has created a new project, or enables its APIs
    first. ``removes`` says whether to remove ``resources`` and ``manifests`` instead of creating
    them. ``namesakes`` are the other locations that have a cluster of the same name.
    """

    plan: Plan
    resources: tuple[Resource | Policy, ...]
    notes: tuple[str, ...] = ()
    prerequisites: tuple[Resource, ...] = ()
    plan_rest: Callable[[], Awaitable[Planned]] | None = None
    removes: bool = False
    manifests: tuple[in_cluster.Manifest, ...] = ()
    controllers: tuple[Controller, ...] = ()
    namesakes: tuple[str, ...] = ()


class Infrastructure:
    """Reads and changes the infrastructure of one site through Google's APIs.

    Args:
        site: Project, zone, cluster, and namespace.
        tell: Receives one line about each step; default: no output.
        environ: The environment; default: that of the process.
        google: A client of Google's APIs; default: with the application-default credentials.
        connect: Connects to the site's cluster; default: through Google's API, as jobs do.
        look_s: The timeout of each read, in seconds; default: 30.

    Use it as an async context manager, which closes its connections.
    """

    def __init__(
        self,
        site: Site,
        *,
        tell: Tell = silent,
        environ: Mapping[str, str] | None = None,
        google: GoogleClient | None = None,
        connect: Callable[[], Awaitable[Access]] | None = None,
        look_s: float = READ_TIMEOUT_S,
    ) -> None:
        self.site = site
        self._connect = connect
        self._environ = os.environ if environ is None else environ
        self._tell = tell
        self._google = google or GoogleClient(
            self._environ, RetryPolicy(total_s=300.0), idle_s=150.0
        )
        self._cloud = Cloud(self._google, site, tell, look_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._google.aclose()

    async def plan_up(
        self,
        *,
        shape: Shape = "standard",
        pools: tuple[Pool, ...] = (),
        public_endpoint: bool = False,
        create_project: bool = False,
        parent: str = "",
        billing_account: str = "",
        controllers: tuple[Controller, ...] = (),
    ) -> Planned:
        """Plan what `up` creates and changes. Nothing is written.

        Raises:
            ConfigurationError: A requirement, such as a permission, isn't met; the message lists
                all.
        """
        setups.check_parent(parent, creates=create_project)
        setup = Setup(site=self.site, shape=shape, public_endpoint=public_endpoint)
        if pools and shape == "autopilot":
            raise ConfigurationError(
                "--accelerator conflicts with --autopilot, because an Autopilot cluster has no "
                "node pools; leave --autopilot out, or --accelerator: GKE then makes nodes for jobs"
            )
        billing = [setups.billing_link(self.site, billing_account)] if billing_account else []
        plan_setup = partial(self._plan_setup, setup, pools, controllers)
        if not create_project:
            return await plan_setup(billing)
        prerequisites = [setups.project_resource(self.site, parent), *billing]
        if await self.has_project():
            return await plan_setup(prerequisites)
        return await plan_setup(prerequisites, plan_rest=partial(plan_setup, billing))

    async def _plan_setup(
        self,
        setup: Setup,
        pools: tuple[Pool, ...],
        controllers: tuple[Controller, ...],
        prerequisites: Sequence[Resource],
        plan_rest: Callable[[], Awaitable[Planned]] | None = None,
    ) -> Planned:
        """Plan all resources of *setup* and *pools*.

        If the project doesn't exist yet, *plan_rest* plans them again after `apply` has created the
        project; otherwise *plan_rest* is None.
        """
        links_billing = any(resource.kind == "billing" for resource in prerequisites)
        observed: dict[str, Observed] = defaultdict(Observed)
        disabled_apis = [*setups.SERVICES]
        is_readable = plan_rest is None
        if is_readable:
            missing_pools = await self._missing_pools(self.site, pools)
            checks = await preflight(
                self._google, self.site, missing_pools, setup, links_billing=links_billing
            )
            disabled_apis = await self._cloud.disabled_apis(setups.SERVICES)
            if checks.waits_for_machines:
                plan_rest = partial(self._plan_with_apis, setup, pools, controllers, prerequisites)
        else:
            note = (
                "kinetic checks permissions, machine types, and quotas after it has created the "
                "project"
            )
            billing_note = "; pass --billing-account ID to link a billing account"
            checks = Preflight(notes=[note if links_billing else note + billing_note])
        wanted = (
            *setups.wanted_resources(
                replace(setup, machine=checks.machine, machine_is_final=plan_rest is None)
            ),
            *node_pools.pool_resources(self.site, pools, self._environ),
        )
        if is_readable:
            observed |= await self._observe((*prerequisites, *wanted))
        changes = [*additions(self.site, prerequisites, observed)]
        if disabled_apis:
            names = ", ".join(name.removesuffix(".googleapis.com") for name in disabled_apis)
            change = Change(
                action=Action.UPDATE, kind="APIs", name=self.site.project, reason=f"enable {names}"
            )
            changes.append(change)
        changes += additions(self.site, wanted, observed)
        manifests = in_cluster.manifests(self.site.namespace, self.site.account("workers"))
        there = replace(self.site, zone=setup.location)
        cluster_changes, notes = await self._plan_in_cluster(
            there, observed, manifests, controllers
        )
        return Planned(
            plan=Plan(site=there, changes=(*changes, *cluster_changes)),
            resources=wanted,
            notes=(*checks.notes, *notes),
            prerequisites=tuple(prerequisites),
            plan_rest=plan_rest,
            manifests=manifests,
            controllers=controllers,
        )

    async def _plan_with_apis(
        self,
        setup: Setup,
        pools: tuple[Pool, ...],
        controllers: tuple[Controller, ...],
        prerequisites: Sequence[Resource],
    ) -> Planned:
        """Enable the project's APIs, and plan again when Google's compute API serves requests."""
        await self._cloud.enable_apis(setups.SERVICES)
        machines = system_machines(self.site)
        await self._cloud.send(f"list the machine types of {self.site.zone}", machines)
        return await self._plan_setup(setup, pools, controllers, prerequisites)

    async def plan_pool(self, pool: Pool, *, slices: int = 1, fixed: bool = False) -> Planned:
        """Plan what `add_pool` creates. Nothing is written.

        Raises:
            NotFound: The cluster doesn't exist.
            ConfigurationError: A quota or reservation is too small, the pool's jobs would use a
                ComputeClass instead, or an Autopilot cluster can't have the pool.
        """
        found = await lookup.find_cluster(self._google, self.site)
        site, cluster = found.there, found.clusters[found.location]
        autopilot = node_pools.is_autopilot(cluster)
        needs_pool = fixed or not compute_classes.can_replace(pool)
        if autopilot and needs_pool:
            raise ConfigurationError(
                f"{self.site.cluster} is an Autopilot cluster, which has ComputeClasses instead of "
                "node pools: a class has no minimum, reservation, or zone of nodes, and no slices "
                "of several hosts"
            )
        # An existing pool stays, and slices of several hosts have no class to prefer.
        if not pool.accelerator.multi_host and pool.name not in node_pools.existing(cluster):
            async with aclosing(Api(await self._open_access(site))) as api:
                if not needs_pool and await compute_classes.is_served(api):
                    return await self._plan_class(api, site, pool, autopilot=autopilot)
                if autopilot:
                    raise ConfigurationError(
                        f"{self.site.cluster} has no ComputeClasses; upgrade it to GKE 1.30.3 or "
                        "later"
                    )
                name = class_name(pool.accelerator)
                if name in await compute_classes.list_own_classes(api):
                    raise ConfigurationError(
                        f"jobs of {pool.accelerator} use the nodes of the ComputeClass {name}, not "
                        f"those of a node pool; first run `kinetic pool remove {name}`"
                    )
        if site.zone == site.region and not pool.zone:
            if self.site.zone == site.region:
                raise ConfigurationError(
                    f"{site.cluster} has nodes in several zones of {site.region}; choose the "
                    "pool's zone with --node-zone"
                )
            pool = replace(pool, zone=self.site.zone)
        pools = pool.slices(slices)
        wanted = node_pools.pool_resources(site, pools, self._environ)
        checks = await preflight(self._google, site, await self._missing_pools(site, pools))
        observed = await self._observe(wanted)
        observed[f"cluster {site.cluster}"] = Observed(document=cluster)
        return Planned(
            plan=Plan(site=site, changes=additions(site, wanted, observed)),
            resources=wanted,
            notes=tuple(checks.notes),
        )

    async def _plan_class(self, api: Api, there: Site, pool: Pool, *, autopilot: bool) -> Planned:
        """Plan a ComputeClass from which GKE makes the nodes that *pool* would have.

        The zone of *there* is the cluster's location.
        """
        is_new = class_name(pool.accelerator) not in await compute_classes.list_classes(api)
        checks = await preflight(
            self._google, self.site, (pool,), regional=True, checks_quota=is_new
        )
        zones = checks.zones or (() if self.site.zone == self.site.region else (self.site.zone,))
        manifest = compute_classes.class_manifest(
            self.site, pool.accelerator, zones, autopilot=autopilot
        )
        description = compute_classes.describe_new(
            self.site, pool.accelerator, zones, self._environ
        )
        change = await compute_classes.plan_class(api, manifest, description)
        return Planned(
            plan=Plan(site=there, changes=(change,)),
            resources=(),
            notes=tuple(checks.notes),
            manifests=(manifest,),
        )

    async def plan_pool_removal(self, name: str) -> Planned:
        """Plan what `remove_pool` removes. Nothing is written.

        Raises:
            NotFound: The cluster has no such pool or class; the message lists all that it has.
            Refused: kinetic didn't create the pool or class, or the cluster needs it.
        """
        found = await lookup.find_cluster(self._google, self.site)
        site = found.there
        existing = node_pools.existing(found.clusters[found.location])
        if name not in existing:
            return await self._plan_class_removal(site, name, [*existing])
        if reason := node_pools.keep_reason(existing[name]):
            raise Refused(reason)
        pool = node_pools.reference(site, name)
        changes = removals(site, (pool,), {pool.key: self._observed_pool(existing[name])})
        return Planned(plan=Plan(site=site, changes=changes), resources=(pool,), removes=True)

    async def _plan_class_removal(
        self, there: Site, name: str, pool_names: Sequence[str]
    ) -> Planned:
        """Plan to remove the ComputeClass *name*; if it is absent, list all pools and classes."""
        async with aclosing(Api(await self._open_access(there))) as api:
            known_classes = await compute_classes.list_classes(api)
        if name not in known_classes:
            names = ", ".join(sorted({*pool_names, *known_classes})) or "none"
            raise NotFound(f"{self.site.cluster} has no pool {name!r}; it has {names}")
        if not compute_classes.is_ours(known_classes[name]):
            raise Refused(
                f"kinetic didn't make the ComputeClass {name}: it lacks the label kinetic=true; "
                "remove it with the tool that made it"
            )
        manifest = compute_classes.reference(name)
        reason = "GKE removes its nodes when they are idle"
        change = replace(manifest.change, action=Action.REMOVE, reason=reason)
        plan = Plan(site=there, changes=(change,))
        return Planned(plan=plan, resources=(), manifests=(manifest,), removes=True)

    async def plan_down(self, *, force_destroy: bool = False) -> Planned:
        """Plan what `down` removes, and what it keeps. Nothing is written.

        If other locations have a cluster of this name (``namesakes`` of the result), the plan keeps
        what it uses, such as the buckets, the accounts, and the repository.

        Args:
            force_destroy: Remove buckets with their contents. Default: False, which keeps
                the buckets.

        Raises:
            ConfigurationError: The cluster, or what is left of it, is in another location. Or the
                API of GKE is disabled, although resources exist.
            Unavailable: Google can't list the clusters of all zones now.
        """
        found = await lookup.find_namesakes(self._google, self.site)
        found.check_complete()
        found.check_location()
        workers = await lookup.list_worker_accounts(self._google, self.site)
        policies = await lookup.list_placement_policies(self._google, self.site)
        present = setups.existing(lookup.setup_at(found.there), workers, policies)
        observed = await self._cloud.observe(present)
        cluster_key = f"cluster {self.site.cluster}"
        cluster = observed[cluster_key].document or {}
        pools = map(self._observed_pool, node_pools.existing(cluster).values())
        usd = setups.CLUSTER_USD + sum(pool.usd_per_hour or 0.0 for pool in pools)
        observed[cluster_key] = replace(observed[cluster_key], usd_per_hour=usd)
        if not found.clusters:
            self._check_region(observed)
        users: dict[GoogleRequest, str] = {}
        for location, document in found.clusters.items():
            if location == found.location and self.site.owns(document):
                continue
            user = replace(self.site, zone=location)
            shared = policies if user.region == self.site.region else []
            used = setups.existing(lookup.setup_at(user), workers, shared)
            users |= {part.read: location for part in used}
        changes = removals(
            self.site, present, observed, keeps_buckets=not force_destroy, users=users
        )
        if found.disabled and any(change.action is Action.REMOVE for change in changes):
            raise ConfigurationError(
                f"kinetic can't list the clusters of {self.site.project}, so one may use what "
                f"`down` removes ({found.disabled}); enable the Kubernetes Engine API in the "
                "project that your credentials charge, and run the command again"
            )
        changes = tuple([await self._with_losses(found.there, change) for change in changes])
        removes_cluster = any(
            change.kind == "cluster" and change.action is Action.REMOVE for change in changes
        )
        notes: list[str] = []
        if removes_cluster and (names := ", ".join(node_pools.foreign(cluster))):
            notes.append(f"the removal includes node pools that kinetic didn't make: {names}")
        return Planned(
            plan=Plan(site=found.there, changes=changes),
            resources=present,
            notes=(*notes, *await self._outliving_notes(shares_network=bool(found.others))),
            removes=True,
            namesakes=found.others,
        )

    def _check_region(self, observed: Mapping[str, Observed]) -> None:
        """Refuse the site's region if a removed cluster was in another region.

        The jobs' bucket shows its region. The subnetwork, router, and repository are there as well.
        """
        site = self.site
        bucket = observed[f"bucket {site.bucket('jobs')}"].document or {}
        subnetwork = observed[f"subnetwork {site.prefix}"].document
        region = str(bucket.get("location") or "").lower()
        # The location of a bucket that kinetic didn't make may be a continent, such as ``us``.
        is_elsewhere = "-" in region and region != site.region and site.owns(bucket)
        if is_elsewhere and subnetwork is None:
            raise ConfigurationError(
                f"there is no cluster {site.cluster} in {site.project}, and what it left isn't in "
                f"{site.region}, but in {region}; pass a --zone of {region}"
            )

    async def _with_losses(self, there: Site, change: Change) -> Change:
        """Say in a removal which objects go with a bucket, and which jobs with the cluster.

        The zone of *there* is the cluster's location.
        """
        if change.action is not Action.REMOVE or change.kind not in ("bucket", "cluster"):
            return change
        limit_s = self._cloud.timeout_s
        try:
            if change.kind == "cluster":
                reason = await describe_work(there, self._open_access, limit_s)
            else:
                reason = await lookup.describe_contents(self._google, change.name, limit_s)
        except BackendError as exc:
            return replace(change, action=Action.UNSEEN, reason=str(exc))
        return replace(change, reason=reason)

    async def _outliving_notes(self, *, shares_network: bool) -> tuple[str, ...]:
        """Return a note about the disks and load balancers that the cluster leaves behind."""
        try:
            resources = await lookup.list_outliving(
                self._google, self.site, shares_network=shares_network
            )
        except BackendError as exc:
            return (f"disks and load balancers may outlive the cluster and cost money: {exc}",)
        if not resources:
            return ()
        advice = (
            "first delete their PersistentVolumeClaims and Services, or remove the resources in "
            "Google's console afterwards"
        )
        return (f"these outlive the cluster and cost money: {', '.join(resources)}; {advice}",)

    async def apply(self, planned: Planned) -> None:
        """Carry out a plan. After an interruption, plan again, and apply the new plan.

        Raises:
            KineticError: A step failed; the error's notes have the other failures.
            Refused: A resource isn't kinetic's, or can't be read; nothing was changed.
        """
        plan = planned.plan
        if plan.obstacles:
            reasons = "\n".join(
                f"- {obstacle.kind} {obstacle.name}: {obstacle.reason}"
                for obstacle in plan.obstacles
            )
            raise Refused(f"nothing was changed, because of these problems:\n{reasons}")
        await self._cloud.apply(plan.changes, planned.prerequisites)
        if planned.plan_rest is not None:
            await self.apply(await planned.plan_rest())
            return
        if any(change.kind == "APIs" for change in plan.changes):
            await self._cloud.enable_apis(setups.SERVICES)
        if planned.removes:
            await self._cloud.remove(plan.changes, planned.resources)
        else:
            await self._cloud.apply(plan.changes, planned.resources)
        if planned.manifests:
            await self._change_in_cluster(planned)

    async def list_pools(self) -> list[dict[str, Any]]:
        """Return the node pools of the cluster, and kinetic's ComputeClasses.

        Raises:
            NotFound: The cluster doesn't exist.
        """
        found = await lookup.find_cluster(self._google, self.site)
        existing = node_pools.existing(found.clusters[found.location])
        pools = [node_pools.summarize(document) for document in existing.values()]
        try:
            async with aclosing(Api(await self._open_access(found.there))) as api:
                pools += [
                    compute_classes.summarize(document)
                    for document in (await compute_classes.list_own_classes(api)).values()
                ]
        except KineticError as exc:
            self._tell(f"can't list ComputeClasses: {str(exc).splitlines()[0]}")
        return pools

    async def status(self) -> Status:
        """Return what exists and runs, what the site costs now, and what kinetic can't read."""
        return await survey(self._google, self._cloud, self.site, self._open_access, self._environ)

    async def _observe(self, resources: Sequence[Resource | Policy]) -> dict[str, Observed]:
        """Return the state of each resource, by key; that of a node pool has its cost."""
        observed = await self._cloud.observe(resources)
        for resource in resources:
            document = observed[resource.key].document
            if resource.kind == "node pool" and document is not None:
                observed[resource.key] = self._observed_pool(document)
        return observed

    def _observed_pool(self, document: Document) -> Observed:
        """Return the state of the node pool in *document*, with the cost of its minimum."""
        usd = node_pools.minimum_usd(document, self.site.zone, self._environ)
        return Observed(document=document, usd_per_hour=usd)

    async def _missing_pools(self, site: Site, pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
        """Return which *pools* the cluster doesn't have; the zone of *site* is its location."""
        resources = {pool: node_pools.reference(site, pool.name) for pool in pools}
        observed = await self._cloud.observe(resources.values())
        return tuple(
            pool for pool, resource in resources.items() if observed[resource.key].document is None
        )

    async def _plan_in_cluster(
        self,
        there: Site,
        observed: Mapping[str, Observed],
        manifests: tuple[in_cluster.Manifest, ...],
        controllers: tuple[Controller, ...],
    ) -> tuple[list[Change], list[str]]:
        """Return the changes inside the cluster, and notes about controllers that are missing.

        The zone of *there* is the cluster's location.
        """
        document = observed[f"cluster {self.site.cluster}"].document
        groups = {group for controller in controllers for group in controller.groups}
        notes = [] if groups.intersection(in_cluster.SETS) else [in_cluster.NO_SETS_NOTE]
        if document is None or document.get("status") != "RUNNING":
            changes = [
                *(manifest.change for manifest in manifests),
                *(controller.change for controller in controllers),
            ]
            return changes, notes
        async with aclosing(Api(await self._open_access(there))) as api:
            changes = [await in_cluster.compare(api, manifest) for manifest in manifests]
            changes += [await plan_controller(api, controller) for controller in controllers]
            return changes, [] if await in_cluster.has_sets(api) else notes

    async def _change_in_cluster(self, planned: Planned) -> None:
        """Apply manifests and controllers where needed; for a removal, remove the manifests."""
        async with aclosing(Api(await self._open_access(planned.plan.site))) as api:
            for manifest in planned.manifests:
                if planned.removes:
                    with suppress(NotFound):
                        await api.call("DELETE", manifest.path)
                    self._tell(f"{manifest.change.kind} {manifest.change.name} is removed")
                elif (await in_cluster.compare(api, manifest)).action is not Action.KEEP:
                    await in_cluster.apply(api, manifest)
                    self._tell(f"{manifest.change.kind} {manifest.change.name} is ready")
            for controller in planned.controllers:
                if (await plan_controller(api, controller)).action is not Action.KEEP:
                    await install(api, controller)
                    self._tell(f"controller {controller.name} is applied")

    async def _open_access(self, there: Site) -> Access:
        """Connect to the cluster; the zone of *there* is its location."""
        if self._connect is not None:
            return await self._connect()
        target = resolve(backend="gke", environ=self._environ, **asdict(there))
        # Ignore a context from the environment, because it may belong to another cluster.
        return await open_access(replace(target, kube_context=None), self._environ)

    async def keep_credentials(self, username: str, token: str) -> None:
        """Store Docker Hub credentials for builds as new versions of two secrets.

        Raises:
            NotFound: `up` hasn't made the builds' service account.
            AuthError: A role is missing.
        """
        account = setups.service_account(self.site, "builds")
        wanted = setups.secret_resources(self.site)
        if (await self._cloud.observe((account,)))[account.key].document is None:
            raise NotFound(f"there is no {account.key}; create it with `kinetic up`")
        await self._cloud.enable_apis(("secretmanager.googleapis.com",))
        changes = additions(self.site, wanted, await self._cloud.observe(wanted))
        await self.apply(Planned(plan=Plan(site=self.site, changes=changes), resources=wanted))
        try:
            for name, value in ((USERNAME, username), (TOKEN, token)):
                payload = {"data": base64.b64encode(value.encode()).decode()}
                path = f"projects/{self.site.project}/secrets/{name}:addVersion"
                body = {"payload": payload}
                await self._google.call(call(setups.SECRETS, "POST", path, body=body))
        except HttpError as refusal:
            raise refusal_error("add a version of a secret", refusal) from refusal

    async def has_project(self) -> bool:
        """Return whether the project exists; False also if you lack permission to see it."""
        project = setups.project_resource(self.site)
        return await lookup.read(self._google, project) is not None

    async def is_billed(self) -> bool:
        """Return whether the project has a billing account; False also if you can't see it."""
        answer = await lookup.read(self._google, setups.billing_link(self.site, ""))
        return bool((answer or {}).get("billingEnabled"))

    async def billing_accounts(self) -> list[lookup.BillingAccount]:
        """Return the open billing accounts that you can see."""
        return await lookup.list_billing_accounts(self._google)
