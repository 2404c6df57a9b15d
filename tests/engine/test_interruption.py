"""A cancellation or a removal at any request of a client leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any

import anyio
import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import signing, wire
from kinetic.aio._submissions.control_log import ControlLog
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.engine.world import left_on

DEADLINE_S = 60.0


Request = Callable[[], Coroutine[Any, Any, Any]]


class Cancellation:
    """Cancel ``task`` at request number *number*: before it is sent, or after it is *answered*.

    A ``stubborn`` cancellation repeats at every later request, like a user who keeps pressing
    Ctrl-C. A cancelled ``scope`` of anyio cancels every later ``await`` of the task.
    """

    def __init__(self, number: int, *, answered: bool, kind: str) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.scope = anyio.CancelScope() if kind == "scope" else None
        self.reached = False
        self._left = number
        self._answered = answered
        self._stubborn = kind == "stubborn"

    async def begin(self, work: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        """Run *work* in a task; return whether it was cancelled, and its value."""

        async def run() -> Any:
            with self.scope or contextlib.nullcontext():
                return await work
            raise asyncio.CancelledError

        self.task = asyncio.ensure_future(run())
        await asyncio.wait({self.task})
        return self.task.cancelled(), None if self.task.cancelled() else await self.task

    def disarm(self) -> None:
        """Cancel nothing at later requests."""
        self._stubborn, self._left = False, 0

    async def __call__(self, request: Request) -> Any:
        for _ in range(3):  # like a real request, it isn't answered in the same turn of the loop
            await asyncio.sleep(0)
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
        if self.scope is not None:
            self.scope.cancel()
        else:
            self.task.cancel()
        await asyncio.sleep(0)  # raises CancelledError in the task


class Intrusion:
    """Call ``deed`` before request number *number*, counted from when ``deed`` is set."""

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
    """Pass each request of a client to a port through *gate*."""

    def __init__(self, port: Any, gate: Callable[[Request], Coroutine[Any, Any, Any]]) -> None:
        self._port = port
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        if not inspect.iscoroutinefunction(method) or name == "aclose":
            return method
        return lambda *args, **kwargs: self._gate(lambda: method(*args, **kwargs))

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


async def until_stored(store: Any, suffix: str) -> None:
    while not any(stored.name.endswith(suffix) for stored in await store.list("jobs/")):
        await asyncio.sleep(0)


async def interrupted(
    begin: Callable[[aio.Client], Any], moment: Cancellation
) -> tuple[bool, list[str]]:
    """Return whether the call was cancelled at *moment*, and the names that it left behind."""
    platform = memory_platform()
    async with aio.Client(platform=watched(platform, moment)) as client:
        cancelled, value = await moment.begin(begin(client))
        assert cancelled or value
        return cancelled, await left_on(platform)


KINDS = pytest.mark.parametrize("kind", ["once", "stubborn", "scope"])


@KINDS
@pytest.mark.parametrize("answered", [False, True])
async def test_a_submission_that_is_cancelled_leaves_nothing(answered: bool, kind: str) -> None:
    async def submit(client: aio.Client) -> str:
        return (await client.submit(for_ever, 1)).job_id

    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            moment = Cancellation(number, answered=answered, kind=kind)
            cancelled, left = await interrupted(submit, moment)
            if not moment.reached:
                break
            assert cancelled == (left == []), f"at request {number}: {left}"
        assert number > 8


class BetweenManifestAndInput(MemoryStore):
    """Cancel ``task`` when the *first* of a job's manifest and input exists, and the other doesn't.

    If the other is *late*, its request takes effect nevertheless.
    """

    task: asyncio.Task[Any]

    def __init__(self, first: str, *, late: bool) -> None:
        super().__init__()
        self.moments = list[list[str]]()
        self._first, self._late = first, late
        self._first_exists = asyncio.Event()

    async def create(self, name: str, body: Any, *args: Any, **options: Any) -> bool:
        if name.endswith(self._first):
            created = await super().create(name, body, *args, **options)
            self._first_exists.set()
            return created
        if name.endswith(("/handle.json", "/inputs/00000000")):
            await self._first_exists.wait()
            self.moments.append([stored.name for stored in await self.list("jobs/")])
            self.task.cancel()
            try:
                await asyncio.sleep(0)
            finally:
                if self._late:
                    await super().create(name, body, *args, **options)
        return await super().create(name, body, *args, **options)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("first", ["/handle.json", "/inputs/00000000"])
async def test_a_job_that_is_cancelled_between_its_manifest_and_its_input_leaves_nothing(
    first: str, late: bool
) -> None:
    store = BetweenManifestAndInput(first, late=late)
    platform = replace(memory_platform(), store=store, cluster=MemoryCluster(store, carry_out))
    async with aio.Client(platform=platform) as client, asyncio.timeout(DEADLINE_S):
        store.task = asyncio.ensure_future(client.submit(same, 1))
        await asyncio.wait({store.task})
        assert store.task.cancelled()
        assert [name.endswith(first) for (name,) in store.moments] == [True]
        assert await left_on(platform) == []


@KINDS
@pytest.mark.parametrize("answered", [False, True])
async def test_a_cancelled_call_leaves_nothing(answered: bool, kind: str) -> None:
    """At any request: of the submission, the wait, the reading of the value and the cleanup."""

    async def call(client: aio.Client) -> object:
        return await client.run(same, 1)

    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            moment = Cancellation(number, answered=answered, kind=kind)
            _, left = await interrupted(call, moment)
            assert left == [], f"at request {number}"
            if not moment.reached:
                break
        assert number > 14  # how many requests are made depends on what is cached by then


@KINDS
@pytest.mark.parametrize("answered", [False, True])
async def test_a_batch_that_is_cancelled_while_it_begins_leaves_nothing(
    answered: bool, kind: str
) -> None:
    async def begin(client: aio.Client) -> str:
        return (await client.run_async_map(for_ever, [1, 2])).group_id

    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            moment = Cancellation(number, answered=answered, kind=kind)
            cancelled, left = await interrupted(begin, moment)
            if not moment.reached:
                break
            if cancelled:
                assert left == [], f"at request {number}"
        assert number > 8


async def running_on(platform: Platform) -> list[str]:
    """Return the jobs, items, and workers that haven't ended."""
    return [seen.name for seen in await platform.cluster.find() if seen.phase is not Phase.ENDED]


@pytest.mark.parametrize(
    "kind",
    ["scope", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("once", "stubborn"))],
)
async def test_a_block_that_is_cancelled_ends_its_items(kind: str) -> None:
    """At any request of the block, which waits, and of its end."""

    async def use(client: aio.Client) -> None:
        async with await client.run_async_map(for_ever, [1, 2, 3], max_concurrent=2) as batch:
            begun.append(batch)
            await batch.results(timeout=0.1)

    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 200, 2):
            begun: list[aio.BatchHandle[Any]] = []
            moment, platform = Cancellation(number, answered=False, kind=kind), memory_platform()
            async with aio.Client(platform=watched(platform, moment)) as client:
                with contextlib.suppress(errors.ResultTimeout):
                    await moment.begin(use(client))
                moment.disarm()
                for batch in begun:
                    assert {*dict(await batch.statuses()).values()} == {JobStatus.NOT_FOUND}
                assert await running_on(platform) == [], f"at request {number}"
            if not moment.reached:
                break
        assert number > 20


async def test_cancelling_a_job_during_its_removal_raises_nothing() -> None:
    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            intrusion = Intrusion(number)
            platform = memory_platform()
            async with (
                aio.Client(platform=platform) as owner,
                aio.Client(platform=watched(platform, intrusion)) as other,
            ):
                job = await owner.submit(for_ever, 1)
                found = await other.attach(job.job_id)
                intrusion.deed = job.cleanup
                await found.cancel()
                if not intrusion.reached:
                    break
                assert await left_on(platform) == [], f"at request {number}"
                assert await found.status() is JobStatus.NOT_FOUND
        assert number > 4


async def test_an_outcome_written_during_a_cleanup_is_removed() -> None:
    """Another process, which saw the handle just before, writes the outcome."""
    async with asyncio.timeout(DEADLINE_S):
        for number in range(1, 100):
            intrusion, platform = Intrusion(number), memory_platform()
            store = platform.store
            async with aio.Client(platform=watched(platform, intrusion)) as client:
                job = await client.submit(for_ever, 1)
                scope = f"jobs/{job.job_id}/"

                async def write_outcome(scope: str = scope, store: Any = store) -> None:
                    if await store.look(f"{scope}handle.json") is not None:
                        await store.create(wire.attempt_key(scope, 0, 1, "outcome"), b"", {})

                intrusion.deed = write_outcome
                await job.cleanup()
                if not intrusion.reached:
                    break
                assert await left_on(platform) == [], f"at request {number}"
        assert number > 4


async def test_a_job_that_was_cancelled_is_gone() -> None:
    """cancel() waits until the process has ended, even if it lingers after its outcome."""
    may_leave, store = asyncio.Event(), MemoryStore()

    async def work(run: Any) -> int | None:
        try:
            return await carry_out(run)
        finally:
            await may_leave.wait()

    async def delay_deletes(request: Request) -> Any:
        if cluster.requests["delete"]:
            await until_stored(store, "outcome")
        return await request()

    cluster = MemoryCluster(store, work)
    platform = watched(replace(memory_platform(), store=store, cluster=cluster), delay_deletes)
    async with aio.Client(platform=platform) as client, asyncio.timeout(DEADLINE_S):
        job = await client.submit(for_ever, 1)
        await until_stored(store, "claim")
        ending = asyncio.ensure_future(job.cancel())
        while cluster.requests["find"] < 2 and not ending.done():
            await asyncio.sleep(0)
        assert not ending.done()
        may_leave.set()
        await ending
        assert await cluster.find() == []


async def test_cleanup_of_a_stopped_job_removes_its_objects() -> None:
    """The process that stopped the job hasn't deleted it."""
    platform = memory_platform()
    store, cluster = platform.store, platform.cluster
    assert isinstance(cluster, MemoryCluster)
    async with aio.Client(platform=platform) as client, asyncio.timeout(DEADLINE_S):
        job = await client.submit(for_ever, 1)
        await until_stored(store, "claim")
        stop = wire.Request(kind="stop", cause="cancel")
        scope = f"jobs/{job.job_id}/"
        key = signing.submission_key(await platform.cluster.root_key(), scope)
        await ControlLog(store, scope, key).append(stop)
        cluster.end(job.k8s_name, exit_code=-15, reason=None)
        await until_stored(store, "outcome")
        assert await job.status() is JobStatus.NOT_FOUND
        await job.cleanup()
        assert await left_on(platform) == []


@contextlib.contextmanager
def cancel_scope() -> Iterator[None]:
    """Cancel the block from outside, as a web framework does when its client disconnects."""
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_later(0.1, scope.cancel)
        yield


@contextlib.asynccontextmanager
async def ended_by(kind: str) -> AsyncIterator[None]:
    if kind == "asyncio.timeout":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                yield
    else:
        with cancel_scope() if kind == "CancelScope" else anyio.move_on_after(0.1):
            yield


async def drained(stream: AsyncIterator[Any]) -> None:
    async with contextlib.aclosing(stream):  # type: ignore[type-var]
        async for _ in stream:
            pass


WAITS: dict[str, Callable[[Any, Any], Coroutine[Any, Any, Any]]] = {
    "job.result": lambda job, batch: job.result(),
    "job.wait": lambda job, batch: job.wait(),
    "job.save_result": lambda job, batch: job.save_result("value"),
    "job.logs": lambda job, batch: drained(job.logs(follow=True)),
    "batch.wait": lambda job, batch: batch.wait(),
    "batch.results": lambda job, batch: batch.results(),
    "batch.outcomes": lambda job, batch: drained(batch.outcomes()),
    "batch.as_completed": lambda job, batch: drained(batch.as_completed()),
    "batch.progress": lambda job, batch: drained(batch.progress()),
}


@pytest.mark.parametrize("kind", ["asyncio.timeout", "move_on_after", "CancelScope"])
async def test_a_wait_that_is_cancelled_ends_and_leaves_the_jobs(kind: str) -> None:
    platform = memory_platform()
    async with aio.Client(platform=platform) as client, asyncio.timeout(DEADLINE_S):
        job = await client.submit(for_ever, 1)
        batch = await client.run_async_map(for_ever, [1, 2])
        await batch.submitted()
        for name, wait in WAITS.items():
            over = False
            async with ended_by(kind):
                with contextlib.suppress(errors.NoLog):  # a job in memory has no log
                    await wait(job, batch)
                    over = True
            assert not over, name
            assert (await job.status()).value in ("PENDING", "RUNNING"), name
            assert len(await platform.cluster.find()) == 5, name  # two items, and their workers
        async with ended_by(kind):
            await client.run(for_ever, 1)
        assert len(await platform.cluster.find()) == 5
        async with ended_by(kind):
            async with batch:
                await batch.wait()
        assert await batch.status_counts() == {"NOT_FOUND": 2}
        await job.cancel()
    async with ended_by(kind):
        async with aio.Client(platform=platform) as client:
            await client.run(for_ever, 1)
    assert await running_on(platform) == []
