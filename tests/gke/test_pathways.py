"""One job on several hosts of a cluster: it runs once, and nothing of it is left."""

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
    """Each host leaves a mark, and none ends before all have, and before there is a *gate*."""
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
                gate.touch()  # a set that goes takes its logs along
        assert seen == {f"[{host}] here is {host}" for host in range(3)}
        value = await job.result(cleanup=False)
        assert value[0] == "0"
        assert value[1].endswith(":8476")
        if kind == "lws":  # by itself: nobody has asked for it
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
    """The host of this number fails once the first has begun; the others would go on for ever."""
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
async def test_following_a_log_ends_when_a_host_dies_which_is_not_repeated(
    kind: str, may_delete: bool, configured: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    """Also where the set cannot go by itself, and its pods stay; what all have said is kept."""
    if may_delete:
        permit_runner(configured)
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(one_fails, str(tmp_path), "2", "die")
        told = {line async for line in job.logs(follow=True)}
        assert "[2] here is 2" in told
        with pytest.raises(errors.JobError, match="host 2 of 3"):
            await job
        await job.cleanup(gcs=False)
        await gone(configured, kind)
        kept = [line async for line in job.logs()]
        assert "[2] here is 2" in kept
        assert (await job.tail(1000)).splitlines() == kept
        await job.cleanup()
    assert len([*tmp_path.glob("2.*")]) == 1


async def test_a_set_goes_when_the_function_ends_though_no_client_lives(
    permitted: Namespace, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"  # for nothing else: each host counts what is there
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


async def test_without_the_right_to_delete_its_set_a_job_says_which_is_missing(
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
        await running.wait()  # who looks only later sees no host but those that were made anew
        gate.touch()
        assert (await waiting)[0] == "0"
        lines: list[str] = []
        while "[0] kind: Role" not in lines:  # the set makes the host anew, which says it again
            await asyncio.sleep(0.1)
            with contextlib.suppress(errors.NotFound):  # between the two
                lines = [line async for line in job.logs()]
        assert "[0]   resources: [leaderworkersets]" in lines
        await job.cleanup()
        await gone(configured, "lws")


@on_hosts
def say_nothing() -> None:
    pass


@pytest.mark.full
async def test_a_plain_call_ends_a_set_that_may_not_end_itself(
    configured: Namespace, client: aio.Client
) -> None:
    """Its hosts are started again and again, and its log may have no end."""
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(say_nothing)
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
        first = next(one for one in pods if one["metadata"]["labels"][INDEX[kind]] == "0")
        pod = f"{permitted.name}/{first['metadata']['name']}"
        await asyncio.to_thread(permitted.kubelet.preempt, pod)
        await until(lambda: len([*tmp_path.glob("[012].*")]) == 6)
        await job.cancel()
        await job.cleanup()
        await gone(permitted, kind)


async def gone(namespace: Namespace, kind: str) -> None:
    """Wait until there is neither a set nor a pod."""

    def left() -> list[str]:
        found = [one for what in (COLLECTIONS[kind], "pods") for one in _items(namespace, what)]
        return [one["metadata"]["name"] for one in found]

    while await asyncio.to_thread(left):
        await asyncio.sleep(0.1)


def _items(namespace: Namespace, what: str) -> list[Any]:
    return namespace.call("GET", what)["items"]
