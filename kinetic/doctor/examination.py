"""Choose the checks for a target, and run them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack

import anyio.to_thread

from kinetic import configuration
from kinetic.doctor.checks import Check, Finding, Report, failed_by, ok, run_checks
from kinetic.doctor.python import installation
from kinetic.errors import ConfigurationError, KineticError

__all__ = ["examine"]


async def examine(
    *,
    backend: str | None = None,
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
    store: str | None = None,
    run: bool = False,
    container_image: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Report:
    """Check everything that a job needs, and leave nothing behind.

    Checks run concurrently, each for at most 30 s; the job of *run* may take 30 min.

    Args:
        backend, project, zone, cluster, namespace, store: The target, resolved as for a job.
        run: Whether to run a tiny job after all other checks have passed. Default: no.
        container_image: The image of that job. Default: one that kinetic builds.
        environ: The environment. Default: that of this process.

    Returns:
        The report, with a result per check.

    Cancelled: all checks end; the job is stopped and removed.

    Example::

        report = await examine(backend="local")
        assert report.healthy, report.to_dict()
    """
    checks = installation(environ)
    try:
        target = configuration.resolve(
            backend=backend,
            project=project,
            zone=zone,
            cluster=cluster,
            namespace=namespace,
            store=store,
            environ=environ,
        )
    except ConfigurationError as exc:
        checks.append(_finished_check("configuration", "configuration", failed_by(exc)))
        return await run_checks(checks)
    checks.append(_finished_check("configuration", "configuration", ok(_describe(target))))
    async with AsyncExitStack() as exit_stack:
        if target.backend == "local":
            from kinetic.doctor.machine import Machine

            checks += Machine(target, environ).checks()
        else:
            checks += await _cluster_checks(target, environ, exit_stack)
        if run:
            from kinetic.doctor.trial import trial

            names = tuple(check.name for check in checks)
            checks.append(trial(target, container_image, after=names))
        return await run_checks(checks)


def _finished_check(name: str, group: str, finding: Finding) -> Check:
    """Return a check that only reports *finding*, which is known before the checks run."""

    async def probe() -> Finding:
        return finding

    return Check(name=name, group=group, probe=probe)


def _describe(target: configuration.Target) -> str:
    description = f"backend {target.backend!r} ({target.why})"
    if target.backend == "local":
        return description
    cluster = target.kube_context or f"{target.cluster} in {target.zone} of {target.project}"
    return f"{description}; cluster {cluster}, namespace {target.namespace}"


async def _cluster_checks(
    target: configuration.Target, environ: Mapping[str, str], exit_stack: AsyncExitStack
) -> list[Check]:
    """Return the checks of a cluster and its stores; *exit_stack* closes their connections."""
    for module in ("backends.gke", "gcs.http"):  # in a thread: the imports take half a second
        await anyio.to_thread.run_sync(importlib.import_module, f"kinetic.aio.{module}")
    from kinetic.aio.backends.gke import (
        builds_url,
        open_store,
        placement,
        store_directory,
        store_url,
    )
    from kinetic.aio.gcs.http import EMULATOR, ONE_TRY
    from kinetic.doctor import bucket
    from kinetic.doctor.cluster import Cluster
    from kinetic.doctor.google import Google

    checks: list[Check] = []
    on_gke = target.kube_context is None
    emulated = bool(environ.get(EMULATOR))
    credentials: tuple[str, ...] = ()
    needs_google = not emulated and store_directory(target) is None
    if on_gke or needs_google:
        google = Google(target, environ)
        exit_stack.push_async_callback(google.aclose)
        checks += google.checks(project=on_gke)
        credentials = ("credentials",)
    cluster = Cluster(target, placement(target, environ), environ)
    exit_stack.push_async_callback(cluster.aclose)
    checks += cluster.checks(after=credentials if on_gke else ())
    store_urls: dict[str, str] = {}
    try:
        kind = "bucket" if store_directory(target) is None else "directory"
        store_urls[kind] = store_url(target)
    except ConfigurationError as exc:
        checks.append(_finished_check("bucket", bucket.GROUP, failed_by(exc)))
    if on_gke and (builds := builds_url(target)):
        store_urls["bucket of builds"] = builds
    for name, url in store_urls.items():
        try:
            store = await anyio.to_thread.run_sync(open_store, url, environ, ONE_TRY)
        except KineticError as exc:  # for example, the directory doesn't exist
            checks.append(_finished_check(name, bucket.GROUP, failed_by(exc)))
            continue
        exit_stack.push_async_callback(store.aclose)
        is_local = emulated or not url.startswith("gs://")
        checks += bucket.checks(name, store, after=() if is_local else credentials)
    return checks
