"""A namespace set up with nothing but the guide's manifest runs jobs."""

from __future__ import annotations

import asyncio

import pytest

from kinetic import aio
from tests.cluster.fixtures import Namespace, on_cluster


@on_cluster
def double(x: int) -> int:
    print("doubling", x)
    return 2 * x


@pytest.mark.timeout(120)
async def test_a_client_that_attaches_sees_at_once_why_a_job_waits(configured: Namespace) -> None:
    """Only the Job's events say that Kubernetes can't create its pod."""
    configured.call("DELETE", "serviceaccounts/kinetic")
    async with asyncio.timeout(90), aio.Client() as client:
        job = await client.submit(double, 4)
        while not configured.call("GET", "events")["items"]:  # Kubernetes tries and reports it
            await asyncio.sleep(0.1)
        async with aio.Client() as other:
            same = await other.attach(job.job_id)
            assert "KINETIC_SERVICE_ACCOUNT" in await same.reason()
        await job.cancel()
