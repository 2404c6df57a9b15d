"""The supervisor runs the workers of a submission, replaces them, and needs no client."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import Crew, Terms, WorkerId
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.errors import NotFound
from tests.jobs import DEADLINE_S, gone, job_spec
from tests.workers.process import KEY, Batch

from .conftest import eventually

NAME = "grp-000000000000-0"
LABELS = {"kinetic.dev/submission": "grp-000000000000", "test": "yes"}


@pytest.fixture
def runner() -> None:
    """Use the real runner."""


def spec(batch: Batch, name: str) -> JobSpec:
    group = name.rpartition("-")[0]
    order = replace(wire.Order.decode(batch.order_text), group_id=group)
    labels = {**LABELS, "kinetic.dev/submission": group}
    return job_spec(name, {}, order=order, key=KEY, labels=labels, grace=1.0)


async def scale(
    cluster: LocalCluster, batch: Batch, workers: int, *, name: str = NAME, **terms: Any
) -> None:
    known = Terms(workers=workers, budgets=batch.budgets, **terms)
    crew = Crew(terms=known, outputs=str(batch.folder / "outputs"))
    await cluster.scale(spec(batch, name), crew, number=0, workers=workers)


async def workers_of(cluster: LocalCluster) -> list[Observation]:
    found = await cluster.find(labels=LABELS)
    return [it for it in found if "kinetic.dev/index" not in it.labels]


async def running_item(cluster: LocalCluster) -> Observation:
    """Return the only item, once it runs."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for it in await cluster.find(labels=LABELS):
                if "kinetic.dev/index" in it.labels:
                    return it
            await asyncio.sleep(0.01)


def square(number: int) -> int:
    return number * number


def mark_and_wait(path: str) -> str:
    """Write this process's ID, and wait until the file is emptied."""
    import time

    mark = Path(path)
    if mark.exists():
        return "again"
    mark.write_text(str(os.getpid()))
    while mark.read_text():
        time.sleep(0.01)
    return "first"


async def final(batch: Batch) -> None:
    await eventually(lambda: batch.requests().done)


async def test_a_batch_runs_to_its_end_without_any_client(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    batch = Batch(tmp_path / "b", square, range(60))
    await scale(cluster, batch, 2)
    await cluster.aclose()
    await final(batch)
    assert [batch.value(index) for index in range(60)] == [i * i for i in range(60)]
    assert all([*attempts] == [1] for attempts in batch.attempts().values())


async def test_more_workers_than_slots_wait_and_leave_nothing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    batch = Batch(tmp_path / "b", square, range(20))
    await scale(cluster, batch, 5)
    await final(batch)
    async with asyncio.timeout(DEADLINE_S):
        while [it for it in await cluster.find(labels=LABELS) if it.phase is not Phase.ENDED]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kill", ["worker", "interpreter", "child"])
async def test_what_dies_costs_its_item_one_attempt(
    cluster: LocalCluster, tmp_path: Path, kill: str
) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)], retries=1)
    await scale(cluster, batch, 1, backoff_s=0.01)
    child = psutil.Process(int(await eventually(lambda: mark.exists() and mark.read_text())))
    interpreter = child.parent()
    assert interpreter is not None
    worker = interpreter.parent()
    assert worker is not None
    {"worker": worker, "interpreter": interpreter, "child": child}[kill].kill()
    await final(batch)
    assert [outcome.kind for outcome in batch.outcomes(0)] == ["lost", "value"]
    assert batch.value(0) == "again"
    assert not child.is_running()


async def test_a_round_that_is_ended_leaves_no_process(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)])
    await scale(cluster, batch, 1)
    child = psutil.Process(int(await eventually(lambda: mark.exists() and mark.read_text())))
    batch.append(wire.Request(kind="stop"))
    (worker,) = await workers_of(cluster)
    await cluster.delete(labels=LABELS)
    await gone(cluster, worker.name)
    assert batch.states() == [wire.ItemState.CANCELLED]
    assert not child.is_running()
    assert not await workers_of(cluster)


async def test_a_worker_hears_of_a_stop_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)])
    await scale(cluster, batch, 1)
    await eventually(lambda: mark.exists() and mark.read_text())
    batch.append(wire.Request(kind="stop"))
    await cluster.tell(LABELS)
    await final(batch)
    assert batch.states() == [wire.ItemState.CANCELLED]


async def test_workers_die_with_their_supervisor(cluster: LocalCluster, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)])
    await scale(cluster, batch, 1)
    child = psutil.Process(int(await eventually(lambda: mark.exists() and mark.read_text())))
    supervisor = child
    while (parent := supervisor.parent()) is not None and parent.pid not in (1, os.getpid()):
        supervisor = parent
    os.kill(supervisor.pid, signal.SIGKILL)
    await eventually(lambda: not child.is_running())


async def test_submissions_take_turns_in_a_slot(cluster: LocalCluster, tmp_path: Path) -> None:
    def note(path: str) -> None:
        import time

        with open(path, "a") as file:
            file.write(f"{os.environ['KINETIC_JOB_ID']}\n")
        while not Path(f"{path}.go").exists():
            time.sleep(0.01)

    order = tmp_path / "order"
    held = Batch(tmp_path / "held", mark_and_wait, [str(tmp_path / "mark")])
    long = Batch(tmp_path / "long", note, [str(order)] * 20)
    short = Batch(tmp_path / "short", note, [str(order)] * 3)
    await scale(cluster, held, 1, name="grp-000000000001-0")  # takes one of the two slots for good
    await eventually(lambda: (tmp_path / "mark").exists())
    await scale(cluster, long, 1, name="grp-000000000002-0")
    await eventually(order.exists)
    await scale(cluster, short, 1, name="grp-000000000003-0")
    (tmp_path / "order.go").touch()
    await final(long)
    await final(short)
    (tmp_path / "mark").write_text("")
    await final(held)
    ran = [line.rpartition("-")[0][-1] for line in order.read_text().split()]
    assert sorted(ran) == ["2"] * 20 + ["3"] * 3
    assert ran.index("3") == 1, "the short batch waited for the end of the long one"


def say_and_wait(path: str) -> None:
    """Print a line, wait until the file exists, and print another."""
    import time

    print("before", path, flush=True)
    while not Path(path).exists():
        time.sleep(0.01)
    print("after", path, flush=True)


async def test_a_running_item_is_found_with_its_log(cluster: LocalCluster, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("one", "two")]
    batch = Batch(tmp_path / "b", say_and_wait, paths)
    await scale(cluster, batch, 1)
    found = await running_item(cluster)
    group = LABELS["kinetic.dev/submission"]
    assert found.name == f"{group}-0-1" and found.phase is Phase.RUNNING
    assert [it.executor for it in await workers_of(cluster)] == [found.executor]
    lines = cluster.logs(found.name, follow=True)
    assert await anext(lines) == f"before {paths[0]}"
    Path(paths[0]).touch()
    assert [line async for line in lines] == [f"after {paths[0]}"]
    async with asyncio.timeout(DEADLINE_S):
        while (second := await running_item(cluster)).name == found.name:
            await asyncio.sleep(0.01)
        while [line async for line in cluster.logs(second.name)] != [f"before {paths[1]}"]:
            await asyncio.sleep(0.01)
    Path(paths[1]).touch()
    await final(batch)
    with pytest.raises(NotFound):
        [line async for line in cluster.logs(found.name)]
    for index, path in enumerate(paths):
        outcome = batch.outcomes(index)[-1]
        log, me = outcome.log, WorkerId.parse(outcome.writer)
        assert log is not None and me is not None
        lines = cluster.worker_log(f"{NAME}.{me.job}.{me.rank}.{me.restarts}", *log)
        assert [line async for line in lines] == [f"before {path}", f"after {path}"]
        lines = cluster.worker_log(f"{NAME}.{me.job}.{me.rank}.{me.restarts}", *log, tail=1)
        assert [line async for line in lines] == [f"after {path}"]


async def test_watchers_hear_of_items(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    batch = Batch(tmp_path / "b", say_and_wait, [str(path)])
    watch = cluster.watch(LABELS)
    await scale(cluster, batch, 1)
    seen: list[Phase] = []
    async with asyncio.timeout(DEADLINE_S):
        async for it in watch:
            if it.labels.get("kinetic.dev/index") == "0":
                seen.append(it.phase)
                path.touch()
                if it.phase is Phase.GONE:
                    break
    assert seen == [Phase.RUNNING, Phase.GONE]
    assert batch.states() == [wire.ItemState.SUCCEEDED]


async def test_an_item_that_dies_with_its_worker_is_reported_with_the_cause(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", mark_and_wait, [str(mark)], retries=1)
    await scale(cluster, batch, 1, backoff_s=0.01)
    found = await running_item(cluster)
    await eventually(lambda: mark.exists() and mark.read_text())
    watch = cluster.watch(LABELS)
    await anext(watch)  # it is connected
    child = psutil.Process(int(mark.read_text()))
    interpreter = child.parent()
    assert interpreter is not None
    worker = interpreter.parent()
    assert worker is not None
    worker.kill()
    async with asyncio.timeout(DEADLINE_S):
        async for it in watch:
            if it.name == found.name and it.phase is Phase.GONE:
                break
    assert it.executor == found.executor and "SIGKILL" in it.message
    await final(batch)


async def test_an_item_that_is_deleted_looks_for_its_stop(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    batch = Batch(tmp_path / "b", say_and_wait, [str(tmp_path / "go")])
    await scale(cluster, batch, 1)
    found = await running_item(cluster)
    batch.append(wire.Request(kind="stop", items=(0,)))
    await cluster.delete(names=[found.name])
    await final(batch)
    assert batch.states() == [wire.ItemState.CANCELLED]
