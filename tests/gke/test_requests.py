"""Count at the servers how many requests it takes to submit and to wait."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kinetic import aio
from tests.cluster.fixtures import Namespace, on_cluster, until

from .proxy import Front

DEADLINE_S = 120.0
RHYTHM_S = 10.0
PROJECT = """
import time
from pathlib import Path

def add(a, b):
    return a + b

def double(x):
    if x < 0:
        raise ValueError(x)
    return 2 * x

def wait(x, folder):
    Path(folder, f"started-{x}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    return x
"""


@pytest.fixture
async def front(
    configured: Namespace, gcs_server: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Front]:
    """Put a counting proxy between the client and the bucket; pods use the server directly."""
    async with Front(gcs_server) as front:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", front.url)
        yield front


@pytest.fixture
def project(configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Import a module of a small project."""
    (tmp_path / "counted.py").write_text(PROJECT)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "counted", raising=False)
    import counted  # type: ignore[import-not-found]

    return counted


async def test_a_later_submission_takes_two_writes_to_the_bucket(
    front: Front, configured: Namespace, project
) -> None:
    """The first one also stores the function, the code, and the runner for the user's image.

    Each takes two writes to the API server: the Job and its Secret. Its value arrives in the
    termination message of its pod.
    """
    start, before, add = 0, Counter[str](), on_cluster(project.add)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        for number in range(3):
            job = await client.submit(add, number, 2)
            now = configured.control_plane.requests(configured.name)
            shared = {"create code": 2, "create functions": 1} if number == 0 else {}
            assert writes(front.counted(start)) == shared | {"create jobs": 2}
            secrets = 2 if number == 0 else 1  # the first submission also creates the root key
            assert writes(now - before) == {"create secrets": secrets, "create jobs": 1}
            assert await job == number + 2
            start = len(front.requests)
            before = configured.control_plane.requests(configured.name)
        outcomes = [request for request in front.requests if request.name.endswith(".outcome")]
        assert {request.kind for request in outcomes} <= {"delete"}


@pytest.mark.parametrize("beats", [0.6, pytest.param(3.1, marks=pytest.mark.slow)])
async def test_a_waiting_client_renews_its_leases_and_seldom_reads_again(
    front: Front, configured: Namespace, project, tmp_path: Path, beats: float
) -> None:
    """A batch renews its lease and checks for requests; each submission reads at intervals."""
    wait = on_cluster(project.wait)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        job = await client.submit(wait, 1, str(tmp_path))
        batch = await client.run_async_map(wait, [(2, str(tmp_path)), (3, str(tmp_path))])
        results = asyncio.create_task(batch.results())
        await until(lambda: len([*tmp_path.glob("started-*")]) == 3)
        waiting = asyncio.create_task(value_of(job))
        await quiet(front, configured)
        start, before = len(front.requests), configured.control_plane.requests(configured.name)
        await asyncio.sleep(beats * RHYTHM_S)  # the period in which requests are counted
        counts: dict[str, Counter[str]] = {"jobs": Counter(), "batches": Counter()}
        for request in front.requests[start:]:
            first, last = request.name.partition("/")[0], request.name.rpartition("/")[2]
            counts[first][f"{request.kind} {last}"] += 1
        assert int(beats) <= counts["batches"].pop("create lease", 0) <= int(beats) + 1
        # The holder of the lease and each reading look for requests.
        looks = counts["batches"].pop("look at 00000000", 0)
        assert int(beats) <= looks <= 2 * int(beats) + 4
        for kind, count in counts.items():
            # Only the store says what workers run, so a batch is read sooner after the last change.
            most = int(beats) + (3 if kind == "batches" else 1)
            assert max(count.values(), default=0) <= most, "one reading takes each once"
            assert len(count) <= 3, count
        api = configured.control_plane.requests(configured.name) - before
        assert api.keys() <= {"list jobs", "list pods"}, api
        assert api.total() <= 2 * 2 * (int(beats) + 1), "each of two submissions sends two lists"
        (tmp_path / "go").touch()
        assert await waiting == 1
        assert await results == [2, 3]


async def test_a_batch_takes_as_many_writes_to_the_cluster_as_one_job(
    front: Front, configured: Namespace, project
) -> None:
    """However many items it has: the Job, its Secret, and what `retry_failed` would need."""
    double = on_cluster(project.double)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        inputs = [*range(40), -1]
        batch = await client.run_async_map(double, inputs, max_concurrent=3, progress=False)
        values = await batch.results(return_exceptions=True, cleanup=False)
        assert values[:-1] == [2 * x for x in range(40)]
        assert isinstance(values[-1], ValueError)
        await batch.cleanup()
        found = writes(configured.control_plane.requests(configured.name))
        assert found.pop("create jobs") == 1
        assert found.pop("create secrets") == 3, "the root key, the environment, and the key"
        assert {name.partition(" ")[0] for name in found} <= {"delete", "deletecollection"}
        assert sum(found.values()) <= 6, found
        assert writes(front.counted())["create batches"] < 41, "no write for an item"


async def value_of(job: aio.JobHandle) -> object:
    return await job


async def quiet(front: Front, configured: Namespace) -> None:
    """Wait until a second passes without a request: the requests of starting are over."""
    before = -1, Counter[str]()
    plane, name = configured.control_plane, configured.name
    while before != (now := (len(front.requests), plane.requests(name))):
        before = now
        await asyncio.sleep(1)


def writes(requests: Counter[str]) -> dict[str, int]:
    """Return the counts without those of reading requests."""
    reading = ("get", "look at", "list", "watch")
    return {name: count for name, count in requests.items() if not name.startswith(reading)}
