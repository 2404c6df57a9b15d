"""Test that shared objects are renewed while in use, so that deletion by age can't break jobs."""

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
from kinetic.aio import _shared_objects
from kinetic.aio._preparing import data_upload
from kinetic.aio._shared_objects import DAY_S, RENEW_AFTER_S
from kinetic.aio.gcs.http import EMULATOR
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.platforms import Platform
from kinetic.data import Data
from kinetic.errors import NotFound
from kinetic.testing import MemoryCluster, Run
from kinetic.testing.platform import MemoryImages
from tests.data.conftest import MakeTree
from tests.data.watched import BIG, Watched
from tests.gcs.server import GcsServer

WEEKS_S = 20 * DAY_S


class AgingStore(Watched):
    """A store whose objects can be made to look older, and can be deleted by age."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.fetched: list[str] = []

    async def fetch(self, name: str, path: Path) -> None:
        self.fetched.append(name)
        await super().fetch(name, path)

    def age(self, seconds: float, prefix: str = "") -> None:
        """Set the last use of all objects below *prefix* to *seconds* ago."""
        used = time.time() - seconds
        for path in self.folder.rglob("*"):
            if path.is_file() and path.relative_to(self.folder).as_posix().startswith(prefix):
                os.utime(path, (used, used))

    async def collect(self, seconds: float, prefix: str = "") -> None:
        """Delete objects not used for *seconds*, like a bucket's lifecycle rule."""
        found = await self.list(prefix)
        await self.delete([info.name for info in found if (info.used or 0) < time.time() - seconds])

    async def used(self) -> dict[str, float]:
        return {info.name: info.used or 0.0 for info in await self.list("")}


@pytest.fixture
def store(tmp_path: Path) -> AgingStore:
    return AgingStore(tmp_path / "store")


async def test_old_data_is_renewed_and_not_sent_again(
    store: AgingStore, make_tree: MakeTree
) -> None:
    data = Data(str(make_tree("tree", {"a": b"1", "big": BIG, "odd\nname": b"3"})))
    await data_upload.upload(store, data)
    store.age(WEEKS_S)
    store.created.clear()
    store.fetched.clear()
    ref = await data_upload.upload(store, data)
    used = await store.used()
    assert min(used.values()) > time.time() - 60
    assert used[ref.uri] == max(used.values()), "the manifest is never older than its files"
    assert store.fetched == [], "the big file is not read back"
    assert [name for name in store.created if "/files/" in name] == []


async def test_a_manifest_without_its_files_is_not_reused(
    store: AgingStore, make_tree: MakeTree
) -> None:
    """A bucket's lifecycle rule may delete objects in any order."""
    data = Data(str(make_tree("tree", {"a": b"1", "b": b"2", "big": BIG})))
    ref = await data_upload.upload(store, data)
    before = {*await store.used()}
    store.age(WEEKS_S)
    store.age(2 * WEEKS_S, f"data/{ref.digest}/files/b")
    await store.collect(1.5 * WEEKS_S)
    assert ref.uri in await store.used()
    assert not await data_upload.renew(store, ref.uri)
    assert await data_upload.upload(store, data) == ref
    assert {*await store.used()} == before
    assert await data_upload.renew(store, ref.uri)


async def test_a_file_that_is_deleted_during_renewal_is_sent(
    store: AgingStore, make_tree: MakeTree
) -> None:
    data = Data(str(make_tree("tree", {"a": b"1", "b": b"2"})))
    ref = await data_upload.upload(store, data)
    store.age(WEEKS_S)
    before = await store.used()

    class DeletingStore(AgingStore):
        async def renew(self, names: Collection[str]) -> set[str]:
            await self.delete({*names} & {f"data/{ref.digest}/files/a"})
            return await super().renew(names)

    await data_upload.upload(DeletingStore(store.folder), data)
    assert {*await store.used()} == {*before}


async def test_files_of_a_fresh_manifest_are_at_most_a_day_older(
    store: AgingStore, make_tree: MakeTree
) -> None:
    """Even a use that renews nothing then finds its files younger than any sensible rule's age."""
    data = Data(str(make_tree("tree", {"a": b"1"})))
    ref = await data_upload.upload(store, data)
    file = f"data/{ref.digest}/files/a"
    await store.delete([ref.uri])
    for age, renewed in ((DAY_S / 2, False), (2 * DAY_S, True)):
        store.age(age)
        await data_upload.upload(store, data)
        assert ((await store.used())[file] > time.time() - 60) is renewed
        await store.delete([ref.uri])


def nothing() -> None:
    pass


KEY = bytes(32)


async def idle(run: Run) -> None:
    """Run a job that never ends by itself."""
    await asyncio.Event().wait()


@pytest.fixture
def platform(store: AgingStore) -> Platform:
    cluster = MemoryCluster(store, idle, key=KEY)
    return Platform(store=store, images=MemoryImages(), cluster=cluster)


@pytest.fixture
async def client(platform: Platform) -> AsyncIterator[aio.Client]:
    async with aio.Client(platform=platform) as client:
        yield client


async def test_each_submission_renews_or_uploads_code_and_function(
    store: AgingStore, client: aio.Client, make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_tree("project", {"pyproject.toml": b""}))
    jobs = [await client.submit(nothing)]
    function = next(name for name in await store.used() if name.startswith("functions/"))
    for age in (RENEW_AFTER_S / 2, 2 * RENEW_AFTER_S):
        store.age(age)
        store.created.clear()
        assert not await _shared_objects.ensure(store, function, (await store.get(function)).body)
        assert ((await store.used())[function] > time.time() - 60) is (age > RENEW_AFTER_S)
        jobs.append(await client.submit(nothing))
        assert [name for name in store.created if not name.startswith("jobs/")] == []
        # A store in a directory has a size limit, so a submission renews what its manifest names.
        assert (await store.used())[function] > time.time() - 60
    store.age(2 * WEEKS_S)
    await store.collect(WEEKS_S)
    jobs.append(await client.submit(nothing))
    assert function in await store.used()
    for job in jobs:
        await job.cancel()


async def test_a_batch_whose_function_was_collected_is_not_resumed(
    store: AgingStore, platform: Platform, client: aio.Client
) -> None:
    batch = await client.run_async_map(abs, [1, 2])
    await batch.submitted()
    async with aio.Client(platform=platform) as other:
        await client.aclose()
        await platform.cluster.keep_secret(batch.group_id, b"{}")
        store.age(2 * WEEKS_S, "functions/")
        attached = await other.attach_batch(batch.group_id)
        await attached.resume(force=True)
        assert all(used > time.time() - 60 for used in (await store.used()).values())
        await attached.detach()
    await store.delete([name for name in await store.used() if name.startswith("functions/")])
    async with aio.Client(platform=platform) as other:
        attached = await other.attach_batch(batch.group_id)
        with pytest.raises(NotFound, match=r"functions of grp-\S+ .*has removed it"):
            await attached.resume(force=True)


async def test_a_submission_takes_four_writes_and_later_ones_two(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_tree("project", {"pyproject.toml": b"", "acts.py": b"def act(): pass\n"})
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    act = importlib.import_module("acts").act
    monkeypatch.delitem(sys.modules, "acts")
    async with GcsServer() as server:
        bucket = GcsStore("gs://kn-test", {EMULATOR: server.url})
        cluster = MemoryCluster(bucket, idle)
        platform = Platform(store=bucket, images=MemoryImages(), cluster=cluster)
        async with aio.Client(platform=platform) as client:
            # The code and the function are looked for once, also by submissions at the same time.
            for jobs, looks in ((3, 2), (1, 0)):
                server.requests.clear()
                await asyncio.gather(*(client.submit(act) for _ in range(jobs)))
                requests = server.requests
                assert requests["create"] + requests["begin"] == looks + 2 * jobs
                assert requests["metadata"] == looks and requests["renew"] == 0
            for stored in server.objects.values():
                stored.custom_time = stored.custom_time and "2020-01-01T00:00:00Z"
        bucket = GcsStore("gs://kn-test", {EMULATOR: server.url})
        platform = Platform(store=bucket, images=MemoryImages(), cluster=cluster)
        async with aio.Client(platform=platform) as client:
            server.requests.clear()
            await client.submit(act)
            assert server.requests["renew"] == 2
