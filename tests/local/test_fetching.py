"""A file that a user gets from a job is the user's own, and a failure leaves the older one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kinetic import aio, errors
from kinetic.aio.gcs.http import EMULATOR
from kinetic.aio.gcs.store import GcsStore
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.gcs.server import GcsServer, Stored

NAMES = ("accuracy 90%.txt", "a%25b", "deep/tab\there")


def write() -> None:
    for name in NAMES:
        path = Path(os.environ["KINETIC_OUTPUT_PATH"], name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)


def large() -> bytes:
    return bytes(1 << 20)


async def one() -> int:
    return 1


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


async def test_a_value_that_was_saved_and_overwritten_is_still_in_the_store(tmp_path: Path) -> None:
    async with aio.Client(backend="local") as client:
        job = await client.submit(large)
        assert await job.save_result(tmp_path / "value") > len(large())
        (tmp_path / "value").write_text("of the user")
        assert await job.result() == large()


@pytest.mark.parametrize("into_itself", [False, True])
async def test_outputs_are_copied_also_onto_themselves(tmp_path: Path, into_itself: bool) -> None:
    async with aio.Client(backend="local") as client:
        job = await client.submit(write)
        await job.result(cleanup=False)
        folder = Path(job.output_dir) if into_itself else tmp_path / "copy"
        assert await job.fetch_outputs(folder) == len(NAMES)
        assert contents(folder) == contents(Path(job.output_dir)) == {it: it for it in NAMES}


async def test_outputs_of_any_name_are_found_in_a_bucket(tmp_path: Path) -> None:
    async with GcsServer() as server:
        store = GcsStore("gs://kn-test/store", {EMULATOR: server.url})
        platform = replace(memory_platform(), store=store, cluster=MemoryCluster(store, carry_out))
        async with aio.Client(platform=platform) as client:
            job = await client.submit(one)
            await job.result(cleanup=False)
            for name in NAMES:
                object_name = f"{job.output_dir.removeprefix('gs://kn-test/')}/{name}"
                server.objects[object_name] = Stored(name.encode(), {}, 1)
            assert await job.outputs() == sorted(NAMES)
            assert await job.fetch_outputs(tmp_path / "copy") == len(NAMES)
            assert contents(tmp_path / "copy") == {it: it for it in NAMES}
        await store.aclose()


async def test_an_output_that_cannot_be_fetched_leaves_the_older_file(tmp_path: Path) -> None:
    class Silent(MemoryStore):
        async def fetch(self, name: str, path: Path) -> None:
            path.write_text("hal")
            raise errors.Unavailable("the store doesn't answer", retryable=True)

    store = Silent()
    platform = replace(memory_platform(), store=store, cluster=MemoryCluster(store, carry_out))
    (tmp_path / "model").write_text("older")
    async with aio.Client(platform=platform) as client:
        job = await client.submit(one)
        await job.result(cleanup=False)
        await store.create(f"{job.output_dir.removeprefix('memory:/')}/model", b"half")
        with pytest.raises(errors.Unavailable):
            await job.fetch_outputs(tmp_path)
    assert contents(tmp_path) == {"model": "older"}
