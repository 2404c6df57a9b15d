"""Batches on a cluster, whose items are run by the pods of an Indexed Job."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from kinetic.errors import ConfigurationError, LaunchError
from kinetic.job_status import JobStatus
from tests.cluster.fixtures import IMAGE, Namespace, on_cluster, until
from tests.gke.proxy import Front

DEADLINE_S = 110.0


@pytest.fixture(autouse=True)
def by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_CLUSTER_WORKERS", "1")


async def test_a_batch_is_one_job_whose_pods_fetch_data_once(
    configured: Namespace, gcs_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @on_cluster
    def square(number: int, data: str) -> tuple[int, str, str]:
        print("squares", number)
        text = Path(data).read_text()
        if number == 5:
            Path(data).write_text("changed")
        return number * number, os.environ["KINETIC_JOB_ID"], text

    (tmp_path / "data").write_text("original")
    data = kinetic.Data(str(tmp_path / "data"))
    inputs = [{"number": number, "data": data} for number in range(12)]
    async with Front(gcs_server) as front:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", front.url)
        configured.kubelet.set_environment(STORAGE_EMULATOR_HOST=front.url)
        async with aio.Client() as client:
            batch = await client.run_async_map(square, inputs, max_concurrent=3, progress=False)
            found = await batch.results(cleanup=False)
            ids = [f"{batch.group_id}-{number}" for number in range(12)]
            assert found == [(i * i, ids[i], "original") for i in range(12)]
            jobs = configured.call("GET", "batch/v1/jobs")["items"]
            assert [job["spec"]["completions"] for job in jobs] == [3]
            job = batch.jobs[5]
            assert [line async for line in job.logs()] == ["squares 5"]
            assert (await job.worker() or "").startswith("0.")
            await batch.cleanup()
            assert configured.call("GET", "batch/v1/jobs")["items"] == []
        counts = front.counted()
    assert counts["get code"] <= 3
    assert 2 <= counts["get data"] <= 2 * (3 + 1)  # of each worker, and after the change


@on_cluster
def speak(gate: str) -> str:
    """Print a line, wait until the file *gate* exists, and print another."""
    print("one", flush=True)
    Path(gate + ".began").touch()
    while not Path(gate).exists():
        time.sleep(0.05)
    print("two", flush=True)
    return os.environ["KINETIC_ATTEMPT"]


@pytest.mark.full
async def test_the_log_of_a_running_item_is_followed(client: aio.Client, tmp_path: Path) -> None:
    gates = [str(tmp_path / name) for name in "ab"]
    batch = await client.run_async_map(speak, gates, max_concurrent=1, progress=False)
    await until(lambda: (tmp_path / "a.began").exists())
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in batch.jobs[0].logs(follow=True):
            lines.append(line)
            if line == "one":
                assert await batch.jobs[0].status() is JobStatus.RUNNING
                assert await (await batch.job(1)).status() is JobStatus.PENDING
                (tmp_path / "a").touch()
        assert lines == ["one", "two"]
        await until(lambda: (tmp_path / "b.began").exists())
        assert [line async for line in (await batch.job(1)).logs()] == ["one"]
        (tmp_path / "b").touch()
        assert await batch.results() == ["1", "1"]


@pytest.mark.full
async def test_a_cancelled_batch_ends_its_pods(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    gates = [str(tmp_path / name) for name in "abc"]
    batch = await client.run_async_map(speak, gates, max_concurrent=2, progress=False)
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: len([*tmp_path.glob("*.began")]) == 2)
        await batch.cancel()
        assert await batch.status_counts() == {"NOT_FOUND": 3}
        await until(lambda: not configured.call("GET", "pods")["items"])
        assert [line async for line in batch.jobs[0].logs(attempt=1)] == ["one"]
        for gate in gates:
            Path(gate).touch()
        assert await batch.retry_failed() == 3
        assert len(await batch.results()) == 3


@pytest.mark.full
async def test_a_batch_ends_without_its_client(configured: Namespace, tmp_path: Path) -> None:
    gates = [str(tmp_path / name) for name in "abcd"]
    async with asyncio.timeout(DEADLINE_S):
        async with aio.Client() as client:
            batch = await client.run_async_map(speak, gates, max_concurrent=2, progress=False)
            await until(lambda: len([*tmp_path.glob("*.began")]) == 2)
        for gate in gates:
            Path(gate).touch()
        await until(lambda: _is_complete(configured))
        async with aio.Client() as client:
            batch = await client.attach_batch(batch.group_id)
            assert await batch.results() == ["1"] * 4


@pytest.mark.full
async def test_a_client_that_lacks_the_setting_leaves_the_batch_alone(
    client: aio.Client, configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await client.run_async_map(double, range(2), progress=False)
    monkeypatch.delenv("KINETIC_CLUSTER_WORKERS")
    async with aio.Client() as other:
        with pytest.raises(ConfigurationError, match="KINETIC_CLUSTER_WORKERS=1"):
            await other.attach_batch(batch.group_id)
    assert await batch.results() == [0, 2]


@on_cluster
def double(number: int) -> int:
    return 2 * number


@pytest.mark.full
async def test_a_single_job_with_init_is_refused(client: aio.Client) -> None:
    @kinetic.run(accelerator="cpu", container_image=IMAGE, init={"base": lambda: 1})
    def add(number: int, base: int) -> int:
        return number + base

    with pytest.raises(LaunchError, match="run_async_map"):
        await client.run(add, 1)
    batch = await client.run_async_map(add, [1, 2], progress=False)
    async with asyncio.timeout(DEADLINE_S):
        assert await batch.results() == [2, 3]


@pytest.mark.full
async def test_a_worker_whose_node_goes_loses_no_item(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    gate = str(tmp_path / "a")
    batch = await client.run_async_map(speak, [gate], progress=False)
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: (tmp_path / "a.began").exists())
        (tmp_path / "a").touch()
        (pod,) = configured.call("GET", "pods")["items"]
        name = pod["metadata"]["name"]
        await asyncio.to_thread(configured.kubelet.preempt, f"{configured.name}/{name}")
        assert await batch.results() in (["1"], ["2"])


def _is_complete(namespace: Namespace) -> bool:
    (job,) = namespace.call("GET", "batch/v1/jobs")["items"]
    conditions = job["status"].get("conditions", ())
    return any(it["type"] == "Complete" and it["status"] == "True" for it in conditions)


@pytest.mark.full
async def test_a_batch_is_scaled(client: aio.Client, configured: Namespace, tmp_path: Path) -> None:
    gates = [str(tmp_path / name) for name in "abcd"]
    batch = await client.run_async_map(speak, gates, max_concurrent=1, progress=False)
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: len([*tmp_path.glob("*.began")]) == 1)
        assert await batch.scale(3) == 3
        await until(lambda: len([*tmp_path.glob("*.began")]) == 3)
        workers = await batch.workers()
        assert [(it.number, it.state) for it in workers] == [(k, "running") for k in range(3)]
        for gate in gates:
            Path(gate).touch()
        assert await batch.results() == ["1"] * 4


@kinetic.run(accelerator="cpu", container_image="example.test/unfit:1", cpu=0.1)
def unfit(number: int) -> int:
    return number


@pytest.mark.full
async def test_items_whose_image_cannot_run_a_worker_fail_with_its_message(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    runner = tmp_path / "runner"
    runner.mkdir()
    message = "kinetic: this job cannot be run: its image has Python 2.7"
    (runner / "remote_runner.py").write_text(f"import sys\nprint({message!r})\nsys.exit(42)\n")
    configured.kubelet.set_image("unfit", python=Path(sys.executable), runner=runner)
    batch = await client.run_async_map(unfit, range(3), max_concurrent=2, progress=False)
    async with asyncio.timeout(DEADLINE_S):
        outcomes = [outcome async for outcome in batch.outcomes()]
    assert len(outcomes) == 3
    assert all("Python 2.7" in str(it.outcome) for it in outcomes)


@pytest.mark.full
async def test_items_whose_image_cannot_be_pulled_fail_with_the_cause(
    client: aio.Client, configured: Namespace
) -> None:
    configured.kubelet.fail_pull("unfit")
    batch = await client.run_async_map(unfit, range(3), max_concurrent=2, progress=False)
    async with asyncio.timeout(DEADLINE_S):
        outcomes = [outcome async for outcome in batch.outcomes()]
    assert len(outcomes) == 3
    assert all("unfit" in str(it.outcome) for it in outcomes)
