"""The progress of real batches as a stream of values."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest

from kinetic import aio
from kinetic.aio._reading.progress import ShownProgress, progress
from kinetic.progress import Progress


@pytest.fixture
async def client(small_project: Path):
    async with aio.Client(backend="local") as client:
        yield client


def third_fails(number: int) -> int:
    if number == 3:
        raise ValueError("three\nis no good")
    return number


def wait_for(path: str) -> None:
    import time

    while not Path(path).exists():
        time.sleep(0.01)


def check(value: Progress) -> None:
    states = value.succeeded, value.failed, value.cancelled, value.lost
    assert value.ended == sum(states) and value.known == value.ended + value.running + value.waiting
    assert value.total is None or value.known == value.total
    assert value.rate >= 0 and value.elapsed >= 0


async def test_values_grow_until_all_items_have_ended(client) -> None:
    batch = await client.run_async_map(third_fails, range(20), max_concurrent=4)
    seen = [value async for value in progress(batch._batch, interval=0.01)]
    for value in seen:
        check(value)
    ended = [value.ended for value in seen]
    assert ended == sorted(ended) and (seen[0].total, ended[-1]) == (20, 20)
    last = seen[-1]
    assert (last.succeeded, last.failed, last.finished, last.eta) == (19, 1, True, 0.0)
    assert last.first_failure == "item 3 (3): ValueError: three is no good"
    again = [value async for value in progress(batch._batch)]
    assert [(value.succeeded, value.failed, value.first_failure) for value in again] == [
        (19, 1, last.first_failure)
    ], "an ended batch gives exactly one value"


def depth_is_odd(depth: int, flag: str, sizes: tuple[int, ...] = ()) -> None:
    raise ValueError("odd")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"flag": "a", "depth": 1}, "flag='a', depth=1"),
        (
            {"depth": 1, "flag": "a" * 99, "sizes": (1,)},
            f"depth=1, flag='{'a' * 12}...{'a' * 13}', …",
        ),
        ((1, "a"), "(1, 'a')"),
    ],
)
async def test_the_first_failure_has_whole_arguments_in_their_order(
    client, given: object, shown: str
) -> None:
    batch = await client.run_async_map(depth_is_odd, [given])
    last = [value async for value in batch.progress()][-1]
    assert last.first_failure == f"item 0 ({shown}): ValueError: odd"


async def test_a_slow_reader_gets_the_newest_and_no_queue(client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    batch = await client.run_async_map(wait_for, [str(go)] * 20, max_concurrent=4)
    values = progress(batch._batch, interval=0.0)
    first = await anext(values)
    go.touch()
    await batch.wait()
    rest = [value async for value in values]
    assert first.ended < 20 and len(rest) == 1 and rest[0].ended == 20


async def test_values_are_an_interval_apart(client, monkeypatch) -> None:
    batch = await client.run_async_map(third_fails, range(20), max_concurrent=4)
    loop, last_reading = asyncio.get_running_loop(), [0.0]
    clock = loop.time

    def time() -> float:
        last_reading[0] = clock()
        return last_reading[0]

    monkeypatch.setattr(loop, "time", time)
    # Compare when the clock was read, because a value may arrive late.
    times = [last_reading[0] async for _ in progress(batch._batch, interval=0.15)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(gap > 0.1 for gap in gaps[:-1]), f"{gaps}: only the last value may come earlier"


async def test_an_unknown_total_becomes_known(client) -> None:
    value_read = asyncio.Event()

    async def inputs():
        for number in range(6):
            if number == 5:
                await value_read.wait()
            yield number

    batch = await client.run_async_map(third_fails, inputs(), max_concurrent=2)
    seen = []
    async for value in progress(batch._batch, interval=0.0):
        value_read.set()
        seen.append(value)
        check(value)
        assert value.total in (None, 6) and (value.total or value.eta is None)
    assert (seen[0].total, seen[-1].total, seen[-1].ended) == (None, 6, 6)


async def test_retries_are_counted_and_end_well(client, tmp_path: Path) -> None:
    def second_time_lucky(number: int) -> None:
        mark = tmp_path / str(number)
        if not mark.exists():
            mark.touch()
            raise RuntimeError("not yet")

    batch = await client.run_async_map(second_time_lucky, range(3), retries=1)
    await batch.wait()
    (last,) = [value async for value in progress(batch._batch)]
    assert (last.succeeded, last.retried, last.first_failure) == (3, 3, "")


async def test_an_input_that_cannot_be_shipped_has_failed(client) -> None:
    import threading

    batch = await client.run_async_map(type, [1, threading.Lock()])
    with contextlib.suppress(BaseException):
        await batch.wait()
    (last,) = [value async for value in progress(batch._batch)]
    assert (last.succeeded, last.failed, last.finished) == (1, 1, True)
    assert last.first_failure.startswith("item 1 (<unlocked ") and "lock" in last.first_failure


async def test_cancelled_items_are_counted(client, tmp_path: Path) -> None:
    paths = [str(tmp_path / "never")] * 5
    batch = await client.run_async_map(wait_for, paths, max_concurrent=2)
    async with contextlib.aclosing(progress(batch._batch, interval=0.0)) as values:
        async for value in values:
            if value.running == 2:
                break
    await batch.cancel()
    (last,) = [value async for value in progress(batch._batch)]
    assert (last.cancelled, last.running, last.finished) == (5, 0, True)


async def test_another_process_sees_the_same(client) -> None:
    batch = await client.run_async_map(third_fails, range(8), max_concurrent=2)
    async with aio.Client(backend="local") as other:
        found = await other.attach_batch(batch.group_id)
        seen = [value async for value in progress(found._batch, interval=0.0)]
    for value in seen:
        check(value)
    assert (seen[-1].succeeded, seen[-1].failed) == (7, 1)
    assert seen[-1].first_failure == "item 3: ValueError: three is no good"


async def test_closing_a_stream_ends_its_tasks(client) -> None:
    batch = await client.run_async_map(third_fails, range(8), max_concurrent=2)
    inner = batch._batch
    listeners, watchers = len(inner.submission._listeners), len(inner.watchers)
    before = asyncio.all_tasks()
    async with contextlib.aclosing(progress(inner)) as values:
        await anext(values)
    async with ShownProgress(inner, wanted=True), ShownProgress(inner, wanted=True):
        await batch.wait()
    remaining = {
        task
        for task in asyncio.all_tasks() - before
        if "progress" in task.get_name() or "failure" in task.get_name()
    }
    assert all(task.cancelling() for task in remaining)
    if remaining:
        _, remaining = await asyncio.wait(remaining, timeout=60)
    assert not remaining
    assert (len(inner.submission._listeners), len(inner.watchers)) <= (listeners, watchers)


async def test_no_progress_is_computed_unless_wanted(client) -> None:
    batch = await client.run_async_map(third_fails, [1])
    async with ShownProgress(batch._batch), ShownProgress(batch._batch, wanted=False):
        assert not any("progress" in task.get_name() for task in asyncio.all_tasks())
        await batch.wait()


async def test_a_running_item_that_is_cancelled_was_not_retried(client, tmp_path: Path) -> None:
    batch = await client.run_async_map(wait_for, [str(tmp_path / "never")] * 2, max_concurrent=1)
    async for value in batch.progress():
        if value.running:
            break
    await batch.cancel()
    (last,) = [value async for value in progress(batch._batch)]
    assert (last.cancelled, last.retried) == (2, 0)
