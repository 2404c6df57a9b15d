"""Jobs and batches in a queue. The tests admit Jobs and take them back, as Kueue does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from kinetic import JobStatus, aio, errors
from tests.cluster.fixtures import Namespace, on_cluster, until

DEADLINE_S = 120.0
JOBS = "batch/v1/jobs"


@pytest.fixture
def queue(configured: Namespace, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setenv("KINETIC_QUEUE", "team")
    return configured


def jobs(queue: Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = queue.call("GET", JOBS)["items"]
    return found


def change(queue: Namespace, **spec: Any) -> None:
    """Change the spec of the only Job."""
    (job,) = jobs(queue)
    queue.call("PATCH", f"{JOBS}/{job['metadata']['name']}", {"spec": spec})


def has_pods(queue: Namespace) -> bool:
    return bool(queue.call("GET", "pods")["items"])


@on_cluster
def wait_once(folder: str, gate: str) -> int:
    """Return how often this has begun; the first call doesn't end, and the second at *gate*."""
    (Path(folder) / str(time.monotonic_ns())).touch()
    count = len(list(Path(folder).iterdir()))
    while count == 1 or not Path(gate).exists():
        time.sleep(0.1)
    return count


@pytest.mark.everyday
async def test_a_running_job_that_its_queue_takes_back_runs_again(
    client: aio.Client, queue: Namespace, tmp_path: Path
) -> None:
    """The pod of the resumed Job has the number of the first one, and makes the second attempt."""
    (folder := tmp_path / "calls").mkdir()
    gate = tmp_path / "gate"
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(wait_once, str(folder), str(gate))
        await until(lambda: jobs(queue))
        await asyncio.to_thread(change, queue, suspend=False)
        await until(lambda: any(folder.iterdir()))
        await asyncio.to_thread(change, queue, suspend=True)
        await until(lambda: not has_pods(queue))
        while await job.status() is not JobStatus.PENDING:
            await asyncio.sleep(0.1)
        await asyncio.to_thread(change, queue, suspend=False)
        while await job.status() is not JobStatus.RUNNING:
            await asyncio.sleep(0.1)
        gate.touch()
        assert await job.result(cleanup=False) == 2
        await job.cleanup()


@on_cluster
def nop(number: int = 0) -> int:
    return number


@pytest.mark.full
async def test_what_waits_too_long_leaves_its_queue(client: aio.Client, queue: Namespace) -> None:
    """A suspended Job has no deadline: its queue would admit it later, and give it machines."""
    impatient = nop.options(start_timeout=3)
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(impatient, 1)
        batch = await client.run_async_map(impatient, range(3), max_concurrent=2)
        with pytest.raises(errors.JobError, match="start_timeout of 3 s"):
            await job.result(cleanup=False)
        with pytest.raises(errors.BatchError, match="no worker could start for 3 s"):
            await batch.results(cleanup=False)
        await until(lambda: not jobs(queue))
        assert await job.status() is JobStatus.FAILED
        assert await batch.retry_failed() == 3
        await until(lambda: jobs(queue))
        await asyncio.to_thread(change, queue, suspend=False)
        assert await batch.results() == [0, 1, 2]
        await job.cleanup()
        await batch.cleanup()
