"""Run jobs in real containers whose store is a directory of the node, without a bucket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import kinetic
from kinetic import aio, errors
from tests.cluster.fixtures import Namespace
from tests.node.images import JOBS
from tests.node.node import Node

DEADLINE_S = 180.0


@kinetic.run(accelerator="cpu", container_image=JOBS, cpu=0.4)
def double(x: int) -> tuple[int, int]:
    Path(os.environ["KINETIC_OUTPUT_PATH"], "kept").write_text(str(x))
    return 2 * x, os.getuid()


@pytest.fixture
def shared(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Configure a directory of this machine as the store; the node's mounts don't hide it."""
    with TemporaryDirectory(prefix="kn-shared-", dir="/var/tmp") as folder:
        for name, value in {
            "KUBECONFIG": str(namespace.kubeconfig),
            "KINETIC_KUBE_CONTEXT": "admin",
            "KINETIC_NAMESPACE": namespace.name,
            "KINETIC_STORE": folder,
            "KINETIC_PACKAGE_ROOT": str(Path(__file__).parent),
        }.items():
            monkeypatch.setenv(name, value)
        yield Path(folder)


async def test_a_job_and_a_batch_run_as_the_user_who_submits(shared: Path) -> None:
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        job = await client.submit(double, 4)
        assert await job == (8, os.geteuid())
        assert await job.outputs() == ["kept"]
        batch = await client.run_async_map(double, range(3), progress=False)
        assert [value for value, _ in await batch.results()] == [0, 2, 4]
        await batch.cleanup()


async def test_a_node_that_lacks_the_directory_is_named_in_the_reason(
    shared: Path, node: Node
) -> None:
    node.cordon(closed=True)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        job = await client.submit(double, 4)
        elsewhere = shared.rename(f"{shared}-elsewhere")
        try:
            node.cordon(closed=False)
            while "hostPath type check failed" not in (reason := await job.reason()):
                await asyncio.sleep(0.5)
            assert "KINETIC_STORE_CLAIM" in reason
        finally:
            elsewhere.rename(shared)
        await job.cancel()
        with pytest.raises(errors.JobCancelled):
            await job
        await job.cleanup()
