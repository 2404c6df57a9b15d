"""A report reads the facts of a batch with few requests, and replaces its file atomically."""

from __future__ import annotations

import asyncio
import os
import pickle
import stat
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic._labels import INDEX
from kinetic._progress.tally import State
from kinetic._report.facts import BatchReport
from kinetic._runner.protocol import frames, wire
from kinetic._runner.protocol.workers import EXIT_DONE
from kinetic.aio._reading import report
from kinetic.aio.platforms import Platform
from kinetic.errors import ConfigurationError, NotFound, WireError
from kinetic.testing import MemoryStore, Run, carry_out, memory_platform
from kinetic.testing.attempts import commit
from tests.engine.world import VIRTUAL

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
    return await report.Snapshots([batch._batch], direction=None, metric=None).read()


async def test_a_report_has_the_facts_of_a_batch(client: aio.Client) -> None:
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
    assert [attempt.message for attempt in bad.attempts] == [
        "ValueError: rate 7.0 is too large"
    ] * 2
    assert [attempt.number for attempt in bad.attempts] == [1, 2]
    attempts = [attempt for item in found.items for attempt in item.attempts]
    assert all(attempt.begun <= attempt.ended for attempt in attempts)
    assert worse.message == "ValueError: rate 8.0 is too large"
    assert found.examples.keys() == {1, 3}, "one of each kind"
    assert found.examples[1].message == "ValueError: rate 7.0 is too large"
    assert "in train" in found.examples[1].traceback


async def test_reading_takes_listings_and_few_requests(client: aio.Client, platform) -> None:
    batch = await client.run_async_map(train, [(n / 100, 1) for n in range(600)])
    await batch.wait()
    async with aclosing(platform.cluster.watch({})) as seen:
        async for job in seen:
            if job.exit_code == EXIT_DONE and INDEX not in job.labels:
                break
    await platform.cluster.delete(labels={})  # a watch that shows ended items has them read again
    store: MemoryStore = platform.store
    chunks = len([info for info in await store.list("batches/") if "/inputs/" in info.name]) - 1
    assert chunks <= 15
    async with aio.Client(backend="local", platform=platform) as other:
        [listed] = await other.list_batches()
        store.requests.clear()
        found = await read(listed)
        assert sum(item.state is State.FAILED for item in found.items) == 99
        assert all(item.message for item in found.items if item.state is State.FAILED)
        assert store.requests == {
            "look": 2,  # whether it exists, and whether its results were collected
            "list": 2,  # 500 items each; list_batches has read the slots of the inputs
            "get": chunks + 2 + 1,  # notes of 100 inputs each, one request and its end, one failure
        }


async def test_an_item_runs_once_it_is_claimed() -> None:
    gate, claimed = asyncio.Event(), asyncio.Event()

    async def work(run: Run) -> int:
        claimed.set()
        await gate.wait()
        body = frames.pack([pickle.dumps(1)])
        return await commit(run, run.spec.order, wire.Outcome(kind=wire.Kind.VALUE), body)

    async with aio.Client(backend="local", platform=memory_platform(work)) as client:
        batch = await client.run_async_map(train, [1.0, 2.0], max_concurrent=1)
        await claimed.wait()
        found = await read(batch)
        first, second = found.items
        assert (first.state, second.state) == (State.RUNNING, State.WAITING)
        assert first.last is not None and first.last.begun <= found.read_at
        gate.set()
        await batch.wait()


async def test_lost_and_cancelled_items() -> None:
    async def work(run: Run) -> int | None:
        if run.spec.name.endswith("-0-1"):
            run.print("the end")
            return 137  # without writing an outcome
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

    async with aio.Client(backend="local", platform=memory_platform()) as client:
        other = await client.run_async_map(never, [1.0, 2.0], max_concurrent=1)
        await other.cancel()
        assert {item.state for item in (await read(other)).items} == {State.CANCELLED}


async def test_a_forged_outcome_is_shown_as_a_failure(client: aio.Client, platform) -> None:
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


async def test_a_report_refuses_changed_inputs(client: aio.Client, platform) -> None:
    batch = await ended(client, [1.0, 2.0])
    store: MemoryStore = platform.store
    name = next(info.name for info in await store.list("batches/") if "/inputs/" in info.name)
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
    ("path", "message"),
    [
        ("missing/report.html", "there is no folder"),
        ("file/report.html", "there is no folder"),
        ("", "must be the path of a file"),
        (None, "must be the path of a file"),
        (3, "must be the path of a file"),
    ],
)
async def test_an_invalid_path_is_an_error_before_any_read(
    client: aio.Client, platform, tmp_path: Path, monkeypatch, path: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    batch = await ended(client, [1.0])
    platform.store.requests.clear()
    with pytest.raises(ConfigurationError, match=message):
        await batch.report(path)
    assert not platform.store.requests


async def test_a_report_replaces_an_earlier_one_atomically(
    client: aio.Client, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = await ended(client, [1.0])
    file = tmp_path / "report.html"
    file.write_text("before")
    with file.open() as before:
        assert await batch.report("report.html") == file
        assert before.read() == "before", "a reader keeps the old file"
    assert file.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, "other users may read it"


async def test_a_file_name_of_the_maximum_length(client: aio.Client, tmp_path: Path) -> None:
    batch = await ended(client, [1.0])
    file = tmp_path / ("r" * 250 + ".html")
    assert await batch.report(file) == file
    with pytest.raises(ConfigurationError, match="File name too long"):
        await batch.report(tmp_path / ("r" * 256))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


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
    before = await read(batch)
    await batch.results()
    assert (await read(batch)).items == before.items
    async with aio.Client(platform=platform) as other:
        attached = await other.attach_batch(batch.group_id)
        after = await read(attached)
        assert replace(after, read_at=before.read_at) == before
        assert await attached.report(tmp_path / "report.html", metric="loss")


async def test_collecting_lists_only_items_with_a_value_of_a_later_attempt() -> None:
    lost = 0

    async def work(run: Run) -> int | None:
        if lost and run.spec.name.endswith("-1-1"):
            return 137  # without writing an outcome
        return await carry_out(run)

    platform = memory_platform(work)
    store: Any = platform.store
    async with aio.Client(backend="local", platform=platform) as client:
        for lost in (0, 1):
            batch = await client.run_async_map(train, [1.0, 2.0, 3.0], retries=1)
            await batch.wait()
            before = await read(batch)
            assert [len(item.attempts) for item in before.items] == [1, 1 + lost, 1]
            while await batch.workers():  # until they have found that nothing is left
                await asyncio.sleep(0.01)
            store.requests.clear()
            await batch.results()
            assert store.requests["list"] == lost + 2, "of the inputs, and of what remains"
            assert (await read(batch)).items == before.items


async def test_a_collected_history_has_the_attempts_after_a_retry(
    client: aio.Client, platform: Platform
) -> None:
    """The first attempt may return its value after a request to retry has started a second one."""
    batch = await ended(client, [1.0, 2.0])
    submission = batch._batch.submission
    key, scope = submission.identity.key, submission.identity.scope
    await submission.requests.append(wire.Request(kind="retry", bases={0: 1}))
    cancelled = wire.Outcome(kind=wire.Kind.CANCELLED, reason="cancelled", executor="someone")
    name = wire.attempt_key(scope, 0, 2, "outcome")
    await platform.store.create(name, b"", cancelled.signed(key, scope, 0, 2))
    before = await read(batch)
    assert [len(item.attempts) for item in before.items] == [2, 1]
    await batch.results()
    assert (await read(batch)).items == before.items
