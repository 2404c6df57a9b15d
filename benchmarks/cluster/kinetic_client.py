"""The contender kinetic: it runs in this process and uses the API as the guide shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.cluster.servers import CPU, Cluster, Workspace, environment_for


@asynccontextmanager
async def _client(cluster: Cluster, workspace: Workspace) -> AsyncIterator[tuple[Any, Any]]:
    """Open a client for *workspace*; yield it and the remote function of all jobs."""
    import finish

    import kinetic
    from kinetic import aio

    run = kinetic.run(
        accelerator="cpu",
        container_image=cluster.image,
        cpu=CPU,
        capture_env_vars=[*cluster.captured_variables],
    )
    function = run(finish.now)
    with environment_for(workspace):
        async with aio.Client() as client:
            yield client, function


async def submit(
    cluster: Cluster, workspace: Workspace, jobs: int, warm: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Submit *jobs* single jobs at once while the scheduler stands still, after another job.

    *warm* is called before the jobs that count.

    Returns:
        When their submission started, and the processor seconds that it took in this process.
    """
    async with _client(cluster, workspace) as (client, function):
        await client.submit(function, 0)
        warm()
        started_at, cpu_before = time.time(), time.process_time()
        await asyncio.gather(*(client.submit(function, number) for number in range(jobs)))
        return started_at, time.process_time() - cpu_before


async def complete(
    cluster: Cluster, workspace: Workspace, items: int, workers: int
) -> tuple[float, list[tuple[float, float]], float]:
    """Run a batch by *workers*, and clean up.

    Returns:
        When it started; when each function ended, and when its value arrived; and when all objects
        were removed.
    """
    async with _client(cluster, workspace) as (client, function):
        started_at = time.time()
        batch = await client.run_async_map(function, range(items), max_concurrent=workers)
        moments = [
            (completion.outcome.unwrap(), time.time()) async for completion in batch.outcomes()
        ]
        await batch.cleanup()
        return started_at, moments, time.time()


async def one_by_one(
    cluster: Cluster, workspace: Workspace, jobs: int
) -> list[tuple[float, float, float, float]]:
    """Run one job after the other.

    Returns:
        When each job was called, was submitted, and ended, and when its value arrived.
    """
    moments = []
    async with _client(cluster, workspace) as (client, function):
        for number in range(jobs):
            called = time.time()
            job = await client.submit(function, number)
            submitted = time.time()
            ended = await job.result(cleanup=False)
            moments.append((called, submitted, ended, time.time()))
            await job.cleanup()
    return moments
