"""A batch's life: inputs of any kind, outputs in any order, retries, stops, and what is left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import wire
from kinetic.job_status import JobStatus
from kinetic.outcome import Cancelled, Failed, Lost, Succeeded

from .crew import behaviour
from .place import Place, wait_at


def square(x: int) -> int:
    return x * x


def odd_fails(x: int) -> int:
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


def mark(folder: str, number: int) -> int:
    """Leave one that nobody else may have left."""
    Path(folder, f"{number}.{os.environ['KINETIC_ATTEMPT']}").touch(exist_ok=False)
    return number


def later_lucky(folder: str, number: int) -> str:
    """Each attempt but the second fails or dies."""
    mark(folder, number)
    if os.environ["KINETIC_ATTEMPT"] == "1":
        if number == 0:
            os._exit(3)
        raise RuntimeError("not yet")
    return os.environ["KINETIC_ATTEMPT"]


@behaviour
async def test_values_come_in_input_order(place: Place) -> None:
    count = place.size(local=20, gke=4)
    terms: Any = {"name": "squares", "tags": {"k": place.name}}
    batch = await place.map(square, range(count), **terms)
    assert await batch.results() == [x * x for x in range(count)]
    assert (batch.name, batch.tags) == ("squares", {"k": place.name})
    assert [job.group_index for job in batch.jobs if job] == [*range(count)]
    assert [one.group_id for one in await place.client.list_batches(**terms)] == [batch.group_id]
    await batch.cleanup()
    assert await place.client.list_batches(**terms) == []
    assert await place.objects(batch.group_id) == []
    assert [one for one in await place.client.list_jobs() if one.group_id == batch.group_id] == []
    assert await batch.jobs[0].status() is JobStatus.NOT_FOUND  # type: ignore[union-attr]


@behaviour
async def test_what_somebody_changed_in_the_store_is_refused_and_can_be_removed(
    place: Place,
) -> None:
    batch = await place.map(square, range(2))
    await batch.wait()
    store, scope = place.ports.store, f"batches/{batch.group_id}/"
    slot = wire.input_key(scope, 0)
    genuine = await store.get(slot)
    await store.delete([slot])
    await store.create(slot, genuine.body.replace(b"digests", b"digestz"), genuine.metadata)
    async with aio.Client() as other:
        found = await other.attach_batch(batch.group_id)
        told = {one.index: (one.input, one.outcome.unwrap()) async for one in found.outcomes()}
        assert told == {0: (None, 0), 1: (None, 1)}
    manifest = await store.get(f"{scope}manifest")
    await store.delete([manifest.name])
    await store.create(manifest.name, manifest.body.replace(b'"uri": "', b'"uri": "another/'))
    async with aio.Client() as other:
        with pytest.raises(errors.WireError, match="is not what its submitter signed"):
            await other.attach_batch(batch.group_id)
        await other.cleanup(batch.group_id)
    assert await place.objects(batch.group_id) == []


@behaviour
async def test_the_jobs_that_results_has_removed_are_not_found_and_failures_are_still_told(
    place: Place,
) -> None:
    batch = await place.map(odd_fails, range(3))
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
async def test_each_job_completes_once_and_what_was_taken_runs_no_more(place: Place) -> None:
    count = place.size(local=12, gke=5)
    inputs = [(str(place.folder), number) for number in range(count)]
    batch = await place.map(mark, inputs, max_concurrent=3, retries=1)
    seen = [await job.result(cleanup=True) async for job in batch.as_completed()]
    assert sorted(seen) == [*range(count)]
    again = [job.group_index async for job in batch.as_completed()]
    assert sorted(again) == [*range(count)]  # type: ignore[type-var]
    assert sorted(await batch.results(ordered=False)) == [*range(count)]
    assert await batch.status_counts() == {"SUCCEEDED": count}
    assert place.marks() == sorted(f"{number}.1" for number in range(count))


@behaviour
async def test_failures_are_told_with_what_went_well(place: Place) -> None:
    """Here and to a second reader, though the first has collected them."""
    batch = await place.map(odd_fails, range(4), name="n", tags={"a": "b"})
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
async def test_outcomes_are_values_errors_and_losses(place: Place) -> None:
    """In the order of the inputs, beside them; an exception that is returned is a value."""

    def come_to(what: str) -> Any:
        if what == "raises":
            raise LookupError(what)
        if what == "dies":
            os._exit(9)
        return ValueError(what)

    inputs = ["returns", "raises", "dies"]
    batch = await place.map(come_to, inputs)
    ended = [one async for one in batch.outcomes(ordered=True)]
    assert [(one.index, one.input) for one in ended] == [*enumerate(inputs)]
    match [one.outcome for one in ended]:
        case [Succeeded(ValueError()), Failed(LookupError()), Lost(errors.JobLost())]:
            pass
        case other:
            raise AssertionError(other)
    assert sorted([one.index async for one in batch.outcomes()]) == [0, 1, 2]
    last = [one async for one in batch.progress()][-1]
    assert (last.total, last.succeeded, last.failed + last.lost) == (3, 1, 2)


@behaviour
async def test_what_fails_or_dies_is_tried_again(place: Place) -> None:
    """What completes is the last attempt."""
    inputs = [(str(place.folder), number) for number in range(2)]
    batch = await place.map(later_lucky, inputs, retries=1)
    seen = {job.group_index: await job.result() async for job in batch.as_completed()}
    assert seen == {0: "2", 1: "2"}
    assert place.marks() == ["0.1", "0.2", "1.1", "1.2"]


@behaviour
async def test_what_failed_is_retried_from_elsewhere(place: Place) -> None:
    inputs = [(str(place.folder), number) for number in (1, 2)]
    batch = await place.map(later_lucky, inputs)
    with pytest.raises(errors.BatchError):
        await batch.results(cleanup=False)
    async with aio.Client() as other:
        found = await other.attach_batch(batch.group_id)
        assert await found.retry_failed() == 2
        assert await found.results() == ["2", "2"]
        assert await found.retry_failed() == 0
        await found.cleanup()


@behaviour
async def test_the_log_of_an_earlier_attempt_can_be_read_after_a_retry(place: Place) -> None:
    def says() -> None:
        print("attempt", os.environ["KINETIC_ATTEMPT"])
        if os.environ["KINETIC_ATTEMPT"] == "1":
            raise RuntimeError("once")

    batch = await place.map(lambda _: says(), [0], retries=1)
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
    await place.ports.cluster.delete(names=[name])
    with pytest.raises(errors.NotFound):
        while True:  # a pod outlives the object that made it, and its log is there as long
            [line async for line in place.ports.cluster.logs(name)]
            await asyncio.sleep(0.05)
    if place.name == "local":
        with pytest.raises(errors.NotFound, match=r"attempt 1 of .* has no log"):
            [line async for line in job.logs(attempt=1)]
    else:  # its runner has kept it
        lines = [line async for line in job.logs(attempt=1)]
        assert lines[0] == "attempt 1"
    await batch.cleanup()


@behaviour
async def test_an_item_knows_itself_and_has_an_output_directory(place: Place) -> None:
    """An attempt finds there what the one before has written."""

    def who(_: int) -> tuple[str, ...]:
        out = Path(os.environ["KINETIC_OUTPUT_DIR"])
        if os.environ["KINETIC_ATTEMPT"] == "1":
            (out / "checkpoint").write_text("half-way")
            raise RuntimeError("interrupted")
        names = ("KINETIC_GROUP_ID", "KINETIC_INDEX", "KINETIC_OUTPUT_DIR")
        return (*(os.environ[name] for name in names), (out / "checkpoint").read_text())

    folder = str(place.folder / "out")
    batch = await place.map(place.on(who, output_dir=folder), range(2), retries=1)
    for index, seen in enumerate(await batch.results()):
        assert seen == (batch.group_id, str(index), f"{folder}/{index}", "half-way")
        job = batch.jobs[index]
        assert job is not None and job.output_dir == f"{folder}/{index}"
        assert await job.outputs() == ["checkpoint"]


@behaviour
async def test_an_empty_list_is_refused_and_an_empty_iterator_is_an_empty_batch(
    place: Place,
) -> None:
    with pytest.raises(ValueError, match="empty"):
        await place.map(square, [])
    batch = await place.map(square, iter([]))
    assert await batch.results() == []


@behaviour
async def test_fail_fast_starts_nothing_more(place: Place) -> None:
    def fail(folder: str, number: int) -> None:
        mark(folder, number)
        raise RuntimeError("at once")

    inputs = [(str(place.folder), number) for number in range(50)]
    batch = await place.map(fail, inputs, max_concurrent=1, fail_fast=True)
    with pytest.raises(errors.BatchError):
        await batch.results()
    assert 1 <= len(place.marks()) < 5
    counts = await batch.status_counts()
    assert counts["FAILED"] >= 1 and sum(counts.values()) == 50


@behaviour
async def test_fail_fast_without_failures_loses_nothing(place: Place) -> None:
    count = place.size(local=24, gke=4)
    batch = await place.map(square, range(count), max_concurrent=3, fail_fast=True)
    seen = [await job.result(cleanup=True) async for job in batch.as_completed()]
    assert sorted(seen) == sorted(x * x for x in range(count))


@behaviour
async def test_cancel_ends_all_also_from_elsewhere(place: Place) -> None:
    """What waits does not start any more, nothing is tried again; waiting less ends nothing."""
    gate = place.gate()
    batch = await place.map(wait_at, [gate.path] * 20, max_concurrent=2, retries=3)
    await gate.entered(2)
    for wait in (batch.wait, batch.results):
        with pytest.raises(TimeoutError):
            await wait(timeout=0.05)
    with pytest.raises(TimeoutError):
        async for _ in batch.as_completed(timeout=0.05):
            pass
    await place.counted(batch, RUNNING=2)
    async with aio.Client() as other:
        await (await other.attach_batch(batch.group_id)).cancel()
    assert {type(one.outcome) async for one in batch.outcomes()} == {Cancelled}
    assert {status for _, status in await batch.statuses()} == {JobStatus.NOT_FOUND}
    results = await batch.results(return_exceptions=True)
    assert {type(error) for error in results} == {errors.JobCancelled}
    assert len(results) == 20
    assert len(place.marks("gate/in.*")) <= 4
    await batch.cleanup()
    assert await place.objects(batch.group_id) == []


@behaviour
async def test_leaving_the_block_ends_what_is_unfinished_unless_it_is_let_go(
    place: Place,
) -> None:
    ended, going = place.gate("ended"), place.gate("going")
    async with await place.map(wait_at, [ended.path] * 3, max_concurrent=2) as batch:
        await ended.entered()
    assert all(status is JobStatus.NOT_FOUND for _, status in await batch.statuses())
    async with aio.Client() as other:
        mine = place.on(wait_at)
        async with await other.run_async_map(mine, [going.path], progress=False) as batch:
            await batch.detach()
        await going.entered()
    going.open("went on")
    found = await place.client.attach_batch(batch.group_id)
    assert await found.results() == ["went on"]


@behaviour
async def test_single_items_are_cancelled_and_looked_at(place: Place) -> None:
    gate = place.gate()
    batch = await place.map(wait_at, [gate.path] * 3, max_concurrent=2, retries=2)
    await gate.entered(2)
    first, last = await batch.job(0), await batch.job(2)
    assert await last.status() is JobStatus.PENDING
    await first.cancel()
    await last.cancel()
    gate.open()
    results = await batch.results(return_exceptions=True)
    assert [type(one) for one in results] == [errors.JobCancelled, str, errors.JobCancelled]


@behaviour
async def test_inputs_larger_than_a_chunk_are_split(place: Place) -> None:
    count = place.size(local=5, gke=3)
    batch = await place.map(len, [(b"x" * 5_000_000,)] * count)
    assert await batch.results() == [5_000_000] * count
