"""Test behavior of jobs and batches that needs a cluster; tests/platforms has the rest."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio.gcs.store import GcsStore
from tests.cluster.fixtures import IMAGE, Namespace, on_cluster

DEADLINE_S = 120.0


@on_cluster
def contents(folder: str, file: str) -> dict[str, str]:
    """Return the text of *file* and of each file in *folder*, by file name."""
    paths = [*Path(folder).rglob("*.txt"), Path(file)]
    return {path.name: path.read_text() for path in paths}


@pytest.mark.everyday
async def test_data_that_lies_in_a_bucket_arrives(
    client: aio.Client, configured: Namespace
) -> None:
    """A prefix becomes a folder, and a single object becomes a file."""
    url = os.environ["KINETIC_STORE"]
    async with aclosing(GcsStore(url)) as store:
        for name in ("a.txt", "deep/b.txt"):
            assert await store.create(f"set/{name}", name.encode())
    async with asyncio.timeout(DEADLINE_S):
        folder, file = kinetic.Data(f"{url}/set/"), kinetic.Data(f"{url}/set/deep/b.txt")
        texts = await client.run(contents, folder, file)
    assert texts == {"a.txt": "a.txt", "b.txt": "deep/b.txt"}


@kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1, capture_env_vars=["SWEEP_RATE"])
def environment() -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.everyday
async def test_a_pod_gets_captured_variables_and_nothing_else_of_its_submitter(
    client: aio.Client, configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod keeps the image's PATH and HOME, and no proxy password reaches the cluster."""
    submitters = {
        "PATH": "/of/the/submitter",
        "HOME": "/of/the/submitter",
        "SHELL": "/of/the/submitter",
        "TZ": "Asia/Kathmandu",
        "REQUESTS_CA_BUNDLE": "/of/the/submitter.pem",
        "HTTP_PROXY": "http://me:hush@proxy.test:3128",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    for name, value in submitters.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SWEEP_RATE", "0.1")
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(environment)
        seen = await job.result(cleanup=False)
        secrets = await asyncio.to_thread(configured.call, "GET", "secrets")
        await job.cleanup()
    assert seen["SWEEP_RATE"] == "0.1"
    assert not submitters.items() & seen.items()
    assert {"PATH", "HOME"} <= seen.keys()
    content = [
        sorted(secret["data"])
        for secret in secrets["items"]
        if job.job_id in str(secret["metadata"])
    ]
    # The image has a name of its own, so it also gets the program that installs the runner.
    assert content == [["env.0", "env.1", "key"]]


async def test_a_job_whose_storage_driver_is_not_in_the_cluster_fails(client: aio.Client) -> None:
    @on_cluster
    def read(path: str) -> str:
        return path

    data = kinetic.Data("gs://bucket/set/", fuse=True)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(errors.JobError, match=r"no storage driver gcsfuse\.csi"):
            await client.run(read, data)
