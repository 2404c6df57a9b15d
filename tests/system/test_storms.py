"""Kill every process of a batch, scale it, and cancel items: each item has one outcome in the end.

Each seed is a batch with retries, whose attempts note their begin and their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kinetic import Cancelled, Failed, Lost, Succeeded, aio
from kinetic._runner.stores.directory import DirectoryObjects
from tests.conftest import processes_of
from tests.scripts import Script

from .conftest import DEADLINE_S, Scene, children, soon
from .disks import Disk, left_in, small_disk
from .toiler import RETRIES, finish

TOILER = Path(__file__).with_name("toiler.py")
FULL, MORE, MORE_FAULTS = 1, 20, 8
FEW, MANY = 12, 60
"""Kills per seed of the full tier, and of the slow one: more than 1,000 there."""

ATTEMPT = re.compile(r"(\d+)\.(\d+)\.(claim|outcome)$")
VICTIMS = {"client": 2, "worker": 6, "interpreter": 6, "child": 6, "parent": 2, "supervisor": 1}
"""What is killed, and how often."""


def seeds(full: int, more: int) -> list[object]:
    few = [pytest.param(seed, marks=pytest.mark.full) for seed in range(full)]
    return [*few, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(full, more))]


class Storm:
    """What happens to the batch *group*: kills, scaling, cancellations."""

    def __init__(
        self, scene: Scene, chance: random.Random, group: str, count: int, clients: list[Script]
    ) -> None:
        self.scene = scene
        self.chance = chance
        self.group = group
        self.count = count
        self.clients = clients
        self.is_over = False
        self.kills: Counter[str] = Counter()
        self.killed: set[int] = set()
        self.cancelled: set[int] = set()

    async def blow(self) -> None:
        """Do something to the batch."""
        weights = {**VICTIMS, "scale": 4, "cancel": 3}
        (what,) = self.chance.choices([*weights], [*weights.values()])
        if what == "scale":
            async with self.attached() as batch:
                await batch.scale(self.chance.choice([1, 2, 8]))
        elif what == "cancel":
            async with self.attached() as batch:
                index = self.chance.randrange(batch.stored)
                self.cancelled.add(index)
                await (await batch.job(index)).cancel()
        elif what == "client":
            self.kill_client()
        else:
            if not (victims := await self.wait_for(what)):
                await self.go_on()
                return
            victim = self.chance.choice(victims)
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
                self.killed.add(victim.pid)
                self.kills[what] += 1

    def find(self, what: str) -> list[psutil.Process]:
        """Return the processes of this kind."""
        found = [*filter(None, [self.scene.supervisor()])]
        for kind in ("supervisor", "parent", "worker", "interpreter"):
            if kind == what:
                return found
            found = [child for process in found for child in children(process)]
        return [child for process in found for child in descendants(process)]

    async def wait_for(self, what: str) -> list[psutil.Process]:
        """Return the processes of this kind; none if there are none for a second."""
        give_up_at = time.monotonic() + 1
        while not (found := self.find(what)) and time.monotonic() < give_up_at:
            await asyncio.sleep(0.005)
        return found

    async def go_on(self) -> None:
        """Find out why nothing runs: the batch is over, or it needs a client."""
        async with self.attached() as batch:
            self.is_over = batch.finished
        if not self.has_client:
            self.start_client()

    @property
    def has_client(self) -> bool:
        """Whether the last client runs: it ends with the batch, or if it lacks inputs."""
        return self.clients[-1].process.poll() is None

    def kill_client(self) -> None:
        """Kill the client, and mostly start another."""
        self.kills["client"] += self.has_client
        self.clients[-1].kill()
        if self.chance.random() < 0.7:
            self.start_client()

    def start_client(self) -> None:
        """Start a client that looks at the batch, or that resumes it."""
        role, marks = self.chance.choice(["look", "resume"]), self.scene.marks
        self.clients.append(self.scene.client(TOILER, role, marks, self.count, self.group))

    async def blow_during(self, fault: Fault) -> None:
        """Let the disk fail for a moment, and do something; an error names the fault."""
        fault.begin()
        end = asyncio.get_running_loop().call_later(self.chance.uniform(0.1, 0.8), fault.end)
        (result,) = await asyncio.gather(self.blow(), return_exceptions=True)
        if result is not None and fault.message not in str(result):
            raise result
        await asyncio.sleep(max(0.0, end.when() - asyncio.get_running_loop().time()))

    @contextlib.asynccontextmanager
    async def attached(self, limit_s: float = DEADLINE_S) -> Any:
        """Attach to the batch for a while."""
        async with asyncio.timeout(limit_s), aio.Client(backend="local") as client:
            yield await client.attach_batch(self.group)


def descendants(process: psutil.Process) -> Iterator[psutil.Process]:
    for child in children(process):
        yield child
        yield from descendants(child)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(FULL, MORE))
async def test_a_batch_outlives_all_of_its_processes(
    scene: Scene, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await endure(scene, seed, monkeypatch, None)


class FullDisk:
    """The home is on a small disk, which is full for a while."""

    message = "No space left on device"

    def __init__(self, home: Path) -> None:
        self._disk = Disk(home)

    def begin(self) -> None:
        self._disk.fill()

    def end(self) -> None:
        self._disk.free()


class FailingDisk:
    """Every third link, rename, and new folder of a running process fails for a while."""

    message = "Input/output error"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._tracer: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        calls = "link,linkat,rename,mkdir"
        options = ["-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"]
        options += ["-e", f"inject={calls}:error=EIO:when=2+3"]
        options += [f"-p{process.pid}" for process in processes_of(self._home)]
        self._tracer = subprocess.Popen(["strace", *options])

    def end(self) -> None:
        if self._tracer is not None:
            self._tracer.terminate()  # then it leaves the processes that it traces
            try:
                self._tracer.wait(2)
            except subprocess.TimeoutExpired:  # it waits for one that is just being forked
                self._tracer.kill()
                self._tracer.wait()


Fault = FullDisk | FailingDisk


@pytest.fixture
def full_disk(scene: Scene) -> Iterator[FullDisk]:
    with small_disk(scene.home, "16m"):
        yield FullDisk(scene.home)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(0, MORE_FAULTS))
async def test_a_batch_outlives_a_full_disk(
    scene: Scene, seed: int, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await endure(scene, seed, monkeypatch, full_disk)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes system calls fail")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(0, MORE_FAULTS))
async def test_a_batch_outlives_a_failing_disk(
    scene: Scene, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await endure(scene, seed, monkeypatch, FailingDisk(scene.home))


async def endure(
    scene: Scene, seed: int, monkeypatch: pytest.MonkeyPatch, fault: Fault | None
) -> None:
    """Run a batch in a storm; check its outcomes, and that nothing is left."""
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "8")
    monkeypatch.setenv("KINETIC_LOCAL_IDLE_S", "2")
    chance, kills = random.Random(seed), FEW if seed < FULL and fault is None else MANY
    count = 100 + 5 * kills
    isolation, mode = ("process", "worker")[seed % 2], ("listed", "lazy")[seed // 2 % 2]
    clients = [scene.client(TOILER, mode, scene.marks, count, isolation)]
    try:
        group = clients[0].hear("submitted").split()[1]
        storm = Storm(scene, chance, group, count, clients)
        await soon(lambda: read_notes(scene))
        while not storm.is_over and sum(storm.kills.values()) < kills:
            await asyncio.sleep(chance.uniform(0, 0.15))
            if fault is None:
                await storm.blow()
            else:
                await storm.blow_during(fault)
    finally:
        for client in clients:
            client.kill()
    print(dict(storm.kills))
    for line in [line for client in clients for line in client.lines if line.startswith("error")]:
        assert "Inputs" in line or "SubmitterLost" in line or (fault and fault.message in line), (
            line
        )
    async with storm.attached(3 * DEADLINE_S) as batch:
        await batch.scale(8)
        if mode == "lazy":
            await finish(batch, str(scene.marks), count)
        outcomes = {index: outcome async for index, _, outcome in batch.outcomes()}
        depth = 5 if isolation == "process" else 4
        check(storm, outcomes, depth, may_fail=fault is not None)
        while await batch.workers():
            await asyncio.sleep(0.1)
        await batch.cleanup()
    left = left_in(scene.home / "store")
    assert [name for name in left if not name.startswith(".tmp/")] == [], "kinetic gc removes those"
    await soon(lambda: not processes_of(scene.home), lambda: str(processes_of(scene.home)))
    state = scene.home / "local" / "v1"
    assert [*state.glob(f"logs/{group}*"), *state.glob("work/*"), *state.glob("spares/*")] == []
    await soon(lambda: not [*state.glob("trash/*")])
    scene.assert_only_supervisor_left()


def read_notes(scene: Scene) -> list[list[Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [*map(json.loads, (scene.marks / "notes").read_text().splitlines())]
    return []


def check(storm: Storm, outcomes: dict[int, Any], depth: int, *, may_fail: bool) -> None:
    """Compare the outcomes with the attempts in the store, and with what the attempts noted."""
    assert outcomes.keys() == {*range(storm.count)}
    notes = read_notes(storm.scene)
    begun = Counter((number, attempt) for what, number, attempt, *_ in notes if what == "begin")
    ended = Counter((number, attempt) for what, number, attempt, *_ in notes if what == "end")
    chains = {(it[1], it[2]): it[3][:depth] for it in notes if it[0] == "begin"}
    assert {*begun.values(), *ended.values()} <= {1}, "an attempt ran twice"
    attempts: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    claims: set[tuple[int, int]] = set()
    objects = DirectoryObjects(storm.scene.home / "store")
    for stored in objects.list(f"batches/{storm.group}/attempts/"):
        if (found := ATTEMPT.search(stored.name)) is None:
            continue
        index, attempt = int(found[1]), int(found[2])
        if found[3] == "claim":
            claims.add((index, attempt))
        else:
            attempts[index][attempt] = json.loads(stored.metadata["header"])
    closed = {(index, attempt) for index, them in attempts.items() for attempt in them}
    assert claims <= closed and begun.keys() <= closed
    for index, outcome in outcomes.items():
        them = attempts[index]
        assert [*them] == [*range(1, len(them) + 1)]
        kinds = [it["kind"] for it in them.values()]
        failures = sum(kind in ("error", "lost") for kind in kinds)
        match outcome:
            case Succeeded(value):
                assert value == index * index and index % 20 != 1
                assert kinds[-1] == "value" and kinds.count("value") == 1
                assert failures <= RETRIES and (index, len(them)) in ended
            case Failed() | Lost():
                assert "value" not in kinds
                assert failures == RETRIES + 1 or index in storm.cancelled, (index, them)
                assert failures <= RETRIES + 1
            case Cancelled():
                assert index in storm.cancelled and not failures
            case _:
                raise AssertionError(outcome)
        for attempt, it in them.items():
            if it["kind"] == "lost" or (it["kind"] == "error" and index % 20 != 1):
                chain = chains.get((index, attempt), ())
                died = len(chain) < depth or bool(storm.killed & {*chain})
                assert died or may_fail, (index, attempt, it, chain)
