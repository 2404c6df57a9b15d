"""Single jobs in real containers: how they end, and what kinetic reports."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.job_status import JobStatus
from tests.cluster.fixtures import Namespace
from tests.images.services import RegistryServer
from tests.node.conftest import gone, until
from tests.node.images import JOBS
from tests.node.node import Node

DEADLINE_S = 120.0
MIB = 2**20
# Containers need STORAGE_EMULATOR_HOST, because the bucket isn't at Google.
in_container = kinetic.run(
    accelerator="cpu",
    container_image=JOBS,
    cpu=0.4,
    capture_env_vars=["STORAGE_EMULATOR_HOST"],
)


@in_container
def add(a: int, b: int) -> tuple[int, list[str]]:
    print("adding", a, b)
    return a + b, sorted(os.listdir("/app"))


@in_container
def fill(size: int) -> int:
    print("filling", flush=True)
    held = [b"x" * MIB for _ in range(size // MIB)]
    return len(held)


@in_container
def last_long(seconds: float) -> str:
    for n in range(3):
        print("waiting", n, flush=True)
        time.sleep(0.2)
    time.sleep(seconds)
    return "waited"


@in_container
def again() -> str:
    attempt = os.environ["KINETIC_ATTEMPT"]
    print("attempt", attempt, flush=True)
    if attempt == "1":
        time.sleep(600)
    return attempt


@in_container
def leave() -> str:
    import sys
    from pathlib import Path

    out = Path(os.environ["KINETIC_OUTPUT_PATH"], "deep")
    out.mkdir()
    (out / "model").write_text("weights")
    for number in range(0, 100, 2):
        print(number)
        print(number + 1, file=sys.stderr)
    return os.environ["KINETIC_OUTPUT_DIR"]


async def test_a_value_comes_back(client: aio.Client, configured: Namespace) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(add, 1, 2)
        value, files = await job.result(cleanup=False)
        assert value == 3 and "remote_runner.py" in files
        assert await job.status() is JobStatus.SUCCEEDED
        assert [line async for line in job.logs()] == ["adding 1 2"]
        await job.cleanup()
        await gone(configured)


async def test_the_error_of_a_job_that_takes_too_much_memory_says_so_and_has_its_log(
    client: aio.Client,
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(fill.options(memory="160Mi"), 400 * MIB)
        with pytest.raises(errors.JobError, match=r"(?s)out of memory.*filling"):
            await job


async def test_an_image_that_cannot_be_pulled_is_reported(client: aio.Client) -> None:
    image = f"{JOBS.partition('/')[0]}:1/absent:1"
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(add.options(container_image=image, start_timeout=8.0), 1, 2)
        with pytest.raises(errors.JobError, match=r"start_timeout of 8 s: .*connection refused"):
            await job
        assert await job.status() is JobStatus.FAILED


async def test_a_job_whose_image_does_not_exist_is_ended(client: aio.Client) -> None:
    async with RegistryServer() as registry, asyncio.timeout(DEADLINE_S):
        image = f"{registry.host}/kn/absent:1"
        job = await client.submit(add.options(container_image=image), 1, 2)
        with pytest.raises(errors.JobError, match=r"absent:1 cannot be pulled: .*not found"):
            await job
        assert registry.asked[404]


async def test_a_job_whose_node_is_drained_is_started_again(
    client: aio.Client, configured: Namespace, node: Node
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(again)
        await printed(job, "attempt 1")
        assert len(await asyncio.to_thread(node.drain, configured.name)) == 1
        await until(lambda: replaced(configured))
        await asyncio.to_thread(node.cordon, closed=False)
        assert await job.result(cleanup=False) == "2"
        await job.cleanup()
        await gone(configured)


async def test_what_a_job_has_written_outlives_its_pod(
    client: aio.Client, configured: Namespace
) -> None:
    """Its files and log stay; the log has both outputs in order and no lines of the kubelet."""
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(leave)
        assert (await job.result(cleanup=False)).startswith("gs://")
        assert await job.outputs() == ["deep/model"]
        expected = [str(number) for number in range(100)]
        assert [line async for line in job.logs()] == expected
        (pod,) = (await asyncio.to_thread(configured.call, "GET", "pods"))["items"]
        name = pod["metadata"]["name"]
        await asyncio.to_thread(configured.call, "DELETE", f"pods/{name}")
        async with aio.Client() as other:
            found = await other.attach(job.job_id)
            while (await asyncio.to_thread(configured.call, "GET", "pods"))["items"]:
                assert [line async for line in found.logs()] == expected
            assert [line async for line in found.logs()] == expected
            assert [line async for line in found.logs(follow=True)] == expected
        await job.cleanup()
        await gone(configured)


async def test_a_log_is_read_while_it_is_written(client: aio.Client) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(last_long, 2.0)
        lines = {}
        async for line in job.logs(follow=True):
            lines[line] = time.monotonic()
        assert [*lines] == [f"waiting {n}" for n in range(3)]
        assert time.monotonic() - lines["waiting 0"] > 2.0  # the line came before the job's end
        assert await job == "waited"


async def test_a_cancelled_job_is_gone_long_before_its_grace_is_over(
    client: aio.Client, configured: Namespace
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(last_long, 600.0)
        await printed(job, "waiting 0")
        began = time.monotonic()
        await job.cancel()
        with pytest.raises(errors.JobCancelled):
            await job
        await job.cleanup()
        await gone(configured)
        assert time.monotonic() - began < 15.0


async def test_a_job_that_has_ended_is_deleted_by_kubernetes_and_its_value_stays(
    client: aio.Client, configured: Namespace
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(add, 3, 4)
        assert (await job.result(cleanup=False))[0] == 7
        (document,) = (await asyncio.to_thread(configured.call, "GET", "batch/v1/jobs"))["items"]
        assert document["spec"]["ttlSecondsAfterFinished"] == 24 * 3600
        name = f"batch/v1/jobs/{document['metadata']['name']}"
        sooner = {"spec": {"ttlSecondsAfterFinished": 1}}
        await asyncio.to_thread(configured.call, "PATCH", name, sooner)
        await gone(configured)
        async with aio.Client() as other:
            assert (await (await other.attach(job.job_id)))[0] == 7


async def printed(job: aio.JobHandle, wanted: str) -> None:
    """Wait until the job prints the line *wanted*."""
    async for line in job.logs(follow=True):
        if line == wanted:
            return
    raise AssertionError(f"the log has ended without {wanted!r}")


def replaced(namespace: Namespace) -> bool:
    """Return whether there is exactly one pod, and it waits for a node."""
    return [pod["status"]["phase"] for pod in namespace.call("GET", "pods")["items"]] == ["Pending"]
