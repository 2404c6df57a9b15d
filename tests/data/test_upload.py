"""Test the upload of data: once, complete, and never other content under its hash."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

import pytest

from kinetic._runner.protocol import manifest
from kinetic.aio._preparing import data_upload
from kinetic.aio.local.store import DirectoryStore
from kinetic.data import Data
from kinetic.errors import DataError
from kinetic.testing import MemoryStore
from tests.data.conftest import Machine, MakeTree
from tests.data.watched import BIG, Watched


@pytest.fixture
def watched(machine: Machine) -> Watched:
    return Watched(machine.store)


async def names(store: DirectoryStore | MemoryStore) -> list[str]:
    return [info.name for info in await store.list("")]


async def test_the_manifest_is_created_after_the_files(
    watched: Watched, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {"a": b"1", "d/b": b"22", "big": BIG}, executable=["d/b"])
    data = Data(str(root))
    reported: list[tuple[int, int]] = []
    ref = await data_upload.upload(watched, data, progress=lambda *counts: reported.append(counts))
    sha = data.content_hash()
    assert (ref.digest, ref.is_dir, ref.mount, ref.fuse) == (sha, True, None, False)
    assert watched.created[-1] == ref.uri
    assert ref.uri.startswith(f"data/{sha}/manifest")
    assert await names(watched) == sorted(
        [f"data/{sha}/files/{path}" for path in ("a", "big", "d/b")] + [ref.uri]
    )
    content = manifest.Manifest.from_bytes((await watched.get(ref.uri)).body)
    assert content.content_hash() == sha
    assert [(entry.path, entry.size, entry.mode) for entry in content.entries] == [
        ("a", 1, 0o644),
        ("big", len(BIG), 0o644),
        ("d/b", 2, 0o755),
    ]
    total = 3 + len(BIG)
    assert reported[-1] == (total, total)
    assert reported == sorted(reported)


@pytest.mark.parametrize("name", ["90%.txt", "tab\there", "x" * 230])
async def test_a_file_that_a_mounted_bucket_would_rename_is_refused(
    make_tree: MakeTree, name: str
) -> None:
    root, store = make_tree("tree", {"a": b"1", f"d/{name}": b"22"}), MemoryStore()
    with pytest.raises(DataError, match="leave out fuse=True"):
        await data_upload.upload(store, Data(str(root), fuse=True))
    assert await names(store) == []
    await data_upload.upload(store, Data(str(root)))


async def test_a_warning_names_an_empty_directory_that_a_mount_lacks(
    make_tree: MakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree("tree", {".hidden": b"1"})
    (root / "empty").mkdir()
    await data_upload.upload(MemoryStore(), Data(str(root), fuse=True))
    assert any("'empty'" in message for message in caplog.messages)


async def test_trees_that_differ_only_in_modes_or_empty_directories_share_files(
    watched: Watched, make_tree: MakeTree
) -> None:
    """The hash ignores modes and empty directories, but the manifest has them."""
    root = make_tree("tree", {"run": b"#!/bin/sh\n"})
    refs = [await data_upload.upload(watched, Data(str(root)))]
    (root / "run").chmod(0o755)
    refs.append(await data_upload.upload(watched, Data(str(root))))
    (root / "empty").mkdir()
    refs.append(await data_upload.upload(watched, Data(str(root))))
    assert len({ref.digest for ref in refs}) == 1
    assert len({ref.uri for ref in refs}) == 3
    assert [name for name in watched.created if "/files/" in name] == [
        f"data/{refs[0].digest}/files/run"
    ]
    manifests = [manifest.Manifest.from_bytes((await watched.get(ref.uri)).body) for ref in refs]
    assert [(found.entries[0].executable, found.empty) for found in manifests] == [
        (False, ()),
        (True, ()),
        (True, ("empty",)),
    ]


async def test_a_uri_is_not_uploaded(watched: Watched) -> None:
    ref = await data_upload.upload(watched, Data("gs://bucket/x/", fuse=True))
    assert (ref.uri, ref.digest, ref.is_dir, ref.fuse) == ("gs://bucket/x/", "", True, True)
    ref = await data_upload.upload(watched, Data("hf://imdb", hf_trust_remote_code=True))
    assert (ref.uri, ref.trust_remote_code) == ("hf://imdb", True)
    assert watched.created == []


async def test_concurrent_uploads_of_a_client_send_data_once(
    watched: Watched, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {f"{i}": b"%d" % i for i in range(50)})
    same = Data(str(root))
    uploads = [data_upload.upload(watched, same) for _ in range(20)]
    uploads += [data_upload.upload(watched, Data(str(root))) for _ in range(20)]
    refs = await asyncio.gather(*uploads)
    assert len(set(refs)) == 1
    assert len(watched.created) == 51


async def test_concurrent_uploads_of_several_clients_succeed(
    store: DirectoryStore, machine: Machine, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {f"{i}": b"%d" % i for i in range(50)} | {"big": BIG})
    clients = [Watched(machine.store) for _ in range(3)]
    refs = await asyncio.gather(
        *(data_upload.upload(client, Data(str(root))) for client in clients)
    )
    assert len(set(refs)) == 1
    assert len(await names(store)) == 52


async def test_when_an_upload_is_cancelled_another_takes_over(
    watched: Watched, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {"a": b"1", "b": b"2"})
    reached, gate = asyncio.Event(), asyncio.Event()

    async def wait(name: str) -> None:
        reached.set()
        await gate.wait()

    watched.before = wait
    data = Data(str(root))
    first = asyncio.create_task(data_upload.upload(watched, data))
    await asyncio.wait_for(reached.wait(), 60)
    second = asyncio.create_task(data_upload.upload(watched, data))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not any("manifest" in name for name in await names(watched))
    gate.set()
    ref = await asyncio.wait_for(second, 60)
    assert ref.uri in await names(watched)


async def test_a_small_file_that_changes_is_never_stored(
    watched: Watched, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {"a": b"1", "b": b"2"})
    data = Data(str(root))
    sha = data.content_hash()
    (root / "b").write_bytes(b"3")
    with pytest.raises(DataError, match=r"tree/b changed since it was hashed") as caught:
        await data_upload.upload(watched, data)
    assert caught.value.path == str(root)
    stored = {info.name: (await watched.get(info.name)).body for info in await watched.list("")}
    assert stored.get(f"data/{sha}/files/b", b"2") == b"2"
    assert not any("manifest" in name for name in stored)


@pytest.mark.parametrize("name", ["a", "big"])
async def test_a_file_that_vanishes_is_an_error(
    watched: Watched, make_tree: MakeTree, name: str
) -> None:
    root = make_tree("tree", {"a": b"1", "big": BIG})
    data = Data(str(root))
    data.content_hash()
    (root / name).unlink()
    with pytest.raises(DataError, match=f"{name} (changed|cannot be read)"):
        await data_upload.upload(watched, data)
    assert not any("manifest" in stored for stored in await names(watched))


async def test_a_big_file_with_a_new_mtime_is_unchanged(
    watched: Watched, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {"big": BIG})
    data = Data(str(root))
    data.content_hash()
    os.utime(root / "big", (1, 1))
    assert (await data_upload.upload(watched, data)).uri in await names(watched)


async def test_a_big_file_that_changes_before_its_upload_is_never_stored(
    watched: Watched, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {"big": BIG})
    data = Data(str(root))
    sha = data.content_hash()
    body = BIG[:-3] + b"BAD"

    async def change(name: str) -> None:
        (root / "big").write_bytes(body)

    watched.before = change
    with pytest.raises(DataError, match="changed since it was hashed"):
        await data_upload.upload(watched, data)
    assert await names(watched) == []
    assert not watched.deletions
    watched.before = None
    (root / "big").write_bytes(BIG)
    ref = await data_upload.upload(watched, Data(str(root)))
    assert ref.digest == sha
    assert (await watched.get(f"data/{sha}/files/big")).body == BIG


async def test_files_that_a_killed_upload_left_are_used(
    watched: Watched, make_tree: MakeTree
) -> None:
    root = make_tree("tree", {"a": b"1", "big": BIG})
    data = Data(str(root))
    sha = data.content_hash()
    await watched.create(f"data/{sha}/files/big", BIG)
    await watched.create(f"data/{sha}/files/a", b"1")
    watched.created.clear()
    ref = await data_upload.upload(watched, data)
    assert watched.created == [ref.uri]


@pytest.mark.skipif(sys.platform == "darwin", reason="names are Unicode there")
async def test_files_whose_names_no_object_can_have(watched: Watched, make_tree: MakeTree) -> None:
    """They are stored under other names; the manifest has the original names."""
    root = make_tree("tree", {"plain": b"1", "ü" * 120: b"2", "new\nline": b"3"})
    (root / os.fsdecode(b"\xff")).write_bytes(b"4")
    deep = "/".join(["d" * 100] * 12)
    (root / deep).mkdir(parents=True)
    (root / deep / "file").write_bytes(b"5")
    ref = await data_upload.upload(watched, Data(str(root)))
    content = manifest.Manifest.from_bytes((await watched.get(ref.uri)).body)
    bodies = {
        entry.path: (await watched.get(name)).body for entry, name in content.objects(ref.digest)
    }
    assert bodies == {
        "plain": b"1",
        "ü" * 120: b"2",
        "new\nline": b"3",
        os.fsdecode(b"\xff"): b"4",
        f"{deep}/file": b"5",
    }
    assert sum("/files/" in name for name in await names(watched)) == 1


async def test_a_linked_directory_is_left_out_with_a_warning(
    watched: Watched, make_tree: MakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree("tree", {"a": b"1", "d/b": b"2"})
    (root / "link").symlink_to(root / "d")
    with caplog.at_level(logging.WARNING):
        ref = await data_upload.upload(watched, Data(str(root)))
    assert f"{root}/link is a link to a directory" in caplog.text
    content = manifest.Manifest.from_bytes((await watched.get(ref.uri)).body)
    assert [entry.path for entry in content.entries] == ["a", "d/b"]
    assert content.empty == ()


async def test_hashing_and_uploading_do_not_block_the_loop(
    watched: Watched, make_tree: MakeTree, loop_guard: Callable[[], object]
) -> None:
    root = make_tree("tree", {f"{i // 100}/{i}": b"%d" % i for i in range(600)} | {"big": BIG * 30})
    with loop_guard():  # type: ignore[attr-defined]
        await data_upload.upload(watched, Data(str(root)))
    assert len(watched.created) == 602


async def test_cancelling_stops_the_hashing(watched: Watched, make_tree: MakeTree) -> None:
    """Hashing this sparse file would take minutes, so the thread must notice the cancellation."""
    root = make_tree("tree", {})
    with open(root / "huge", "wb") as file:
        file.truncate(1 << 38)
    data = Data(str(root))
    task = asyncio.create_task(data_upload.upload(watched, data))
    async with asyncio.timeout(30):
        while not data._lock.locked():  # until the thread hashes
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30):  # until the thread releases the data
        while not data._lock.acquire(blocking=False):
            await asyncio.sleep(0.005)
    data._lock.release()
    assert watched.created == []
