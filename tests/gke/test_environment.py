"""What of its submitter's environment a pod has."""

from __future__ import annotations

import asyncio
import os

import pytest

import kinetic
from kinetic import aio
from tests.cluster.fixtures import Namespace

from .conftest import IMAGE

pytestmark = pytest.mark.timeout(180)  # the first one starts the control plane
DEADLINE_S = 120.0


@kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1, capture_env_vars=["SWEEP_RATE"])
def environment() -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.everyday
async def test_a_pod_gets_captured_variables_and_nothing_else_of_its_submitter(
    client: aio.Client, configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's own PATH and HOME stay, and no password of a proxy reaches the cluster."""
    own = {
        "PATH": "/of/the/submitter",
        "HOME": "/of/the/submitter",
        "SHELL": "/of/the/submitter",
        "TZ": "Asia/Kathmandu",
        "REQUESTS_CA_BUNDLE": "/of/the/submitter.pem",
        "HTTP_PROXY": "http://me:hush@proxy.test:3128",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SWEEP_RATE", "0.1")
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(environment)
        seen = await job.result(cleanup=False)
        secrets = await asyncio.to_thread(configured.call, "GET", "secrets")
        await job.cleanup()
    assert seen["SWEEP_RATE"] == "0.1"
    assert not own.items() & seen.items()
    assert {"PATH", "HOME"} <= seen.keys()
    content = [
        sorted(one["data"]) for one in secrets["items"] if job.job_id in str(one["metadata"])
    ]
    assert content == [["env.0", "key"]]
