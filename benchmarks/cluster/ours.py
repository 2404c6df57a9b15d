"""kinetic, in this process, as its guide shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.cluster import raw
from benchmarks.cluster.place import CPU, Corner, Place, standing_in

__all__ = ["complete", "one_by_one", "submit"]


@asynccontextmanager
async def _client(place: Place, corner: Corner) -> AsyncIterator[tuple[Any, Any]]:
    import finish

    import kinetic
    from kinetic import aio

    run = kinetic.run(
        accelerator="cpu",
        container_image=place.image,
        cpu=CPU,
        capture_env_vars=[*place.captured],
    )
    function = run(finish.now)
    with standing_in(corner):
        async with aio.Client() as client:
            yield client, function


async def submit(
    place: Place, corner: Corner, jobs: int, warm: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Submit a batch, after another one of one item. Nothing of it runs.

    *warm* is called between the two.

    Returns:
        When it began, and the processor seconds it took here.
    """
    async with _client(place, corner) as (client, function):
        await client.run_async_map(function, [0])
        await asyncio.to_thread(place.until_created, corner, 1)
        warm()
        began, used = time.time(), time.process_time()
        await client.run_async_map(function, range(jobs), max_concurrent=None)
        await asyncio.to_thread(place.until_created, corner, 1 + jobs)
        return began, time.process_time() - used


async def complete(
    place: Place, corner: Corner, jobs: int
) -> tuple[float, list[tuple[float, float, float]], float]:
    """Run a batch, with everything as by default, and clean up.

    Returns:
        When it began; when each function ended, when a bare watch saw its pod end, and when its
        value was here; and when all was removed.
    """
    async with _client(place, corner) as (client, function):
        with raw.watching(place, corner, jobs) as watcher:
            began = time.time()
            batch = await client.run_async_map(function, range(jobs))
            seen = [
                (ended.index, ended.outcome.unwrap(), time.time())
                async for ended in batch.outcomes()
            ]
            pods = await asyncio.wrap_future(watcher)
        await batch.cleanup()
        found = [(ended, pods[index], arrived) for index, ended, arrived in seen]
        return began, found, time.time()


async def one_by_one(
    place: Place, corner: Corner, jobs: int
) -> list[tuple[float, float, float, float]]:
    """One job after the other: when it was called, submitted, had ended, and its value was here."""
    found = []
    async with _client(place, corner) as (client, function):
        for number in range(jobs):
            called = time.time()
            job = await client.submit(function, number)
            submitted = time.time()
            ended = await job.result(cleanup=False)
            found.append((called, submitted, ended, time.time()))
            await job.cleanup()
    return found
