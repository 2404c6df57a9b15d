"""``kinetic gc`` removes what nothing needs any more from a store: a directory or a bucket."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic._runner.protocol import wire
from kinetic.aio import _shared_objects
from kinetic.aio.gcs.http import EMULATOR
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Object, Store
from kinetic.sweeps import Choice, GridSearch
from kinetic.testing import MemoryCluster, carry_out, memory_platform
from tests.gcs.server import GcsServer

SHARED = {"store/code", "store/functions", "store/data"}


@dataclass
class Stores:
    """A store, that of image builds, and a function that makes their objects some days old."""

    store: Store
    builds: Store
    age: Callable[[float], None]

    def platform(self, work: Any = carry_out) -> Platform:
        cluster = MemoryCluster(self.store, work)
        return replace(
            memory_platform(),
            store=self.store,
            cluster=cluster,
            builds=self.builds,
        )

    async def names(self, prefix: str = "") -> list[str]:
        return [stored.name for stored in await self.store.list(prefix)]


@pytest.fixture(params=["directory", "gcs"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with AsyncExitStack() as stack:
        if request.param == "directory":

            def age(days: float) -> None:
                then = time.time() - 24 * 3600 * days
                for path in (tmp_path / "s").rglob("*"):
                    os.utime(path, (then, then), follow_symlinks=False)

            yield Stores(DirectoryStore(tmp_path / "s"), DirectoryStore(tmp_path / "s" / "b"), age)
            return
        server = await stack.enter_async_context(GcsServer())

        def age_bucket(days: float) -> None:
            then = datetime.now(UTC) - timedelta(days=days)
            for stored in server.objects.values():
                stored.time_created = then.isoformat()
                if stored.custom_time:
                    stored.custom_time = then.isoformat(timespec="milliseconds")[:-6] + "Z"
                    stored.metageneration += 1

        opened = [GcsStore(f"gs://kn-test/{name}", {EMULATOR: server.url}) for name in "sb"]
        yield Stores(opened[0], opened[1], age_bucket)
        for store in opened:
            await store.aclose()


def value(*_: object, **parameters: object) -> int:
    return 5


@pytest.fixture
def data(tmp_path: Path) -> kinetic.Data:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a").write_text("words")
    return kinetic.Data(str(tmp_path / "words"))


async def test_what_nothing_refers_to_goes_after_a_day(stores: Stores, data: kinetic.Data) -> None:
    await stores.builds.create("contexts/x.tar.gz", b"context", shared=True)
    async with aio.Client(platform=stores.platform()) as client:
        assert await client.run(value) == 5
        batch = await client.run_async_map(value, [(data,)], retries=0)
        await batch.wait()
        await batch.cleanup()
        assert (await client.collect()).freed == {}, "they were just used"
        stores.age(0.9)
        assert (await client.collect()).freed == {}
        stores.age(1.1)
        freed = (await client.collect()).freed
        assert {*freed} == {*SHARED, "builds/contexts"}
        assert freed["store/data"].files == 2 and freed["store/functions"].size > 10
        assert await stores.names() == []


async def test_what_a_batch_refers_to_stays_until_it_is_collected(
    stores: Stores, data: kinetic.Data
) -> None:
    async with aio.Client(platform=stores.platform()) as client:
        batch = await client.run_async_map(value, [1, 2])
        # The footers of inputs name their Data; single jobs can't have Data on this platform.
        other = await client.run_async_map(value, [(data,), ("x" * 100_000, data)])
        await asyncio.gather(batch.wait(), other.wait())
        assert await batch.results(cleanup=False) == [5, 5]
        stores.age(100)
        kept = {*await stores.names()}
        assert (await client.collect()).freed == {}
        assert kept <= {*await stores.names()}, "workers may say meanwhile that they are done"
        await other.cleanup()
        assert {*(await client.collect()).freed} == {"store/data"}
        assert await batch.results() == [5, 5]
        assert {*(await client.collect()).freed} == SHARED - {"store/data"}
        assert await batch.status_counts() == {"SUCCEEDED": 2}


async def test_what_a_job_that_has_not_ended_refers_to_stays(stores: Stores) -> None:
    gate = asyncio.Event()

    async def waits(run: Any) -> int | None:
        await gate.wait()
        return await carry_out(run)

    async with aio.Client(platform=stores.platform(waits)) as client:
        job = await client.submit(value)
        stores.age(100)
        assert (await client.collect()).freed == {}
        gate.set()
        assert await job.result(cleanup=False) == 5
        assert {*(await client.collect()).freed} == SHARED - {"store/data"}


async def test_what_a_job_reads_that_was_preempted_stays_for_its_next_attempt(
    stores: Stores,
) -> None:
    scope, function = "jobs/job-000000000000/", "functions/abc.pkl"
    lost = wire.Outcome(kind=wire.Kind.LOST, reason="preempted")
    async with aio.Client(platform=stores.platform()) as client:
        await stores.store.create(function, b"x", shared=True)
        await stores.store.create(f"{scope}handle.json", json.dumps([function]).encode())
        for attempt, outcome in enumerate((lost, wire.Outcome(kind=wire.Kind.VALUE)), start=1):
            stores.age(100)
            assert (await client.collect()).freed == {}
            name = wire.attempt_key(scope, 0, attempt, "outcome")
            await stores.store.create(name, b"", outcome.signed(b"k" * 32, scope, 0, attempt))
        stores.age(100)
        assert {*(await client.collect()).freed} == {"store/functions"}


async def test_a_collection_keeps_what_a_new_submission_uses(stores: Stores) -> None:
    """Using a shared object renews it after half a day, and it stays for a day."""
    async with aio.Client(platform=stores.platform()) as client:
        assert await client.run(value) == 5
        stores.age(100)
        _shared_objects.forget(stores.store)  # as ten minutes later
        shared = await stores.names("functions/") + await stores.names("code/")
        collecting = asyncio.create_task(client.collect())
        job = await client.submit(value)
        await collecting
        assert {*shared} <= {*await stores.names()}, "each was renewed or uploaded again"
        assert await job.result() == 5
        stores.age(0.6)
        assert await client.run(value) == 5
        stores.age(0.0)
        assert (await client.collect()).freed == {}


async def test_what_a_process_that_died_left_of_a_batch_goes(stores: Stores) -> None:
    async with aio.Client(platform=stores.platform()) as client:
        batch = await client.run_async_map(value, [1, 2])
        await batch.wait()
        scope = f"batches/{batch.group_id}/"
        left: list[Object] = [
            await stores.store.get(stored.name)
            for stored in await stores.store.list(f"{scope}attempts/")
        ]
        await batch.results()
        for stored in left:  # simulate a process that died after it removed the inputs
            await stores.store.create(stored.name, stored.body, stored.metadata)
        unknown = f"batches/grp-{'0' * 12}/collected"
        await stores.store.create(unknown, b"late")
        starting = f"batches/grp-{'1' * 12}/inputs/00000000"
        await stores.store.create(
            starting.replace("batches", "groups")[: starting.index("/i") - 1], b""
        )
        await stores.store.create(starting, b"early")
        stores.age(1.1)
        freed = (await client.collect()).freed["store/batches"]
        assert freed.files == len(left) + 1
        kinds = {it.removeprefix(scope).partition("/")[0] for it in await stores.names(scope)}
        assert kinds - {"control", "workers"} == {"manifest", "lease", "collected"}
        assert await stores.names(unknown) == [] and await stores.names(starting) == [starting]
        assert await batch.status_counts() == {"SUCCEEDED": 2}


async def test_what_a_client_that_was_killed_left_of_a_job_goes(stores: Stores) -> None:
    """Or what a process of the job has stored after the cleanup."""
    left = [f"jobs/job-{'0' * 12}/{name}" for name in ("attempts/0/0.1.claim", "inputs/00000000")]
    kept = [f"jobs/job-{'1' * 12}/{name}" for name in ("handle.json", "inputs/00000000")]
    others = ["batches/", "jobs/"]  # consoles make such objects, to show folders
    async with aio.Client(platform=stores.platform()) as client:
        for name in (*left, *kept, *others):
            await stores.store.create(name, b"x")
        assert (await client.collect()).freed == {}, "a client may be about to store the manifest"
        stores.age(1.1)
        assert (await client.collect()).freed["store/jobs"].files == len(left)
        assert await stores.names() == sorted([*kept, *others])


async def test_the_name_of_a_sweep_goes_after_its_last_batch(stores: Stores) -> None:
    async with aio.Client(platform=stores.platform()) as client:
        for name in ("kept", "removed"):
            search = GridSearch({"x": Choice([1, 2])})
            async with await client.sweep(value, search, trials=None, name=name) as sweep:
                await sweep.wait()
        names = await stores.names("sweeps/")
        assert len(names) == 2 and "store/sweeps" not in (await client.collect()).freed
        await sweep.batch.cleanup()
        assert (await client.collect()).freed["store/sweeps"].files == 1
        (kept,) = await stores.names("sweeps/")
        assert b'"kept"' in (await stores.store.get(kept)).body
