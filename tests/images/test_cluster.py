"""Run a function on a cluster in an image that kinetic builds for it."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kinetic import aio
from tests.cluster.fixtures import Namespace, settings
from tests.images.conftest import Cloud


@pytest.fixture
async def client(
    cloud: Cloud, namespace: Namespace, project: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[aio.Client]:
    project_settings = {"KINETIC_PROJECT": "kn", "KINETIC_CLUSTER": "c1"}
    cluster_settings = settings(namespace, "kn-test", cloud.bucket.url)
    for name, value in (cloud.environ | project_settings | cluster_settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(project)
    namespace.kubelet.set_environment(STORAGE_EMULATOR_HOST=cloud.bucket.url)
    async with aio.Client() as client:
        yield client


CODE = """
import kinetic


@kinetic.run(accelerator="cpu", cpu=0.1)
def add(a, b):
    return a + b
"""


async def test_a_batch_has_its_image_built_once_and_runs_in_it(
    client: aio.Client,
    cloud: Cloud,
    namespace: Namespace,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (project / "kn_sums.py").write_text(CODE)
    monkeypatch.syspath_prepend(project)
    add = importlib.import_module("kn_sums").add
    async with asyncio.timeout(120):
        batch = await client.run_async_map(add, [{"a": n, "b": 1} for n in range(3)])
        assert await batch.results(cleanup=False) == [1, 2, 3]
    (started,) = cloud.builds.builds.values()
    assert started.context["install/requirements.txt"] == b"numpy==2.0\n"
    (uri,) = cloud.registry.images
    jobs = namespace.call("GET", "batch/v1/jobs")["items"]
    images = {
        container["image"]
        for job in jobs
        for container in job["spec"]["template"]["spec"]["containers"]
    }
    assert images == {uri}
