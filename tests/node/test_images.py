"""An image that is built on the way: by the steps that Cloud Build is told, and run."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kinetic import aio
from tests.cluster.fixtures import Namespace
from tests.gcs.server import GcsServer
from tests.images.services import BuildServer, RegistryServer
from tests.images.steps import run_steps
from tests.node import machine
from tests.node.images import PYTHON, Kitchen
from tests.node.node import Node

from .conftest import gone

DEADLINE_S = 1500.0
CODE = """
import kinetic


@kinetic.run(accelerator="cpu", cpu=0.5, capture_env_vars=["STORAGE_EMULATOR_HOST"])
def versions():
    import jax.numpy, tomli_w

    print(jax.devices())
    return float(jax.numpy.arange(4).sum()), tomli_w.dumps({"a": 1}), kinetic.__name__
"""


@pytest.fixture
async def builds(node: Node, kitchen: Kitchen) -> AsyncIterator[BuildServer]:
    """Cloud Build, which gives what it has built to the node."""

    async def load(uri: str) -> None:
        archive = kitchen.folder / "bundled.tar"
        await asyncio.to_thread(kitchen.save, uri, archive)
        await asyncio.to_thread(node.load, archive)
        archive.unlink()

    async with GcsServer(machine.ADDRESS) as bucket, RegistryServer() as registry:
        async with BuildServer(bucket, registry) as builds:
            builds.script = run_steps([str(kitchen.program())], load)
            yield builds


@pytest.fixture
async def client(
    builds: BuildServer, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[aio.Client]:
    settings = {
        "STORAGE_EMULATOR_HOST": builds.bucket.url,
        "CLOUD_BUILD_EMULATOR_HOST": builds.host,
        "ARTIFACT_REGISTRY_EMULATOR_HOST": builds.registry.host,
        "KINETIC_PYTHON_IMAGE": PYTHON,
        "KUBECONFIG": str(namespace.kubeconfig),
        "KINETIC_KUBE_CONTEXT": "admin",
        "KINETIC_NAMESPACE": namespace.name,
        "KINETIC_PROJECT": "kn",
        "KINETIC_CLUSTER": "c1",
        "KINETIC_STORE": "gs://kn-test",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    async with aio.Client() as client:
        yield client


async def test_an_image_of_the_projects_own_is_built_and_runs(
    client: aio.Client,
    builds: BuildServer,
    namespace: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "requirements.txt").write_text("tomli-w==1.1.0\n")
    (tmp_path / "kn_versions.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    versions = importlib.import_module("kn_versions").versions
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(versions)
        (one,) = builds.builds.values()
        assert one.build.status.name == "SUCCESS"
        assert await job.result(cleanup=False) == (6.0, "a = 1\n", "kinetic")
        await job.cleanup()
        await gone(namespace)
    assert len(builds.registry.images) == 1
