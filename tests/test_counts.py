"""What a submission costs, counted in objects and bytes: seconds would depend on the machine."""

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


class Written(DirectoryStore):
    """A store that remembers what the client has created; jobs write to it directly."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.root = root
        self.by_client: list[str] = []
        self.asked: Counter[str] = Counter()

    async def create(self, name: str, *what: Any, **how: Any) -> bool:
        self.asked[name] += 1
        created = await super().create(name, *what, **how)
        if created:
            self.by_client.append(pattern(name))
        return created

    def there(self) -> dict[str, int]:
        """Pattern → number of the objects there are."""
        return dict(Counter(pattern(name) for name in self.sizes()))

    def sizes(self) -> dict[str, int]:
        """Name → bytes of its file."""
        return {
            path.relative_to(self.root).as_posix(): path.stat().st_size
            for path in self.root.rglob("*")
            if path.is_file() and path.relative_to(self.root).parts[0] != ".tmp"
        }


def pattern(name: str) -> str:
    """The name, with ids, digests and numbers left out."""
    name = re.sub(r"(job|grp)-local-[0-9a-f]+", r"\1", name)
    return re.sub(r"\b[0-9a-f]{64}\b|\b[0-9]{4,}\b", "#", name)


class Watched(LocalCluster):
    """A platform that counts its watches."""

    watches = 0

    def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        self.watches += 1
        return super().watch(labels)


@pytest.fixture
def store(home: Path) -> Written:
    return Written(home / "store")


@pytest.fixture
def cluster(home: Path) -> Watched:
    return Watched(home)


@pytest.fixture
async def client(store: Written, cluster: Watched):
    platform = Platform(
        store=store, images=CurrentInterpreter(), cluster=cluster, id_marker="local-"
    )
    async with aio.Client(backend="local", platform=platform) as client:
        yield client


@pytest.fixture
def square(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function of a small project."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "squares.py").write_text(
        "def square(x):\n    return x * x\n\n\ndef times(one):\n    return lambda x: x * x * one\n"
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


async def test_a_job_writes_four_objects_and_what_later_ones_share(
    client: aio.Client, store: Written, square
) -> None:
    job = await client.submit(square, 3)
    assert await job.result(cleanup=False) == 9
    assert store.there() == SHARED | JOB
    again = await client.submit(square, 4)
    assert await again.result(cleanup=False) == 16
    assert store.there() == SHARED | {name: 2 * number for name, number in JOB.items()}
    client_writes = {name for name in JOB if "attempts" not in name}
    assert Counter(store.by_client) == SHARED | dict.fromkeys(client_writes, 2)


async def test_a_job_that_is_cleaned_up_leaves_what_later_ones_share(
    client: aio.Client, store: Written, square
) -> None:
    assert await (await client.submit(square, 3)) == 9
    assert store.there() == SHARED


async def test_a_batch_writes_two_objects_a_job(client: aio.Client, store: Written, square) -> None:
    """Its inputs are stored by the chunk: the first alone, so that it can start at once."""
    batch = await client.run_async_map(square, range(JOBS))
    assert await batch.results(cleanup=False) == [x * x for x in range(JOBS)]
    await batch._batch.coordinator.over.wait()  # how all ended is written down after they are told
    there = store.there()
    chunks = there.pop("batches/grp/inputs/#")
    assert chunks <= 3
    assert there == SHARED | {
        "batches/grp/manifest": 1,
        "batches/grp/lease": 1,
        "groups/grp": 1,
        "batches/grp/attempts/#/#.#.claim": JOBS,
        "batches/grp/attempts/#/#.#.outcome": JOBS,
    }
    by_client = Counter(store.by_client)
    assert by_client["code/#.zip"] == by_client["functions/#.pkl"] == 1
    assert by_client.total() <= 6 + chunks, "the client writes nothing per job"


async def test_a_batch_whose_results_were_collected_keeps_nothing_per_job(
    client: aio.Client, store: Written, square
) -> None:
    batch = await client.run_async_map(square, range(JOBS))
    assert await batch.results() == [x * x for x in range(JOBS)]
    its = ("batches/grp/manifest", "batches/grp/lease", "batches/grp/collected", "groups/grp")
    assert store.there() == SHARED | dict.fromkeys(its, 1)


class Pickled:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        Pickled.times += 1
        return int, (1,)


OPENED: Counter[str] = Counter()


@pytest.mark.timeout(300)
async def test_the_items_of_a_batch_share_what_is_the_same_for_all(
    client: aio.Client, store: Written, cluster: Watched, tmp_path: Path, square
) -> None:
    from squares import times  # type: ignore[import-not-found]

    many, one = 300, Pickled()
    (tmp_path / "table.csv").write_text("a,b\n")

    sys.addaudithook(lambda event, args: note_opened(str(args[0])) if event == "open" else None)
    OPENED.clear()
    batch = await client.run_async_map(times(one), range(many))
    assert await batch.results() == [x * x for x in range(many)]
    assert Pickled.times == 1, "the function is pickled once"
    assert OPENED["table.csv"] == 1, "the project is read, hashed and archived in one go"
    by_client = Counter(store.by_client)
    assert by_client["code/#.zip"] == by_client["functions/#.pkl"] == 1
    assert by_client["batches/grp/inputs/#"] <= many / 100 + 10
    assert set(store.asked.values()) == {1}, "nothing is written twice"
    assert cluster.watches == 1


def note_opened(path: str) -> None:
    if path.endswith("table.csv"):
        OPENED["table.csv"] += 1


async def test_an_item_takes_little_room(client: aio.Client, store: Written, square) -> None:
    """Claim and outcome of a number: what 100,000 of them cost is in the order of 100 MB."""
    batch = await client.run_async_map(square, range(JOBS))
    await batch.results()
    of_items = [size for name, size in store.sizes().items() if "/attempts/" in name]
    inputs = [size for name, size in store.sizes().items() if "/inputs/" in name]
    assert sum(of_items) <= 1000 * JOBS
    assert sum(inputs) <= 200 * JOBS
