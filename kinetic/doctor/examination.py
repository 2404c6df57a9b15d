"""Which checks there are for a target, and all of them carried out."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import anyio.to_thread

from kinetic import configuration
from kinetic.doctor.checks import Check, Finding, Report, Result, State, carry_out
from kinetic.doctor.python import Installation
from kinetic.errors import ConfigurationError

__all__ = ["examine"]

CONFIGURATION = "configuration"


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
    told: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Look at everything that a job needs, and change nothing that lasts.

    The target is resolved as for a job. With *run*, a tiny job is run when nothing else has
    failed, in *container_image* if one is named. *told* hears of each result as it comes.

    Takes as long as its slowest check: without *run*, about a minute at most.

    Cancelled: all checks end; a job of *run* is stopped.
    """
    settled: configuration.Target | ConfigurationError
    try:
        settled = configuration.resolve(
            backend=backend,
            project=project,
            zone=zone,
            cluster=cluster,
            namespace=namespace,
            environ=environ,
        )
        if store is not None:
            settled = configuration.with_store(settled, store)
    except ConfigurationError as exc:
        settled = exc

    async def configured() -> Finding:
        if isinstance(settled, ConfigurationError):
            return Finding.of(settled)
        return Finding(State.OK, _described(settled))

    table = Installation(environ).checks()
    table.append(Check(name=CONFIGURATION, group=CONFIGURATION, look=configured))
    async with AsyncExitStack() as closing:
        if not isinstance(settled, ConfigurationError):
            table += await _subjects(settled, environ, closing)
            if run:
                from kinetic.doctor.trial import Trial

                every = tuple(one.name for one in table)
                table += Trial(settled, container_image).checks(after=every)
        return await carry_out(table, told)


def _described(target: configuration.Target) -> str:
    words = f"backend {target.backend!r} ({target.why})"
    if target.backend == "local":
        return words
    where = target.kube_context or f"{target.cluster} in {target.zone} of {target.project}"
    return f"{words}; cluster {where}, namespace {target.namespace}"


async def _subjects(
    target: configuration.Target, environ: Mapping[str, str], closing: AsyncExitStack
) -> list[Check]:
    """The checks of the platform; what they open is closed with *closing*."""
    if target.backend == "local":
        from kinetic.doctor.machine import Machine

        return Machine(target, environ).checks()
    return await _of_cluster(target, environ, closing)


async def _of_cluster(
    target: configuration.Target, environ: Mapping[str, str], closing: AsyncExitStack
) -> list[Check]:
    for module in ("backends.gke", "gcs.http"):  # half a second, which the loop is spared
        await anyio.to_thread.run_sync(importlib.import_module, f"kinetic.aio.{module}")
    from kinetic.aio.backends.gke import builds_url, placement, store_url
    from kinetic.aio.gcs.http import EMULATOR
    from kinetic.doctor.bucket import Bucket
    from kinetic.doctor.cluster import Cluster
    from kinetic.doctor.google import Google

    table: list[Check] = []
    by_google = target.kube_context is None
    emulated = bool(environ.get(EMULATOR))
    if by_google or not emulated:
        google = Google(target, environ)
        closing.push_async_callback(google.aclose)
        table += google.checks(cluster=by_google)
    known = tuple(one.name for one in table if one.name == "credentials")
    cluster = Cluster(target, placement(target, environ), environ)
    closing.push_async_callback(cluster.aclose)
    table += cluster.checks(after=known if by_google else ())
    for_bucket = () if emulated else known
    try:
        url = store_url(target)
        buckets = {"bucket": url}
    except ConfigurationError as exc:
        table.append(_failed("bucket", exc))
        buckets = {}
    if by_google and (builds := builds_url(target)):
        buckets["bucket of builds"] = builds
    for name, url in buckets.items():
        bucket = await anyio.to_thread.run_sync(Bucket, name, url, environ)
        closing.push_async_callback(bucket.aclose)
        table += bucket.checks(after=for_bucket)
    return table


def _failed(name: str, failure: ConfigurationError) -> Check:
    async def look() -> Finding:
        raise failure

    return Check(name=name, group="store", look=look)
