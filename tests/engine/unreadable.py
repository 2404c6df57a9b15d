"""Script without root's privileges: check how clients treat stored objects with mode 000."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from kinetic import aio, errors
from kinetic.aio.local.store import DirectoryStore
from kinetic.testing import MemoryCluster, carry_out, memory_platform


async def same(x: int) -> int:
    return x


def make_unreadable(root: Path, pattern: str) -> None:
    (path,) = root.glob(pattern)
    path.chmod(0)


async def main(root: Path) -> None:
    store = DirectoryStore(root, shared=True)  # in which claims and outcomes are files
    cluster = MemoryCluster(store, carry_out)
    platform = replace(memory_platform(), store=store, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        batches = [await client.run_async_map(same, range(3)) for _ in range(5)]
        for batch in batches:
            await batch.results(cleanup=False)
        manifest, entry, inputs, outcome, _ = (batch.group_id for batch in batches)
        jobs = [await client.submit(same, number) for number in range(3)]
        for job in jobs:
            await job.wait()
    make_unreadable(root, f"batches/{manifest}/manifest")
    make_unreadable(root, f"groups/{entry}")
    make_unreadable(root, f"batches/{inputs}/inputs/00000000")
    make_unreadable(root, f"batches/{outcome}/attempts/*/00000001.0001.outcome")
    make_unreadable(root, f"jobs/{jobs[0].job_id}/attempts/*/00000000.0001.outcome")
    make_unreadable(root, f"jobs/{jobs[1].job_id}/handle.json")
    async with aio.Client(platform=platform) as client:
        listed = {batch.group_id for batch in await client.list_batches()}
        assert listed == {outcome, batches[-1].group_id}, listed
        found = {job.job_id for job in await client.list_jobs()}
        assert found >= {jobs[0].job_id, jobs[2].job_id}, found
        assert jobs[1].job_id not in found
        batch = await client.attach_batch(outcome)
        first, second, third = await batch.results(cleanup=False, return_exceptions=True)
        assert (first, third) == (0, 2)
        assert isinstance(second, errors.KineticError), second
        assert await (await client.attach(jobs[2].job_id)).result() == 2


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
