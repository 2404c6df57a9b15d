"""Join an existing cluster: check it, create what jobs need, list what the user can't create."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Self

import anyio.to_thread

from kinetic.aio._net.google import GoogleClient
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import NO_RETRIES
from kinetic.aio._store_check import check_listing, check_use
from kinetic.aio.backends.gke import open_store, store_directory, store_url
from kinetic.aio.gcs import http as gcs_http
from kinetic.aio.infra import setup as setups
from kinetic.aio.infra.controllers import Controller, install, plan_install
from kinetic.aio.infra.namespace import Manifest, apply, as_yaml, compare, manifests
from kinetic.aio.infra.resources import Action, Change, Tell, silent
from kinetic.aio.infra.site import NAMESPACE_NAME, Site
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import ONE_TRY, Api
from kinetic.aio.kubernetes.diagnosis.documents import labels_of
from kinetic.aio.kubernetes.manifests import POD_SECURITY
from kinetic.aio.kubernetes.request import Forbidden, Request
from kinetic.aio.kubernetes.reviews import missing_rights, user_name
from kinetic.aio.kubernetes.rights import NEEDED_BY, Right, by_resource, rights
from kinetic.configuration import DEFAULTS, Target, checked_zone
from kinetic.errors import BackendError, ConfigurationError, NotFound, Refused

MIN_VERSION = (1, 29)
"""The first version of Kubernetes whose indexed Jobs can limit the failures of each index."""

NO_HOST_PATH = ("baseline", "restricted")
"""The Pod Security Standards that refuse pods with a hostPath volume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The result of `init`: what kinetic found, and what it does with each object.

    ``user`` is your name in the cluster. ``manifest`` is YAML of the objects that an administrator
    has to apply; empty if there are none.
    """

    target: Target
    cluster: str
    user: str
    changes: tuple[Change, ...]
    objects: tuple[Manifest, ...]
    controllers: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Change, ...]:
        """Return the changes that create or update an object."""
        changes = (*self.changes, *self.controllers)
        return tuple(
            change for change in changes if change.action in (Action.CREATE, Action.UPDATE)
        )

    @property
    def manifest(self) -> str:
        """Return YAML of the objects that an administrator must apply; empty if there are none."""
        pairs = zip(self.objects, self.changes, strict=True)
        requested = tuple(manifest for manifest, change in pairs if change.action is Action.ASK)
        return as_yaml(requested) if requested else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as ``--json`` shows it."""
        return {
            "cluster": self.cluster,
            "namespace": self.target.namespace,
            "store": self.target.store,
            "user": self.user,
            "changes": [change.to_dict() for change in (*self.changes, *self.controllers)],
            "notes": list(self.notes),
            "manifest": self.manifest,
        }


def target_of(
    *,
    kube_context: str | None = None,
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
    store: str | None = None,
    store_claim: str | None = None,
) -> Target:
    """Return the target that these settings name; ignore environment variables and profiles.

    Args:
        kube_context: A context of the kubeconfig. Default: none; the next three name a GKE cluster.
        project, zone, cluster: The GKE cluster. Default: zone ``us-central1-a``, cluster
            ``kinetic-cluster``.
        namespace: The Kubernetes namespace of the jobs. Default: ``default``.
        store: ``gs://BUCKET``, which becomes ``gs://BUCKET/NAMESPACE``, or the absolute path of a
            directory that all nodes mount. Default: the bucket that `up` makes for the cluster.
        store_claim: The PersistentVolumeClaim that holds that directory. Default: none; each pod
            mounts the directory's path of its node.

    Raises:
        ConfigurationError: No cluster or store is named, or a name is malformed.
    """
    if not (kube_context or project):
        raise ConfigurationError(
            "no cluster is named; pass --kube-context NAME, or --project, --zone, and --cluster "
            "of a GKE cluster"
        )
    target = Target(
        backend="gke",
        why="named",
        project=project,
        zone=checked_zone(zone, "zone"),
        cluster=cluster or DEFAULTS["cluster"],
        namespace=namespace or DEFAULTS["namespace"],
        store=store,
        base_image_repo=None,
        output_dir=None,
        kube_context=kube_context,
        store_claim=store_claim,
    )
    if not NAMESPACE_NAME.fullmatch(target.namespace):
        raise ConfigurationError(
            f"{target.namespace!r} can't be a namespace's name; name one like 'team'"
        )
    directory, url = store_directory(target), store_url(target)
    if store_claim and directory is None:
        raise ConfigurationError(
            "a store claim needs a directory as the store, where pods mount it"
        )
    if directory is not None:
        return replace(target, store=str(directory.absolute()))
    bucket, _, folder = url.removeprefix("gs://").rstrip("/").partition("/")
    return replace(target, store=f"gs://{bucket}/{folder or target.namespace}")


class Join:
    """Joins the cluster of *target*; *tell* receives a line about each step.

    Use it as an async context manager, which closes its connections.
    """

    def __init__(
        self,
        target: Target,
        *,
        tell: Tell,
        environ: Mapping[str, str] = os.environ,
        controllers: tuple[Controller, ...] = (),
    ) -> None:
        self._controllers = controllers
        self._target = target
        self._tell = tell
        self._environ = environ
        self._api: Api

    async def __aenter__(self) -> Self:
        self._api = Api(await open_access(self._target, self._environ, NO_RETRIES), ONE_TRY)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.aclose()

    async def plan(self) -> Joining:
        """Check cluster and store, and plan what to create. The cluster isn't changed.

        Raises:
            ConfigurationError: The cluster or the store can't run jobs.
            AuthError: The cluster refuses your credentials, or the store refuses access.
            BackendError: The cluster or the store doesn't answer.
        """
        await self._check_cluster()
        await self._check_store()
        namespace = self._target.namespace
        missing = await missing_rights(self._api, rights(namespace))
        needed = [right for right in missing if right.resource not in NEEDED_BY]
        user = await user_name(self._api)
        account, account_notes = await self._account()
        objects = manifests(namespace, account, user if needed else "")
        changes: list[Change] = []
        needed_change: Change | None
        for manifest in objects:
            # The first object is the namespace. If an administrator has to create it, the user
            # can't create other objects in it yet.
            namespace_is_missing = bool(changes) and changes[0].action is Action.ASK
            try:
                needed_change = await compare(self._api, manifest)
            except Forbidden:  # the user lacks permission to read the object
                needed_change = None
            can_write = not namespace_is_missing and await self._can_write(manifest, needed_change)
            change = decide(manifest, needed_change, can_write=can_write, can_submit=not needed)
            changes.append(change)
        return Joining(
            target=self._target,
            cluster=self._api.cluster,
            user=user,
            changes=tuple(changes),
            objects=objects,
            controllers=tuple(
                [await plan_install(self._api, controller) for controller in self._controllers]
            ),
            notes=(*account_notes, *_notes(missing, changes)),
        )

    async def everything(self) -> str:
        """Return YAML of all objects that `plan` checks, with the user's right to submit jobs."""
        account, _ = await self._account()
        return as_yaml(manifests(self._target.namespace, account, await user_name(self._api)))

    async def apply(self, joining: Joining) -> Joining:
        """Create and update the objects of the plan; return the result.

        An administrator has to apply the objects that the API server refuses.

        Cancelled: created objects stay; join the cluster again to continue.
        """
        changes = list(joining.changes)
        for index, manifest in enumerate(joining.objects):
            if changes[index] not in joining.steps:
                continue
            try:
                await apply(self._api, manifest)
            # A user can't grant permissions that they lack, nor bind a role that is missing.
            except (Forbidden, Refused, NotFound) as refusal:
                reason = str(refusal).splitlines()[0]
                changes[index] = replace(changes[index], action=Action.ASK, reason=reason)
            else:
                self._tell(f"{changes[index].kind} {changes[index].name} is ready")
        for controller, change in zip(self._controllers, joining.controllers, strict=True):
            if change in joining.steps:
                await install(self._api, controller)
                self._tell(f"controller {controller.name} is applied")
        return replace(joining, changes=tuple(changes))

    async def _check_cluster(self) -> None:
        """Check that the version of Kubernetes and the namespace permit the pods of jobs."""
        version = await self._api.call("GET", "/version")
        number = str(version.get("gitVersion") or "")
        match = re.match(r"v?(\d+)\.(\d+)", number)
        if match is not None and (int(match[1]), int(match[2])) < MIN_VERSION:
            raise ConfigurationError(
                f"{self._api.cluster} runs Kubernetes {number}, and jobs need "
                f"{'.'.join(map(str, MIN_VERSION))} or later; upgrade it"
            )
        await self._check_security()
        self._tell(f"{self._api.cluster} answers: Kubernetes {number or 'of an unknown version'}")

    async def _check_security(self) -> None:
        """If the store is a directory of the nodes, check that pods are allowed to mount it."""
        if store_directory(self._target) is None or self._target.store_claim:
            return
        name = self._target.namespace
        try:
            document = await self._api.call("GET", f"/api/v1/namespaces/{name}")
        except (NotFound, Forbidden):
            return
        if (standard := labels_of(document).get(POD_SECURITY)) in NO_HOST_PATH:
            raise ConfigurationError(
                f"the namespace {name!r} enforces the Pod Security Standard {standard!r}, which "
                "refuses pods that mount a path of their node; name another namespace, or a "
                "PersistentVolumeClaim that holds the directory (--store-claim)"
            )

    async def _check_store(self) -> None:
        url = store_url(self._target)
        store = await anyio.to_thread.run_sync(open_store, url, self._environ, gcs_http.ONE_TRY)
        async with aclosing(store):
            await check_listing(store)
            if not await check_use(store):
                raise BackendError(
                    f"the store {store.url} changed or replaced an existing object; use another "
                    "store"
                )
        self._tell(f"objects can be written, read, and removed in {self._target.store}")

    async def _account(self) -> tuple[str, list[str]]:
        """Return the Google service account for pods (empty without one), and notes about it."""
        target = self._target
        store = target.store or ""
        # Only pods on GKE with a store in a bucket need an account. `up` makes one per namespace.
        if target.project is None or target.kube_context or not store.startswith("gs://"):
            return "", []
        try:
            site = Site.of(target)
        except ConfigurationError:  # `up` can't have made a cluster with such a name
            return "", []
        email = site.account("workers")
        async with aclosing(GoogleClient(self._environ, NO_RETRIES, idle_s=20.0)) as google:
            try:
                await google.call(setups.service_account(site, "workers").read)
            except (HttpError, BackendError) as exc:
                reason = exc.message if isinstance(exc, HttpError) else str(exc)
                note = (
                    f"pods get no Google service account, because kinetic can't look up {email} "
                    f"({reason}); `kinetic up --namespace {site.namespace}` creates a missing one"
                )
                return "", [note]
        if store.startswith(f"gs://{site.bucket('jobs')}/"):
            return email, []
        return email, [f"pods need a role on {store}: grant {setups.OBJECTS_ROLE} to {email}"]

    async def _can_write(self, manifest: Manifest, needed_change: Change | None) -> bool:
        """Return whether the user can patch the object and, if it may be absent, also create it."""
        action = Action.CREATE if needed_change is None else needed_change.action
        if action is Action.KEEP:
            return True
        needed = [Request(method="PATCH", path=manifest.path).right]
        if action is Action.CREATE:
            needed.append(replace(needed[0], verb="create", name=""))
        return not await missing_rights(self._api, needed)


def decide(
    manifest: Manifest, needed_change: Change | None, *, can_write: bool, can_submit: bool
) -> Change:
    """Decide what to do with *manifest*.

    Args:
        manifest: The object.
        needed_change: The result of `compare` for the object; None if the user can't read it.
        can_write: Whether the user can create or update the object.
        can_submit: Whether the user has all permissions that submitting jobs needs.
    """
    if needed_change is None and can_submit:
        reason = "you lack permission to read it; only a job can show whether it exists"
        return replace(manifest.change, action=Action.UNSEEN, reason=reason)
    change = needed_change or manifest.change
    if change.action is Action.KEEP or can_write:
        return change
    return replace(change, action=Action.ASK, reason="you lack permission to create or update it")


def _notes(missing: Iterable[Right], changes: Iterable[Change]) -> Iterable[str]:
    optional = [right for right in missing if right.resource in NEEDED_BY]
    if optional:
        yield f"you lack permissions that only some jobs need: {'; '.join(by_resource(optional))}"
    if unreadable := [change for change in changes if change.action is Action.UNSEEN]:
        names = ", ".join(f"{change.kind} {change.name}" for change in unreadable)
        yield f"you lack permission to read {names}"


async def init(
    target: Target,
    *,
    controllers: tuple[Controller, ...] = (),
    preview: bool = False,
    tell: Tell = silent,
    environ: Mapping[str, str] = os.environ,
) -> Joining:
    """Join a cluster that exists: check it, and create what jobs need in a namespace.

    Args:
        target: The cluster, namespace, and store; `target_of` makes it.
        controllers: Controllers to install; `read_controller` reads their files. Default: none.
        preview: Check and plan, and create nothing. Default: False.
        tell: Receives one line about each step.
        environ: The environment. Default: that of this process.

    Returns:
        What kinetic did with each object. ``manifest`` is for an administrator.

    Raises:
        ConfigurationError: The context or cluster doesn't exist, or the cluster can't run jobs.
        AuthError: The cluster refuses your credentials, the store refuses access, or you lack
            permission to install a controller.
        BackendError: The cluster or the store doesn't answer.

    Cancelled: created objects stay; run `init` again to continue.

    Example::

        target = infra.target_of(kube_context="kind-kind", store="/shared/kinetic")
        joined = await infra.init(target)
        print(joined.manifest)
    """
    async with Join(target, tell=tell, environ=environ, controllers=controllers) as join:
        joining = await join.plan()
        return joining if preview else await join.apply(joining)
