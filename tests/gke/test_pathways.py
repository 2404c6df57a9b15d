"""A job on several hosts of a cluster runs once and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic.job_status import JobStatus
from tests.cluster.fixtures import IMAGE, Namespace, until
from tests.cluster.rights import permit_runner
from tests.gke.sets import COLLECTIONS, kind, permitted

__all__ = ["kind", "permitted"]

DEADLINE_S = 100.0
on_hosts = kinetic.run(accelerator="cpu:hosts=3", container_image=IMAGE, cpu=0.1)
INDEX = {
    "lws": "leaderworkerset.sigs.k8s.io/worker-index",
    "jobset": "batch.kubernetes.io/job-completion-index",
}

pytestmark = pytest.mark.usefixtures("groups")


@on_hosts
def met(folder: str, gate: str = "") -> list[str]:
    """Leave a marker on each host, then wait for the other hosts' markers and for *gate*."""
    host = os.environ["KINETIC_HOST"]
    Path(folder, f"{host}.{os.getpid()}").touch(exist_ok=False)
    print("here is", host, flush=True)
    while len([*Path(folder).iterdir()]) < int(os.environ["KINETIC_HOSTS"]):
        time.sleep(0.02)
    while gate and not Path(gate).exists():
        time.sleep(0.02)
    return [host, os.environ["KINETIC_COORDINATOR"]]


async def test_the_first_hosts_value_comes_back_and_it_runs_once(
    kind: str, permitted: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    marks.mkdir()
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(met, str(marks), str(gate))
        seen = set()
        async for line in job.logs(follow=True):
            seen.add(line)
            if len(seen) == 3:
                gate.touch()  # only now: deleting a set deletes its logs
        assert seen == {f"[{host}] here is {host}" for host in range(3)}
        value = await job.result(cleanup=False)
        assert value[0] == "0"
        assert value[1].endswith(":8476")
        if kind == "lws":  # it goes without a cleanup
            await gone(permitted, kind)
        await job.cleanup()
        await gone(permitted, kind)
    assert sorted(path.name[0] for path in marks.iterdir()) == ["0", "1", "2"]


@on_hosts
def wait_marked(folder: str) -> None:
    Path(folder, f"{os.environ['KINETIC_HOST']}.{os.getpid()}").touch(exist_ok=False)
    time.sleep(600)


@on_hosts
def one_fails(folder: str, host: str, how: str) -> None:
    """Fail on this host once all hosts run; the others would run for ten minutes."""
    own = os.environ["KINETIC_HOST"]
    Path(folder, f"{own}.{os.getpid()}").touch(exist_ok=False)
    print("here is", own, flush=True)
    while len([*Path(folder).glob("[012].*")]) < 3:
        time.sleep(0.02)
    if own == host:
        if how == "raise":
            raise LookupError(f"host {host} has nothing")
        os.abort()
    time.sleep(600)


async def test_the_exception_of_any_host_ends_all(
    kind: str, permitted: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(one_fails, str(tmp_path), "1", "raise")
        with pytest.raises(LookupError, match="host 1 has nothing") as caught:
            await job
        assert "host 1 of 3" in "".join(caught.value.__notes__)
        await job.cleanup()
        await gone(permitted, kind)


@pytest.mark.parametrize("may_delete", [True, False])
async def test_following_a_log_ends_when_a_host_dies_and_the_host_is_not_restarted(
    kind: str, may_delete: bool, configured: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    """This also holds when the set can't delete itself; the log of every host is kept."""
    if may_delete:
        permit_runner(configured)
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(one_fails, str(tmp_path), "2", "die")
        lines = {line async for line in job.logs(follow=True)}
        assert "[2] here is 2" in lines
        with pytest.raises(errors.JobError, match="host 2 of 3"):
            await job
        await job.cleanup(gcs=False)
        await gone(configured, kind)
        kept = [line async for line in job.logs()]
        assert "[2] here is 2" in kept
        assert (await job.tail(1000)).splitlines() == kept
        await job.cleanup()
    assert len([*tmp_path.glob("2.*")]) == 1


async def test_a_set_goes_when_the_function_ends_although_no_client_runs(
    permitted: Namespace, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"  # holds nothing but markers: each host counts its files
    marks.mkdir()
    async with asyncio.timeout(DEADLINE_S):
        async with aio.Client() as client:
            job = await client.submit(met, str(marks))
        await gone(permitted, "lws")
        async with aio.Client() as other:
            again = await other.attach(job.job_id)
            kept = [line async for line in again.logs()]
            assert kept == [f"[{host}] here is {host}" for host in range(3)]
            assert (await again)[0] == "0"
    assert sorted(path.name[0] for path in marks.iterdir()) == ["0", "1", "2"]


async def test_a_job_that_may_not_delete_its_set_logs_the_missing_permission(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    marks.mkdir()
    running = asyncio.Event()

    def note(status: JobStatus) -> None:
        if status is JobStatus.RUNNING:
            running.set()

    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(met, str(marks), str(gate))
        waiting = asyncio.create_task(job.result(cleanup=False, on_status_change=note))
        await running.wait()  # a later client would see only the recreated hosts
        gate.touch()
        assert (await waiting)[0] == "0"
        log = ""
        while "kinetic doctor --manifest" not in log:  # each recreated host prints it again
            await asyncio.sleep(0.1)
            with contextlib.suppress(errors.NotFound):  # no pod exists before the host is recreated
                log = "\n".join([line async for line in job.logs()])
        await job.cleanup()
        await gone(configured, "lws")


@on_hosts
def return_nothing() -> None:
    pass


@pytest.mark.full
async def test_a_plain_call_ends_a_set_that_may_not_end_itself(
    configured: Namespace, client: aio.Client
) -> None:
    """The set keeps restarting its hosts, so its log may never end."""
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(return_nothing)
        assert await job.result(stream_logs=True) is None
        await gone(configured, "lws")
        await job.cleanup()


async def test_when_the_first_host_is_preempted_all_run_again(
    kind: str, permitted: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(wait_marked, str(tmp_path))
        await until(lambda: len([*tmp_path.glob("[012].*")]) == 3)
        pods = _items(permitted, "pods")
        first = next(pod for pod in pods if pod["metadata"]["labels"][INDEX[kind]] == "0")
        name = f"{permitted.name}/{first['metadata']['name']}"
        await asyncio.to_thread(permitted.kubelet.preempt, name)
        await until(lambda: len([*tmp_path.glob("[012].*")]) == 6)
        await job.cancel()
        await job.cleanup()
        await gone(permitted, kind)


async def gone(namespace: Namespace, kind: str) -> None:
    """Wait until the namespace has neither sets nor pods."""

    def left() -> bool:
        return any(_items(namespace, collection) for collection in (COLLECTIONS[kind], "pods"))

    while await asyncio.to_thread(left):
        await asyncio.sleep(0.1)


def _items(namespace: Namespace, collection: str) -> list[Any]:
    return namespace.call("GET", collection)["items"]


# --- batches: each set runs one item, and the client starts another in its place ---------------


@kinetic.run(accelerator="cpu:hosts=2", container_image=IMAGE, cpu=0.1)
def count(folder: str, number: int) -> tuple[int, str]:
    """Leave a marker on each host; the first attempt at an odd number fails."""
    host, attempt = os.environ["KINETIC_HOST"], os.environ["KINETIC_ATTEMPT"]
    Path(folder, f"{number}.{attempt}.{host}").touch(exist_ok=False)
    print("here is", host, flush=True)
    while len([*Path(folder).glob(f"{number}.{attempt}.*")]) < 2:
        time.sleep(0.02)
    if number % 2 and attempt == "1":
        raise LookupError(number)
    return number, host


async def test_a_batch_runs_each_item_on_all_hosts_of_a_set(
    kind: str, permitted: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    async with asyncio.timeout(DEADLINE_S):
        inputs = [(str(folder), number) for number in range(4)]
        batch = await client.run_async_map(
            count, inputs, input_mode="args", max_concurrent=2, retries=1, progress=False
        )
        assert await batch.results(cleanup=False) == [(number, "0") for number in range(4)]
        job = await batch.job(1)
        assert sorted([line async for line in job.logs()]) == ["[0] here is 0", "[1] here is 1"]
        while await batch.workers():  # a host ends a moment after its item
            await asyncio.sleep(0.1)
        await batch.cleanup()
        await gone(permitted, kind)
    attempts = [f"{item}.{attempt}" for item in range(4) for attempt in range(1, item % 2 + 2)]
    marks = [f"{attempt}.{host}" for attempt in attempts for host in range(2)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(marks)


@kinetic.run(accelerator="cpu:hosts=2", container_image=IMAGE, cpu=0.1)
def stay(folder: str, number: int) -> int:
    """Leave a marker on each host, and wait for the gate of this item."""
    mark = f"{number}.{os.environ['KINETIC_ATTEMPT']}.{os.environ['KINETIC_HOST']}"
    Path(folder, mark).touch(exist_ok=False)
    while not Path(folder, f"gate.{number}").exists():
        time.sleep(0.02)
    return number


async def test_a_lost_host_costs_one_attempt_and_another_set_runs_the_next(
    kind: str, permitted: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        inputs = [(str(tmp_path), number) for number in range(2)]
        batch = await client.run_async_map(stay, inputs, input_mode="args", progress=False)
        await until(lambda: len([*tmp_path.glob("[01].1.[01]")]) == 4)
        worker = await (await batch.job(1)).worker()
        assert worker is not None
        place = worker.partition(".")[2]
        first = next(
            pod
            for pod in _items(permitted, "pods")
            if pod["metadata"]["annotations"]["kinetic.dev/name"].endswith(place)
            and pod["metadata"]["labels"][INDEX[kind]] == "0"
        )
        name = f"{permitted.name}/{first['metadata']['name']}"
        await asyncio.to_thread(permitted.kubelet.preempt, name)
        await until(lambda: len([*tmp_path.glob("1.2.[01]")]) == 2)
        for number in range(2):
            (tmp_path / f"gate.{number}").touch()
        assert await batch.results(cleanup=False) == [0, 1]
        assert await (await batch.job(1)).worker() != worker
        await batch.cleanup()
        await gone(permitted, kind)
