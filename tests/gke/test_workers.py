"""Batches on a cluster, whose items are run by the pods of an Indexed Job."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

import kinetic
from kinetic import aio
from kinetic.aio.ports import LONGEST_LINE
from kinetic.job_status import JobStatus
from tests.cluster.fixtures import IMAGE, Namespace, on_cluster, until
from tests.gke.proxy import Front

DEADLINE_S = 110.0
LONG = LONGEST_LINE + 5
"""The length of a line that a log has in two pieces."""


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
    """Print a line, wait until the file *gate* exists, and print another without its end."""
    print("one" if len(Path(gate).name) == 1 else "x" * LONG, flush=True)
    Path(gate + ".began").touch()
    while not Path(gate).exists():
        time.sleep(0.05)
    print("two", end="", flush=True)
    return os.environ["KINETIC_ATTEMPT"]


@pytest.mark.full
async def test_the_log_of_a_running_item_is_followed(client: aio.Client, tmp_path: Path) -> None:
    gates = [str(tmp_path / name) for name in ("a", "long")]
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
        await until(lambda: (tmp_path / "long.began").exists())
        long = await batch.job(1)
        pieces = [piece async for piece in long.logs()]
        assert (len(pieces), "".join(pieces)) == (2, "x" * LONG)
        (tmp_path / "long").touch()
        assert await batch.results(cleanup=False) == ["1", "1"]
        assert [line async for line in long.logs()] == ["two"]  # the store has the last MiB
        assert [line async for line in batch.jobs[0].logs()] == ["one", "two"]
        await batch.cleanup()


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
        await until(lambda: _ends(configured, "Complete"))
        async with aio.Client() as client:
            batch = await client.attach_batch(batch.group_id)
            assert await batch.results() == ["1"] * 4


@kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1, init={"base": lambda: 1})
def add(number: int, base: int) -> int:
    """Return the sum, but wait first if *number* is 2, and fail if it is 3."""
    print(f"adds {number} to {base}", flush=True)
    if number == 3:
        raise ValueError(number)
    if number == 2:
        time.sleep(60)
    return number + base


@pytest.mark.full
async def test_a_single_job_with_init_is_like_any_other(
    client: aio.Client, configured: Namespace
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        good, waits, bad = await asyncio.gather(*(client.submit(add, it) for it in (1, 2, 3)))
        assert await good.result(cleanup=False) == 2
        with pytest.raises(ValueError, match="3"):
            await bad.result(cleanup=False)
        assert await bad.status() is JobStatus.FAILED
        assert [line async for line in good.logs()] == ["adds 1 to 1"]
        async for line in waits.logs(follow=True):
            assert line == "adds 2 to 1"
            break
        assert await waits.status() is JobStatus.RUNNING
        await until(lambda: good.k8s_name in _ends(configured, "Complete"))
        await until(lambda: bad.k8s_name in _ends(configured, "Failed"))
        assert {it.job_id for it in await client.list_jobs()} == {
            *(good.job_id, waits.job_id, bad.job_id)
        }
        await waits.cancel()
        assert await waits.status() is JobStatus.NOT_FOUND
        await until(lambda: waits.k8s_name not in str(configured.call("GET", "pods")))
        for job in (good, waits, bad):
            await job.cleanup()
        assert configured.call("GET", "batch/v1/jobs")["items"] == []


def _ends(namespace: Namespace, kind: str) -> list[str]:
    """Return the names of the Jobs that have ended like this."""
    return [
        job["metadata"]["name"]
        for job in namespace.call("GET", "batch/v1/jobs")["items"]
        if any(it["type"] == kind for it in job["status"].get("conditions", ()))
    ]


async def test_a_worker_whose_node_goes_loses_no_item_and_no_line(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    """Each attempt runs once, and the disruption uses up no retry."""
    gate = str(tmp_path / "a")
    batch = await client.run_async_map(speak, [gate], progress=False)
    job, lines = batch.jobs[0], list[str]()
    async with asyncio.timeout(DEADLINE_S):
        async for line in job.logs(follow=True):
            lines.append(line)
            if len(lines) == 1:
                (pod,) = configured.call("GET", "pods")["items"]
                name = f"{configured.name}/{pod['metadata']['name']}"
                await asyncio.to_thread(configured.kubelet.preempt, name)
            if len(lines) == 2:
                (tmp_path / "a").touch()
        assert lines == ["one", "one", "two"]
        assert [line async for line in job.logs(attempt=1)] == ["one"]  # its pod is deleted
        assert await batch.results() == ["2"]


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_worker_whose_node_goes_while_no_client_looks_uses_up_no_retry(
    configured: Namespace, tmp_path: Path
) -> None:
    """Its pod is removed, and the next one finds no machine until a client has looked."""
    gate = str(tmp_path / "a")
    large = speak.options(cpu=20)
    add_node = partial(asyncio.to_thread, configured.kubelet.add_node, "large", cpu=32)
    await add_node()
    async with aio.Client() as client:
        name = (await client.run_async_map(large, [gate], progress=False)).group_id
        await until(lambda: (tmp_path / "a.began").exists())
    (before,) = configured.call("GET", "pods")["items"]
    await asyncio.to_thread(configured.kubelet.remove_node, "large")

    def is_replaced() -> bool:
        pods = configured.call("GET", "pods")["items"]
        return [it["status"]["phase"] for it in pods] == ["Pending"] and before not in pods

    await until(is_replaced)
    async with aio.Client() as client:
        job = (await client.attach_batch(name)).jobs[0]
        waiting = asyncio.create_task(job.result(cleanup=False))
        await asyncio.wait({waiting}, timeout=20)  # it reads the job at once, and after 10 s
        assert await job.status() is JobStatus.PENDING
        (tmp_path / "a").touch()
        await add_node()
        assert await waiting == "2"


@pytest.mark.full
async def test_a_batch_is_scaled(client: aio.Client, configured: Namespace, tmp_path: Path) -> None:
    gates = [str(tmp_path / name) for name in "abcd"]
    batch = await client.run_async_map(
        speak.options(timeout=500), gates, max_concurrent=1, batch_timeout=1000, progress=False
    )
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: len([*tmp_path.glob("*.began")]) == 1)
        (job,) = configured.call("GET", "batch/v1/jobs")["items"]
        assert job["spec"]["activeDeadlineSeconds"] == 1060
        assert "activeDeadlineSeconds" not in job["spec"]["template"]["spec"]
        await (await batch.job(3)).cancel()
        assert await batch.retry_failed() == 1
        (job,) = configured.call("GET", "batch/v1/jobs")["items"]
        assert 1060 < job["spec"]["activeDeadlineSeconds"] < 1060 + DEADLINE_S
        assert await batch.scale(3) == 3
        await until(lambda: len([*tmp_path.glob("*.began")]) == 3)
        workers = await batch.workers()
        assert [(it.number, it.state) for it in workers] == [(k, "running") for k in range(3)]
        for gate in gates:
            Path(gate).touch()
        assert await batch.results() == ["1", "1", "1", "2"]


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


class Denied(Front):
    """Denies pods the right to read the bucket."""

    async def _forwarded(self, request: web.BaseRequest, body: bytes) -> web.Response:
        message = "pods@p.iam does not have storage.objects.get access to the object."
        return web.json_response({"error": {"code": 403, "message": message}}, status=403)


@pytest.mark.full
@pytest.mark.timeout(240)
async def test_items_whose_workers_may_not_use_the_bucket_fail_with_the_right_that_they_lack(
    client: aio.Client, configured: Namespace, gcs_server: str
) -> None:
    """Kubernetes would start the workers again without an end."""
    async with Denied(gcs_server) as front, asyncio.timeout(200):
        configured.kubelet.set_environment(STORAGE_EMULATOR_HOST=front.url)
        batch = await client.run_async_map(add, range(3), max_concurrent=2, progress=False)
        outcomes = [outcome async for outcome in batch.outcomes()]
        assert len(outcomes) == 3
        assert all("lacks storage.objects.get" in str(it.outcome) for it in outcomes)
        await until(lambda: not configured.call("GET", "batch/v1/jobs")["items"])
        configured.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs_server)
        assert await batch.retry_failed() == 3
        await batch.jobs[0].result(cleanup=False)


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
