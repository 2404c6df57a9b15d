"""Test the portal in one process: values, errors, threads, other loops, iteration."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
import traceback
import types
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kinetic._sync.portal import Portal
from kinetic.errors import PortalError

DEADLINE = 60.0
side = contextvars.ContextVar("side", default="none")


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal(grace=DEADLINE)
    yield portal
    portal.close()


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def numbers(closed: threading.Event | None = None) -> AsyncIterator[int]:
    try:
        for number in range(3):
            await asyncio.sleep(0)
            yield number
    finally:
        if closed is not None:
            closed.set()


def identity(number: int) -> int:
    return number


def test_a_call_returns_what_the_coroutine_returns(portal: Portal) -> None:
    assert portal.call(double, 21) == 42
    assert portal.call(double, number=4) == 8


def test_a_call_raises_what_the_coroutine_raises(portal: Portal) -> None:
    error = LookupError("there")

    async def fail() -> None:
        raise error

    with pytest.raises(LookupError, match="there") as caught:
        portal.call(fail)
    assert caught.value is error
    assert "fail" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, SystemExit, GeneratorExit])
def test_exceptions_with_a_special_meaning_reach_the_caller(
    portal: Portal, kind: type[BaseException]
) -> None:
    error = kind("raised in the loop")

    async def fail() -> None:
        raise error

    before = portal.ensure_loop_thread()
    with pytest.raises(kind, match="raised in the loop"):
        portal.call(fail)
    assert portal.call(double, 1) == 2
    assert portal.current is before, "the same loop still runs"


def test_a_coroutine_sees_the_callers_context_and_does_not_change_it(portal: Portal) -> None:
    async def change() -> str:
        before = side.get()
        side.set("loop")
        return before

    token = side.set("caller")
    try:
        assert portal.call(change) == "caller"
        assert side.get() == "caller"
    finally:
        side.reset(token)


def test_a_call_from_another_async_library_runs_under_asyncio(
    portal: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If sniffio is installed, anyio asks it which library's loop runs."""
    library: contextvars.ContextVar[str | None] = contextvars.ContextVar("library", default=None)
    sniffio = types.SimpleNamespace(current_async_library_cvar=library)
    monkeypatch.setitem(sys.modules, "sniffio", sniffio)

    async def current_library() -> str | None:
        return library.get()

    token = library.set("trio")
    try:
        assert portal.call(current_library) is None
        assert library.get() == "trio"
    finally:
        library.reset(token)


def test_concurrent_calls_of_many_threads_share_one_loop(portal: Portal) -> None:
    barrier = threading.Barrier(16)

    def work(number: int) -> tuple[int, int]:
        barrier.wait(DEADLINE)
        return portal.call(double, number), id(portal.ensure_loop_thread())

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    assert [value for value, _ in results] == [2 * number for number in range(16)]
    assert len({loop_id for _, loop_id in results}) == 1


def test_a_call_from_the_portals_own_loop_is_refused(portal: Portal) -> None:
    async def nested() -> int:
        return portal.call(double, 1)

    with pytest.raises(PortalError, match=r"own event loop.*kinetic\.aio"):
        portal.call(nested)


async def test_a_call_in_a_running_loop_works_and_warns_at_the_callers_line(portal: Portal) -> None:
    with pytest.warns(RuntimeWarning, match="blocks the event loop") as caught:
        assert portal.call(double, 2) == 4
    assert [warning.filename for warning in caught] == [__file__]
    assert "await kinetic.aio.run(f, ...)" in str(caught[0].message)


def test_a_loop_that_ends_by_an_exception_fails_its_calls_and_is_replaced(
    portal: Portal, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def waits_for_a_task_that_exits() -> None:
        tasks.append(asyncio.create_task(exits()))
        await asyncio.Event().wait()

    async def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(PortalError, match="closed"):
        portal.call(waits_for_a_task_that_exits)
    assert portal.call(double, 3) == 6
    assert "event loop failed" in caplog.text
    assert isinstance(tasks[0].exception(), SystemExit)


def test_closing_runs_the_hooks_then_cancels_running_tasks() -> None:
    portal = Portal(grace=DEADLINE)
    order: list[str] = []

    async def hook() -> None:
        await asyncio.sleep(0)
        order.append("hook")

    async def fails() -> None:
        raise ValueError("a broken hook")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("work")

    async def start_work() -> asyncio.Task[None]:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        return task

    portal.on_close(fails)
    portal.on_close(hook)
    task = portal.call(start_work)
    portal.close()
    assert order == ["hook", "work"]
    assert task.cancelled()
    portal.close()
    assert portal.call(double, 1) == 2, "a later call starts another loop"
    portal.close()


def test_closing_the_loop_fails_a_waiting_call() -> None:
    portal = Portal(grace=DEADLINE)
    running = threading.Event()

    async def work() -> None:
        running.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(portal.call, work)
        assert running.wait(DEADLINE)
        portal.close()
        with pytest.raises(PortalError, match="closed"):
            waiting.result(DEADLINE)


# --- from another loop ---


async def test_another_loop_awaits_without_being_blocked(portal: Portal) -> None:
    """The coroutine in the portal can end only while this loop runs."""
    own_loop = asyncio.get_running_loop()
    reached = asyncio.Event()
    answered = threading.Event()

    async def work() -> str:
        own_loop.call_soon_threadsafe(reached.set)
        while not answered.is_set():
            await asyncio.sleep(0)
        return "through"

    async def answer() -> None:
        await reached.wait()
        answered.set()

    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
        group.create_task(answer())
        assert await portal.acall(work) == "through"


def test_the_portals_own_loop_may_await_it(portal: Portal) -> None:
    async def nested() -> int:
        return await portal.acall(double, 5)

    assert portal.call(nested) == 10


async def test_cancelling_an_await_cancels_the_coroutine_and_waits_for_its_cleanup(
    portal: Portal,
) -> None:
    running, cleaned = asyncio.Event(), threading.Event()
    own_loop = asyncio.get_running_loop()

    async def work() -> None:
        own_loop.call_soon_threadsafe(running.set)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    task = asyncio.create_task(portal.acall(work))
    async with asyncio.timeout(DEADLINE):
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert cleaned.is_set()


async def test_a_second_cancellation_ends_the_wait(portal: Portal) -> None:
    running, cleaning = asyncio.Event(), asyncio.Event()
    own_loop = asyncio.get_running_loop()
    may_end = threading.Event()

    async def work() -> None:
        own_loop.call_soon_threadsafe(running.set)
        try:
            await asyncio.Event().wait()
        finally:
            own_loop.call_soon_threadsafe(cleaning.set)
            while not may_end.is_set():
                await asyncio.sleep(0)

    task = asyncio.create_task(portal.acall(work))
    async with asyncio.timeout(DEADLINE):
        await running.wait()
        task.cancel()
        await cleaning.wait()
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    may_end.set()


# --- iteration ---


def test_an_iteration_converts_items_and_ends(portal: Portal) -> None:
    closed = threading.Event()
    assert list(portal.iterate(lambda: numbers(closed), str)) == ["0", "1", "2"]
    assert closed.is_set()


async def test_the_same_object_serves_async_for(portal: Portal) -> None:
    items = portal.iterate(numbers, str)
    assert [item async for item in items] == ["0", "1", "2"]
    with pytest.raises(StopAsyncIteration):
        await anext(items)


def test_an_error_of_the_iterator_is_raised_once(portal: Portal) -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise LookupError("there")

    items = portal.iterate(broken, identity)
    assert next(items) == 1
    with pytest.raises(LookupError, match="there"):
        next(items)
    assert list(items) == []


def test_closing_an_iteration_waits_for_its_cleanup(portal: Portal) -> None:
    closed = threading.Event()
    items = portal.iterate(lambda: numbers(closed), identity)
    assert next(items) == 0
    items.close()
    assert closed.is_set()
    assert list(items) == []


@pytest.mark.parametrize("on_the_loop", [False, True])
def test_an_iteration_without_references_cleans_up(portal: Portal, on_the_loop: bool) -> None:
    """Its finalizer may run anywhere, even in the portal's own loop."""
    closed = threading.Event()
    items = [portal.iterate(lambda: numbers(closed), identity)]
    assert next(items[0]) == 0

    async def drop() -> None:
        items.clear()
        gc.collect()

    if on_the_loop:
        portal.call(drop)
    else:
        items.clear()
        gc.collect()
    assert closed.wait(DEADLINE)


def test_an_iterator_that_is_not_a_generator_is_closed(portal: Portal) -> None:
    closed = threading.Event()

    class Numbers:
        def __aiter__(self) -> AsyncIterator[int]:
            return self

        async def __anext__(self) -> int:
            return 7

        async def aclose(self) -> None:
            closed.set()

    items = portal.iterate(Numbers, identity)
    assert next(items) == 7
    del items
    gc.collect()
    assert closed.wait(DEADLINE)


def test_an_iteration_on_a_closed_loop_is_an_error(portal: Portal) -> None:
    items = portal.iterate(numbers, identity)
    assert next(items) == 0
    portal.close()
    with pytest.raises(PortalError, match="start a new one"):
        next(items)
    items.close()


def test_errors_leave_no_reference_cycles(portal: Portal) -> None:
    """A cycle would keep the result alive until the next garbage collection."""

    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

    async def fail() -> None:
        big = Big()
        raise LookupError(repr(big))

    gc.collect()
    gc.disable()
    try:
        try:
            portal.call(fail)
        except LookupError:
            pass
        portal.call(double, 1)
        assert Big.alive == 0
    finally:
        gc.enable()
