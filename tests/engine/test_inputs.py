"""Inputs of any kind are pulled on demand and stored before any job needs them."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import frames, signing, wire
from kinetic.aio._engine.input_pump import Backpressure
from kinetic.aio.platforms import Platform
from kinetic.testing import memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, left_on


@pytest.fixture
async def platform() -> Platform:
    return on_loop_time(memory_platform())


def same(x: Any) -> Any:
    return x


async def chunks(platform: Platform, group: str) -> list[int]:
    listed = await platform.store.list(f"batches/{group}/inputs/")
    return [int(stored.metadata["count"]) for stored in listed if "count" in stored.metadata]


async def signed(platform: Platform, group: str, name: str, slot: wire.Slot) -> dict[str, str]:
    """Sign *slot* like another process that submits the batch; return the metadata."""
    scope = f"batches/{group}/"
    key = signing.submission_key(await platform.cluster.root_key(), scope)
    return slot.signed(key, scope, name)


async def settle() -> None:
    """Let all pending work finish: virtual time advances only when no thread works."""
    await asyncio.sleep(1)


async def until_stored(batch: aio.BatchHandle[Any]) -> None:
    """Wait without virtual time, which stands still while endless inputs are pulled."""
    while not batch.stored:
        await asyncio.sleep(0)


class Endless:
    """An infinite async generator that counts what was pulled."""

    def __init__(self) -> None:
        self.pulled = 0

    async def __aiter__(self) -> AsyncIterator[int]:
        while True:
            self.pulled += 1
            yield self.pulled


@VIRTUAL
@pytest.mark.parametrize("window", [None, 1, 7])
async def test_a_consumer_that_stops_reading_stops_the_pulling(
    client: aio.Client, window: int | None
) -> None:
    inputs = Endless()
    async with await client.run_async_map(same, inputs, max_concurrent=4, window=window) as batch:
        stream = batch.outcomes()
        taken = [(await anext(stream)).index for _ in range(3)]
        await settle()
        at_rest = inputs.pulled
        assert at_rest <= len(taken) + 4 + (window or 8)
        await asyncio.sleep(60)  # the first minute imports what reading again needs
        memory = _used()
        await asyncio.sleep(60)
        assert inputs.pulled == at_rest
        assert _used() - memory < 100_000
        await stream.aclose()
        await batch.cancel()


def _used() -> int:
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    yield
    tracemalloc.stop()


@VIRTUAL
async def test_what_is_delivered_in_one_turn_of_the_loop_is_told_once() -> None:
    told: list[int | None] = []
    window = Backpressure(4, lambda: told.append(window.bound))
    for count in (1, 2, 3):
        window.note("reader", count)
    await asyncio.sleep(0)
    assert told == [7]


async def test_a_window_bounds_a_list_as_well(client: aio.Client, platform: Platform) -> None:
    async with await client.run_async_map(same, range(50), max_concurrent=8, window=10) as batch:
        stream = batch.outcomes()
        first = (await anext(stream)).index
        await settle()
        launched = platform.cluster.requests["launch"]  # type: ignore[attr-defined]
        async for _ in stream:
            pass
    assert first == 0
    assert launched <= 8 + 11, "those before the first read, and one window"


@VIRTUAL
async def test_a_list_is_stored_in_chunks_of_a_hundred(
    client: aio.Client, platform: Platform
) -> None:
    batch = await client.run_async_map(same, [*range(230)], max_concurrent=10)
    assert await batch.results(cleanup=False) == [*range(230)]
    assert await chunks(platform, batch.group_id) == [100, 100, 30]


@VIRTUAL
async def test_a_fast_generator_fills_its_chunks(client: aio.Client, platform: Platform) -> None:
    async def fast() -> AsyncIterator[int]:  # a plain generator needs a thread
        for x in range(230):
            yield x

    # 100 items may run, and the window is twice that: the pump never waits for room.
    batch = await client.run_async_map(same, fast(), max_concurrent=100)
    assert await batch.results(cleanup=False) == [*range(230)]
    assert await chunks(platform, batch.group_id) == [8, 16, 32, 64, 100, 10]


@VIRTUAL
async def test_an_async_iterator_that_waits_has_its_inputs_stored(client: aio.Client) -> None:
    async def waiting() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    batch = await client.run_async_map(same, waiting())
    for _ in range(1000):  # turns of the loop, in which virtual time stands still
        await asyncio.sleep(0)
    assert batch.stored == 1
    await batch.cancel()


@VIRTUAL
async def test_a_slow_input_starts_at_once(client: aio.Client, platform: Platform) -> None:
    loop, pulled_at = asyncio.get_running_loop(), dict[int, float]()

    async def slow() -> AsyncIterator[int]:
        for number in range(3):
            pulled_at[number] = loop.time()
            yield number
            await asyncio.sleep(100)

    batch = await client.run_async_map(same, slow(), max_concurrent=2)
    async for done in batch.outcomes():
        assert loop.time() - pulled_at[done.index] < 90, "an item doesn't wait for the next input"
        assert done.outcome.unwrap() == done.index
    assert await chunks(platform, batch.group_id) == [1, 1, 1]


@VIRTUAL
async def test_the_next_input_may_depend_on_the_last_outcome(client: aio.Client) -> None:
    outcomes: asyncio.Queue[int] = asyncio.Queue()

    async def adaptive() -> AsyncIterator[int]:
        value = 1
        while value < 100:
            yield value
            value = await outcomes.get()

    batch = await client.run_async_map(lambda x: x * 3, adaptive())
    values = []
    async for done in batch.outcomes():
        values.append(done.outcome.unwrap())
        outcomes.put_nowait(values[-1])
    assert values == [3, 9, 27, 81, 243]


@VIRTUAL
async def test_inputs_that_another_process_stored_are_kept(
    client: aio.Client, platform: Platform
) -> None:
    """When two processes fill the same slot, the loser uses the next one; no input is lost."""
    gate = asyncio.Event()

    async def inputs() -> AsyncIterator[str]:
        yield "a"
        await gate.wait()
        yield "b"

    batch = await client.run_async_map(same, inputs())
    group = batch.group_id
    async with aio.Client(platform=platform) as other:
        unrelated = await other.run_async_map(same, ["late"])
        await unrelated.wait()
        stored = await platform.store.get(f"batches/{unrelated.group_id}/inputs/00000000")
    await asyncio.sleep(1)
    footer = hashlib.sha256(frames.footer_of(stored.body)).hexdigest()
    late = wire.Slot(first=1, count=1, footer=footer, size=len(stored.body))
    name = f"batches/{group}/inputs/00000001"
    assert await platform.store.create(name, stored.body, await signed(platform, group, name, late))
    gate.set()
    assert await batch.results(cleanup=False) == ["a", "late", "b"]
    assert await chunks(platform, group) == [1, 1, 1]


@VIRTUAL
async def test_nothing_comes_after_the_end(client: aio.Client, platform: Platform) -> None:
    gate = asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        yield 0
        await gate.wait()
        yield 1

    batch = await client.run_async_map(same, inputs())
    await asyncio.sleep(1)
    name = wire.input_key(f"batches/{batch.group_id}/", 1)
    end = await signed(platform, batch.group_id, name, wire.Slot(total=1))
    assert await platform.store.create(name, b"{}", end)
    gate.set()
    with pytest.raises(errors.InputsUnfinished, match="sealed with 1 inputs"):
        await batch.results()
    async with aio.Client(platform=platform) as other:
        assert await (await other.attach_batch(batch.group_id)).results() == [0]


@VIRTUAL
async def test_inputs_come_back_as_they_were_given(client: aio.Client, platform: Platform) -> None:
    inputs: list[Any] = [1, [2, 3], {"a": 4}, (5,), {"not a name": 6}]
    batch = await client.run_async_map(lambda *args, **kwargs: None, inputs)
    await batch.wait()
    found = [done.input async for done in batch.outcomes(ordered=True)]
    assert all(read is input_ for read, input_ in zip(found, inputs, strict=True))
    async with aio.Client(platform=platform) as other:
        again = await other.attach_batch(batch.group_id)
        found = [done.input async for done in again.outcomes(ordered=True)]
    assert found == [1, (2, 3), {"a": 4}, (5,), {"not a name": 6}]


@VIRTUAL
async def test_a_sealed_input_ends_with_what_was_pulled(client: aio.Client) -> None:
    inputs = Endless()
    batch = await client.run_async_map(same, inputs, max_concurrent=2)
    await until_stored(batch)
    await batch._batch.seal()
    pulled = inputs.pulled
    assert len(await batch.results()) <= pulled
    assert inputs.pulled <= pulled + 1


def at_once(error: BaseException) -> Iterator[int]:
    yield 1
    raise error


@VIRTUAL
async def test_an_input_that_does_not_fit_counts_as_failed(client: aio.Client) -> None:
    async def inputs() -> AsyncIterator[Any]:
        for given in (1, (1, 2, 3), 3):
            yield given

    batch = await client.run_async_map(same, inputs())
    await batch.wait()
    assert await batch.status_counts() == {"SUCCEEDED": 2, "FAILED": 1}
    with pytest.raises(errors.BatchError, match="corrected inputs in another batch"):
        await batch.results()


@VIRTUAL
async def test_a_batch_whose_inputs_did_not_end_says_how_to_end_them(platform: Platform) -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise ValueError("broken")

    async with aio.Client(platform=platform) as first:
        batch = await first.run_async_map(same, broken())
        with pytest.raises(ValueError, match="broken"):
            await batch.results()
    async with aio.Client(platform=platform) as other:
        left = await other.attach_batch(batch.group_id)
        advice = r"number 1 on, .*resume\(inputs=.*If there are no more, .*seal=True\).* --seal`"
        with pytest.raises(errors.SubmitterLost, match=advice):
            await left.results()
        await left.resume(seal=True)
        assert await left.results() == [1]


@VIRTUAL
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr
)
async def test_inputs_that_exit_end_their_batch_and_nothing_else(
    client: aio.Client, error: BaseException
) -> None:
    other = await client.run_async_map(same, range(3))
    batch = await client.run_async_map(same, at_once(error))
    with pytest.raises(RuntimeError, match="iterator of the inputs raised") as caught:
        await batch.results(timeout=100)
    assert caught.value.__cause__ is error
    await batch.resume(seal=True)
    assert await batch.results() == [1]
    assert await other.results() == [0, 1, 2]


@VIRTUAL
async def test_the_rest_of_the_inputs_may_come_from_elsewhere(platform: Platform) -> None:
    async with aio.Client(platform=platform) as first:
        batch = await first.run_async_map(same, (x for x in range(10)), max_concurrent=2)
        await asyncio.sleep(0)
    async with aio.Client(platform=platform) as second:
        found = await second.attach_batch(batch.group_id)
        await found.resume(inputs=range(100, 103))
        values = await found.results(cleanup=False)
        assert values[found.stored - 3 :] == [100, 101, 102]
        with pytest.raises(errors.ConfigurationError, match="all its"):
            await found.resume(inputs=[1])


@VIRTUAL
async def test_inputs_may_be_declared_finished(platform: Platform) -> None:
    async with aio.Client(platform=platform) as first:
        batch = await first.run_async_map(same, Endless(), max_concurrent=2)
        await until_stored(batch)
    async with aio.Client(platform=platform) as second:
        found = await second.attach_batch(batch.group_id)
        await found.resume()
        with pytest.raises(errors.InputsUnfinished) as caught:
            await found.results(cleanup=False)
        assert caught.value.stored == found.stored > 0
        await found.resume(seal=True)
        assert await found.results() == [*range(1, found.stored + 1)]


@pytest.mark.looptime
async def test_inputs_that_have_the_client_closed_and_wait_on_are_ended(
    platform: Platform,
) -> None:
    client = aio.Client(platform=platform)
    closing: list[asyncio.Task[None]] = []
    ended = asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        yield 0
        closing.append(asyncio.create_task(client.aclose()))
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await client.run_async_map(same, inputs())
    async with asyncio.timeout(100):
        await ended.wait()
    await closing[0]


# --- an input is fixed when it is pulled ---


class Setting:
    """An object that isn't built-in, so that a thread pickles it."""

    def __init__(self) -> None:
        self.number = -1

    def __iter__(self) -> Iterator[int]:
        yield self.number


def change_dict(target: dict[str, Any], number: int) -> None:
    target["x"] = number


def change_list(target: list[Any], number: int) -> None:
    target[0] = number


def change_nested(target: dict[str, Any], number: int) -> None:
    target["x"][0]["y"] = number


def change_object(target: Setting, number: int) -> None:
    target.number = number


def change_array(target: Any, number: int) -> None:
    target[0] = number


def new_array() -> Any:
    import numpy

    return numpy.zeros(20_000, dtype=int)  # larger than what the loop's thread pickles


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None]]] = {
    "dict": (lambda: {"x": -1}, change_dict),
    "list": (lambda: [-1], change_list),
    "nested": (lambda: {"x": [{"y": -1}]}, change_nested),
    "object": (Setting, change_object),
    "array": (new_array, change_array),
}


def first_number(*args: Any, **kwargs: Any) -> int:
    number: Any = args or kwargs
    while not hasattr(number, "__index__") or hasattr(number, "__len__"):
        number = next(iter(number.values() if isinstance(number, dict) else number))
    return int(number)


def reused(kind: str, count: int) -> Iterator[Any]:
    """Yield one object again and again, and change it before each time."""
    make, change = KINDS[kind]
    target = make()
    for number in range(count):
        change(target, number)
        yield target


async def async_reused(kind: str, count: int) -> AsyncIterator[Any]:
    for target in reused(kind, count):
        yield target


@pytest.mark.parametrize("lazy", [reused, async_reused])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_reused_object_has_the_value_of_its_yield(
    client: aio.Client, kind: str, lazy: Callable[[str, int], Any]
) -> None:
    batch = await client.run_async_map(first_number, lazy(kind, 30), max_concurrent=4)
    found = [
        (first_number(done.input), done.outcome.unwrap())
        async for done in batch.outcomes(ordered=True)
    ]
    assert found == [(number, number) for number in range(30)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["list", "tuple", "deque", "values", "sized"])
async def test_later_changes_to_inputs_that_exist_have_no_effect(
    client: aio.Client, kind: str, form: str
) -> None:
    make, change = KINDS[kind]
    targets = [make() for _ in range(5)]
    for number, target in enumerate(targets):
        change(target, number)
    given: dict[str, Callable[[], Any]] = {
        "list": lambda: targets,
        "tuple": lambda: tuple(targets),
        "deque": lambda: collections.deque(targets),
        "values": lambda: dict(enumerate(targets)).values(),
        "sized": lambda: collections.UserList(targets),
    }
    batch = await client.run_async_map(first_number, given[form](), max_concurrent=1)
    for target in targets:
        change(target, 99)
    targets.clear()
    found = [
        (first_number(done.input), done.outcome.unwrap())
        async for done in batch.outcomes(ordered=True)
    ]
    assert found == [(number, number) for number in range(5)]


@pytest.mark.parametrize("inputs", [reused, async_reused, list])
async def test_inputs_of_a_resumed_batch_are_fixed_likewise(
    platform: Platform, inputs: Callable[..., Any]
) -> None:
    async def unfinished() -> AsyncIterator[Any]:
        yield {"x": -1}
        await asyncio.Event().wait()

    async with aio.Client(platform=platform) as first:
        batch = await first.run_async_map(first_number, unfinished(), max_concurrent=1)
        await until_stored(batch)
    async with aio.Client(platform=platform) as second:
        found = await second.attach_batch(batch.group_id)
        given = [{"x": number} for number in range(7)]
        await found.resume(inputs=given if inputs is list else inputs("dict", 7), force=True)
        if inputs is list:
            for setting in given:
                setting["x"] = 99
        assert await found.results() == [*range(-1, 7)]


async def test_arguments_of_a_call_may_change_as_soon_as_it_has_begun(client: aio.Client) -> None:
    setting, row = {"x": [0]}, [0]

    async def one(number: int) -> Any:
        setting["x"][0] = row[0] = number
        return await client.run(both, setting, row=row)

    async def submit(number: int) -> Any:
        setting["x"][0] = row[0] = number
        job = await client.submit(both, setting, row=row)
        setting["x"][0] = row[0] = 99
        return await job

    expected = [[number, number] for number in range(20)]
    assert await asyncio.gather(*(one(number) for number in range(20))) == expected
    assert [await submit(number) for number in range(3)] == expected[:3]


def both(setting: dict[str, list[int]], *, row: list[int]) -> list[int]:
    return [setting["x"][0], row[0]]


async def test_a_cancelled_batch_whose_inputs_are_being_stored_leaves_nothing(
    platform: Platform,
) -> None:
    begun = threading.Event()
    may_go_on = threading.Event()

    class Slow(collections.UserList[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            begun.set()
            may_go_on.wait(30)
            yield 1

    async with aio.Client(platform=platform) as client:
        starting = asyncio.ensure_future(client.run_async_map(same, Slow([0, 1])))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        starting.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await left_on(platform) == []
