"""Scale batches that run by workers, and look at the workers, with real processes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic.aio import BatchHandle, Client
from kinetic.cli.app import main
from kinetic.errors import ConfigurationError, NotFound
from tests.jobs import DEADLINE_S, eventually

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def project(small_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "4")


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(backend="local") as client:
        yield client


@kinetic.run(backend="local", accelerator="cpu", isolation="worker")
def work(index: int, folder: str) -> int:
    """Leave a mark, wait for a file, and fail if it says so."""
    import time

    mark = Path(folder, f"began-{index}")
    mark.write_text(mark.read_text() + "again" if mark.exists() else "")
    go = Path(folder, f"go-{index}")
    while not go.exists():
        time.sleep(0.01)
    if text := go.read_text():
        raise ValueError(text)
    return index


def double(number: int) -> int:
    return 2 * number


class Items:
    """The items of a batch of `work`: which ones have begun, and which ones may end."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.inputs = [(index, str(folder)) for index in range(count)]

    def begun(self) -> set[int]:
        return {int(it.name.rpartition("-")[2]) for it in self.folder.glob("began-*")}

    def free(self, *indexes: int, error: str = "") -> None:
        for index in indexes:
            (self.folder / f"go-{index}").write_text(error)

    def free_all(self) -> None:
        self.free(*(index for index, _ in self.inputs))

    async def until_begun(self, count: int) -> set[int]:
        """Wait until exactly *count* items have begun, and return them."""
        await eventually(lambda: len(self.begun()) >= count)
        begun = self.begun()
        assert len(begun) == count
        return begun

    def ran_once(self) -> bool:
        return all(not it.read_text() for it in self.folder.glob("began-*"))


async def until_workers(batch: BatchHandle[Any, Any], count: int) -> list[kinetic.Worker]:
    async with asyncio.timeout(DEADLINE_S):
        while len(workers := await batch.workers()) != count:
            await asyncio.sleep(0.02)
    return workers


async def test_a_batch_that_runs_is_scaled_up_and_down(client: Client, tmp_path: Path) -> None:
    items = Items(tmp_path, 9)
    async with await client.run_async_map(work, items.inputs, max_concurrent=1) as batch:
        (first,) = await items.until_begun(1)
        (only,) = await batch.workers()
        assert (only.number, only.round, only.state, only.item) == (0, 0, "running", first)
        assert (only.leaving, only.done, only.restarts) == (False, 0, 0)
        assert await (await batch.job(first)).worker() == only.name
        assert await (await batch.job(8)).worker() is None

        assert await batch.scale(3) == 3
        assert batch.max_concurrent == 3
        begun = await items.until_begun(3)
        workers = await until_workers(batch, 3)
        assert [it.number for it in workers] == [0, 1, 2]
        assert {it.item for it in workers} == begun

        assert await batch.scale(1) == 1
        workers = await batch.workers()
        assert [it.leaving for it in workers] == [False, True, True]
        assert all(it.state == "running" for it in workers), "a worker left its item"
        items.free(*(it.item for it in workers[1:] if it.item is not None))
        (rest,) = await until_workers(batch, 1)
        assert rest.number == 0 and items.begun() == begun, "a leaving worker took another item"

        assert await batch.scale(2) == 2, "ranks that have left count"
        await items.until_begun(4)
        assert [it.number for it in await until_workers(batch, 2)] == [0, 3]
        items.free_all()
        assert await batch.results(cleanup=False) == [*range(9)]
        assert items.ran_once()
        assert {record["attempts"] for record in await batch.records()} == {1}
        assert await until_workers(batch, 0) == []


async def test_another_client_scales_within_its_own_limit(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = Items(tmp_path, 6)
    async with await client.run_async_map(work, items.inputs, max_concurrent=1) as batch:
        await items.until_begun(1)
        async with Client(backend="local", max_concurrent=1) as other:
            attached = await other.attach_batch(batch.group_id)
            with caplog.at_level(logging.WARNING):
                assert await attached.scale(4) == 4
            assert "gets 1 of 3 more workers" in caplog.text
            await items.until_begun(2)
            assert await attached.scale(1) == 1
            assert [it.leaving for it in await attached.workers()] == [False, True]
        async with Client(backend="local") as third:
            assert await (await third.attach_batch(batch.group_id)).scale(3) == 3
        await items.until_begun(4)  # two run, one leaves with its item
        items.free_all()
        assert await batch.results() == [*range(6)]
        assert items.ran_once()


async def test_the_number_holds_in_a_later_round_of_any_client(
    client: Client, tmp_path: Path
) -> None:
    items = Items(tmp_path, 4)
    items.free(*range(4), error="no")
    batch = await client.run_async_map(work, items.inputs, max_concurrent=1)
    await batch.wait()
    async with Client(backend="local") as other:
        attached = await other.attach_batch(batch.group_id)
        await until_workers(attached, 0)
        assert await attached.scale(2) == 2
        for index in range(4):
            (tmp_path / f"began-{index}").unlink()
            (tmp_path / f"go-{index}").unlink()
        assert await attached.retry_failed() == 4
        await items.until_begun(2)
        assert len({it.round for it in await until_workers(attached, 2)} - {0}) == 1
        items.free_all()
        assert await attached.results(cleanup=False) == [*range(4)]
        assert {record["attempts"] for record in await attached.records()} == {2}


async def test_a_client_with_a_limit_scales_its_own_batches(tmp_path: Path) -> None:
    first, second = Items(tmp_path / "a", 5), Items(tmp_path / "b", 2)
    first.folder.mkdir()
    second.folder.mkdir()
    async with Client(backend="local", max_concurrent=3) as client:
        async with await client.run_async_map(work, second.inputs, max_concurrent=1) as small:
            await second.until_begun(1)
            async with await client.run_async_map(work, first.inputs, max_concurrent=1) as batch:
                await first.until_begun(1)
                assert await batch.scale(3) == 3
                await first.until_begun(2)
                assert len(await batch.workers()) == 2, "the limit of the client"
                second.free_all()
                await small.results()
                await first.until_begun(3)
                first.free_all()
                assert await batch.results() == [*range(5)]


async def test_a_worker_that_leaves_gives_its_place_to_another_batch(tmp_path: Path) -> None:
    first, second = Items(tmp_path / "a", 4), Items(tmp_path / "b", 1)
    first.folder.mkdir()
    second.folder.mkdir()
    async with Client(backend="local", max_concurrent=2) as client:
        async with await client.run_async_map(work, first.inputs, max_concurrent=2) as batch:
            begun = await first.until_begun(2)
            async with await client.run_async_map(work, second.inputs) as other:
                await batch.scale(1)
                leaving = [it.item for it in await batch.workers() if it.leaving]
                await asyncio.sleep(0.5)  # long enough for a worker that must not start
                assert second.begun() == set(), "both places are taken"
                first.free(*(index for index in begun if index in leaving))
                await second.until_begun(1)
                second.free_all()
                assert await other.results() == [0]
            first.free_all()
            assert await batch.results() == [*range(4)]


async def test_lazy_inputs_keep_more_workers_busy_and_let_others_leave(
    client: Client, tmp_path: Path
) -> None:
    items = Items(tmp_path, 40)

    async def lazily() -> AsyncIterator[tuple[int, str]]:
        for entry in items.inputs:
            yield entry

    async with await client.run_async_map(work, lazily(), max_concurrent=1) as batch:
        values: list[int] = []

        async def read() -> None:
            async for _, _, outcome in batch.outcomes():
                values.append(outcome.unwrap())

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            await items.until_begun(1)
            await batch.scale(4)
            begun = await items.until_begun(4)
            await batch.scale(1)
            items.free(*begun)
            await eventually(lambda: len(values) >= 4)
            await until_workers(batch, 1)
            items.free_all()
        assert sorted(values) == [*range(40)] and items.ran_once()


async def test_lists_show_items_and_no_workers(client: Client, tmp_path: Path) -> None:
    items = Items(tmp_path, 3)
    async with await client.run_async_map(work, items.inputs, max_concurrent=1) as batch:
        (running,) = await items.until_begun(1)
        listed = await client.list_jobs()
        assert [it.job_id for it in listed] == [f"{batch.group_id}-{running}"]
        assert await client.list_jobs(items=False) == []
        items.free(running)
        await items.until_begun(2)
        listed = await client.list_jobs()
        assert {it.group_index for it in listed} == items.begun(), "an ended item is missing"
        items.free_all()
        await batch.results(cleanup=False)
        assert {it.group_index for it in await client.list_jobs()} == {0, 1, 2}
        assert len(await client.list_jobs(limit=2)) == 2


async def test_the_commands_show_and_scale_workers(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*arguments: str) -> str:
        await asyncio.to_thread(run_command, *arguments)
        return capsys.readouterr().out

    items = Items(tmp_path, 6)
    async with await client.run_async_map(work, items.inputs, max_concurrent=1) as batch:
        (first,) = await items.until_begun(1)
        status = json.loads(await run("batches", "status", batch.group_id, "--json"))
        (worker,) = status["workers"]
        assert (worker["number"], worker["state"], worker["item"]) == (0, "running", first)
        scaled = json.loads(await run("batches", "scale", batch.group_id, "8", "--json"))
        assert (scaled["asked"], scaled["able"]) == (8, 4)
        await items.until_begun(4)
        text = await run("batches", "status", batch.group_id)
        assert text.count("running") >= 4 and "WORKER" in text
        shown = json.loads(await run("local", "status", "--json"))
        assert shown["jobs"] == {"running": 4} and shown["workers"] == {"running": 4}
        items.free_all()
        await batch.results()


def run_command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert not ended.value.code


async def test_wrong_numbers_and_removed_batches_are_refused(client: Client) -> None:
    batch = await client.run_async_map(double, [1])
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(ConfigurationError, match="workers must be an int of at least 1"):
            await batch.scale(wrong)  # type: ignore[arg-type]
    await batch.results(cleanup=False)
    async with Client(backend="local") as other:
        await other.cleanup(batch.group_id)
    with pytest.raises(NotFound):
        await batch.scale(2)  # it finds this out itself, and writes nothing
    with pytest.raises(NotFound):
        await batch.workers()
