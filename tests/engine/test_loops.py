"""A client, its handles, and their iterators belong to one event loop, and refuse another."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._tasks import one_loop_stream
from kinetic.options import MapSettings
from kinetic.testing import memory_platform

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "__aexit__": (None, None, None),
    "attach": ("job-0123456789ab",),
    "attach_batch": ("grp-0123456789ab",),
    "cleanup": ("job-0123456789ab",),
    "fetch_outputs": ("outputs",),
    "full_id": ("job-01",),
    "input": (0,),
    "job": (0,),
    "prune": (0,),
    "report": ("report.html",),
    "run": (abs, 1),
    "run_async_map": (abs, [1]),
    "run_owned": (abs, (1,), {}),
    "scale": (2,),
    "start_batch": (abs, [1], MapSettings()),
    "save_result": ("value",),
    "store_of": (abs, None, None),
    "submit": (abs, 1),
}
"""The required arguments of methods."""

LOCAL = {"debug_attach", "debugger", "follow_record", "forward_debugger", "sweep"}
"""Methods that refuse a job without a debugger first, take a record, or call others of these."""


def same(value: Any) -> Any:
    return value


@pytest.fixture
def first() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def used(first: asyncio.Runner) -> tuple[Any, Any, Any]:
    """A client that the loop of `first` has used, a job, and a batch."""

    async def use() -> tuple[Any, Any, Any]:
        client = aio.Client(platform=memory_platform())
        job = await client.submit(same, 1)
        return client, job, await client.run_async_map(same, [1, 2])

    return first.run(use())


def entries(owner: Any) -> Iterator[tuple[str, Callable[[], Awaitable[Any]]]]:
    """Yield the name and a call of each public coroutine method and iterator of *owner*."""
    for name, method in inspect.getmembers(owner, callable):
        function = inspect.unwrap(method)
        arguments = ARGUMENTS.get(name, ())
        if name == "cleanup" and not isinstance(owner, aio.Client):
            arguments = ()
        if (name.startswith("_") and name not in ("__aenter__", "__aexit__")) or name in LOCAL:
            continue
        if inspect.isasyncgenfunction(function):
            yield name, lambda method=method, given=arguments: anext(method(*given))
        elif inspect.iscoroutinefunction(function):
            yield name, lambda method=method, given=arguments: method(*given)


async def refused(begin: Callable[[], Awaitable[Any]]) -> str:
    """Return the message with which a call refuses this loop."""
    async with asyncio.timeout(30):
        try:
            await begin()
        except errors.PortalError as exc:
            return str(exc)
    return "not refused"


@pytest.mark.parametrize("closed", [False, True], ids=["open loop", "closed loop"])
def test_every_entry_refuses_a_second_loop_and_names_the_remedy(
    first: asyncio.Runner, used: tuple[Any, Any, Any], closed: bool
) -> None:
    client, job, batch = used
    remedies = {client: "async with kinetic.aio.Client()", job: job.job_id, batch: batch.group_id}
    if closed:
        first.close()
    count = 0
    with asyncio.Runner() as second:
        for owner, remedy in remedies.items():
            for name, begin in entries(owner):
                message = second.run(refused(begin))
                assert ("a closed event loop" if closed else "another event loop") in message, name
                assert remedy in message, name
                count += 1
        assert repr(job) and repr(batch) and batch.stored == 2 and not batch.submission_failures
    assert count > 35
    if not closed:
        assert first.run(batch.results(timeout=30)) == [1, 2]
        assert first.run(job.result(timeout=30)) == 1
        first.run(client.aclose())


def test_a_second_thread_is_refused_likewise(
    first: asyncio.Runner, used: tuple[Any, Any, Any]
) -> None:
    messages: list[str] = []

    def use() -> None:
        messages.extend(asyncio.run(refused(lambda: used[0].run(same, 1))) for _ in range(2))

    async def wait_beside_the_thread() -> Any:
        thread = threading.Thread(target=use)
        thread.start()
        value = await used[1].result(timeout=30)
        await asyncio.to_thread(thread.join)
        return value

    assert first.run(wait_beside_the_thread()) == 1
    assert len(messages) == 2 and all("another event loop" in message for message in messages)
    first.run(used[0].aclose())


@pytest.mark.parametrize("name", ["outcomes", "as_completed", "progress", "logs"])
def test_an_iteration_does_not_go_on_in_a_second_loop(
    first: asyncio.Runner, used: tuple[Any, Any, Any], name: str
) -> None:
    client, job, batch = used
    stream = getattr(job if name == "logs" else batch, name)()
    if name == "logs":
        first.run(job.wait(30))
        with pytest.raises(StopAsyncIteration):
            first.run(anext(stream))
    else:
        first.run(anext(stream))
    with asyncio.Runner() as second:
        for begin in (lambda: anext(stream), stream.aclose):
            assert "begin another one" in second.run(refused(begin))
    first.run(stream.aclose())
    first.run(client.aclose())


def test_an_iteration_that_was_cancelled_does_not_seem_to_have_ended() -> None:
    """A loop would otherwise take a time limit of one item for the end of all."""

    @one_loop_stream
    async def numbers() -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.Event().wait()

    async def use() -> None:
        stream = numbers()
        assert await anext(stream) == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        with pytest.raises(errors.KineticError, match="begin another one"):
            await anext(stream)

    asyncio.run(use())


async def test_a_callback_runs_in_the_context_of_its_caller() -> None:
    """The tasks that notice a change have the context of the client's first call."""
    caller = contextvars.ContextVar("caller", default=-1)
    seen: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        caller.set(number)
        job = await client.submit(same, number)
        await job.result(on_status_change=lambda _: seen.append((number, caller.get())))

    async with aio.Client(platform=memory_platform()) as client:
        await asyncio.gather(*map(call, range(4)))
    assert {number for number, _ in seen} == {0, 1, 2, 3}
    assert all(number == found for number, found in seen)


async def test_handles_of_jobs_are_pickled_and_those_of_batches_name_what_to_pass(
    client: aio.Client,
) -> None:
    job, batch = await client.submit(same, 1), await client.run_async_map(same, [1])
    assert pickle.loads(pickle.dumps(job)) == job
    with pytest.raises(TypeError, match="attach_batch"):
        pickle.dumps(batch)


def test_a_stream_passes_on_what_a_generator_does() -> None:
    seen: list[Any] = []

    @one_loop_stream
    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
            try:
                yield 2
            except KeyError:
                yield 3
        finally:
            seen.append("closed")

    async def use() -> None:
        stream = numbers()
        assert [await anext(stream), await stream.asend(None)] == [1, 2]
        assert await stream.athrow(KeyError()) == 3
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert [number async for number in numbers()] == [1, 2]

    asyncio.run(use())
    assert seen == ["closed", "closed"]


def test_without_a_loop_the_functions_of_the_module_name_asyncio() -> None:
    for call in (aio.pack(same), aio.load_result("x"), aio.run(same, 1)):
        with pytest.raises(errors.PortalError, match="no loop of asyncio runs here"):
            call.send(None)


def test_the_functions_of_the_module_have_a_client_for_each_loop(tmp_path: Path) -> None:
    """A handle of the first loop names `attach`, by which the second one finds the job."""

    async def submit() -> Any:
        return await aio.submit(same, 1)

    async def use(job: Any) -> Any:
        with pytest.raises(errors.PortalError, match="closed event loop"):
            await job.result()
        found = await aio.attach(job.job_id)
        return await found.result(), await aio.run(same, 2)

    assert asyncio.run(use(asyncio.run(submit()))) == (1, 2)
