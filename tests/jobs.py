"""Jobs that run a stand-in of the runner, and ways to wait for what a cluster reports of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kinetic.aio.ports import Cluster, Image, JobSpec, Observation, Phase, Resources
from tests.orders import order_of

DEADLINE_S = 60.0
"""How many seconds a step may take on a busy machine."""


def job_spec(name: str, facts: dict[str, Any], *, grace: float = 0.2, **changes: Any) -> JobSpec:
    """Make a job whose order tells a stand-in these *facts*."""
    spec = JobSpec(
        name=name,
        labels={"test": "yes", "name": name},
        image=Image(uri="", command=(sys.executable,)),
        order=order_of(facts),
        environment={"PATH": os.environ["PATH"]},
        key=b"k" * 32,
        resources=Resources(),
    )
    spec = replace(spec, **changes)
    return replace(spec, order=replace(spec.order, grace=grace))


async def eventually(condition: Callable[[], Any]) -> Any:
    """Poll *condition* until it is true, and return its value."""
    async with asyncio.timeout(DEADLINE_S):
        while not (result := condition()):
            await asyncio.sleep(0.01)
    return result


@asynccontextmanager
async def watching(
    cluster: Cluster, labels: Mapping[str, str] | None = None
) -> AsyncGenerator[AsyncIterator[Observation]]:
    """Open a watch, by default of all jobs of tests, and close it at the end of the block."""
    watch = cluster.watch({"test": "yes"} if labels is None else labels)
    try:
        yield watch
    finally:
        await watch.aclose()  # type: ignore[attr-defined]


async def until(
    cluster: Cluster,
    name: str,
    *phases: Phase,
    labels: Mapping[str, str] | None = None,
    after: Observation | None = None,
) -> Observation:
    """Return the first observation of the job in one of *phases*; by default, one of its end.

    Skip the executor of *after*, an earlier job with this name that a watch may still report.
    """
    wanted = phases or (Phase.ENDED, Phase.GONE)
    async with asyncio.timeout(DEADLINE_S), watching(cluster, labels) as watch:
        async for seen in watch:
            if after is not None and seen.executor == after.executor:
                continue
            if seen.name == name and seen.phase in wanted:
                return seen
    raise AssertionError("a watch never ends")


async def gone(cluster: Cluster, *names: str) -> None:
    """Wait until these jobs no longer exist."""
    async with asyncio.timeout(DEADLINE_S):
        while await cluster.find(names=names):
            await asyncio.sleep(0.02)


async def names(cluster: Cluster, **labels_or_names: Any) -> list[str]:
    """Return the sorted names of the jobs that match."""
    return sorted(seen.name for seen in await cluster.find(**labels_or_names))


async def lines(cluster: Cluster, name: str, **options: Any) -> list[str]:
    """Read the job's log."""
    async with asyncio.timeout(DEADLINE_S):
        return [line async for line in cluster.logs(name, **options)]
