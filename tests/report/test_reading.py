"""What a report reads of a batch, what that costs, and what becomes of the file."""

from __future__ import annotations

import asyncio
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic._progress.tally import State
from kinetic._report.facts import BatchReport
from kinetic._runner.protocol import frames, wire
from kinetic.aio._engine import report
from kinetic.aio.platforms import Platform
from kinetic.errors import ConfigurationError, NotFound, WireError
from kinetic.testing import MemoryStore, Run, carry_out, memory_platform
from kinetic.testing.attempts import commit
from tests.engine.world import VIRTUAL, World

pytestmark = [VIRTUAL, pytest.mark.usefixtures("small_project")]


def train(rate: float, layers: int = 1) -> dict[str, Any]:
    if rate > 5:
        raise ValueError(f"rate {rate} is too large")
    return {"loss": rate / layers, "weights": object}


@pytest.fixture
def platform() -> Platform:
    return memory_platform()


@pytest.fixture
async def client(platform: Platform):
    async with aio.Client(backend="local", platform=platform) as client:
        yield client


async def ended(client: aio.Client, inputs: list[Any], **options: Any) -> aio.BatchHandle[Any]:
    batch = await client.run_async_map(train, inputs, **options)
    await batch.wait()
    return batch


async def read(batch: aio.BatchHandle[Any]) -> BatchReport:
    return await report.read(batch._batch)


async def test_what_is_read_of_a_batch(client: aio.Client) -> None:
    inputs = [{"rate": 1.0, "layers": 2}, (7.0,), 8.0, object]
    batch = await client.run_async_map(
        train, inputs, name="demo", tags={"a": "b"}, retries=1, max_concurrent=3
    )
    await batch.wait()
    found = await read(batch)
    assert (found.group_id, found.name, found.function) == (batch.group_id, "demo", "train")
    assert (found.tags, found.max_concurrent, found.total) == ({"a": "b"}, 3, 4)
    good, bad, worse, odd = found.items
    assert [item.state for item in found.items] == [State.SUCCEEDED, *[State.FAILED] * 3]
    assert (good.input, good.result) == ({"rate": 1.0, "layers": 2}, {"loss": 0.5})
    assert (bad.input, bad.result, odd.input) == ({"rate": 7.0}, {}, {})
    assert [one.message for one in bad.attempts] == ["ValueError: rate 7.0 is too large"] * 2
    assert [one.number for one in bad.attempts] == [1, 2]
    assert all(one.begun <= one.ended for item in found.items for one in item.attempts)
    assert worse.message == "ValueError: rate 8.0 is too large"
    assert found.examples.keys() == {1, 3}, "one of each kind"
    assert found.examples[1].message == "ValueError: rate 7.0 is too large"
    assert "in train" in found.examples[1].traceback


async def test_reading_takes_listings_and_few_requests(client: aio.Client, platform) -> None:
    batch = await client.run_async_map(train, [(n / 100, 1) for n in range(600)])
    await batch.wait()
    store: MemoryStore = platform.store
    chunks = len([one for one in await store.list("batches/") if "/inputs/" in one.name]) - 1
    assert chunks <= 15
    async with aio.Client(backend="local", platform=platform) as other:
        [listed] = await other.list_batches()
        store.requests.clear()
        found = await read(listed)
        assert sum(item.state is State.FAILED for item in found.items) == 99
        assert all(item.message for item in found.items if item.state is State.FAILED)
        assert store.requests == {
            "look": 2,  # is it there, was it collected?
            "list": 2,  # 500 items each; the slots of the inputs were read by list_batches
            "get": chunks + 1 + 1,  # notes of 100 inputs each, no request to stop, one failure
        }


async def test_a_batch_that_goes_on() -> None:
    world = World()
    async with aio.Client(backend="local", platform=world.platform) as client:
        batch = await client.run_async_map(train, [1.0, 2.0, 3.0], max_concurrent=2)
        await world.until_started(2)
        found = await read(batch)
        states = [item.state for item in found.items]
        assert states == [State.WAITING] * 3, "none of them has claimed its attempt"
        world.gate.set()
        await batch.wait()
        assert (await read(batch)).items[2].state is State.SUCCEEDED


async def test_one_that_runs_is_known_by_its_claim() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    async def work(run: Run) -> int:
        order = run.spec.order
        claim = wire.attempt_key(order.scope, order.index, order.attempt, "claim")
        await run.store.create(claim, b"", wire.claim_metadata(run.executor, order.fence))
        begun.set()
        await gate.wait()
        body = frames.pack([pickle.dumps(1)])
        return await commit(run, order, wire.Outcome(kind=wire.Kind.VALUE), body)

    async with aio.Client(backend="local", platform=memory_platform(work)) as client:
        batch = await client.run_async_map(train, [1.0, 2.0], max_concurrent=1)
        await begun.wait()
        found = await read(batch)
        first, second = found.items
        assert (first.state, second.state) == (State.RUNNING, State.WAITING)
        assert first.last is not None and first.last.begun <= found.read_at
        gate.set()
        await batch.wait()


async def test_what_was_cancelled_and_what_was_lost() -> None:
    async def work(run: Run) -> int | None:
        if run.spec.name.endswith("-0-1"):
            run.print("the end")
            return 137  # without a word
        return await carry_out(run)

    platform = memory_platform(work)
    async with aio.Client(backend="local", platform=platform) as client:
        batch = await client.run_async_map(train, [1.0, 2.0])
        await batch.wait()
        found = await read(batch)
        assert [item.state for item in found.items] == [State.LOST, State.SUCCEEDED]
        assert found.items[0].message

        async def never(rate: float) -> None:
            await asyncio.Event().wait()

        other = await client.run_async_map(never, [1.0, 2.0], max_concurrent=1)
        await other.cancel()
        assert {item.state for item in (await read(other)).items} == {State.CANCELLED}


async def test_a_forged_outcome_is_a_failure_and_ends_nothing(client: aio.Client, platform) -> None:
    batch = await ended(client, [1.0, 2.0])
    store: MemoryStore = platform.store
    scope = batch._batch.submission.identity.scope
    name = wire.attempt_key(scope, 0, 1, "outcome")
    await store.delete([name])
    forged = wire.Outcome(kind=wire.Kind.VALUE, note={"loss": -1e9})
    await store.create(name, b"", forged.signed(b"another key", scope, 0, 1))
    found = await read(batch)
    assert found.items[0].state is State.FAILED and found.items[0].result == {}
    assert "forged" in found.examples[0].message


async def test_inputs_that_are_not_as_submitted_are_not_shown(client: aio.Client, platform) -> None:
    batch = await ended(client, [1.0, 2.0])
    store: MemoryStore = platform.store
    name = next(one.name for one in await store.list("batches/") if "/inputs/" in one.name)
    content = await store.get(name)
    await store.delete([name])
    await store.create(name, content.body.replace(b"1.0", b"9.0"), content.metadata)
    async with aio.Client(backend="local", platform=platform) as other:
        again = await other.attach_batch(batch.group_id)
        with pytest.raises(WireError, match="is not what the submitter"):
            await again.report("never.html")
    assert not Path("never.html").exists()


async def test_a_batch_that_was_cleaned_up_has_no_report(
    client: aio.Client, platform, tmp_path: Path
) -> None:
    batch = await ended(client, [1.0])
    async with aio.Client(backend="local", platform=platform) as other:
        [listed] = await other.list_batches()
        await batch.cleanup()
        for handle in (batch, listed):
            with pytest.raises(NotFound, match="cleaned up"):
                await handle.report(tmp_path / "report.html")
    assert not [*tmp_path.iterdir()]


# --- the file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing/report.html", "there is no folder"),
        ("folder", "that is a folder"),
        ("file/report.html", "there is no folder"),
        ("", "must be the path of a file"),
        (None, "must be the path of a file"),
        (3, "must be the path of a file"),
    ],
)
async def test_a_place_that_cannot_be_is_told_before_anything_is_read(
    client: aio.Client, platform, tmp_path: Path, monkeypatch, path: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    batch = await ended(client, [1.0])
    platform.store.requests.clear()
    with pytest.raises(ConfigurationError, match=words):
        await batch.report(path)
    assert not platform.store.requests


async def test_a_report_replaces_the_one_before_in_one_step(
    client: aio.Client, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = await ended(client, [1.0])
    place = tmp_path / "report.html"
    place.write_text("before")
    with place.open() as before:
        assert await batch.report("report.html") == place
        assert before.read() == "before", "whoever reads it goes on reading the old one"
    assert place.read_text().startswith("<!doctype html>")
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(place.stat().st_mode) == 0o666 & ~umask, "it is made to be passed on"


async def test_a_name_as_long_as_names_may_be(client: aio.Client, tmp_path: Path) -> None:
    batch = await ended(client, [1.0])
    place = tmp_path / ("r" * 250 + ".html")
    assert await batch.report(place) == place
    with pytest.raises(ConfigurationError, match="File name too long"):
        await batch.report(tmp_path / ("r" * 256))
    assert [one.name for one in tmp_path.iterdir()] == [place.name]


async def test_a_metric_that_no_result_has_is_refused_with_the_names_that_exist(
    client: aio.Client, tmp_path: Path
) -> None:
    batch = await ended(client, [1.0])
    with pytest.raises(ConfigurationError, match=r"'los'.*loss"):
        await batch.report(tmp_path / "report.html", metric="los")
    assert await batch.report(tmp_path / "report.html", metric="loss", direction="maximize")
    with pytest.raises(ConfigurationError, match="direction"):
        await batch.report(tmp_path / "report.html", direction="up")  # type: ignore[arg-type]


async def test_a_report_shows_every_item_after_its_results_were_collected(
    client: aio.Client, platform: Platform, tmp_path: Path
) -> None:
    batch = await client.run_async_map(train, [{"rate": 1.0, "layers": 2}, {"rate": 2.0}])
    await batch.wait()
    before = await report.read(batch._batch)
    await batch.results()
    assert (await report.read(batch._batch)).items == before.items
    async with aio.Client(platform=platform) as other:
        attached = await other.attach_batch(batch.group_id)
        after = await report.read(attached._batch)
        assert replace(after, read_at=before.read_at) == before
        assert await attached.report(tmp_path / "report.html", metric="loss")
