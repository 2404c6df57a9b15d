"""Test metrics of pods, and how a pod learns that its attempt was pruned."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

import kinetic
from kinetic import aio
from kinetic.aio.gcs.store import GcsStore
from tests.cluster.fixtures import on_cluster

DEADLINE_S = 120.0


@on_cluster
def learns(rate: float, steps: int) -> float:
    for step in range(steps):
        kinetic.report(step, rate)
        time.sleep(0.05)
    return rate


@pytest.mark.everyday
async def test_a_pod_is_pruned_by_its_metrics_and_nothing_is_left(client: aio.Client) -> None:
    async with asyncio.timeout(DEADLINE_S):
        batch = await client.run_async_map(
            learns, [(0.5, 100_000), (2.0, 3)], prunable=True, retries=1
        )
        found: list[kinetic.Metric] = []
        async for metric in batch.metrics():
            found.append(metric)
            if metric.index == 0:
                await batch.prune(0, metric.attempt)
        outcomes = {completion.index: completion.outcome async for completion in batch.outcomes()}
        pruned = outcomes[0]
        assert isinstance(pruned, kinetic.Pruned)
        assert outcomes[1].unwrap() == 2.0
        curve = [metric for metric in found if metric.index == 0]
        assert [metric.step for metric in curve] == [*range(pruned.step + 1)]
        assert [metric[1:] for metric in found if metric.index == 1] == [
            (1, step, 2.0) for step in range(3)
        ]
        assert await batch.status_counts() == {"SUCCEEDED": 2}
        results = await batch.results()
        assert [type(value) for value in results] == [kinetic.Pruned, float]
        store = GcsStore(os.environ["KINETIC_STORE"])
        try:
            left = await store.list(f"batches/{batch.group_id}/metrics/")
        finally:
            await store.aclose()
        assert left == []
        await batch.cleanup()
