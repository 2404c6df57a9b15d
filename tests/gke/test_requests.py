"""Count the requests for outcomes at the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kinetic import aio
from tests.cluster.fixtures import Namespace, on_cluster

from .proxy import Front

DEADLINE_S = 120.0


@on_cluster
def double(x: int) -> int:
    if x < 0:
        raise ValueError(x)
    return 2 * x


@pytest.fixture
async def front(
    configured: Namespace, gcs_server: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Front]:
    """Put a counting proxy between the client and the bucket; pods use the server directly."""
    async with Front(gcs_server) as front:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", front.url)
        yield front


async def test_outcomes_are_read_from_receipts(front: Front) -> None:
    """Values and errors of a usual size arrive in the termination messages of their pods."""
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        batch = await client.run_async_map(double, [*range(12), -1], progress=False)
        values = await batch.results(return_exceptions=True, cleanup=False)
        assert values[:-1] == [2 * x for x in range(12)]
        assert isinstance(values[-1], ValueError)
        attempts = [f"{x.kind} {x.name}" for x in front.requests if "attempts" in x.name]
        assert not [request for request in attempts if request.endswith(".outcome")]
        assert len(attempts) <= 1, "only the failed item's attempt is looked at, once"
