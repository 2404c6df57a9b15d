"""Jobs keep their objects in a directory that all nodes mount, without a bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kinetic import aio, errors
from tests.cluster.fixtures import Namespace, on_cluster

DEADLINE_S = 120.0


@on_cluster
def double(x: int) -> int:
    print("doubling", x)
    return 2 * x


@on_cluster
def keep(text: str) -> str:
    import os

    Path(os.environ["KINETIC_OUTPUT_PATH"], "kept.txt").write_text(text)
    return os.environ["KINETIC_OUTPUT_PATH"]


@pytest.fixture
def shared(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configure this process for a shared directory instead of a bucket."""
    folder = tmp_path / "shared store"
    folder.mkdir()
    for name, value in {
        "KUBECONFIG": str(namespace.kubeconfig),
        "KINETIC_KUBE_CONTEXT": "admin",
        "KINETIC_NAMESPACE": namespace.name,
        "KINETIC_STORE": str(folder),
        "KINETIC_PACKAGE_ROOT": str(Path(__file__).parent),
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
async def client(shared: Path) -> AsyncIterator[aio.Client]:
    async with aio.Client() as client:
        yield client


async def test_a_job_and_a_batch_run_without_a_bucket(client: aio.Client, shared: Path) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(double, 4)
        assert [listed.job_id for listed in await client.list_jobs()] == [job.job_id]
        assert [line async for line in job.logs(follow=True)] == ["doubling 4"]
        assert await job == 8
        batch = await client.run_async_map(double, range(3), progress=False)
        assert await batch.results() == [0, 2, 4]
        await batch.cleanup()
    assert not [*shared.glob("jobs/*"), *shared.glob("batches/*")]


async def test_outputs_are_files_of_the_volume(client: aio.Client, shared: Path) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(keep, "hello")
        assert Path(await job).is_relative_to(shared)
        assert await job.outputs() == ["kept.txt"]


async def test_pods_mount_a_claim_instead_of_the_directory(
    namespace: Namespace, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_STORE_CLAIM", "results")
    size = {"storage": "1Gi"}
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace.name},
        "spec": {**spec, "capacity": size, "hostPath": {"path": str(shared)}},
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "results"},
        "spec": {**spec, "resources": {"requests": size}, "volumeName": namespace.name},
    }
    namespace.admin.call("POST", "/api/v1/persistentvolumes", volume)
    try:
        namespace.call("POST", "persistentvolumeclaims", claim)
        async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
            assert await client.run(double, 2) == 4
    finally:
        namespace.admin.call("DELETE", f"/api/v1/persistentvolumes/{namespace.name}")


async def test_the_error_names_a_volume_that_this_machine_does_not_mount(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_STORE", str(shared / "absent"))
    async with aio.Client() as client:
        with pytest.raises(errors.ConfigurationError, match="mount its volume"):
            await client.submit(double, 1)
