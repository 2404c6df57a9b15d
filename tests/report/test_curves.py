"""The curves of a report: what jobs have reported, read without waiting for more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic._progress.tally import State
from kinetic._report.facts import BatchReport
from kinetic.aio._reading.report import CurveReader
from kinetic.errors import ConfigurationError, Pruned
from kinetic.sweeps import Choice, GridSearch
from kinetic.testing import Run, memory_platform
from tests.engine.reports import store_slot, succeed
from tests.engine.world import VIRTUAL, World, claim

pytestmark = [VIRTUAL, pytest.mark.usefixtures("small_project")]


CURVE = [(0, 0.5), (1, {"loss": 0.4}), (2, 0.3)]


def same(x: int) -> int:
    return x


async def read(batch: aio.BatchHandle[Any]) -> BatchReport:
    return await batch.snapshots(None, None, ()).read()


async def test_a_curve_has_the_slots_and_the_tail_of_the_last_attempt() -> None:
    async def work(run: Run) -> int:
        order = run.spec.order
        if order.index == 0 and order.attempt == 1:
            await claim(run)
            await store_slot(run, 0, [(9, 9.0)])
            return 9
        await store_slot(run, 0, [(0, 0.5), (1, {"loss": 0.4})])
        await store_slot(run, 1, [(5, 5.0)], key=b"another key".ljust(32))
        return await succeed(run, [(1, {"loss": 0.4}), (2, 0.3)], first=1)

    world = World(work)
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, [1, 2], retries=1)
        world.gate.set()
        await batch.wait()
        found = (await read(batch)).curves
        assert found.reported == 2
        assert found.by_item == {0: CURVE, 1: CURVE}
        await batch.results()
        assert not (await read(batch)).curves.by_item, "the reports were removed"


async def test_a_running_item_has_a_curve_and_each_piece_is_read_once() -> None:
    more, stored = asyncio.Event(), asyncio.Event()

    async def work(run: Run) -> int:
        await claim(run)
        await store_slot(run, 0, [(0, 0.5)])
        stored.set()
        await more.wait()
        await store_slot(run, 1, [(1, 0.4)])
        return await succeed(run, [(2, 0.3)])

    world = World(work)
    store: Any = world.platform.store
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, [1])
        world.gate.set()
        await stored.wait()
        snapshots = batch.snapshots(None, None, ())
        first = await snapshots.read()
        assert first.items[0].state is State.RUNNING
        assert first.curves.by_item == {0: [(0, 0.5)]}
        more.set()
        await batch.wait()
        assert (await snapshots.read()).curves.by_item == {0: [(0, 0.5), (1, 0.4), (2, 0.3)]}
        store.requests.clear()
        await snapshots.read()
        assert store.requests["get"] <= 2, "the inputs, and whether there are requests to stop"


async def test_many_slots_and_items_are_read_in_part() -> None:
    async def work(run: Run) -> int:
        for slot in range(40):
            await store_slot(run, slot, [(slot, float(slot))])
        return await succeed(run, [(40, 40.0)])

    world = World(work)
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, range(7))
        world.gate.set()
        await batch.wait()
        reader = CurveReader(batch._batch, max_curves=3, max_slots=30)
        found = await reader.read((await read(batch)).items, None)
        assert found.reported == 7 and [*found.by_item] == [0, 2, 4]
        for curve in found.by_item.values():
            assert [step for step, _ in curve] == [*range(0, 40, 4), 39, 40]


async def test_jobs_that_report_nothing_cost_no_request() -> None:
    platform = memory_platform()
    store: Any = platform.store
    async with aio.Client(backend="local", platform=platform) as client:
        batch = await client.run_async_map(same, [1, 2])
        await batch.wait()
        store.requests.clear()
        assert not (await read(batch)).curves.by_item
        assert store.requests["list"] == 1, "the attempts, and no reports"


def facts(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="facts">')[2].partition("</script>")[0])


def train(rate: float) -> float:
    if rate > 2:
        raise Pruned(3, rate)
    return rate


async def test_the_page_of_a_sweep_ranks_as_the_sweep_does(tmp_path: Path) -> None:
    platform = memory_platform()
    search = GridSearch({"rate": Choice([1.0, 2.0, 3.0, 4.0])}, direction="maximize")
    async with aio.Client(backend="local", platform=platform) as client:
        async with await client.sweep(train, search, trials=None, name="grid") as sweep:
            await sweep.wait()
        batch = sweep.batch
        assert (await batch.best())["index"] == 1, "the highest"
        assert (await batch.best(direction="minimize"))["index"] == 0
        shown = facts(await batch.report(tmp_path / "page.html"))
        assert shown["direction"] == "maximize"
        assert shown["sweep"] == {
            "direction": "maximize",
            "metric": None,
            "best": [1, 2.0],
            "rungs": [[2, 2, 2]],
        }
        lowest = await batch.report(tmp_path / "page.html", direction="minimize")
        assert facts(lowest)["direction"] == "minimize"

        other = await client.run_async_map(train, [1.0, 0.5], name="plain")
        await other.wait()
        both = facts(await batch.report(tmp_path / "both.html", compare=[other]))
        assert [part["label"] for part in both["parts"]] == ["grid", "plain"]
        assert both["known"] == 6 and both["sweep"] is None and both["direction"] == "minimize"
        with pytest.raises(ConfigurationError, match="'loss'"):
            await batch.report(tmp_path / "both.html", metric="loss", compare=[other])
