"""What submitting and waiting cost, counted at the servers."""

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
    Path(folder, f"begun-{x}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    return x
"""


@pytest.fixture
async def front(
    configured: Namespace, gcs_server: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Front]:
    """The bucket as the client sees it; pods go to the server itself."""
    async with Front(gcs_server) as front:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", front.url)
        yield front


@pytest.fixture
def project(configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of a small project."""
    (tmp_path / "counted.py").write_text(PROJECT)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "counted", raising=False)
    import counted  # type: ignore[import-not-found]

    return counted


async def test_a_submission_takes_four_writes_to_the_bucket_and_later_ones_two(
    front: Front, configured: Namespace, project
) -> None:
    """And two to the API server: the Job, and its Secret."""
    at, before, add = 0, Counter[str](), on_cluster(project.add)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        for number in range(3):
            job = await client.submit(add, number, 2)
            asked, at = front.counted(at), len(front.asked)
            now = configured.control_plane.requests(configured.name)
            shared = {"create code": 1, "create functions": 1} if number == 0 else {}
            assert written(asked) == shared | {"create jobs": 2}
            first = {"create secrets": 2} if number == 0 else {"create secrets": 1}  # the root key
            assert written(now - before) == first | {"create jobs": 1}
            assert await job == number + 2
            at, before = (
                len(front.asked),
                configured.control_plane.requests(configured.name),
            )


@pytest.mark.parametrize("beats", [0.6, pytest.param(3.1, marks=pytest.mark.slow)])
async def test_a_waiting_client_renews_its_leases_and_seldom_reads_again(
    front: Front, configured: Namespace, project, tmp_path: Path, beats: float
) -> None:
    """A batch renews its lease and looks for requests; each submission reads again at intervals."""
    wait = on_cluster(project.wait)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        job = await client.submit(wait, 1, str(tmp_path))
        batch = await client.run_async_map(wait, [(2, str(tmp_path)), (3, str(tmp_path))])
        results = asyncio.create_task(batch.results())
        await until(lambda: len([*tmp_path.glob("begun-*")]) == 3)
        waiting = asyncio.create_task(anything(job))
        await quiet(front, configured)
        at, before = len(front.asked), configured.control_plane.requests(configured.name)
        await asyncio.sleep(beats * RHYTHM_S)  # that long it is watched
        asked: dict[str, Counter[str]] = {"jobs": Counter(), "batches": Counter()}
        for one in front.asked[at:]:
            asked[one.name.partition("/")[0]][f"{one.kind} {one.name.rpartition('/')[2]}"] += 1
        for counted in asked.values():  # a reading looks at the request and gets it
            counted["look at 00000000"] -= counted["get 00000000"]
        assert abs(asked["jobs"].pop("look at 00000000")) <= 1, "the last reading may be cut in two"
        for beat in ("look at 00000000", "create lease"):
            assert int(beats) <= asked["batches"].pop(beat, 0) <= int(beats) + 1
        for counted in asked.values():
            assert max(counted.values(), default=0) <= int(beats) + 1, "one reading takes each once"
            assert len(counted) <= 3, counted
        there = configured.control_plane.requests(configured.name) - before
        assert there.keys() <= {"list jobs", "list pods"}, there
        assert there.total() <= 2 * (int(beats) + 1)
        (tmp_path / "go").touch()
        assert await waiting == 1
        assert await results == [2, 3]


async def test_outcomes_are_read_from_receipts(
    front: Front, configured: Namespace, project
) -> None:
    """Values and errors of a usual size come with the last word of their pods."""
    double = on_cluster(project.double)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        batch = await client.run_async_map(double, [*range(12), -1], progress=False)
        values = await batch.results(return_exceptions=True, cleanup=False)
        assert values[:-1] == [2 * x for x in range(12)]
        assert isinstance(values[-1], ValueError)
        asked = [f"{one.kind} {one.name}" for one in front.asked if "attempts" in one.name]
        assert not [what for what in asked if what.endswith(".outcome")]
        assert len(asked) <= 1, "the item that failed is looked at once"


async def anything(job: aio.JobHandle) -> object:
    """Its value."""
    return await job


async def quiet(front: Front, configured: Namespace) -> None:
    """Return when what belongs to beginning is over: a second without a request."""
    before = -1, Counter[str]()
    while before != (now := (len(front.asked), configured.control_plane.requests(configured.name))):
        before = now
        await asyncio.sleep(1)


def written(asked: Counter[str]) -> dict[str, int]:
    """Those that are no reading."""
    reading = ("get", "look at", "list", "watch")
    return {what: number for what, number in asked.items() if not what.startswith(reading)}
