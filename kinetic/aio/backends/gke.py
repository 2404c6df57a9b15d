"""Compose the backend ``gke``: Jobs in a Kubernetes cluster, its bucket, and images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kinetic import configuration
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.images.container import ContainerImages
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.inventory import layout_in
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.platforms import Platform
from kinetic.errors import ConfigurationError


async def open_backend(target: configuration.Target, environ: Mapping[str, str]) -> Platform:
    """Open the platform of *target*; it sends nothing to the bucket yet.

    Raises:
        ConfigurationError: There is no such cluster or context, or no bucket is configured.
        AuthError: There are no credentials, or they are refused.
        Unavailable: The API server, or Google's API, does not answer.
    """
    at = placement(target, environ)
    store, images = storage(target, store_url(target), environ)  # nothing is open yet
    access = await open_access(target, environ)
    api = Api(access)
    return Platform(
        store=store,
        images=images,
        builds=images.builds,
        cluster=GkeCluster(api, at),
        layout=partial(layout_in, api, access.pools),
        restarts=True,
    )


def placement(target: configuration.Target, environ: Mapping[str, str]) -> Placement:
    """Return the placement of the pods of *target*.

    Raises:
        ConfigurationError: KINETIC_JOB_TTL_S isn't a whole number of at least 0.
    """
    own = Placement()
    return Placement(
        namespace=target.namespace,
        service_account=environ.get("KINETIC_SERVICE_ACCOUNT") or own.service_account,
        ttl_s=configuration.number("KINETIC_JOB_TTL_S", own.ttl_s, environ),
        queue=environ.get("KINETIC_QUEUE", own.queue),
        run_as_user=target.run_as_user,
        priority_class=environ.get("KINETIC_PRIORITY_CLASS", own.priority_class),
    )


def storage(
    target: configuration.Target, url: str, environ: Mapping[str, str]
) -> tuple[GcsStore, ContainerImages]:
    """Return the bucket of jobs at *url*, and the images, built with the project's other bucket."""
    store = GcsStore(url, environ)
    builds = GcsStore(builds_url(target) or url, environ)
    return store, ContainerImages(target, jobs=store, builds=builds, environ=environ)


def store_url(target: configuration.Target) -> str:
    """Return the URL of the store of *target*: its project's bucket, unless it names another.

    Raises:
        ConfigurationError: Neither a bucket nor a project is configured, or the store is a
            directory, which pods can't read.
    """
    if target.store is None:
        if target.project is None:
            raise ConfigurationError(
                f"the context {target.kube_context!r} says where jobs run, not where to keep their "
                "values: set KINETIC_STORE, or the store= of the client, to gs://BUCKET, or "
                "configure a project"
            )
        return _bucket(target, "jobs")
    if target.store.startswith("gs://"):
        return target.store
    if "://" in target.store or "/" in target.store:
        raise ConfigurationError(
            f"jobs on a cluster cannot keep their values in {target.store!r}: set KINETIC_STORE, "
            "or the store= of the client, to gs://BUCKET or gs://BUCKET/FOLDER"
        )
    return f"gs://{target.store}"


def builds_url(target: configuration.Target) -> str:
    """Return the URL of the bucket that Cloud Build reads; empty without a project."""
    return _bucket(target, "builds") if target.project else ""


def _bucket(target: configuration.Target, what: str) -> str:
    return f"gs://{target.project}-kn-{target.cluster}-{what}"
