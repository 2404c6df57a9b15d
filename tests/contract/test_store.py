"""One suite that every store must pass."""

from __future__ import annotations

import asyncio
import io
import os
import time
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio.gcs.http import EMULATOR
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.ports import Store
from kinetic.errors import BackendError, Conflict, NotFound
from kinetic.testing import MemoryStore
from tests.contract.names import HOSTILE
from tests.gcs.server import GcsServer


@pytest.fixture(params=["memory", "directory", "shared directory", "gcs", "fake-gcs-server"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with AsyncExitStack() as stack:
        match request.param:
            case "memory":
                made: Store = MemoryStore()
            case "directory":
                made = DirectoryStore(tmp_path / "s")
            case "shared directory":
                made = DirectoryStore(tmp_path / "s", shared=True)
            case "gcs":
                server = await stack.enter_async_context(GcsServer())
                made = GcsStore("gs://kn-test", {EMULATOR: server.url})
            case _:
                url = request.getfixturevalue("fake_gcs")
                made = GcsStore(f"gs://kn-test/{uuid.uuid4()}", {EMULATOR: url})
        yield made
        await made.aclose()


async def test_an_object_is_created_once(store: Store) -> None:
    assert await store.create("a", b"first", {"k": "v"})
    assert not await store.create("a", b"second")
    stored = await store.get("a")
    assert (stored.body, dict(stored.metadata)) == (b"first", {"k": "v"})
    assert [info.generation for info in await store.list("a")] == [stored.generation]


async def test_content_that_fails_its_check_is_never_there(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(1 << 21))

    def refuse() -> None:
        raise BackendError("it has changed")

    with pytest.raises(BackendError, match="it has changed"):
        await store.create("a", path, check=refuse)
    assert await store.look("a") is None
    assert await store.create("a", path, check=lambda: None)


@pytest.mark.parametrize("size", [10, 400_000])
async def test_the_end_of_an_object_is_read_without_the_rest(store: Store, size: int) -> None:
    content = bytes(range(10)) * (size // 10)
    await store.create("a", content, {"k": "v"})
    stored = await store.get("a", start=size - 7)
    assert (stored.body, dict(stored.metadata)) == (content[-7:], {"k": "v"})
    assert (await store.get("a", start=size - 7, limit=7)).body == content[-7:]


@pytest.mark.parametrize("name", HOSTILE)
async def test_any_name_comes_back_as_it_was(store: Store, name: str) -> None:
    assert await store.create(name, name.encode(), {"name": "é"})
    assert (await store.get(name)).body == name.encode()
    assert [info.name for info in await store.list("")] == [name]
    await store.delete([name])
    assert await store.list("") == []


async def test_of_fifty_creators_one_wins(store: Store) -> None:
    bodies = [bytes([number]) * 1000 for number in range(50)]
    created = await asyncio.gather(*(store.create("race", body) for body in bodies))
    assert created.count(True) == 1
    assert (await store.get("race")).body == bodies[created.index(True)]


@pytest.mark.parametrize("size", [0, 1, 300_000])
async def test_content_of_any_size(store: Store, tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    source = tmp_path / "source"
    source.write_bytes(content)
    await store.create("bytes", content, {"m": "1"})
    await store.create("file", source)
    for name in ("bytes", "file"):
        assert (await store.get(name)).body == content
        await store.fetch(name, tmp_path / f"copy of {name}")
        assert (tmp_path / f"copy of {name}").read_bytes() == content
    assert {info.name: info.size for info in await store.list("")} == {"bytes": size, "file": size}


async def test_a_listing_is_sorted_and_has_metadata(store: Store) -> None:
    for name in ("b/2", "b/10", "a", "bc", "b/1/x"):
        await store.create(name, b"", {"n": name})
    assert [info.name for info in await store.list("b/")] == ["b/1/x", "b/10", "b/2"]
    assert [info.name for info in await store.list("b")] == ["b/1/x", "b/10", "b/2", "bc"]
    assert [stored.metadata["n"] for stored in await store.list("b/1")] == ["b/1/x", "b/10"]
    assert await store.list("nothing/") == []


async def test_many_objects_are_read_at_once_and_missing_ones_left_out(store: Store) -> None:
    names = [f"of/{number}" for number in range(120)]
    for number, name in enumerate(names):
        await store.create(name, b"x" * (number % 2 * number), {"n": str(number)})
    found = await store.get_many(["missing", *names])
    assert [*sorted(found)] == sorted(names)
    for name in (names[0], names[51]):
        assert found[name] == await store.get(name)
    assert await store.get_many([]) == await store.get_many(["missing"]) == {}


async def test_what_is_missing_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="missing"):
        await store.get("missing")
    with pytest.raises(NotFound, match="missing"):
        await store.fetch("missing", tmp_path / "x")
    with pytest.raises(NotFound):
        await store.replace("missing", b"", generation=1)
    await store.delete(["missing"])


async def test_only_the_known_generation_is_replaced(store: Store) -> None:
    await store.create("lease", b"1", {"gone": "after"})
    first = (await store.get("lease")).generation
    second = await store.replace("lease", b"2", generation=first)
    assert second > first
    with pytest.raises(Conflict):
        await store.replace("lease", b"x", generation=first)
    stored = await store.get("lease")
    assert (stored.body, stored.generation) == (b"2", second)


async def test_begin_returns_the_generation_for_a_replacement(store: Store) -> None:
    first = await store.begin("lease", b"1")
    assert first is not None
    assert await store.begin("lease", b"x") is None
    second = await store.replace("lease", b"2", generation=first)
    stored = await store.get("lease")
    assert (stored.body, stored.generation) == (b"2", second)
    generations = await asyncio.gather(
        *(store.begin("race", bytes([number])) for number in range(20))
    )
    winners = [number for number, generation in enumerate(generations) if generation is not None]
    stored = await store.get("race")
    assert [(bytes([number]), generations[number]) for number in winners] == [
        (stored.body, stored.generation)
    ]


async def test_of_many_replacers_of_a_generation_one_wins(store: Store) -> None:
    await store.create("lease", b"")
    first = (await store.get("lease")).generation

    async def replace(number: int) -> bool:
        try:
            await store.replace("lease", bytes([number]), generation=first)
        except Conflict:
            return False
        return True

    assert (await asyncio.gather(*map(replace, range(20)))).count(True) == 1


async def test_a_deleted_name_is_free_again(store: Store) -> None:
    await store.create("a/b", b"1")
    await store.delete(["a/b", "a/b"])
    assert await store.create("a/b", b"2")


async def test_look_returns_what_a_listing_says_of_the_object(store: Store) -> None:
    assert await store.look("a") is None
    await store.create("ab", b"longer")
    assert await store.look("a") is None, "a look doesn't match prefixes"
    await store.create("a", b"one", {"k": "v"})
    assert [await store.look("a")] == [info for info in await store.list("a") if info.name == "a"]


@pytest.mark.parametrize("size", [1, 2_000_000])
async def test_what_is_shared_tells_when_it_was_made(store: Store, size: int) -> None:
    before = time.time()
    assert await store.create("code/a", bytes(size), {"k": "v"}, shared=True)
    assert not await store.create("code/a", b"", shared=True)
    stored = await store.look("code/a")
    assert stored is not None
    assert stored.used == pytest.approx((before + time.time()) / 2, abs=10)
    assert [info.used for info in await store.list("code/")] == [stored.used]
    assert (stored.size, dict(stored.metadata)) == (size, {"k": "v"})


@pytest.mark.parametrize("count", [1, 5, 120])
async def test_what_is_renewed_is_the_same_but_for_its_time(store: Store, count: int) -> None:
    names = [f"data/{number} é%/" for number in range(count)]
    for name in names:
        await store.create(name, name.encode(), {"n": name}, shared=True)
    before = {info.name: info for info in await store.list("data/")}
    await asyncio.sleep(0.02)  # longer than the resolution: milliseconds or kernel ticks
    assert await store.renew([*names, "data/missing"]) == {"data/missing"}
    for stored in await store.list("data/"):
        was = before[stored.name]
        assert stored.used is not None and was.used is not None and stored.used > was.used
        assert replace(stored, used=was.used, metageneration=was.metageneration) == was
    assert (await store.get(names[0])).body == names[0].encode()
    assert await store.renew([]) == set()
    assert await store.renew(["nobody"]) == {"nobody"}


@pytest.mark.parametrize("count", [1, 3, 150])
async def test_what_nobody_has_renewed_since_it_was_listed_is_collected(
    store: Store, count: int
) -> None:
    for number in range(count):
        await store.create(f"code/{number:03}", b"x", shared=True)
    listed = await store.list("code/")
    await asyncio.sleep(0.01)  # longer than the resolution of files and buckets
    await store.renew([listed[0].name])
    assert not await store.collect(listed)
    assert [info.name for info in await store.list("code/")] == [info.name for info in listed]
    assert await store.collect(await store.list("code/"))
    assert await store.list("code/") == []
    assert await store.collect(listed), "objects that no longer exist don't count"
    assert await store.collect([])


async def test_a_renewed_object_is_replaced_and_deleted_as_any(store: Store) -> None:
    await store.create("x", b"1", shared=True)
    generation = (await store.get("x")).generation
    assert await store.renew(["x"]) == set()
    await store.replace("x", b"2", generation=generation)
    await store.delete(["x"])
    assert await store.look("x") is None


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.binary(max_size=100), st.dictionaries(st.text("abc", min_size=1), st.text(), max_size=3))
def test_content_may_look_like_anything(
    tmp_path: Path, content: bytes, metadata: dict[str, str]
) -> None:
    """The directory store tells a header from content that begins like one."""
    objects = DirectoryObjects(tmp_path / "s")
    for start in (b"", b"\x89KNO\r\n\x1a\n"):
        objects.delete(["x"])
        objects.create("x", start + content, metadata)
        assert objects.get("x") == (start + content, metadata)


def test_reading_a_small_object_allocates_no_more_than_its_size(tmp_path: Path) -> None:
    """A client reads the outcome of each job; its limit is 256 KiB."""
    objects = DirectoryObjects(tmp_path / "s")
    objects.create("x", b"content", {"header": "{}"})
    tracemalloc.start()
    try:
        assert objects.read("x", 1 << 18)[1] == b"content"
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_deletion_removes_each_empty_folder_before_it_empties_the_next(tmp_path: Path) -> None:
    """Otherwise, a process that is killed would leave them, and nothing removes them later."""
    objects = DirectoryObjects(tmp_path / "s")
    names = ["a/0/x", "a/0/y", "a/1/x", "b/x"]
    for name in names:
        objects.create(name, b"")

    def interrupted() -> Iterator[str]:
        yield from names
        assert not (tmp_path / "s/a").exists()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        objects.delete(interrupted())
    assert not (tmp_path / "s/b").exists()


@pytest.mark.parametrize("target", ["elsewhere", "absent", "link"])
def test_a_listing_follows_no_link_of_the_directory(tmp_path: Path, target: str) -> None:
    """A link to itself can't even be opened."""
    objects = DirectoryObjects(tmp_path / "s")
    objects.create("a/x", b"")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/y").touch()
    (tmp_path / "s/a/link").symlink_to(tmp_path / ("s/a/link" if target == "link" else target))
    assert objects.list("a/link/") == objects.list("a/link/b/") == []


def test_a_second_try_of_the_same_write_to_a_shared_directory_succeeds(tmp_path: Path) -> None:
    """An NFS client may repeat a request whose reply was lost; then the file is its own."""
    source = tmp_path / "source"
    source.write_bytes(b"content")
    for shared, again in ((False, False), (True, True)):
        objects = DirectoryObjects(tmp_path / f"shared {shared}", shared=shared)
        assert objects.create("a/b/c", source, consume=True)
        assert objects.create("a/b/c", source, consume=True) is again
        assert not objects.create("a/b/c", b"content")


async def test_a_place_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match=r"KINETIC_STORE|check the directory"):
        DirectoryStore(tmp_path / "file" / "s")


async def test_a_cancelled_create_writes_nothing_afterwards(tmp_path: Path) -> None:
    """A cancelled caller removes what it created, so the cancellation must end after the write."""
    store, pipe = DirectoryStore(tmp_path / "store"), tmp_path / "pipe"
    os.mkfifo(pipe)
    creating = asyncio.ensure_future(store.create("a/b", pipe))
    with await asyncio.to_thread(pipe.open, "wb") as feed:  # opens once the store reads it
        creating.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not creating.done()
        feed.write(b"the rest")
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert [info.name for info in await store.list("")] == ["a/b"]


def test_a_part_is_whole_if_the_kernel_reads_only_some_of_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LimitedFile(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(size if size is None or size < 0 else min(size, 3))

    objects = DirectoryObjects(tmp_path)
    objects.create("name", b"0123456789")
    monkeypatch.setattr("io.FileIO", LimitedFile)  # as for more than 2 GiB
    assert objects.get("name", 1, 9)[0] == b"12345678"
    assert objects.get("name", 1, 99)[0] == b"123456789"
