"""Count the objects and bytes that a submission writes; seconds would depend on the machine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic.aio.images.current import CurrentInterpreter
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation

JOBS = 50


class CountingStore(DirectoryStore):
    """A store that counts the objects that the client creates; jobs write to it directly."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.by_client: list[str] = []
        self.requests: Counter[str] = Counter()

    async def create(self, name: str, *args: Any, **options: Any) -> bool:
        self.requests[name] += 1
        created = await super().create(name, *args, **options)
        if created:
            self.by_client.append(pattern(name))
        return created

    def counts(self) -> dict[str, int]:
        """Return pattern → number of objects in the store."""
        return dict(Counter(pattern(name) for name in self.sizes()))

    def sizes(self) -> dict[str, int]:
        """Return name → bytes of the object's file."""
        return {
            path.relative_to(self.root).as_posix(): path.stat().st_size
            for path in self.root.rglob("*")
            if path.is_file() and path.relative_to(self.root).parts[0] != ".tmp"
        }


def pattern(name: str) -> str:
    """Replace the IDs, digests, and numbers in a name."""
    name = re.sub(r"(job|grp)-local-[0-9a-f]+", r"\1", name)
    return re.sub(r"\b[0-9a-f]{64}\b|\b[0-9]{4,}\b", "#", name)


class CountingCluster(LocalCluster):
    """A cluster that counts its watches."""

    watches = 0

    def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        self.watches += 1
        return super().watch(labels)


@pytest.fixture
def store(home: Path) -> CountingStore:
    return CountingStore(home / "store")


@pytest.fixture
def cluster(home: Path) -> CountingCluster:
    return CountingCluster(home)


@pytest.fixture
async def client(store: CountingStore, cluster: CountingCluster):
    platform = Platform(
        store=store,
        images=CurrentInterpreter(),
        cluster=cluster,
        id_marker="local-",
    )
    async with aio.Client(backend="local", platform=platform) as client:
        yield client


@pytest.fixture
def square(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function of a small project."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "squares.py").write_text(
        "def square(x):\n    return x * x\n\n\ndef times(y):\n    return lambda x: x * x * y\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "squares", raising=False)
    import squares

    return squares.square


SHARED = {"code/#.zip": 1, "functions/#.pkl": 1}
JOB = {
    "jobs/job/handle.json": 1,
    "jobs/job/inputs/#": 1,
    "jobs/job/attempts/#/#.#.claim": 1,
    "jobs/job/attempts/#/#.#.outcome": 1,
}


async def test_a_job_writes_four_objects_and_those_that_later_jobs_share(
    client: aio.Client, store: CountingStore, square
) -> None:
    job = await client.submit(square, 3)
    assert await job.result(cleanup=False) == 9
    assert store.counts() == SHARED | JOB
    again = await client.submit(square, 4)
    assert await again.result(cleanup=False) == 16
    assert store.counts() == SHARED | {name: 2 * number for name, number in JOB.items()}
    client_writes = {name for name in JOB if "attempts" not in name}
    assert Counter(store.by_client) == SHARED | dict.fromkeys(client_writes, 2)
    before = store.counts()
    assert await (await client.submit(square, 5)) == 25
    assert store.counts() == before, "a job that is cleaned up leaves nothing of its own"


async def test_a_batch_writes_no_file_a_job_and_keeps_nothing_per_job_once_collected(
    client: aio.Client, store: CountingStore, square
) -> None:
    """The inputs are stored in chunks; the first input is alone, so that it can start at once."""
    batch = await client.run_async_map(square, range(JOBS))
    assert await batch.results(cleanup=False) == [x * x for x in range(JOBS)]
    await batch._batch.coordinator.over.wait()  # it writes the batch's end after the results
    counts = without_workers(store)
    chunks = counts.pop("batches/grp/inputs/#")
    assert chunks <= 3
    assert counts == SHARED | {
        "batches/grp/manifest": 1,
        "batches/grp/lease": 1,
        "groups/grp": 1,
        "batches/grp/attempts%": 1,
    }
    by_client = Counter(store.by_client)
    assert by_client["code/#.zip"] == by_client["functions/#.pkl"] == 1
    assert by_client.total() <= 6 + chunks, "the client writes nothing per job"
    # With these limits, the claims and outcomes of 100,000 numbers take 80 MB.
    attempts = [size for name, size in store.sizes().items() if "/attempts" in name]
    inputs = [size for name, size in store.sizes().items() if "/inputs/" in name]
    assert 0 < sum(attempts) <= 800 * JOBS
    assert sum(inputs) <= 200 * JOBS
    assert await batch.results() == [x * x for x in range(JOBS)]
    per_batch = ("batches/grp/manifest", "batches/grp/lease", "batches/grp/collected", "groups/grp")
    assert without_workers(store) == SHARED | dict.fromkeys(per_batch, 1)


def without_workers(store: CountingStore) -> dict[str, int]:
    """Count the objects, except one of each worker and the request of the last one."""
    of_workers = ("batches/grp/workers/", "batches/grp/control/")
    return {name: it for name, it in store.counts().items() if not name.startswith(of_workers)}


class PickleCounter:
    """Count how often an instance is pickled; it unpickles as 1."""

    count = 0

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        PickleCounter.count += 1
        return int, (1,)


OPENED: Counter[str] = Counter()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_the_items_of_a_batch_share_their_function_and_code(
    client: aio.Client, store: CountingStore, cluster: CountingCluster, tmp_path: Path, square
) -> None:
    from squares import times  # type: ignore[import-not-found]

    count = 300
    (tmp_path / "table.csv").write_text("a,b\n")

    sys.addaudithook(lambda event, args: note_opened(str(args[0])) if event == "open" else None)
    OPENED.clear()
    batch = await client.run_async_map(times(PickleCounter()), range(count))
    assert await batch.results() == [x * x for x in range(count)]
    assert PickleCounter.count == 1, "the function is pickled once"
    assert OPENED["table.csv"] == 1, "the project is read, hashed, and archived in one go"
    by_client = Counter(store.by_client)
    assert by_client["code/#.zip"] == by_client["functions/#.pkl"] == 1
    assert by_client["batches/grp/inputs/#"] <= count / 100 + 10
    assert set(store.requests.values()) == {1}, "nothing is written twice"
    assert cluster.watches == 1


def note_opened(path: str) -> None:
    if path.endswith("table.csv"):
        OPENED["table.csv"] += 1
