"""Open the platform ``gke``: Kubernetes Jobs, a bucket or directory as store, and images."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio.to_thread

from kinetic import configuration
from kinetic._runner.protocol import directory_urls
from kinetic._runner.protocol.gcs_names import BUCKET
from kinetic.aio.gcs.http import Limits
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.images.container import ContainerImages
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.inventory import layout_in
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Store
from kinetic.errors import ConfigurationError


async def open_backend(target: configuration.Target, environ: Mapping[str, str]) -> Platform:
    """Open the platform of *target*; send no request to its bucket yet.

    Raises:
        ConfigurationError: There is no such cluster or context, or no store is configured.
        AuthError: There are no credentials, or they are refused.
        Unavailable: The API server, or Google's API, does not answer.
    """
    pod_placement, store, images = await anyio.to_thread.run_sync(open_storage, target, environ)
    access = await open_access(target, environ)
    api = Api(access)
    cluster = GkeCluster(api, pod_placement, use_compute_classes=access.gke)
    return Platform(
        store=store,
        images=images,
        builds=images.builds,
        cluster=cluster,
        layout=partial(layout_in, api, access.pools),
    )


def open_storage(
    target: configuration.Target, environ: Mapping[str, str]
) -> tuple[Placement, Store, ContainerImages]:
    """Return the pods' placement, the store, and the images. Blocks if a directory is slow."""
    return placement(target, environ), *storage(target, store_url(target), environ)


def placement(target: configuration.Target, environ: Mapping[str, str]) -> Placement:
    """Return the placement of the pods of *target*.

    Raises:
        ConfigurationError: KINETIC_JOB_TTL_S isn't a whole number of at least 0.
    """
    defaults = Placement()
    user = target.run_as_user
    # Only the owner of a file in a store's directory can read it.
    if user is None and store_directory(target) is not None:
        user = os.geteuid()
    return Placement(
        namespace=target.namespace,
        service_account=environ.get("KINETIC_SERVICE_ACCOUNT") or defaults.service_account,
        ttl_s=configuration.number("KINETIC_JOB_TTL_S", defaults.ttl_s, environ),
        queue=environ.get("KINETIC_QUEUE", defaults.queue),
        run_as_user=user,
        pod_annotations=dict(target.pod_annotations),
        claim=target.store_claim or defaults.claim,
        priority_class=environ.get("KINETIC_PRIORITY_CLASS", defaults.priority_class),
    )


def storage(
    target: configuration.Target, url: str, environ: Mapping[str, str]
) -> tuple[Store, ContainerImages]:
    """Return the store at *url*, and the images; without a project, their builds also use *url*."""
    store, builds = open_store(url, environ), open_store(builds_url(target) or url, environ)
    return store, ContainerImages(target, jobs=store, builds=builds, environ=environ)


def open_store(url: str, environ: Mapping[str, str], limits: Limits | None = None) -> Store:
    """Open the bucket, or the shared directory, at *url*; *limits* are for a bucket only.

    Raises:
        ConfigurationError: There is no such directory on this machine.
    """
    if (directory := directory_urls.directory_of(url)) is not None:
        if not os.path.isdir(directory):  # don't create it: its volume may not be mounted
            raise ConfigurationError(
                f"the store {directory} isn't a directory of this machine; mount its volume, or "
                "create it"
            )
        return DirectoryStore(Path(directory), shared=True)
    return GcsStore(url, environ, limits=limits)


def store_directory(target: configuration.Target) -> Path | None:
    """Return the directory that is the store of *target*; None for a bucket.

    Pods mount it at the same path.
    """
    location = target.store or ""
    return Path(location).expanduser() if location.startswith(("/", "~/")) else None


def store_url(target: configuration.Target) -> str:
    """Return the URL of the store that *target* names; default: the bucket of its project.

    Raises:
        ConfigurationError: Neither a store nor a project is configured, or the store is neither a
            bucket nor an absolute path.
    """
    if target.store is None:
        if target.project is None:
            raise ConfigurationError(
                f"the context {target.kube_context!r} says where jobs run, not where to store "
                "their values: pass --store, or set KINETIC_STORE or the client's store=, to "
                "gs://BUCKET or to a directory that all nodes mount, or configure a project"
            )
        return _bucket(target, "jobs")
    if target.store.startswith("gs://"):
        return target.store
    if (directory := store_directory(target)) is not None:
        return directory_urls.url_of(str(directory), shared=True)
    if "://" in target.store or "/" in target.store:
        raise ConfigurationError(
            f"jobs on a cluster can't store their results in {target.store!r}: set KINETIC_STORE, "
            "or the store= of the client, to gs://BUCKET, gs://BUCKET/FOLDER, or the absolute path "
            "of a directory that all nodes mount"
        )
    return f"gs://{target.store}"


def builds_url(target: configuration.Target) -> str:
    """Return the URL of the bucket that Cloud Build reads; empty without a project."""
    return _bucket(target, "builds") if target.project else ""


def _bucket(target: configuration.Target, purpose: str) -> str:
    # A project's ID may contain a domain (example.com:name), and no bucket can have this name.
    project = (target.project or "").replace(":", "-").replace(".", "-")
    name = f"{project}-kn-{target.cluster}-{purpose}"
    if not BUCKET.fullmatch(name):
        raise ConfigurationError(
            f"project {target.project!r} and cluster {target.cluster!r} need the bucket {name!r}, "
            "and no bucket can have this name: correct the name of the project or of the cluster"
        )
    return f"gs://{name}"
