"""What only a cluster can show of jobs and batches; tests/platforms has the rest."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing
from pathlib import Path

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio.gcs.store import GcsStore
from tests.cluster.fixtures import Namespace
from tests.gke.conftest import until

from .conftest import IMAGE

pytestmark = pytest.mark.timeout(180)  # the first one starts the control plane
DEADLINE_S = 120.0
on_cluster = kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1)


@on_cluster
def add(a: int, b: int) -> int:
    return a + b


@on_cluster
def marked(folder: str, x: int) -> int:
    """Leaves a mark for each start; the first attempt lasts until it is ended."""
    attempt = os.environ["KINETIC_ATTEMPT"]
    Path(folder, f"{x}.{attempt}").touch(exist_ok=False)
    if attempt == "1":
        time.sleep(600)
    return x


async def test_a_disrupted_item_is_started_again_by_the_cluster(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    """Each attempt runs once, and no retry of the user's is used up."""
    async with asyncio.timeout(DEADLINE_S):
        batch = await client.run_async_map(marked, [(str(tmp_path), 7)], max_concurrent=1)
        await until(lambda: (tmp_path / "7.1").exists())
        (pod,) = await asyncio.to_thread(names, configured, "pods")
        pod = f"{configured.name}/{pod}"
        await asyncio.to_thread(configured.kubelet.preempt, pod)
        assert await batch.results() == [7]
        assert sorted(path.name for path in tmp_path.glob("7.*")) == ["7.1", "7.2"]
        await batch.cleanup()


@pytest.mark.everyday
async def test_nothing_of_what_ended_or_was_cancelled_is_left(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    """No Job, pod or Secret, but for the key of the namespace."""
    folder = str(tmp_path)

    async def ends() -> None:
        assert await client.run(add, 1, 2) == 3

    async def is_cancelled() -> None:
        job = await client.submit(marked, folder, 0)
        await until((tmp_path / "0.1").exists)
        await job.cancel()
        with pytest.raises(errors.JobCancelled):
            await job
        await job.cleanup()

    async def is_a_batch() -> None:
        batch = await client.run_async_map(add, [(1, 1), (1, 2)])
        assert await batch.results() == [2, 3]
        await batch.cleanup()

    async def is_a_cancelled_batch() -> None:
        inputs = [(folder, x) for x in range(1, 4)]
        batch = await client.run_async_map(marked, inputs, max_concurrent=2)
        await until(lambda: len([*tmp_path.glob("[123].1")]) == 2)
        await batch.cancel()
        await batch.cleanup()

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for life in (ends, is_cancelled, is_a_batch, is_a_cancelled_batch):
            group.create_task(life())
    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(left, configured):
            await asyncio.sleep(0.2)


@on_cluster
def contents(folder: str, file: str) -> dict[str, str]:
    """Of both, by the name of the file."""
    found = [*Path(folder).rglob("*.txt"), Path(file)]
    return {path.name: path.read_text() for path in found}


@pytest.mark.everyday
async def test_data_that_lies_in_a_bucket_arrives(
    client: aio.Client, configured: Namespace
) -> None:
    """A folder of it, and a single object as one file."""
    url = os.environ["KINETIC_STORE"]
    async with aclosing(GcsStore(url)) as store:
        for name in ("a.txt", "deep/b.txt"):
            assert await store.create(f"set/{name}", name.encode())
    async with asyncio.timeout(DEADLINE_S):
        folder, file = kinetic.Data(f"{url}/set/"), kinetic.Data(f"{url}/set/deep/b.txt")
        found = await client.run(contents, folder, file)
    assert found == {"a.txt": "a.txt", "b.txt": "deep/b.txt"}


def left(namespace: Namespace) -> list[str]:
    """The names of Jobs, pods, and submissions' Secrets."""
    found = [name for kind in ("batch/v1/jobs", "pods") for name in names(namespace, kind)]
    return found + [name for name in names(namespace, "secrets") if "root" not in name]


def names(namespace: Namespace, kind: str) -> list[str]:
    """Of all objects of a kind."""
    return [one["metadata"]["name"] for one in namespace.call("GET", kind)["items"]]
