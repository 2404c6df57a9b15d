"""Shared content is collected by its age, and never from under whoever uses it."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from kinetic import aio
from kinetic.aio._engine import data_upload
from kinetic.aio._shared_objects import DAY_S, RENEWED_S
from kinetic.aio.gcs.http import EMULATOR
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.platforms import Platform
from kinetic.data import Data
from kinetic.errors import NotFound
from kinetic.testing import MemoryCluster, Run
from kinetic.testing.platform import MemoryImages
from tests.data.conftest import Plant
from tests.data.watched import BIG, Watched
from tests.gcs.server import GcsServer

WEEKS_S = 20 * DAY_S


class Place(Watched):
    """A store whose objects can be made older than they are, and collected by their age."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.fetched: list[str] = []

    async def fetch(self, name: str, path: Path) -> None:
        self.fetched.append(name)
        await super().fetch(name, path)

    def age(self, seconds: float, prefix: str = "") -> None:
        """All below *prefix* was used so long ago."""
        then = time.time() - seconds
        for path in self.folder.rglob("*"):
            if path.is_file() and path.relative_to(self.folder).as_posix().startswith(prefix):
                os.utime(path, (then, then))

    async def collect(self, seconds: float, prefix: str = "") -> None:
        """As a lifecycle rule does: what was used before that."""
        there = await self.list(prefix)
        await self.delete([one.name for one in there if (one.used or 0) < time.time() - seconds])

    async def used(self) -> dict[str, float]:
        return {one.name: one.used or 0.0 for one in await self.list("")}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


async def test_what_is_old_is_renewed_and_not_sent_again(place: Place, plant: Plant) -> None:
    data = Data(str(plant("tree", {"a": b"1", "big": BIG, "odd\nname": b"3"})))
    await data_upload.upload(place, data)
    place.age(WEEKS_S)
    place.created.clear()
    place.fetched.clear()
    ref = await data_upload.upload(place, data)
    used = await place.used()
    assert min(used.values()) > time.time() - 60
    assert used[ref.uri] == max(used.values()), "the manifest is never older than what it names"
    assert place.fetched == [], "the big one is not read back"
    assert [name for name in place.created if "/files/" in name] == []


async def test_a_manifest_that_outlived_its_data_is_not_believed(
    place: Place, plant: Plant
) -> None:
    """A bucket's rule deletes objects one by one, in any order and at any time."""
    data = Data(str(plant("tree", {"a": b"1", "b": b"2", "big": BIG})))
    ref = await data_upload.upload(place, data)
    before = {*await place.used()}
    place.age(WEEKS_S)
    place.age(2 * WEEKS_S, f"data/{ref.digest}/files/b")
    await place.collect(1.5 * WEEKS_S)
    assert ref.uri in await place.used()
    assert not await data_upload.renew(place, ref.uri)
    assert await data_upload.upload(place, data) == ref
    assert {*await place.used()} == before
    assert await data_upload.renew(place, ref.uri)


async def test_a_file_that_goes_while_it_is_renewed_is_sent(place: Place, plant: Plant) -> None:
    data = Data(str(plant("tree", {"a": b"1", "b": b"2"})))
    ref = await data_upload.upload(place, data)
    place.age(WEEKS_S)
    whole = await place.used()

    class Collected(Place):
        async def renew(self, names: Collection[str]) -> set[str]:
            await self.delete({*names} & {f"data/{ref.digest}/files/a"})
            return await super().renew(names)

    await data_upload.upload(Collected(place.folder), data)
    assert {*await place.used()} == {*whole}


async def test_files_of_a_fresh_manifest_are_at_most_a_day_older(
    place: Place, plant: Plant
) -> None:
    """So what is used unseen is younger than any sensible rule allows."""
    data = Data(str(plant("tree", {"a": b"1"})))
    ref = await data_upload.upload(place, data)
    file = f"data/{ref.digest}/files/a"
    await place.delete([ref.uri])
    for age, renewed in ((DAY_S / 2, False), (2 * DAY_S, True)):
        place.age(age)
        await data_upload.upload(place, data)
        assert ((await place.used())[file] > time.time() - 60) is renewed
        await place.delete([ref.uri])


def nothing() -> None:
    pass


KEY = bytes(32)


async def idle(run: Run) -> None:
    """A job that never ends by itself."""
    await asyncio.Event().wait()


@pytest.fixture
async def client(place: Place) -> AsyncIterator[aio.Client]:
    platform = Platform(
        store=place, images=MemoryImages(), cluster=MemoryCluster(place, idle, key=KEY)
    )
    async with aio.Client(platform=platform) as client:
        yield client


async def test_each_submission_finds_code_and_function_or_brings_them(
    place: Place, client: aio.Client, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plant("project", {"pyproject.toml": b""}))
    jobs = [await client.submit(nothing)]
    function = next(name for name in await place.used() if name.startswith("functions/"))
    for age in (RENEWED_S / 2, 2 * RENEWED_S):
        place.age(age)
        place.created.clear()
        jobs.append(await client.submit(nothing))
        assert [name for name in place.created if not name.startswith("jobs/")] == []
        assert ((await place.used())[function] > time.time() - 60) is (age > RENEWED_S)
    place.age(2 * WEEKS_S)
    await place.collect(WEEKS_S)
    jobs.append(await client.submit(nothing))
    assert function in await place.used()
    for job in jobs:
        await job.cancel()


async def test_a_batch_whose_function_was_collected_is_not_resumed(
    place: Place, client: aio.Client
) -> None:
    batch = await client.run_async_map(abs, [1, 2])
    await batch.submitted()
    platform = Platform(
        store=place, images=MemoryImages(), cluster=MemoryCluster(place, idle, key=KEY)
    )
    async with aio.Client(platform=platform) as other:
        await client.aclose()
        await platform.cluster.keep_secret(batch.group_id, b"{}")
        place.age(2 * WEEKS_S, "functions/")
        found = await other.attach_batch(batch.group_id)
        await found.resume(force=True)
        assert all(used > time.time() - 60 for used in (await place.used()).values())
        await found.detach()
    await place.delete([name for name in await place.used() if name.startswith("functions/")])
    async with aio.Client(platform=platform) as other:
        found = await other.attach_batch(batch.group_id)
        with pytest.raises(NotFound, match=r"functions of grp-\S+ .*collected by its age"):
            await found.resume(force=True)


async def test_a_submission_takes_four_writes_and_a_second_one_two(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = plant("project", {"pyproject.toml": b"", "acts.py": b"def act(): pass\n"})
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    act = importlib.import_module("acts").act
    monkeypatch.delitem(sys.modules, "acts")
    async with GcsServer() as server:
        store = GcsStore("gs://kn-test", {EMULATOR: server.url})
        platform = Platform(store=store, images=MemoryImages(), cluster=MemoryCluster(store, idle))
        async with aio.Client(platform=platform) as client:
            for writes in (4, 2):
                server.requests.clear()
                job = await client.submit(act)
                assert server.requests["create"] + server.requests["begin"] == writes
                assert server.requests["renew"] == 0
                await job.cancel()
            for stored in server.objects.values():
                stored.custom_time = stored.custom_time and "2020-01-01T00:00:00Z"
            await client.submit(act)
            assert server.requests["renew"] == 2
