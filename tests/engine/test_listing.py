"""Clients list jobs and read little from the store for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio, configuration, errors
from kinetic._labels import SUBMISSION
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import open_platform
from kinetic.aio.ports import Object, ObjectInfo, Observation, Phase
from kinetic.job_record import utc_now
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform


def add(a: int, b: int) -> int:
    return a + b


@pytest.mark.parametrize("limit", [0, 3, 20, None])
async def test_only_the_handles_that_are_returned_are_read(limit: int | None) -> None:
    platform = memory_platform()
    store = platform.store
    assert isinstance(store, MemoryStore)
    async with aio.Client(platform=platform) as client:
        jobs = [await client.submit(add, 1, number) for number in range(10)]
        batch = await client.run_async_map(add, [(1, number) for number in range(10)])
        await batch.wait()
        for job in jobs:  # a running job would read from the store too
            await job.result(cleanup=False)
    submitted = {job.job_id for job in jobs} | {f"{batch.group_id}-{index}" for index in range(10)}
    async with aio.Client(platform=platform) as other:
        before = store.requests["get"]
        found = await other.list_jobs(limit=limit)
        read = store.requests["get"] - before
        appeared = {
            name: observation.created_at
            for observation in await platform.cluster.find(labels={"app": platform.app})
            if (name := observation.labels.get(SUBMISSION))
        }
    expected = 20 if limit is None else limit
    assert len({job.job_id for job in found} & submitted) == len(found) == expected
    assert [job.created_at for job in found] == sorted(job.created_at for job in found)[::-1]
    # A job that appears in a later second than an older record may have a newer record: it is read.
    oldest = found[-1].created_at[:19] if found else "~"
    assert read <= expected + sum(time[:19] > oldest for time in appeared.values())


class Counts:
    """Count the objects that the listings of a store return."""

    objects = 0

    async def list(self, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = await super().list(prefix)  # type: ignore[misc]
        self.objects += len(found)
        return found


class InMemory(Counts, MemoryStore): ...


class OnDisk(Counts, DirectoryStore): ...


async def test_a_look_at_an_item_reads_nothing_of_the_others() -> None:
    cost: list[int] = []
    for items in (3, 60):
        store = InMemory()
        cluster = MemoryCluster(store, carry_out)
        platform = replace(memory_platform(), store=store, cluster=cluster)
        async with aio.Client(platform=platform) as client:
            batch = await client.run_async_map(add, [(1, number) for number in range(items)])
            await batch.wait()
            while any(seen.phase is not Phase.ENDED for seen in await cluster.find()):
                await asyncio.sleep(0.01)  # a worker that leaves reads from the store too
        async with aio.Client(platform=platform) as other:
            jobs = await other.list_jobs(limit=3)
            before = store.objects
            for job in jobs:
                assert await job.status() is JobStatus.SUCCEEDED
                assert await job.reason() == "" and (await job.estimate()).hours >= 0
            cost.append(store.objects - before)
            assert await (await other.list_jobs(limit=1))[0].result(cleanup=False) > 0
    assert cost[0] == cost[1]


async def test_single_jobs_on_this_machine_are_found_without_a_listing(tmp_path: Path) -> None:
    store = OnDisk(tmp_path / "store")
    local = await open_platform(configuration.resolve(backend="local"))
    async with aio.Client(platform=replace(local, store=store)) as client:
        jobs = [await client.submit(add, 1, number) for number in range(4)]
        for job in jobs:
            await job.wait()
        before = store.objects
        assert {*await client.list_jobs()} == {*jobs}
        assert store.objects == before


class Late(MemoryCluster):
    """A cluster where the items of a batch start long after the batch was created."""

    async def find(self, **wanted: Any) -> list[Observation]:
        return [
            replace(seen, created_at="2999-01-01T00:00:00Z") if "grp-" in seen.name else seen
            for seen in await super().find(**wanted)
        ]


async def test_a_limit_leaves_out_the_oldest_also_where_items_began_late() -> None:
    plain = memory_platform()
    cluster = Late(plain.store, carry_out)
    platform = replace(plain, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(add, [(1, number) for number in range(5)])
        await batch.wait()
        while utc_now() == batch.created_at:
            await asyncio.sleep(0.01)
        jobs = [await client.submit(add, 1, number) for number in range(3)]
        everything = [job.job_id for job in await client.list_jobs()]
        assert {*everything[:3]} == {job.job_id for job in jobs} and len(everything) == 8
        for limit in range(9):
            found = await client.list_jobs(limit=limit)
            assert [job.job_id for job in found] == everything[:limit]


class Crowded(MemoryCluster):
    """A cluster that also runs a hundred jobs of another store."""

    async def find(self, **wanted: Any) -> list[Observation]:
        own = await super().find(**wanted)
        if wanted != {"labels": {"app": "kinetic"}}:
            return own
        names = [f"job-{number:012x}" for number in range(100)]
        return own + [replace(own[0], labels={**own[0].labels, SUBMISSION: name}) for name in names]


class Busy(MemoryStore):
    """A store that records how many reads ran at once."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.peak = 0

    async def get(self, *args: Any, **kwargs: Any) -> Object:
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0)
            return await super().get(*args, **kwargs)
        finally:
            self.running -= 1


async def test_jobs_of_another_store_are_passed_over_side_by_side() -> None:
    store = Busy()
    cluster = Crowded(store, carry_out)
    platform = replace(memory_platform(), store=store, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(add, 1, 2)
        await job.wait()
        assert await client.list_jobs(limit=2) == [job]
    assert store.peak > 16


async def test_a_job_without_a_handle_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    platform = replace(memory_platform(), store=store, cluster=Crowded(store, carry_out))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(add, 1, 2)
        await job.wait()
        assert await client.list_jobs() == [job]
    [warning] = [message for message in caplog.messages if "list omits" in message]
    assert "100" in warning and "job-0000000000" in warning


async def test_listing_includes_jobs_that_the_local_platform_has_forgotten() -> None:
    async with aio.Client(backend="local") as client:
        jobs = [await client.submit(add, 1, number) for number in range(4)]
        for job in jobs:
            await job.wait()
        found = await client.list_jobs(limit=2)
    assert len(found) == 2
    assert {job.job_id for job in found} == {job.job_id for job in jobs[2:]}


async def test_an_item_is_as_old_as_its_last_attempt() -> None:
    platform = memory_platform()
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(divided, [0])
        await batch.wait()
        first = (await batch.job(0)).began_at()
        assert await batch.retry_failed() == 1
        await batch.wait()
    async with aio.Client(platform=platform) as other:
        (listed,) = await other.list_jobs()
        await listed.status()
        assert listed.began_at() > first and listed.created_at == batch.created_at


def divided(by: int) -> float:
    return 1 / by


async def test_a_limit_that_is_none_is_refused() -> None:
    async with aio.Client(backend="local") as client:
        with pytest.raises(errors.ConfigurationError, match="limit"):
            await client.list_jobs(limit=-1)


async def test_a_list_without_items_has_the_newest_single_jobs() -> None:
    async with aio.Client(platform=memory_platform()) as client:
        jobs = [await client.submit(add, 1, number) for number in range(2)]
        await (await client.run_async_map(add, [(1, number) for number in range(5)])).wait()
        assert {*await client.list_jobs(items=False)} == {*jobs}
        assert len(await client.list_jobs(items=False, limit=1)) == 1
        assert len(await client.list_jobs()) == 7
        with pytest.raises(errors.ConfigurationError, match="items"):
            await client.list_jobs(items=1)  # type: ignore[arg-type]
