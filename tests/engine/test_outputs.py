"""The outcomes of a batch: their order, kinds, consumers, and what reading them leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic import aio, errors
from kinetic._labels import INDEX
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Object
from kinetic.outcome import Cancelled, Failed, Lost, Succeeded
from kinetic.testing import MemoryCluster, MemoryStore, Run, carry_out, memory_platform


async def square(x: int) -> int:
    return x * x


async def odd_fails(x: int) -> int:
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


async def raise_or_return(x: int) -> Exception:
    if x % 2:
        raise KeyError(x)
    return KeyError(x)


class Gates:
    """A client of a platform in memory where each item waits for its gate."""

    def __init__(self, opened: Iterable[int] = ()) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.client = aio.Client(platform=memory_platform(self.work))
        for index in opened:
            self.open(index)

    def gate(self, index: int) -> asyncio.Event:
        return self.gates.setdefault(index, asyncio.Event())

    def open(self, index: int) -> None:
        self.gate(index).set()

    def another_client(self) -> aio.Client:
        """Open a client like another process: on the same store and cluster."""
        return aio.Client(platform=self.client._platform)

    async def work(self, run: Run) -> int:
        await self.gate(int(run.spec.labels[INDEX])).wait()
        return await carry_out(run)

    async def end(self, batch: aio.BatchHandle[Any], order: Iterable[int]) -> None:
        """Let the items end in this *order*."""
        for index in order:
            self.open(index)
            with contextlib.suppress(Exception):
                await (await batch.job(index)).result(cleanup=False)


@pytest.fixture
async def gates() -> AsyncIterator[Gates]:
    gates = Gates()
    async with gates.client:
        yield gates


@pytest.fixture
async def platform() -> Platform:
    return memory_platform()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def reading_tasks() -> set[asyncio.Task[Any]]:
    return {
        task
        for task in asyncio.all_tasks()
        if "read" in task.get_name() or "doubt" in task.get_name()
    }


# --- order ---


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(9)), st.sets(st.integers(0, 8)))
def test_outcomes_are_complete_and_ordered_in_whatever_order_items_end(
    order: list[int], failing: set[int]
) -> None:
    async def sometimes(x: int) -> int:
        if x in failing:
            raise ValueError(x)
        return x * x

    async def scenario() -> None:
        gates = Gates()
        async with gates.client as client:
            batch = await client.run_async_map(sometimes, list(range(9)))
            ending = asyncio.create_task(gates.end(batch, order))
            ordered = [item async for item in batch.outcomes(ordered=True)]
            await ending
            assert [item.index for item in ordered] == list(range(9))
            assert {item.index for item in ordered if not item.outcome.ok} == failing
            assert all(
                item.outcome.unwrap() == item.index**2 for item in ordered if item.outcome.ok
            )
            assert sorted([item.index async for item in batch.outcomes()]) == list(range(9))

    asyncio.run(scenario())


async def test_as_they_end_is_the_order_in_which_they_ended(gates: Gates) -> None:
    order = [3, 0, 4, 1, 2]
    batch = await gates.client.run_async_map(square, range(5))
    async with asyncio.TaskGroup() as group:
        results = group.create_task(batch.results(ordered=False, cleanup=False))
        group.create_task(gates.end(batch, order))
        assert [item.index async for item in batch.outcomes()] == order
    assert results.result() == [x * x for x in order]
    assert await batch.results() == [0, 1, 4, 9, 16]


async def test_in_order_nothing_overtakes_and_nothing_but_numbers_is_held(gates: Gates) -> None:
    batch = await gates.client.run_async_map(square, range(100), max_concurrent=None)
    stream = batch.outcomes(ordered=True)
    first = asyncio.ensure_future(anext(stream))
    await gates.end(batch, range(1, 100))
    assert not first.done() and not reading_tasks(), "no value is read before its turn"
    gates.open(0)
    assert (await first).index == 0
    assert [item.index async for item in stream] == list(range(1, 100))


# --- kinds ---


async def test_outcomes_are_values_errors_losses_and_cancellations(gates: Gates) -> None:
    platform = gates.client._platform
    batch = await gates.client.run_async_map(odd_fails, [0, 1, threading.Lock(), 2, 4])
    await gates.end(batch, [0, 1])
    lost, cancelled = await batch.job(3), await batch.job(4)
    running = {f"{batch.group_id}-{index}-1" for index in (3, 4)}
    await until(lambda: running <= platform.cluster._jobs.keys())
    platform.cluster.end(f"{batch.group_id}-3-1", exit_code=-9, reason=None)
    await cancelled.cancel()
    found = {item.index: item.outcome async for item in batch.outcomes(ordered=True)}
    match found:
        case {
            0: Succeeded(0),
            1: Failed(ValueError()),
            2: Failed(error),
            3: Lost(),
            4: Cancelled(),
        }:
            assert isinstance(error, errors.SubmissionError | TypeError | ValueError)
        case _:
            pytest.fail(f"{found}")
    assert isinstance(found[3].error, errors.JobLost)
    assert isinstance(found[4].error, errors.JobCancelled)
    assert [job.group_index for job in await batch.failures()] == [1, 3]
    assert list(batch.submission_failures) == [2]
    with pytest.raises(errors.JobLost):
        found[3].unwrap()
    with pytest.raises(errors.JobLost):
        await lost


async def test_inputs_that_cannot_be_submitted_do_not_block_ordered_outcomes(
    client: aio.Client,
) -> None:
    def inputs() -> Iterable[Any]:
        for number in itertools.count():
            yield threading.Lock() if number in (0, 3) else number

    async with await client.run_async_map(square, inputs(), max_concurrent=2) as batch:
        stream = batch.outcomes(ordered=True)
        taken = [await anext(stream) for _ in range(12)]
    assert [item.index for item in taken] == list(range(12))
    assert [item.index for item in taken if not item.outcome.ok] == [0, 3]


async def test_another_process_sees_what_could_not_be_submitted() -> None:
    platform = memory_platform()
    async with aio.Client(platform=platform) as client, aio.Client(platform=platform) as other:
        batch = await client.run_async_map(square, [1, threading.Lock(), 3])
        await batch.wait()
        found = await other.attach_batch(batch.group_id)
        items = [item async for item in found.outcomes(ordered=True)]
        assert [item.outcome.ok for item in items] == [True, False, True]
        assert isinstance(items[1].outcome.error, errors.SubmissionError)
        assert "cannot be pickled" in str(items[1].outcome.error) and items[1].input is None
        assert [job.group_index async for job in found.as_completed()] == [0, 2]
        assert len(await found.results(return_exceptions=True, cleanup=False)) == 3
        assert [*found.submission_failures] == [1]
        with pytest.raises(errors.BatchError) as caught:
            await found.results()
        assert caught.value.failures == [] and await found.failures() == []
        assert [*caught.value.submission_failures] == [*found.submission_failures] == [1]


# --- consumers ---


async def test_an_exception_that_was_returned_is_no_failure(client: aio.Client) -> None:
    inputs = [{"x": number} for number in range(4)]
    batch = await client.run_async_map(raise_or_return, inputs)
    async for index, input_, outcome in batch.outcomes():
        assert input_ is inputs[index] and outcome.ok == (index in (0, 2))
    with pytest.raises(errors.BatchError) as caught:
        await batch.results()
    assert [*map(type, caught.value.partial_results)] == [KeyError, type(None)] * 2
    assert [job.group_index for job in caught.value.failures] == [1, 3]
    results = await (await client.run_async_map(raise_or_return, inputs[::2])).results()
    assert [*map(type, results)] == [KeyError] * 2


async def test_any_number_of_consumers_get_everything(gates: Gates) -> None:
    batch = await gates.client.run_async_map(square, range(20))

    async def consume(ordered: bool) -> list[int]:
        return [item.index async for item in batch.outcomes(ordered=ordered)]

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(consume(n % 2 == 0)) for n in range(4)]
        results = group.create_task(batch.results())
        jobs = group.create_task(_indices(batch))
        group.create_task(gates.end(batch, reversed(range(20))))
    assert [sorted(stream.result()) for stream in streams] == [[*range(20)]] * 4
    assert streams[0].result() == [*range(20)]
    assert streams[1].result() == [*reversed(range(20))]
    assert results.result() == [n * n for n in range(20)]
    assert sorted(jobs.result()) == [*range(20)]


async def _indices(batch: aio.BatchHandle[Any]) -> list[int | None]:
    return [job.group_index async for job in batch.as_completed()]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_consumer_that_is_cancelled_half_way_leaves_nothing_behind(
    gates: Gates, ordered: bool, loop_guard
) -> None:
    batch = await gates.client.run_async_map(square, range(40), max_concurrent=8)
    await batch.submitted()
    before, watchers = len(asyncio.all_tasks()), len(batch._batch.watchers)
    taken: list[int] = []

    async def consume() -> None:
        async for item in batch.outcomes(ordered=ordered):
            taken.append(item.index)  # noqa: PERF401  # the test counts them meanwhile

    with loop_guard():
        for stop_at in (0, 3, 25):
            consuming = asyncio.create_task(consume())
            for index in range(stop_at):
                gates.open(index)
            await until(lambda stop_at=stop_at: len(taken) >= stop_at)
            consuming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consuming
            taken.clear()
            assert not reading_tasks()
        await gates.end(batch, range(40))
        assert await batch.results() == [n * n for n in range(40)], "it runs without consumers"
    assert len(batch._batch.watchers) == watchers
    assert len(asyncio.all_tasks()) <= before


async def test_a_stream_that_is_dropped_half_way_leaves_nothing_behind(client: aio.Client) -> None:
    batch = await client.run_async_map(square, range(100))
    watched = len(batch._batch.watchers)
    async for _ in batch.outcomes():
        break
    async with contextlib.aclosing(batch.outcomes(ordered=True)) as stream:
        await anext(stream)
    await until(lambda: len(batch._batch.watchers) == watched)
    assert not reading_tasks()
    await batch.wait()


# --- bounds ---


async def test_in_order_the_slowest_item_bounds_what_is_pulled(gates: Gates) -> None:
    pulled = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal pulled
        for number in itertools.count():
            pulled = number + 1
            if number:
                gates.open(number)
            yield number

    terms: dict[str, Any] = {"max_concurrent": 3, "window": 8}
    async with await gates.client.run_async_map(square, endless(), **terms) as batch:
        stream = batch.outcomes(ordered=True)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: pulled >= 8)
        for _ in range(500):
            await asyncio.sleep(0)
        assert pulled <= 8 + 3 and not first.done()
        gates.open(0)
        assert [(await first).index, *[(await anext(stream)).index for _ in range(20)]] == [
            *range(21)
        ]


async def test_of_two_consumers_the_slower_one_bounds_an_endless_input(gates: Gates) -> None:
    pulled = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal pulled
        for number in itertools.count():
            pulled = number + 1
            gates.open(number)
            yield number

    terms: dict[str, Any] = {"max_concurrent": 2, "window": 6}
    async with await gates.client.run_async_map(square, endless(), **terms) as batch:
        slow, fast = batch.outcomes(), batch.outcomes()
        await anext(slow)
        taken = [await anext(fast) for _ in range(5)]
        waiting = asyncio.ensure_future(anext(fast))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert pulled <= len(taken) + 1 + 6 + 2
        await slow.aclose()
        for _ in range(40):
            await anext(fast) if waiting.done() else await waiting
        assert pulled >= 40


async def test_few_values_are_held_at_once(client: aio.Client) -> None:
    from kinetic.aio._reading.iteration import READ_AHEAD

    batch = await client.run_async_map(square, range(300), max_concurrent=10)
    await batch.wait()
    stream = batch.outcomes()
    for _ in range(10):
        await anext(stream)
        assert len(reading_tasks()) <= READ_AHEAD
    await stream.aclose()
    assert not reading_tasks()


# --- waiting ---


async def test_a_timeout_names_the_batch_and_ends_the_waiting_only(gates: Gates) -> None:
    batch = await gates.client.run_async_map(square, [1, 2])
    gates.open(0)

    async def waits() -> AsyncIterator[Any]:
        yield batch.wait(timeout=0.01)
        yield batch.results(timeout=0.01)
        yield _indices_within(batch, 0.01)
        yield _outcomes_within(batch, 0.01)

    async for waiting in waits():
        with pytest.raises(errors.ResultTimeout, match=batch.group_id) as caught:
            await waiting
        assert isinstance(caught.value, TimeoutError)
    gates.open(1)
    assert await batch.results() == [1, 4]


async def _indices_within(batch: aio.BatchHandle[Any], timeout: float) -> list[Any]:
    return [job async for job in batch.as_completed(timeout=timeout)]


async def _outcomes_within(batch: aio.BatchHandle[Any], timeout: float) -> list[Any]:
    return [item async for item in batch.outcomes(ordered=True, timeout=timeout)]


async def long_text(x: int) -> str:
    return str(x) * 5000


class Flaky(MemoryStore):
    """A store that returns no outcomes while ``down`` is set."""

    down = False

    async def get(self, name: str, **options: Any) -> Object:
        if self.down and name.endswith(".outcome"):
            raise errors.Unavailable("the store does not answer", retryable=True)
        return await super().get(name, **options)


async def test_a_store_that_does_not_answer_is_no_failure_of_an_item() -> None:
    store = Flaky()
    cluster = MemoryCluster(store, carry_out)
    platform = replace(memory_platform(), store=store, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(long_text, range(3))
        await batch.wait()
        store.down = True
        with pytest.raises(errors.Unavailable):
            await batch.results()
        with pytest.raises(errors.Unavailable):
            await anext(batch.outcomes())
        store.down = False
        assert [len(value) for value in await batch.results()] == [5000] * 3


async def test_an_error_of_the_body_is_not_taken_for_the_streams(client: aio.Client) -> None:
    batch = await client.run_async_map(square, [1, 2])
    with pytest.raises(TimeoutError, match="mine"):
        async for _ in batch.outcomes():
            raise TimeoutError("mine")


async def test_leaving_the_block_by_an_error_says_what_it_does(gates: Gates, caplog) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await gates.client.run_async_map(square, range(3)) as batch:
            raise ZeroDivisionError
    assert await batch.status_counts() == {"NOT_FOUND": 3}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [batch.group_id in warning and "cancelled" in warning for warning in warnings] == [True]


async def test_a_detached_batch_goes_on_and_sealed_it_has_an_end(gates: Gates) -> None:
    async def endless() -> AsyncIterator[int]:
        for number in itertools.count():
            gates.open(number)
            yield number

    async with await gates.client.run_async_map(square, endless(), max_concurrent=2) as batch:
        stream = batch.outcomes(ordered=True)
        assert [(await anext(stream)).index for _ in range(3)] == [0, 1, 2]
        await batch.detach(seal=True)
    left = [item.index async for item in stream]
    assert left == [*range(3, batch.stored)]
    assert await batch.results() == [n * n for n in range(batch.stored)]


async def test_the_former_submitter_does_not_end_a_batch_that_was_taken_over(
    gates: Gates, caplog
) -> None:
    async with gates.another_client() as other:
        async with await gates.client.run_async_map(square, range(4), max_concurrent=2) as batch:
            gates.open(0)
            assert (await anext(batch.outcomes())).index == 0
            taken = await other.attach_batch(batch.group_id)
            assert await taken.resume(force=True) is taken
        for index in range(4):
            gates.open(index)
        assert await taken.results() == [0, 1, 4, 9]
    assert any("the batch continues" in message for message in caplog.messages)


async def test_a_handle_that_resumed_a_batch_ends_it_and_one_that_observes_does_not(
    gates: Gates,
) -> None:
    batch = await gates.client.run_async_map(square, range(4), max_concurrent=2)
    await until(lambda: batch.stored == 4)
    async with gates.another_client() as other:
        async with await other.attach_batch(batch.group_id):
            pass
        assert "NOT_FOUND" not in await batch.status_counts()
        async with await other.attach_batch(batch.group_id) as taken:
            await taken.resume(force=True)
        assert await taken.status_counts() == {"NOT_FOUND": 4}
