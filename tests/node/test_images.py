"""Build an image by the steps that kinetic gives Cloud Build, and run jobs in it."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from kinetic.aio.images import recipe
from tests.cluster import children
from tests.cluster.fixtures import Namespace, settings
from tests.gcs.server import GcsServer
from tests.images.packages import repack_runner
from tests.images.services import BuildServer, RegistryServer
from tests.images.steps import run_steps
from tests.node import machine
from tests.node.images import PYTHON, SANDBOX, Builder
from tests.node.node import Node

from .conftest import gone

DEADLINE_S = 1500.0
CODE = """
import os
from pathlib import Path

import kinetic


@kinetic.run(accelerator="cpu", cpu=0.5, capture_env_vars=["STORAGE_EMULATOR_HOST"])
def versions():
    import jax.numpy, tomli_w

    print(jax.devices())
    return float(jax.numpy.arange(4).sum()), tomli_w.dumps({"a": 1}), kinetic.__name__


@kinetic.run(
    accelerator="cpu",
    cpu=0.5,
    capture_env_vars=["STORAGE_EMULATOR_HOST"],
    volumes={"/set/deep": kinetic.Data("corpus"), "/models/model.txt": kinetic.Data("model.txt")},
)
def writes():
    for folder in (".", Path.home(), os.environ["KINETIC_OUTPUT_PATH"], "/tmp", "/set/deep"):
        Path(folder, "written").write_text("by the job")
    return os.getuid(), sorted(os.listdir("/set/deep")), Path("/models/model.txt").read_text()
"""


OWN = ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST", "STORAGE_EMULATOR_HOST")


@kinetic.run(accelerator="cpu", container_image=SANDBOX, cpu=0.5, capture_env_vars=[*OWN])
def where() -> tuple[str, bool]:
    import kinetic_runner

    return kinetic_runner.__file__, Path("/app").exists()


@pytest.fixture
def index(tmp_path: Path, node: Node) -> Iterator[str]:
    """Serve the runner's packages to containers, and yield the address of their list."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    repack_runner(folder)
    port = str(children.free_port(machine.ADDRESS))
    command = [sys.executable, "-m", "http.server", "--bind", machine.ADDRESS, port]
    server = children.start([*command, "--directory", str(folder)], tmp_path / "index.log", {})
    yield f"http://{machine.ADDRESS}:{port}/"
    server.kill()
    server.wait()


@pytest.mark.parametrize("user", ["", "1000"])
async def test_a_public_image_without_the_runner_gets_it(
    configured: Namespace, index: str, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index)
    monkeypatch.setenv("PIP_TRUSTED_HOST", machine.ADDRESS)
    monkeypatch.setenv("KINETIC_RUN_AS_USER", user)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        job = await client.submit(where)
        runner, has_app = await job.result(cleanup=False)
        assert runner.startswith("/tmp/kinetic-") and not has_app
        log = "\n".join([line async for line in job.logs()])
        assert re.search(r"installed the runner in \d+\.\d s", log), log
        await job.cleanup()
        await gone(configured)


@pytest.fixture
async def builds(node: Node, builder: Builder) -> AsyncIterator[BuildServer]:
    """Start a fake Cloud Build that loads the images it builds into the node."""

    async def load(uri: str) -> None:
        archive = builder.folder / "bundled.tar"
        await asyncio.to_thread(builder.save, uri, archive)
        await asyncio.to_thread(node.load, archive)
        archive.unlink()

    async with GcsServer(machine.ADDRESS) as bucket, RegistryServer() as registry:
        async with BuildServer(bucket, registry) as builds:
            builds.script = run_steps([str(builder.program())], load)
            yield builds


@pytest.fixture
async def client(
    builds: BuildServer, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[aio.Client]:
    environ = {
        **settings(namespace, "kn-test", builds.bucket.url),
        "CLOUD_BUILD_EMULATOR_HOST": builds.host,
        "ARTIFACT_REGISTRY_EMULATOR_HOST": builds.registry.host,
        "KINETIC_PYTHON_IMAGE": PYTHON,
        "KINETIC_PROJECT": "kn",
        "KINETIC_CLUSTER": "c1",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    async with aio.Client() as client:
        yield client


async def test_a_projects_own_image_is_built_and_runs_where_root_is_refused(
    client: aio.Client,
    builds: BuildServer,
    namespace: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "requirements.txt").write_text("tomli-w==1.1.0\n")
    (tmp_path / "kn_versions.py").write_text(CODE)
    (tmp_path / "corpus" / "sub").mkdir(parents=True)
    (tmp_path / "corpus" / "sub" / "a").write_text("a")
    (tmp_path / "model.txt").write_text("weights")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("kn_versions")
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{namespace.name}"
    namespace.admin.call("PATCH", path, {"metadata": {"labels": restricted}})
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(module.versions)
        (started,) = builds.builds.values()
        assert started.build.status.name == "SUCCESS"
        assert await job.result(cleanup=False) == (6.0, "a = 1\n", "kinetic")
        await job.cleanup()
        seen = await client.run(module.writes)
        assert seen == (recipe.USER, ["sub", "written"], "weights")
        await gone(namespace)
    assert len(builds.registry.images) == 1
