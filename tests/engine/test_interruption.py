"""Whoever is cancelled, or comes after a removal, at any request he makes, leaves nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio
from kinetic._runner.protocol import signing, wire
from kinetic.aio._engine.control_log import ControlLog
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.engine.world import left_on

DEADLINE_S = 60.0


Request = Callable[[], Coroutine[Any, Any, Any]]


class Cancellation:
    """Cancels *task* at its *number*-th request: before it is made, or when it was answered.

    A *stubborn* one does so at every request after that as well, as somebody does who presses
    Ctrl-C all the time.
    """

    def __init__(self, number: int, *, answered: bool, stubborn: bool) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.reached = False
        self._left = number
        self._answered = answered
        self._stubborn = stubborn

    async def __call__(self, request: Request) -> Any:
        self._left -= 1
        if self._left > 0 or (self._left < 0 and not self._stubborn):
            return await request()
        if self._answered:
            try:
                return await request()
            finally:
                await self._cancel()
        await self._cancel()
        return await request()

    async def _cancel(self) -> None:
        self.reached = True
        assert self.task is not None
        self.task.cancel()
        await asyncio.sleep(0)  # who is cancelled hears of it here


class Intrusion:
    """Has somebody else come in between, before the *number*-th request that is counted."""

    def __init__(self, number: int) -> None:
        self.deed: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self.reached = False
        self._left = number

    async def __call__(self, request: Request) -> Any:
        if self.deed is not None:
            self._left -= 1
            if self._left == 0:
                self.reached = True
                await self.deed()
        return await request()


class Watched:
    """Passes on what a client asks a port for, through *gate*."""

    def __init__(self, port: Any, gate: Callable[[Request], Coroutine[Any, Any, Any]]) -> None:
        self._port = port
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._port, name)
        if not inspect.iscoroutinefunction(asked) or name == "aclose":
            return asked
        return lambda *args, **kwargs: self._gate(lambda: asked(*args, **kwargs))

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        async for seen in self._port.watch(labels):
            yield seen


def watched(platform: Platform, gate: Callable[[Request], Coroutine[Any, Any, Any]]) -> Platform:
    store: Any = Watched(platform.store, gate)
    cluster: Any = Watched(platform.cluster, gate)
    return replace(platform, store=store, cluster=cluster)


def same(value: object) -> object:
    return value


async def for_ever(value: object) -> object:
    await asyncio.Event().wait()
    return value


async def until_there_is(store: Any, what: str) -> None:
    while not any(one.name.endswith(what) for one in await store.list("jobs/")):
        await asyncio.sleep(0)


async def interrupted(
    begin: Callable[[aio.Client], Any], moment: Cancellation
) -> tuple[bool, list[str]]:
    """Whether a call was cancelled at *moment*, and what is left of it."""
    platform = memory_platform()
    async with aio.Client(platform=watched(platform, moment)) as client:
        moment.task = asyncio.ensure_future(begin(client))
        await asyncio.wait({moment.task})
        if not moment.task.cancelled():
            assert await moment.task
        return moment.task.cancelled(), await left_on(platform)


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("answered", [False, True])
async def test_a_submission_that_is_cancelled_leaves_nothing(
    answered: bool, stubborn: bool
) -> None:
    async def submit(client: aio.Client) -> str:
        return (await client.submit(for_ever, 1)).job_id

    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            moment = Cancellation(number, answered=answered, stubborn=stubborn)
            cancelled, left = await interrupted(submit, moment)
            if not moment.reached:
                break
            assert cancelled == (left == []), f"at request {number}: {left}"
        assert number > 8


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("answered", [False, True])
async def test_a_cancelled_call_leaves_nothing(answered: bool, stubborn: bool) -> None:
    """While it is submitted, while it waits, and while its value is read and cleaned up after."""

    async def call(client: aio.Client) -> object:
        return await client.run(same, 1)

    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            moment = Cancellation(number, answered=answered, stubborn=stubborn)
            _, left = await interrupted(call, moment)
            assert left == [], f"at request {number}"
            if not moment.reached:
                break
        assert number > 17


async def test_who_cancels_what_is_removed_in_that_moment_has_nothing_to_complain_about() -> None:
    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            moment = Intrusion(number)
            platform = memory_platform()
            async with (
                aio.Client(platform=platform) as owner,
                aio.Client(platform=watched(platform, moment)) as other,
            ):
                job = await owner.submit(for_ever, 1)
                found = await other.attach(job.job_id)
                moment.deed = job.cleanup
                await found.cancel()
                if not moment.reached:
                    break
                assert await left_on(platform) == [], f"at request {number}"
                assert await found.status() is JobStatus.NOT_FOUND
        assert number > 4


async def test_an_end_that_is_told_while_its_job_is_cleaned_up_is_removed_with_it() -> None:
    """By another process, which has seen the handle a moment before."""
    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            moment, platform = Intrusion(number), memory_platform()
            store = platform.store
            async with aio.Client(platform=watched(platform, moment)) as client:
                job = await client.submit(for_ever, 1)
                scope = f"jobs/{job.job_id}/"

                async def tell(scope: str = scope, store: Any = store) -> None:
                    if await store.look(f"{scope}handle.json") is not None:
                        await store.create(wire.attempt_key(scope, 0, 1, "outcome"), b"", {})

                moment.deed = tell
                await job.cleanup()
                if not moment.reached:
                    break
                assert await left_on(platform) == [], f"at request {number}"
        assert number > 4


async def test_a_job_that_was_cancelled_is_gone() -> None:
    """Also one whose process takes its time after it has told that it was cancelled."""
    leaving, store = asyncio.Event(), MemoryStore()

    async def work(run: Any) -> int | None:
        try:
            return await carry_out(run)
        finally:
            await leaving.wait()

    async def late(request: Request) -> Any:
        if cluster.requests["delete"]:
            await until_there_is(store, "outcome")
        return await request()

    cluster = MemoryCluster(store, work)
    platform = watched(replace(memory_platform(), store=store, cluster=cluster), late)
    async with aio.Client(platform=platform) as client, asyncio.timeout(DEADLINE_S):
        job = await client.submit(for_ever, 1)
        await until_there_is(store, "claim")
        ending = asyncio.ensure_future(job.cancel())
        while cluster.requests["find"] < 2 and not ending.done():
            await asyncio.sleep(0)
        assert not ending.done()
        leaving.set()
        await ending
        assert await cluster.find() == []


async def test_what_was_stopped_is_cleaned_up_with_its_job() -> None:
    """Whoever stopped it has not come to delete it."""
    platform = memory_platform()
    store, cluster = platform.store, platform.cluster
    assert isinstance(cluster, MemoryCluster)
    async with aio.Client(platform=platform) as client, asyncio.timeout(DEADLINE_S):
        job = await client.submit(for_ever, 1)
        await until_there_is(store, "claim")
        stop = wire.Request(kind="stop", cause="cancel")
        scope = f"jobs/{job.job_id}/"
        key = signing.submission_key(await platform.cluster.root_key(), scope)
        await ControlLog(store, scope, key).append(stop)
        cluster.end(job.k8s_name, exit_code=-15, reason=None)
        await until_there_is(store, "outcome")
        assert await job.status() is JobStatus.NOT_FOUND
        await job.cleanup()
        assert await left_on(platform) == []
