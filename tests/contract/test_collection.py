"""What ``kinetic gc`` removes from a store, a directory or a bucket: what nobody needs any more."""

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
from kinetic.aio.gcs.http import EMULATOR
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Object, Store
from kinetic.testing import MemoryCluster, carry_out, memory_platform
from tests.gcs.server import GcsServer

SHARED = {"store/code", "store/functions", "store/data"}


@dataclass
class Place:
    """A store, and how everything in it becomes so many days old."""

    store: Store
    builds: Store
    age: Callable[[float], None]

    def platform(self, work: Any = carry_out) -> Platform:
        cluster = MemoryCluster(self.store, work)
        return replace(memory_platform(), store=self.store, cluster=cluster, builds=self.builds)

    async def names(self, prefix: str = "") -> list[str]:
        return [one.name for one in await self.store.list(prefix)]


@pytest.fixture(params=["directory", "gcs"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        if request.param == "directory":

            def age(days: float) -> None:
                then = time.time() - 24 * 3600 * days
                for path in (tmp_path / "s").rglob("*"):
                    os.utime(path, (then, then), follow_symlinks=False)

            yield Place(DirectoryStore(tmp_path / "s"), DirectoryStore(tmp_path / "s" / "b"), age)
            return
        server = await stack.enter_async_context(GcsServer())

        def age_there(days: float) -> None:
            then = datetime.now(UTC) - timedelta(days=days)
            for stored in server.objects.values():
                if stored.custom_time:
                    stored.custom_time = then.isoformat(timespec="milliseconds")[:-6] + "Z"
                    stored.metageneration += 1

        stores = [GcsStore(f"gs://kn-test/{name}", {EMULATOR: server.url}) for name in "sb"]
        yield Place(stores[0], stores[1], age_there)
        for store in stores:
            await store.aclose()


def value(*_: object) -> int:
    return 5


@pytest.fixture
def words(tmp_path: Path) -> kinetic.Data:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a").write_text("words")
    return kinetic.Data(str(tmp_path / "words"))


async def test_what_nothing_refers_to_goes_after_a_day(place: Place, words: kinetic.Data) -> None:
    await place.builds.create("contexts/x.tar.gz", b"context", shared=True)
    async with aio.Client(platform=place.platform()) as client:
        assert await client.run(value) == 5
        batch = await client.run_async_map(value, [(words,)], retries=0)
        await batch.wait()
        await batch.cleanup()
        assert (await client.collect()).freed == {}, "it was just used"
        place.age(0.9)
        assert (await client.collect()).freed == {}
        place.age(1.1)
        done = (await client.collect()).freed
        assert {*done} == {*SHARED, "builds/contexts"}
        assert done["store/data"].files == 2 and done["store/functions"].size > 10
        assert await place.names() == []


async def test_what_a_batch_refers_to_stays_until_it_is_collected(
    place: Place, words: kinetic.Data
) -> None:
    async with aio.Client(platform=place.platform()) as client:
        batch = await client.run_async_map(value, [1, 2])
        # As the footer of an input names its Data; jobs of this platform can have none.
        other = await client.run_async_map(value, [(words,), ("x" * 100_000, words)])
        await asyncio.gather(batch.wait(), other.wait())
        assert await batch.results(cleanup=False) == [5, 5]
        place.age(100)
        kept = await place.names()
        assert (await client.collect()).freed == {}
        assert await place.names() == kept
        await other.cleanup()
        assert {*(await client.collect()).freed} == {"store/data"}
        assert await batch.results() == [5, 5]
        assert {*(await client.collect()).freed} == SHARED - {"store/data"}
        assert await batch.status_counts() == {"SUCCEEDED": 2}


async def test_what_a_job_that_has_not_ended_refers_to_stays(place: Place) -> None:
    gate = asyncio.Event()

    async def waits(run: Any) -> int | None:
        await gate.wait()
        return await carry_out(run)

    async with aio.Client(platform=place.platform(waits)) as client:
        job = await client.submit(value)
        place.age(100)
        assert (await client.collect()).freed == {}
        gate.set()
        assert await job.result(cleanup=False) == 5
        assert {*(await client.collect()).freed} == SHARED - {"store/data"}


async def test_what_a_job_reads_that_was_preempted_stays_for_its_next_attempt(
    place: Place,
) -> None:
    scope, function = "jobs/job-000000000000/", "functions/abc.pkl"
    lost = wire.Outcome(kind=wire.Kind.LOST, reason="preempted")
    async with aio.Client(platform=place.platform()) as client:
        await place.store.create(function, b"x", shared=True)
        await place.store.create(f"{scope}handle.json", json.dumps([function]).encode())
        for attempt, outcome in enumerate((lost, wire.Outcome(kind=wire.Kind.VALUE)), start=1):
            place.age(100)
            assert (await client.collect()).freed == {}
            name = wire.attempt_key(scope, 0, attempt, "outcome")
            await place.store.create(name, b"", outcome.signed(b"k" * 32, scope, 0, attempt))
        place.age(100)
        assert {*(await client.collect()).freed} == {"store/functions"}


async def test_what_a_submission_that_begins_uses_is_not_removed_under_it(place: Place) -> None:
    """It is renewed when it is half a day old, and stays for a day."""
    async with aio.Client(platform=place.platform()) as client:
        assert await client.run(value) == 5
        place.age(100)
        shared = await place.names("functions/") + await place.names("code/")
        collecting = asyncio.create_task(client.collect())
        job = await client.submit(value)
        await collecting
        assert {*shared} <= {*await place.names()}, "renewed, or sent again"
        assert await job.result() == 5
        place.age(0.6)
        assert await client.run(value) == 5
        place.age(0.0)
        assert (await client.collect()).freed == {}


async def test_what_a_process_that_died_left_of_a_batch_goes(place: Place) -> None:
    async with aio.Client(platform=place.platform()) as client:
        batch = await client.run_async_map(value, [1, 2])
        await batch.wait()
        scope = f"batches/{batch.group_id}/"
        left: list[Object] = [
            await place.store.get(one.name) for one in await place.store.list(f"{scope}attempts/")
        ]
        await batch.results()
        for one in left:  # as if it had come to the inputs
            await place.store.create(one.name, one.body, one.metadata)
        gone = f"batches/grp-{'0' * 12}/collected"
        await place.store.create(gone, b"late")
        begun = f"batches/grp-{'1' * 12}/inputs/00000000"
        await place.store.create(begun.replace("batches", "groups")[: begun.index("/i") - 1], b"")
        await place.store.create(begun, b"early")
        place.age(1.1)
        freed = (await client.collect()).freed["store/batches"]
        assert freed.files == len(left) + 1
        there = await place.names(scope)
        assert {one.removeprefix(scope) for one in there} == {"manifest", "lease", "collected"}
        assert await place.names(gone) == [] and await place.names(begun) == [begun]
        assert await batch.status_counts() == {"SUCCEEDED": 2}
