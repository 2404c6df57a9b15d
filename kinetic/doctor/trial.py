"""The last check, if it is asked for: a tiny job, and how long each of its steps took."""

from __future__ import annotations

import asyncio
import platform
import time

import anyio

from kinetic._tasks import release
from kinetic.aio.client import Client
from kinetic.configuration import Target
from kinetic.doctor.checks import Check, Finding, State
from kinetic.function import run
from kinetic.job_status import JobStatus

LIMIT_S = 1800.0
"""A node may have to be made, and an image to be built."""


class Trial:
    """One call of a function of the standard library on *target*, with no accelerator."""

    def __init__(self, target: Target, container_image: str | None) -> None:
        self._target = target
        self._container_image = container_image

    def checks(self, *, after: tuple[str, ...]) -> list[Check]:
        """The job, which is run *after* all other checks."""
        advice = "kinetic jobs list shows the jobs there; kinetic jobs logs ID what one has said"
        return [
            Check(
                name="job",
                group="run",
                look=self._run,
                needs=after,
                advice=advice,
                limit_s=LIMIT_S,
            )
        ]

    async def _run(self) -> Finding:
        target = self._target
        if target.backend != "local" and target.project is None and not self._container_image:
            return Finding(
                State.FAILED,
                "no image can be built for it, for no project is configured",
                "kinetic doctor --run --image NAME, an image that has kinetic's runner in it",
            )
        function = run(
            accelerator="cpu",
            container_image=self._container_image,
            capture_env_vars=["STORAGE_EMULATOR_HOST"],  # the job needs it where this process does
        )(platform.python_version)
        began = time.monotonic()
        times: dict[JobStatus, float] = {}

        def note(status: JobStatus) -> None:
            times.setdefault(status, time.monotonic())

        async with Client(
            backend=target.backend,
            project=target.project,
            zone=target.zone,
            cluster=target.cluster,
            namespace=target.namespace,
            store=target.store,
        ) as client:
            job = await client.submit(function)
            submitted = time.monotonic()
            try:
                value = await job.result(on_status_change=note, stream_logs=False)
            except asyncio.CancelledError:
                with anyio.CancelScope(shield=True):  # a check is cancelled again and again
                    await release(job.cleanup(), what=f"removing {job.job_id}")
                raise
        removed = time.monotonic()
        ended = times.get(JobStatus.SUCCEEDED, removed)
        running = times.get(JobStatus.RUNNING, ended)
        steps = {
            "submitted in": submitted - began,
            "running after": running - submitted,
            "done after": ended - running,
            "removed in": removed - ended,
        }
        words = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in steps.items())
        return Finding(State.OK, f"{words}; it ran Python {value}")
