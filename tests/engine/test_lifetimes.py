"""What clients keep and release, in long-running applications and when they close."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import queue
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic.aio._preparing.input_source import Source
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec, ObjectInfo
from kinetic.testing import Run, carry_out, memory_platform
from tests.engine.world import Passing, encoder, left_on
from tests.jobs import eventually


@pytest.fixture
async def platform() -> Platform:
    return memory_platform()


def echo(value: object) -> object:
    return value


async def for_ever(value: object) -> None:
    await asyncio.Event().wait()


async def briefly(value: object) -> object:
    await asyncio.sleep(0.3)
    return value


def gated(gate: asyncio.Event) -> Platform:
    """Return a platform whose jobs start their work when *gate* is set."""

    async def work(run: Run) -> int | None:
        await gate.wait()
        return await carry_out(run)

    return memory_platform(work)


# --- in long-running applications ---


async def test_a_batch_that_nobody_asks_for_any_more_is_forgotten(
    platform: Platform, client: aio.Client, other: aio.Client
) -> None:
    kept: list[weakref.ref[Any]] = []
    ids: list[str] = []
    for _ in range(3):
        batch = await client.run_async_map(echo, ["x" * 1000] * 5)
        await batch.wait()
        ids.append(batch.group_id)
        kept.append(weakref.ref(batch._batch))
        del batch
    for group_id in ids:
        observed = await other.attach_batch(group_id)
        assert await observed.results() == ["x" * 1000] * 5
        kept.append(weakref.ref(observed._batch))
        del observed
    for _ in range(100):
        await asyncio.sleep(0)  # let ended tasks release their references
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6
    again = await other.attach_batch(ids[0])
    assert (await again.status_counts()) == {"SUCCEEDED": 5}
    another = await client.run_async_map(for_ever, [1])
    watches = [task for task in asyncio.all_tasks() if "watch grp-" in task.get_name()]
    assert await other.attach_batch(another.group_id)
    await eventually(lambda: sum(not task.done() for task in watches) <= 1)  # that of `again`
    await another.cancel()


async def test_a_batch_goes_on_when_its_handle_is_dropped(
    client: aio.Client, other: aio.Client
) -> None:
    batch = await client.run_async_map(briefly, range(6), max_concurrent=2)
    group_id = batch.group_id
    del batch
    gc.collect()
    assert await (await other.attach_batch(group_id)).results(timeout=30) == [*range(6)]


async def test_only_the_consumer_keeps_a_reference_to_a_completed_job(client: aio.Client) -> None:
    batch = await client.run_async_map(echo, iter(range(40)))
    held: list[weakref.ref[Any]] = []
    async for job in batch.as_completed():
        held.append(weakref.ref(job))
    del job
    gc.collect()
    assert len(held) == 40
    assert not any(ref() for ref in held)


def test_a_stop_of_many_items_is_looked_up_in_few_steps() -> None:
    class Counted(int):
        compared = 0

        def __lt__(self, other: int) -> bool:
            Counted.compared += 1
            return int(self) < int(other)

    request = wire.Request(kind="stop", items=tuple(map(Counted, range(0, 10_000, 2))))
    states = [
        wire.item_state(wire.standing(index, [request]), {}, RetryBudgets()).state
        for index in (0, 5001, 9998)
    ]
    assert states == [wire.ItemState.CANCELLED, wire.ItemState.OPEN, wire.ItemState.CANCELLED]
    assert 3 <= Counted.compared <= 3 * 14


def test_items_to_be_stopped_are_found_in_whatever_order_they_were_written() -> None:
    request = wire.Request.from_bytes(b'{"kind": "stop", "items": [7, 1, 5]}')
    state = wire.item_state(wire.standing(7, [request]), {}, RetryBudgets()).state
    assert state is wire.ItemState.CANCELLED


# --- closing ---


class Silent(Passing):
    """A store that never answers while ``silent`` is set."""

    silent = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.port, name)
        if name == "aclose" or not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.silent:
                await asyncio.Event().wait()
            return await method(*args, **kwargs)

        return call


@pytest.mark.looptime(noop_cycles=300)
async def test_a_client_with_many_batches_closes_when_its_store_is_silent(
    platform: Platform,
) -> None:
    store = Silent(platform.store)
    client = aio.Client(platform=replace(platform, store=store))
    batches = [await client.run_async_map(for_ever, range(9), max_concurrent=2) for _ in range(5)]
    for batch in batches:
        await eventually(
            lambda batch=batch: len([job for job in batch.jobs if job is not None]) == 9
        )
    store.silent = True
    before = asyncio.get_running_loop().time()
    await client.aclose()
    assert asyncio.get_running_loop().time() - before < 30
    left = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in left if name.startswith("kinetic")]


class Held(Passing):
    """Hold requests called *verb* for names that end with *suffix*, until ``may`` is set."""

    def __init__(self, port: Any, verb: str, suffix: str = "") -> None:
        super().__init__(port)
        self.verb = verb
        self.suffix = suffix
        self.asked = asyncio.Event()
        self.may = asyncio.Event()
        self.done = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.port, name)
        if name != self.verb:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            if not args or str(args[0]).endswith(self.suffix):
                self.asked.set()
                await self.may.wait()
            answer = await method(*args, **kwargs)
            self.done += 1
            return answer

        return call


@pytest.mark.parametrize("held_request", ["secret", "manifest", "lease"])
async def test_a_batch_that_is_being_made_when_its_client_closes_is_undone(
    platform: Platform, held_request: str
) -> None:
    if held_request == "secret":
        held = Held(platform.cluster, "keep_secret")
        opened = replace(platform, cluster=held)
    else:
        held = Held(platform.store, "begin" if held_request == "lease" else "create", held_request)
        opened = replace(platform, store=held)
    async with aio.Client(platform=opened) as client:
        making = asyncio.ensure_future(client.run_async_map(echo, range(3)))
        await held.asked.wait()
    assert await left_on(platform) == []
    held.may.set()
    with pytest.raises(errors.ClientClosed, match="this client is closed"):
        await making
    assert await left_on(platform) == []


async def test_a_job_that_is_being_launched_when_its_client_closes_is_undone(
    platform: Platform,
) -> None:
    cluster = Slow(platform.cluster)
    async with aio.Client(platform=replace(platform, cluster=cluster), max_concurrent=1) as client:
        launching = asyncio.ensure_future(client.submit(for_ever, 1))
        await eventually(lambda: cluster.asked == 1)
        waiting = asyncio.ensure_future(client.submit(for_ever, 2))  # for the only place
        await eventually(lambda: client.limit._places._waiters)
    assert await left_on(platform) == []
    cluster.open.set()
    for submission in (launching, waiting):
        with pytest.raises(errors.ClientClosed, match="this client is closed"):
            await submission
    assert (cluster.asked, await left_on(platform)) == (1, [])


@dataclass(frozen=True)
class Frozen(Exception):
    number: int


def raise_frozen(number: int) -> None:
    raise Frozen(number)


async def test_an_exception_that_refuses_attributes_arrives_from_a_call(platform: Platform) -> None:
    async with aio.Client(platform=platform) as client:
        with pytest.raises(Frozen):
            await client.run(raise_frozen, 1)


async def test_the_jobs_of_calls_end_when_their_client_closes(platform: Platform) -> None:
    async with aio.Client(platform=platform) as client:
        call = asyncio.ensure_future(client.run(for_ever, 1))
        await eventually(lambda: platform.cluster.requests["launch"])  # type: ignore[attr-defined]
    with pytest.raises(errors.ClientClosed, match="this client is closed"):
        await call
    assert await left_on(platform) == []


async def test_items_that_end_while_their_client_closes_do_not_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    platform = gated(gate := asyncio.Event())
    store = Held(platform.store, "replace", "lease")
    client = aio.Client(platform=replace(platform, store=store))
    await client.run_async_map(echo, range(3), max_concurrent=2)
    closing = asyncio.ensure_future(client.aclose())
    await store.asked.wait()
    gate.set()
    while any(not seen.phase.is_over for seen in await platform.cluster.find()):
        await asyncio.sleep(0.01)
    store.may.set()
    await closing
    assert "no longer submits" not in caplog.text


@pytest.mark.parametrize("kind", ["whole", "lazy"])
async def test_a_client_that_closes_says_what_it_leaves_undone(
    platform: Platform, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with aio.Client(platform=platform, max_concurrent=1) as client:
        await client.run_async_map(for_ever, [1])  # it has the only place
        inputs = range(3) if kind == "whole" else itertools.count()
        batch = await client.run_async_map(echo, inputs, max_concurrent=2)
        await eventually(lambda: batch.stored)
    (message,) = [message for message in caplog.messages if "no longer submits" in message]
    assert f"{batch.stored} items wait" in message
    assert (f"inputs from number {batch.stored} on" in message) is (kind == "lazy")


async def test_a_cancelled_aclose_closes_all_platforms(platform: Platform) -> None:
    store = Held(platform.store, "aclose")
    client = aio.Client(backend="local", platform=replace(platform, store=store))
    for project in ("one", "two", "three"):  # the client opens a platform for each
        await client.list_jobs(project=project)
    closing = asyncio.ensure_future(client.aclose())
    await store.asked.wait()
    closing.cancel()
    await asyncio.sleep(0)
    store.may.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert store.done == 3


@pytest.mark.looptime
async def test_platforms_that_do_not_close_cost_the_time_of_one(
    platform: Platform, caplog: pytest.LogCaptureFixture
) -> None:
    store = Held(platform.store, "aclose")
    client = aio.Client(backend="local", platform=replace(platform, store=store))
    for project in ("one", "two", "three"):
        await client.list_jobs(project=project)
    before = asyncio.get_running_loop().time()
    await client.aclose()
    assert asyncio.get_running_loop().time() - before == pytest.approx(30.0)
    assert "gave up on closing the client" in caplog.text


class Slow(Passing):
    """A cluster whose launches wait until ``open`` is set."""

    def __init__(self, port: Any) -> None:
        super().__init__(port)
        self.open = asyncio.Event()
        self.asked = 0

    async def launch(self, job: JobSpec) -> None:
        self.asked += 1
        await self.open.wait()
        await self.port.launch(job)


async def test_sealing_first_stores_the_inputs_that_were_pulled(client: aio.Client) -> None:
    supplied: queue.SimpleQueue[int] = queue.SimpleQueue()
    pulled: list[int] = []

    def inputs() -> Iterator[int]:
        while True:
            pulled.append(supplied.get())
            yield pulled[-1]

    batch = await client.run_async_map(for_ever, inputs(), max_concurrent=4)
    for number in range(1, 6):  # one chunk for each input
        supplied.put(number)
        await eventually(lambda number=number: batch.stored == number)
    for number in range(6, 20):
        supplied.put(number)
    await batch.detach(seal=True)
    assert batch.stored == len(pulled) >= 5
    await batch.cancel()


async def test_inputs_end_although_the_call_that_seals_them_is_cancelled(
    client: aio.Client,
) -> None:
    batch = await client.run_async_map(echo, itertools.count(), max_concurrent=2)
    await eventually(lambda: batch.stored >= 2)
    sealing = asyncio.create_task(batch.detach(seal=True))
    pump = batch._batch.coordinator.pump  # type: ignore[union-attr]
    while not pump.closing:
        await asyncio.sleep(0)
    sealing.cancel()
    assert await batch.results(timeout=30) == [*range(batch.stored)]


async def test_an_input_that_is_being_produced_counts_when_the_source_closes() -> None:
    second_requested, may_give = threading.Event(), threading.Event()

    def inputs() -> Iterator[int]:
        yield 1
        second_requested.set()
        may_give.wait(30)
        yield 2
        yield 3

    source = Source(inputs(), "auto")
    assert [taken.value for taken in await source.take(1, encoder())] == [1]
    taking = asyncio.ensure_future(source.take(1, encoder()))
    await eventually(second_requested.is_set)
    taking.cancel()
    draining = asyncio.ensure_future(source.drain(30))
    await eventually(lambda: source._stopped)
    may_give.set()
    assert [drained.value for drained in await draining] == [2]
    await source.aclose()


async def test_a_sync_iterator_runs_in_one_thread(client: aio.Client) -> None:
    threads: set[int] = set()

    def inputs() -> Iterator[int]:
        for number in range(300):
            threads.add(threading.get_ident())
            yield number

    batch = await client.run_async_map(echo, inputs(), max_concurrent=4)
    assert len(await batch.results(timeout=30)) == 300
    assert len(threads) == 1 and threads != {threading.get_ident()}


async def test_a_sync_iterator_is_read_also_if_no_thread_can_start(monkeypatch: Any) -> None:
    start = threading.Thread.start

    def start_none_for_inputs(thread: threading.Thread) -> None:
        if thread.name == "kinetic inputs":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_none_for_inputs)
    source = Source(iter(range(3)), "auto")
    taken = [*await source.take(3, encoder()), *await source.take(3, encoder())]
    assert [input_.value for input_ in taken] == [0, 1, 2]
    await source.aclose()


def test_the_program_ends_although_an_iterator_blocks() -> None:
    code = """
    import asyncio, threading
    from kinetic.aio._preparing.input_source import Source
    from tests.engine.world import encoder

    blocks = threading.Event()

    def inputs():
        yield 1
        blocks.set()
        threading.Event().wait()

    async def main():
        source = Source(inputs(), "auto")
        assert len(await source.take(1, encoder())) == 1
        taking = asyncio.ensure_future(source.take(1, encoder()))
        while not blocks.is_set():
            await asyncio.sleep(0.01)
        taking.cancel()
        await source.aclose()

    asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


async def test_inputs_that_cannot_be_closed_end_no_batch(client: aio.Client, caplog: Any) -> None:
    async def inputs() -> AsyncIterator[int]:
        number = 0
        try:
            while True:
                yield (number := number + 1)
        finally:
            raise RuntimeError("the connection is gone")

    batch = await client.run_async_map(briefly, inputs(), max_concurrent=2)
    await eventually(lambda: batch.stored >= 2)
    await batch.detach(seal=True)
    assert await batch.results(timeout=30) == [*range(1, batch.stored + 1)]
    assert "the connection is gone" in caplog.text


@pytest.mark.parametrize("kind", ["as_completed", "outcomes", "progress"])
def test_an_iteration_that_is_left_open_ends_quietly_with_its_loop(kind: str) -> None:
    iterations: list[Any] = []
    reports: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        async with aio.Client(platform=memory_platform()) as client:
            batch = await client.run_async_map(echo, range(3))
            await batch.wait()
            iterations.append(getattr(batch, kind)())
            await anext(iterations[0])

    asyncio.run(main())
    assert reports == []


# --- windows and lengths ---


async def test_a_window_bounds_pulled_inputs_without_max_concurrent() -> None:
    gate, taken = asyncio.Event(), 0
    in_window: list[int] = []

    async def inputs() -> AsyncIterator[int]:
        for pulled in itertools.count(1):
            in_window.append(pulled - taken)
            yield pulled
            await asyncio.sleep(0)

    async with aio.Client(platform=gated(gate)) as client:
        batch = await client.run_async_map(echo, inputs(), max_concurrent=None, window=5)
        outcomes = batch.outcomes()
        # Reading opens the window before any input is pulled.
        reading = asyncio.ensure_future(anext(outcomes))
        await eventually(lambda: len(in_window) == 5)
        gate.set()
        await reading
        taken = 1
        async for _ in outcomes:
            taken += 1
            if taken == 50:
                break
        assert max(in_window) == 5
        await outcomes.aclose()
        await batch.cancel()


class Promising:
    """Inputs whose length promises more than they yield."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


async def test_a_length_that_was_promised_counts_until_the_end_is_known(
    client: aio.Client, other: aio.Client
) -> None:
    batch = await client.run_async_map(echo, Promising())
    observed = await other.attach_batch(batch.group_id)
    assert await batch.results() == [*range(8)]
    assert len(batch.jobs) == 8
    assert await observed.status_counts() == {"SUCCEEDED": 8}
    assert [snapshot async for snapshot in observed.progress()][-1].total == 8


# --- continuing ---


async def test_a_retry_gets_the_whole_batch_timeout() -> None:
    gate = asyncio.Event()  # holds the jobs until the batch timeout has stopped them
    async with aio.Client(platform=gated(gate)) as client:
        batch = await client.run_async_map(briefly, range(3), batch_timeout=0.1)
        assert {*await batch.status_counts()} <= {"PENDING", "RUNNING", "NOT_FOUND"}
        results = await batch.results(return_exceptions=True, timeout=30)
        assert all(isinstance(result, errors.JobCancelled) for result in results)
        batch._batch.manifest["terms"]["batch_timeout"] = 30.0
        gate.set()
        assert await batch.retry_failed() == 3
        assert await batch.results(timeout=30) == [0, 1, 2]


class Failing(Passing):
    """A store whose next listings fail."""

    failures = 0

    async def list(self, prefix: str) -> list[ObjectInfo]:
        if self.failures:
            self.failures -= 1
            raise errors.Unavailable("503", retryable=True)
        listed: list[ObjectInfo] = await self.port.list(prefix)
        return listed


@pytest.mark.full
@pytest.mark.looptime(noop_cycles=300)
async def test_after_a_failed_attach_the_loss_of_the_submitter_is_still_reported(
    client: aio.Client, platform: Platform
) -> None:
    store = Failing(platform.store)
    batch = await client.run_async_map(for_ever, itertools.count(), max_concurrent=1)
    async with aio.Client(platform=replace(platform, store=store)) as observer:
        store.failures = 1
        with pytest.raises(errors.Unavailable):
            await observer.attach_batch(batch.group_id)
        observed = await observer.attach_batch(batch.group_id)
        await client.aclose()
        with pytest.raises(errors.SubmitterLost):
            await observed.wait(timeout=30)
        await observed.cancel()


async def test_the_newest_batch_comes_first_within_a_second_too(
    client: aio.Client, other: aio.Client
) -> None:
    created = [(await client.run_async_map(echo, [1])).group_id for _ in range(6)]
    listed = [batch.group_id for batch in await other.list_batches()]
    assert listed == created[::-1]
