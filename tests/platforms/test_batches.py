"""Batches: inputs of any kind, outputs in any order, retries, stops and what remains."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic.job_status import JobStatus
from kinetic.outcome import Cancelled, Failed, Lost, Succeeded

from .crew import behaviour
from .harness import Harness, wait_at


def square(x: int) -> int:
    return x * x


def odd_fails(x: int) -> int:
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


def mark(folder: str, number: int) -> int:
    """Create the attempt's marker file, which must not exist yet."""
    Path(folder, f"{number}.{os.environ['KINETIC_ATTEMPT']}").touch(exist_ok=False)
    return number


def fail_first(folder: str, number: int) -> str:
    """Fail or die in the first attempt, and succeed in the second."""
    mark(folder, number)
    if os.environ["KINETIC_ATTEMPT"] == "1":
        if number == 0:
            os._exit(3)
        raise RuntimeError("not yet")
    return os.environ["KINETIC_ATTEMPT"]


@behaviour
async def test_values_come_in_input_order(harness: Harness) -> None:
    count = harness.size(local=20, gke=4)
    terms: Any = {"name": "squares", "tags": {"k": harness.name}}
    batch = await harness.map(square, range(count), **terms)
    assert await batch.results() == [x * x for x in range(count)]
    assert (batch.name, batch.tags) == ("squares", {"k": harness.name})
    assert [job.group_index for job in batch.jobs if job] == [*range(count)]
    assert [listed.group_id for listed in await harness.client.list_batches(**terms)] == [
        batch.group_id
    ]
    await batch.cleanup()
    assert await harness.client.list_batches(**terms) == []
    assert await harness.objects(batch.group_id) == []
    assert [job for job in await harness.client.list_jobs() if job.group_id == batch.group_id] == []
    assert await batch.jobs[0].status() is JobStatus.NOT_FOUND  # type: ignore[union-attr]


@behaviour
async def test_after_results_the_jobs_are_gone_and_failures_are_still_known(
    harness: Harness,
) -> None:
    batch = await harness.map(odd_fails, range(3))
    with pytest.raises(errors.BatchError) as raised:
        await batch.results()
    children = [*filter(None, batch.jobs), *raised.value.failures]
    assert {await job.status() for job in children} == {JobStatus.NOT_FOUND}
    assert [job.group_index for job in await batch.failures()] == [1]
    assert await batch.status_counts() == {"SUCCEEDED": 2, "FAILED": 1}
    assert [await children[index].result() for index in (0, 2)] == [0, 2]
    async with aio.Client() as other:
        found = await other.attach_batch(batch.group_id)
        assert await (await found.job(0)).status() is JobStatus.SUCCEEDED


@behaviour
async def test_each_job_completes_once_and_collected_ones_never_run_again(harness: Harness) -> None:
    count = harness.size(local=12, gke=5)
    inputs = [(str(harness.folder), number) for number in range(count)]
    batch = await harness.map(mark, inputs, max_concurrent=3, retries=1)
    seen = [await job.result(cleanup=True) async for job in batch.as_completed()]
    assert sorted(seen) == [*range(count)]
    again = [job.group_index async for job in batch.as_completed()]
    assert sorted(again) == [*range(count)]  # type: ignore[type-var]
    assert sorted(await batch.results(ordered=False)) == [*range(count)]
    assert await batch.status_counts() == {"SUCCEEDED": count}
    assert harness.marks() == sorted(f"{number}.1" for number in range(count))


@behaviour
async def test_failures_are_reported_with_the_successes(harness: Harness) -> None:
    """Both the submitter and a later reader see the failures next to the values."""
    batch = await harness.map(odd_fails, range(4), name="n", tags={"a": "b"})
    with pytest.raises(errors.BatchError) as caught:
        await batch.results()
    error = caught.value
    assert error.partial_results == [0, None, 2, None]
    assert [job.group_index for job in error.failures] == [1, 3]
    assert error.group_id == batch.group_id
    assert str(error).startswith(f"Batch {batch.group_id}: 2 of 4 jobs failed; ")
    assert [job.group_index for job in await batch.failures()] == [1, 3]
    async with aio.Client() as other:
        found = await other.attach_batch(batch.group_id)
        assert (found.name, found.tags, len(found.jobs)) == ("n", {"a": "b"}, 4)
        assert await found.status_counts() == {"SUCCEEDED": 2, "FAILED": 2}
        mixed = await found.results(return_exceptions=True)
        assert isinstance(mixed[1], ValueError) and mixed[2] == 2
        assert await (await other.attach(f"{batch.group_id}-2")) == 2


@behaviour
async def test_outcomes_are_values_errors_and_losses(harness: Harness) -> None:
    """Outcomes come with their inputs, in order; a returned exception is a value."""

    def finish(how: str) -> Any:
        if how == "raises":
            raise LookupError(how)
        if how == "dies":
            os._exit(9)
        return ValueError(how)

    inputs = ["returns", "raises", "dies"]
    batch = await harness.map(finish, inputs)
    items = [item async for item in batch.outcomes(ordered=True)]
    assert [(item.index, item.input) for item in items] == [*enumerate(inputs)]
    match [item.outcome for item in items]:
        case [Succeeded(ValueError()), Failed(LookupError()), Lost(errors.JobLost())]:
            pass
        case other:
            raise AssertionError(other)
    assert sorted([item.index async for item in batch.outcomes()]) == [0, 1, 2]
    last = [snapshot async for snapshot in batch.progress()][-1]
    assert (last.total, last.succeeded, last.failed + last.lost) == (3, 1, 2)


@behaviour
async def test_what_fails_or_dies_is_tried_again(harness: Harness) -> None:
    """A job completes with its last attempt."""
    inputs = [(str(harness.folder), number) for number in range(2)]
    batch = await harness.map(fail_first, inputs, retries=1)
    seen = {job.group_index: await job.result() async for job in batch.as_completed()}
    assert seen == {0: "2", 1: "2"}
    assert harness.marks() == ["0.1", "0.2", "1.1", "1.2"]


@behaviour
async def test_what_failed_is_retried_from_elsewhere(harness: Harness) -> None:
    inputs = [(str(harness.folder), number) for number in (1, 2)]
    batch = await harness.map(fail_first, inputs)
    with pytest.raises(errors.BatchError):
        await batch.results(cleanup=False)
    async with aio.Client() as other:
        found = await other.attach_batch(batch.group_id)
        assert await found.retry_failed() == 2
        assert await found.results() == ["2", "2"]
        assert await found.retry_failed() == 0
        await found.cleanup()


@behaviour
async def test_the_log_of_an_earlier_attempt_can_be_read_after_a_retry(harness: Harness) -> None:
    def fail_once() -> None:
        print("attempt", os.environ["KINETIC_ATTEMPT"])
        if os.environ["KINETIC_ATTEMPT"] == "1":
            raise RuntimeError("once")

    batch = await harness.map(lambda _: fail_once(), [0], retries=1)
    job = await batch.job(0)
    assert await job.result(cleanup=False) is None
    for number in (1, 2):
        lines = [line async for line in job.logs(attempt=number)]
        assert lines[0] == f"attempt {number}"
        assert lines == [line async for line in job.logs(follow=True, attempt=number)]
    assert [line async for line in job.logs()] == ["attempt 2"]
    with pytest.raises(errors.NotFound, match="no attempt 3"):
        [line async for line in job.logs(attempt=3)]
    name = f"{batch.group_id}-0-1"
    await harness.ports.cluster.delete(names=[name])
    with pytest.raises(errors.NotFound):
        while True:  # a pod, and its log with it, outlives the object that created it
            [line async for line in harness.ports.cluster.logs(name)]
            await asyncio.sleep(0.05)
    # The runner has kept the log in the store. On this machine, it is a part of its worker's log.
    lines = [line async for line in job.logs(attempt=1)]
    assert lines[0] == "attempt 1"
    await batch.cleanup()


@behaviour
async def test_an_item_knows_itself_and_has_an_output_directory(harness: Harness) -> None:
    """A later attempt finds what an earlier one wrote."""

    def identity(_: int) -> tuple[str, ...]:
        out = Path(os.environ["KINETIC_OUTPUT_DIR"])
        if os.environ["KINETIC_ATTEMPT"] == "1":
            (out / "checkpoint").write_text("half-way")
            raise RuntimeError("interrupted")
        names = ("KINETIC_GROUP_ID", "KINETIC_INDEX", "KINETIC_OUTPUT_DIR")
        return (*(os.environ[name] for name in names), (out / "checkpoint").read_text())

    folder = str(harness.folder / "out")
    batch = await harness.map(harness.on(identity, output_dir=folder), range(2), retries=1)
    for index, seen in enumerate(await batch.results()):
        assert seen == (batch.group_id, str(index), f"{folder}/{index}", "half-way")
        job = batch.jobs[index]
        assert job is not None and job.output_dir == f"{folder}/{index}"
        assert await job.outputs() == ["checkpoint"]


@behaviour
async def test_an_empty_list_is_refused_and_an_empty_iterator_is_an_empty_batch(
    harness: Harness,
) -> None:
    with pytest.raises(ValueError, match="empty"):
        await harness.map(square, [])
    batch = await harness.map(square, iter([]))
    assert await batch.results() == []


@behaviour
async def test_fail_fast_starts_nothing_more(harness: Harness) -> None:
    def fail(folder: str, number: int) -> None:
        mark(folder, number)
        raise RuntimeError("at once")

    inputs = [(str(harness.folder), number) for number in range(50)]
    batch = await harness.map(fail, inputs, max_concurrent=1, fail_fast=True)
    with pytest.raises(errors.BatchError):
        await batch.results()
    assert 1 <= len(harness.marks()) < 5
    counts = await batch.status_counts()
    assert counts["FAILED"] >= 1 and sum(counts.values()) == 50


@behaviour
async def test_fail_fast_without_failures_loses_nothing(harness: Harness) -> None:
    count = harness.size(local=24, gke=4)
    batch = await harness.map(square, range(count), max_concurrent=3, fail_fast=True)
    seen = [await job.result(cleanup=True) async for job in batch.as_completed()]
    assert sorted(seen) == sorted(x * x for x in range(count))


@behaviour
async def test_cancel_ends_all_also_from_elsewhere(harness: Harness) -> None:
    """After it nothing starts or retries; a timeout of a wait cancels nothing."""
    gate = harness.gate()
    batch = await harness.map(wait_at, [gate.path] * 20, max_concurrent=2, retries=3)
    await gate.entered(2)
    for wait in (batch.wait, batch.results):
        with pytest.raises(TimeoutError):
            await wait(timeout=0.05)
    with pytest.raises(TimeoutError):
        async for _ in batch.as_completed(timeout=0.05):
            pass
    await harness.counted(batch, RUNNING=2, PENDING=18)
    async with aio.Client() as other:
        await (await other.attach_batch(batch.group_id)).cancel()
    assert {type(item.outcome) async for item in batch.outcomes()} == {Cancelled}
    assert await batch.reason() == "cancelled (cancel() was called)"
    assert [line async for line in (await batch.job(0)).logs()] == ["waiting"]
    with pytest.raises(errors.NoLog, match="-19 has no log: it was cancelled before it began"):
        await (await batch.job(19)).tail()
    assert {status for _, status in await batch.statuses()} == {JobStatus.NOT_FOUND}
    results = await batch.results(return_exceptions=True)
    assert {type(error) for error in results} == {errors.JobCancelled}
    assert len(results) == 20
    assert len(harness.marks("gate/in.*")) <= 4
    await batch.cleanup()
    assert await harness.objects(batch.group_id) == []


@behaviour
async def test_leaving_the_block_ends_what_is_unfinished_unless_it_is_let_go(
    harness: Harness,
) -> None:
    ended, detached = harness.gate("ended"), harness.gate("going")
    async with await harness.map(wait_at, [ended.path] * 3, max_concurrent=2) as batch:
        await ended.entered()
    assert all(status is JobStatus.NOT_FOUND for _, status in await batch.statuses())
    async with aio.Client() as other:
        decorated = harness.on(wait_at)
        async with await other.run_async_map(decorated, [detached.path], progress=False) as batch:
            await batch.detach()
        await detached.entered()
    detached.open("went on")
    found = await harness.client.attach_batch(batch.group_id)
    assert await found.results() == ["went on"]


@pytest.mark.full
@behaviour
async def test_single_items_are_cancelled_and_looked_at(harness: Harness) -> None:
    gate = harness.gate()
    batch = await harness.map(wait_at, [gate.path] * 3, max_concurrent=2, retries=2)
    await gate.entered(2)
    first, last = await batch.job(0), await batch.job(2)
    assert await last.status() is JobStatus.PENDING
    await first.cancel()
    await last.cancel()
    gate.open()
    results = await batch.results(return_exceptions=True)
    assert [type(result) for result in results] == [errors.JobCancelled, str, errors.JobCancelled]
    async with aio.Client() as other:
        found = await (await other.attach_batch(batch.group_id)).job(0)
        for options in ({}, {"follow": True}, {"attempt": 1}):
            assert [line async for line in found.logs(**options)] == ["waiting"], options
        assert await found.tail() == await first.tail() == "waiting"


@behaviour
async def test_inputs_larger_than_a_chunk_are_split(harness: Harness) -> None:
    count = harness.size(local=5, gke=3)
    batch = await harness.map(len, [(b"x" * 5_000_000,)] * count)
    assert await batch.results() == [5_000_000] * count
