"""Bugs that libraries of this kind often have; tests/platforms covers more of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio.images.current import CurrentInterpreter
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.job_status import JobStatus

from .conftest import DEADLINE_S


@pytest.fixture(autouse=True)
def project(empty_project: Path) -> Path:
    return empty_project


@pytest.fixture
async def client() -> AsyncIterator[aio.Client]:
    async with aio.Client(backend="local") as client, asyncio.timeout(2 * DEADLINE_S):
        yield client


class Faulty(DirectoryStore):
    """A store that hangs or has a taken name when a test asks for it."""

    hangs = False
    """Whether downloads hang."""
    taken = ""
    """Another client creates objects whose names end like this first."""

    async def fetch(self, name: str, path: Path) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await super().fetch(name, path)

    async def create(self, name: str, body: Any, *args: Any, **options: Any) -> bool:
        if self.taken and name.endswith(self.taken):
            await super().create(name, b"somebody else's")
        return await super().create(name, body, *args, **options)


@pytest.fixture
async def faulty(home: Path) -> AsyncIterator[tuple[aio.Client, Faulty]]:
    """Yield a client and its faulty store."""
    store = Faulty(home / "store")
    cluster = LocalCluster(home)
    platform = Platform(
        store=store,
        images=CurrentInterpreter(),
        cluster=cluster,
        id_marker="local-",
    )
    async with aio.Client(backend="local", platform=platform) as client:
        async with asyncio.timeout(2 * DEADLINE_S):
            yield client, store


# --- many jobs ------------------------------------------------------------------------------------


async def test_a_timeout_bounds_collecting_too(faulty) -> None:
    client, store = faulty
    batch = await client.run_async_map(os.urandom, [300_000])
    await batch.wait()
    store.hangs = True
    with pytest.raises(TimeoutError):
        await batch.results(timeout=0.2)
    store.hangs = False
    assert len(await batch.results()) == 1


async def test_the_target_of_a_batch_is_that_of_its_jobs(client) -> None:
    batch = await client.run_async_map(abs, [-1], project="theirs")
    await batch.results(cleanup=False)
    assert [job.project for job in batch.jobs if job] == ["theirs"]


async def test_attaching_in_the_same_client_sees_a_lazy_batch_to_its_end(client) -> None:
    async def inputs():
        for number in range(-3, 0):
            yield number

    batch = await client.run_async_map(abs, inputs(), max_concurrent=1)
    async with await client.attach_batch(batch.group_id) as same:
        pass  # leaving an attached batch doesn't end it
    assert await same.results(cleanup=False) == [3, 2, 1]
    assert await batch.results() == [3, 2, 1]


# --- one job --------------------------------------------------------------------------------------


async def test_homes_and_stores_do_not_mix(
    client, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.Client(backend="local", store=str(tmp_path / "other")) as elsewhere:
        here, there = await client.submit(abs, -1), await elsewhere.submit(abs, -2)
        with pytest.raises(errors.NotFound):
            await elsewhere.attach(here.job_id)
        with tempfile.TemporaryDirectory(prefix="kn-", dir="/tmp") as another:
            monkeypatch.setenv("KINETIC_HOME", another)
            from tests.conftest import end_processes

            third = await client.submit(abs, -3)
            assert [job.job_id for job in await client.list_jobs()] == [third.job_id]
            assert await here.status() not in (JobStatus.NOT_FOUND, JobStatus.FAILED)
            assert [await here, await there, await third] == [1, 2, 3]
            monkeypatch.setenv("KINETIC_HOME", str(home))
            assert await (await client.submit(abs, -4)) == 4
            assert end_processes(Path(another)) == []


async def test_a_job_that_exists_already_is_left_alone(faulty, home: Path) -> None:
    client, store = faulty
    store.taken = "handle.json"
    with pytest.raises(errors.Conflict, match="exists already"):
        await client.submit(abs, -1)
    [theirs] = (home / "store" / "jobs").rglob("*.json")
    assert theirs.read_text() == "somebody else's"


async def test_only_the_jobs_own_prefix_is_deleted(client, home: Path) -> None:
    objects = DirectoryObjects(home / "store")
    job = await client.submit(abs, -1)
    await job.result(cleanup=False)
    neighbours = [f"jobs/{job.job_id}0/handle.json", f"jobs/{job.job_id}-1/x", "jobs/other"]
    for name in neighbours:
        objects.create(name, b"theirs")
    await job.cleanup()
    assert [found.name for found in objects.list("jobs/")] == sorted(neighbours)


async def test_a_link_at_the_destination_of_a_download_is_not_followed(
    home: Path, tmp_path: Path
) -> None:
    store = DirectoryStore(home / "store")
    await store.create("plain", b"new")
    await store.create("headed", b"new", {"a": "b"})
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("old")
    link.symlink_to(victim)
    for name in ("plain", "headed"):
        with pytest.raises(errors.BackendError):
            await store.fetch(name, link)
    assert victim.read_text() == "old"


async def test_a_large_result_leaves_no_temporary_file(
    client, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    job = await client.submit(os.urandom, 1_000_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert len(await job) == 1_000_000
    assert [*(tmp_path / "temporary").iterdir(), *home.glob("cache/scratch/*")] == []
