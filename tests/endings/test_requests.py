"""What a batch costs the store: requests, counted at a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

import kinetic
from kinetic import aio
from tests.cluster.fixtures import Namespace
from tests.gcs.server import GcsServer

from .grid import IMAGE

JOBS = 12


@kinetic.run(accelerator="cpu", cpu=0.1, container_image=IMAGE)
def double(x: int) -> int:
    if x < 0:
        raise ValueError(x)
    return 2 * x


@pytest.fixture
async def server(
    configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[GcsServer]:
    """In place of the one that keeps no book."""
    async with GcsServer() as server:
        monkeypatch.setenv("KINETIC_STORE", "gs://kn-test")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        configured.kubelet.set_environment(STORAGE_EMULATOR_HOST=server.url)
        yield server


@pytest.mark.timeout(180)
async def test_outcomes_are_read_from_receipts(server: GcsServer) -> None:
    """Values and errors of a usual size come with the last word of their pods."""
    async with aio.Client() as client:
        inputs = [*range(JOBS), -1]
        batch = await client.run_async_map(double, inputs, progress=False)
        values = await batch.results(return_exceptions=True, cleanup=False)
        assert values[:-1] == [2 * x for x in range(JOBS)]
        assert isinstance(values[-1], ValueError)
    reads = Counter(
        kind for kind, name in server.asked if "/attempts/" in name and name.endswith(".outcome")
    )
    assert reads["media"] == 0, "that of a client; a pod looks only whether it is there"
    assert reads["metadata"] <= JOBS + 1
