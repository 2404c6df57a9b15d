"""The store's requests, names, closing, and event loops."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic.aio import _lease
from kinetic.aio.gcs.http import EMULATOR, Location
from kinetic.aio.gcs.store import GcsStore
from kinetic.errors import BackendError, ConfigurationError
from tests import programs
from tests.gcs.conftest import QUICK
from tests.gcs.server import GcsServer, Stored

ROOT = Path(__file__).parents[2]


async def test_what_each_operation_costs(
    server: GcsServer, store: GcsStore, tmp_path: Path
) -> None:
    """Count requests; the JSON API has none that returns metadata and content together."""

    async def cost(operation: Awaitable[object]) -> dict[str, int]:
        server.requests.clear()
        await operation
        return dict(server.requests)

    assert await cost(store.create("a", b"x" * 1000, {"k": "v"})) == {"create": 1}
    assert await cost(store.create("a", b"other")) == {"create": 1, "metadata": 1}
    assert await cost(store.create("large", b"x" * 100_000)) == {"begin": 1, "put": 1}
    assert await cost(store.begin("lease", b"1")) == {"create": 1}
    await store.delete(["lease"])
    generation = (await store.get("a")).generation
    assert await cost(store.replace("a", b"y", generation=generation)) == {"create": 1}
    assert await cost(store.get("a")) == {"metadata": 1, "media": 1}
    await store.create("empty", b"", {"k": "v"})
    assert await cost(store.get("empty")) == {"metadata": 1}
    assert await cost(store.get_many(["empty", "missing"])) == {"batch": 1}
    await store.delete(["empty"])
    assert await cost(store.fetch("a", tmp_path / "a")) == {"metadata": 1, "media": 1}
    assert await cost(store.list("")) == {"list": 1}
    assert await cost(store.look("a")) == {"metadata": 1}
    assert await cost(store.renew(["a"])) == {"renew": 1}
    assert await cost(store.renew([])) == {}
    assert await cost(store.delete(["a"])) == {"delete": 1}
    assert await cost(store.delete([])) == {}
    server.objects = {f"n/{number:04}": Stored(b"", {}, 1) for number in range(2500)}
    assert await cost(store.list("n/")) == {"list": 3}
    names = [*server.objects][:150]
    assert await cost(store.renew(names)) == {"renew": 150}
    assert await cost(store.get_many(names)) == {"batch": 2}
    assert await cost(store.delete(names)) == {"batch": 2}
    assert len(server.objects) == 2350


async def test_a_lease_takes_one_request_to_make_and_one_to_renew(
    server: GcsServer, store: GcsStore
) -> None:
    """The answer to the creation has the generation that the first renewal needs."""
    hold = await _lease.begin(store, "batches/b/", time.monotonic)
    await hold.renew()
    await hold.renew()
    assert dict(server.requests) == {"create": 3}


async def test_a_listing_of_many_pages_is_sorted_and_whole(
    server: GcsServer, store: GcsStore
) -> None:
    names = [f"{'%é🙂'[number % 3]}/{number}" for number in range(2500)]
    location = Location("kn-test", "")
    server.objects = {
        location.object_name(name): Stored(b"x" * (number % 7), {"n": name}, number + 1)
        for number, name in enumerate(names)
    }
    listed = await store.list("")
    assert [found.name for found in listed] == sorted(names)
    assert all(found.metadata == {"n": found.name} for found in listed)
    assert sum(found.size for found in listed) == sum(number % 7 for number in range(2500))
    assert server.requests["list"] == 3


async def test_metadata_is_what_was_given_and_nothing_else(store: GcsStore) -> None:
    await store.create("bare", b"")
    await store.create("large", b"x" * 100_000, {"é": "ü", "empty": ""})
    listed = await store.list("")
    assert [dict(found.metadata) for found in listed] == [{}, {"é": "ü", "empty": ""}]
    assert dict((await store.get("large")).metadata) == {"é": "ü", "empty": ""}


async def test_only_shared_objects_have_a_custom_time(server: GcsServer, store: GcsStore) -> None:
    """A lifecycle rule on that time deletes no other objects, whatever their names."""
    for size in (10, 100_000):
        await store.create(f"jobs/{size}", b"x" * size)
        await store.create(f"code/{size}", b"x" * size, shared=True)
    generation = (await store.get("jobs/10")).generation
    await store.replace("jobs/10", b"", generation=generation)
    timed = {name for name, stored in server.objects.items() if stored.custom_time}
    assert timed == {"code/10", "code/100000"}


@pytest.mark.parametrize("count", [1, 20])
async def test_renewing_keeps_a_later_time_set_by_a_client_whose_clock_is_ahead(
    server: GcsServer, store: GcsStore, count: int
) -> None:
    names = [f"code/{number}" for number in range(count)]
    for name in names:
        await store.create(name, b"", shared=True)
    server.objects[names[0]].custom_time = "2999-01-01T00:00:00Z"
    assert await store.renew([*names, "missing"]) == {"missing"}
    assert server.objects[names[0]].custom_time == "2999-01-01T00:00:00Z"


@pytest.mark.parametrize("count", [3, 20])
async def test_collect_keeps_objects_that_were_renewed_or_recreated_since_the_listing(
    server: GcsServer, store: GcsStore, count: int
) -> None:
    """The server checks preconditions when it deletes."""
    names = [f"data/{number:02}" for number in range(count)]
    for name in names:
        await store.create(name, b"", shared=True)
    listed = await store.list("data/")
    await asyncio.sleep(0.01)
    await store.renew(names[1:2])
    await store.delete(names[2:3])
    await store.create(names[2], b"", shared=True)
    assert not await store.collect(listed)
    assert {*server.objects} == {*names[1:3]}


async def test_a_folder_is_a_separate_store(server: GcsServer) -> None:
    environ = {EMULATOR: server.url.removeprefix("http://")}
    folder = GcsStore("gs://kn-test/of/mine/", environ)
    whole = GcsStore("gs://kn-test", environ)
    assert (folder.url, whole.url) == ("gs://kn-test/of/mine", "gs://kn-test")
    await whole.create("other", b"")
    await folder.create("x", b"1")
    assert [found.name for found in await folder.list("")] == ["x"]
    assert [found.name for found in await whole.list("")] == ["of/mine/x", "other"]
    await folder.delete(["x"])
    await folder.aclose()
    await whole.aclose()


@pytest.mark.parametrize("url", ["gs://", "gs:///x", "gs://Upper", "s3://bucket", "bucket", "gs:b"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="gs://BUCKET"):
        GcsStore(url, {})


async def test_the_longest_name_works_and_a_longer_one_is_refused(store: GcsStore) -> None:
    name = "é" * 512
    assert await store.create(name, b"")
    assert [found.name for found in await store.list("é")] == [name]
    with pytest.raises(BackendError, match="1025 bytes"):
        await store.create(f"{name}x", b"")


@given(st.text(max_size=60), st.integers(0, 60), st.sampled_from(["", "folder/"]))
def test_every_name_has_an_object_name_that_the_service_takes(
    name: str, cut: int, folder: str
) -> None:
    location = Location("bucket", folder)
    full = location.object_name(name)
    assert location.name(full) == name
    assert full.startswith(location.object_name(name[:cut]))
    own = full.removeprefix(folder)
    assert not re.search("[\x00-\x1f\x7f-\x9f]", full) and not own.startswith(".")


def test_an_object_name_that_no_name_maps_to_is_not_the_stores() -> None:
    location = Location("bucket", "")
    assert location.name("50% of %41") is None
    assert location.name("caf%E9.html") is None
    assert location.name("%2Eplain") == ".plain"


async def test_a_closed_store_says_so_and_pending_requests_fail(
    server: GcsServer,
) -> None:
    store = GcsStore("gs://kn-test", {EMULATOR: server.url}, limits=QUICK)
    server.fail("list", stall=True)
    waiting = asyncio.create_task(store.list(""))
    while not server.requests["list"]:
        await asyncio.sleep(0)
    await store.aclose()
    await store.aclose()
    for operation in (waiting, store.list(""), store.create("x", b"")):
        with pytest.raises(BackendError, match="closed"):
            await operation


@pytest.mark.parametrize("way", ["get", "fetch"])
async def test_a_download_fails_when_the_store_is_closed(
    server: GcsServer, store: GcsStore, tmp_path: Path, way: str
) -> None:
    await store.create("x", b"a" * 3_000_000)
    stalled = server.fail("media", times=10, at=700_000, stall=True)
    download = store.get("x") if way == "get" else store.fetch("x", tmp_path / "copy")
    reading = asyncio.create_task(download)
    while not stalled.seen:
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)  # usually until it reads; it fails either way
    await store.aclose()
    async with asyncio.timeout(60):
        with pytest.raises(BackendError, match="closed"):
            await reading
    assert list(tmp_path.iterdir()) == []


def test_each_loop_has_a_store_and_a_store_one_loop() -> None:
    def elsewhere(store: GcsStore) -> None:
        with pytest.raises(BackendError, match="another event loop"):
            asyncio.run(store.list(""))

    async def use() -> None:
        async with GcsServer() as server:
            store = GcsStore("gs://kn-test", {EMULATOR: server.url})
            assert await store.create("x", b"")
            await asyncio.to_thread(elsewhere, store)
            assert [found.name for found in await store.list("")] == ["x"]
            await store.aclose()

    async def both() -> None:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, use()) for _ in range(2)))

    asyncio.run(use())
    asyncio.run(both())


QUIET = """
import asyncio, gc, sys
sys.path.insert(0, {root!r})
from kinetic.aio.gcs.store import GcsStore
from tests.gcs.server import GcsServer

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60
    async with GcsServer() as server:
        store = GcsStore("gs://kn-test", {{"STORAGE_EMULATOR_HOST": server.url}})
        await asyncio.gather(*(store.create(str(number), b"x") for number in range(20)))
        server.fail("media", stall=True)
        getting = asyncio.create_task(store.get("1"))
        while not server.requests["media"]:
            await asyncio.sleep(0)
        getting.cancel()
        await asyncio.wait({{getting}})
        await store.aclose()

asyncio.run(main())
gc.collect()
"""


def test_closing_the_store_prints_no_warning() -> None:
    code = QUIET.format(root=str(ROOT))
    done = programs.run(sys.executable, *("-W", "error", "-X", "dev", "-c", code))
    assert (done.returncode, done.stderr) == (0, "")
