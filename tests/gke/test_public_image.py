"""Jobs run in a public image: the runner travels as an object, and the pod installs it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kinetic
from kinetic import aio, errors
from tests.cluster.fixtures import Namespace
from tests.images.packages import repack_runner

DEADLINE_S = 240.0
IMAGE = f"python:3.{sys.version_info.minor}-slim"


@kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1, capture_env_vars=["GREETING"])
def greet(name: str) -> tuple[str, list[str]]:
    import os

    return f"{os.environ['GREETING']} {name}", [key for key in os.environ if "BOOTSTRAP" in key]


@pytest.fixture
def image(configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the nodes the image: an interpreter with pip only, and no runner. Return its index."""
    monkeypatch.setenv("GREETING", "hello")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    python = tmp_path / "image" / "bin" / "python3"
    configured.kubelet.set_image("-slim", python=python, runner=tmp_path / "nowhere")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    return wheels


def offline(configured: Namespace, wheels: Path, gcs_server: str) -> None:
    """Let pods find packages in *wheels* only, whether they find pip or uv."""
    configured.kubelet.set_environment(
        STORAGE_EMULATOR_HOST=gcs_server,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(wheels),
        UV_OFFLINE="1",
        UV_FIND_LINKS=str(wheels),
    )


@pytest.mark.timeout(DEADLINE_S + 30)
async def test_a_batch_and_a_job_run_and_the_jobs_log_says_what_the_installation_cost(
    client: aio.Client, configured: Namespace, image: Path, gcs_server: str, bucket: str
) -> None:
    repack_runner(image)
    offline(configured, image, gcs_server)
    async with asyncio.timeout(DEADLINE_S):
        batch = await client.run_async_map(greet, ["a"], progress=False)
        job = await client.submit(greet, "b")
        assert await batch.results(cleanup=False) == [("hello a", [])]
        assert await job.result(cleanup=False) == ("hello b", [])
        lines = [line async for line in job.logs()]
        assert any(line.startswith("kinetic: installed the runner in ") for line in lines), lines
        (pod, *_) = configured.call("GET", "pods")["items"]
        (container,) = pod["spec"]["containers"]
        assert len(json.dumps(container["command"])) < 200, "the text is in the Secret"
        await batch.cleanup()
        await job.cleanup()


@pytest.mark.timeout(DEADLINE_S + 30)
async def test_a_failed_installation_is_the_jobs_error(
    client: aio.Client, configured: Namespace, image: Path, gcs_server: str
) -> None:
    offline(configured, image, gcs_server)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(errors.JobLost, match=r"cannot install absl-py.*PIP_INDEX_URL"):
            await client.run(greet, "a")
