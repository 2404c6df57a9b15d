"""Check that a tiny job runs, and measure how long each of its steps takes."""

from __future__ import annotations

import asyncio
import platform
import time

import anyio

from kinetic._tasks import release
from kinetic.aio._plain_call import cancelled_on_sigterm
from kinetic.aio.client import Client
from kinetic.configuration import Target
from kinetic.doctor.checks import Check, Finding, failed, ok
from kinetic.function import run
from kinetic.job_status import JobStatus

LIMIT_S = 1800.0
"""Timeout of the check in seconds; kinetic may build an image, and the cluster add a node."""


def trial(target: Target, container_image: str | None, *, after: tuple[str, ...]) -> Check:
    """Return the check that runs a job on *target*, unless one of the checks *after* fails."""

    async def probe() -> Finding:
        with cancelled_on_sigterm():
            return await _run_job(target, container_image)

    return Check(
        name="job",
        group="run",
        probe=probe,
        needs=after,
        advice="`kinetic jobs list` lists the jobs, `kinetic jobs logs ID` prints a job's output",
        limit_s=LIMIT_S,
    )


async def _run_job(target: Target, container_image: str | None) -> Finding:
    """Run a tiny job, and report how long each step took."""
    if target.backend != "local" and target.project is None and not container_image:
        return failed(
            "without a project, kinetic can't build an image",
            "kinetic doctor --run --image python:3.12-slim, with the minor version of your Python",
        )
    function = run(
        accelerator="cpu",
        container_image=container_image,
        capture_env_vars=["STORAGE_EMULATOR_HOST"],  # the job uses the same emulator
    )(platform.python_version)
    times = {"start": time.monotonic()}

    def note(status: JobStatus) -> None:
        times.setdefault(status.value, time.monotonic())

    async with Client(
        backend=target.backend,
        project=target.project,
        zone=target.zone,
        cluster=target.cluster,
        namespace=target.namespace,
        store=target.store,
    ) as client:
        job = await client.submit(function)
        submitted_at = time.monotonic()
        try:
            value = await job.result(on_status_change=note, stream_logs=False)
        except asyncio.CancelledError:
            # anyio repeats a cancellation, which would interrupt the removal.
            with anyio.CancelScope(shield=True):
                await release(job.cleanup(), operation=f"removing {job.job_id}")
            raise
    removed_at = time.monotonic()
    ended_at = times.get("SUCCEEDED", removed_at)
    running_at = times.get("RUNNING", ended_at)
    return ok(
        f"submitted in {submitted_at - times['start']:.1f} s, running after "
        f"{running_at - submitted_at:.1f} s, done after {ended_at - running_at:.1f} s, removed in "
        f"{removed_at - ended_at:.1f} s; it ran Python {value}"
    )
