"""Failing requests and damaged objects: waiting callers get the error or all the results."""

from __future__ import annotations

import asyncio
import base64
import inspect
import tracemalloc
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import wire
from kinetic.aio._net.retry import retry_forever
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.testing import Run, carry_out
from tests.engine.world import VIRTUAL, Passing, World, claim, dies

REFUSED = errors.AuthError("403: the right is missing")
FULL = errors.StoreFull("507: no room")
SILENT = errors.Unavailable("503", retryable=True)


class Faulty(Passing):
    """A store or a cluster; ``fault`` returns the error of a request, or None."""

    def __init__(self, port: Any) -> None:
        super().__init__(port)
        self.fault: Callable[[str, str], Exception | None] = lambda verb, name: None

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self.port, verb)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            name = args[0] if args and isinstance(args[0], str) else ""
            if (error := self.fault(verb, name)) is not None:
                raise error
            return await method(*args, **kwargs)

        return call

    def once(self, verb: str, part: str, error: Exception) -> asyncio.Event:
        """Fail the next such request for a name with *part* in it; the event is set then."""
        failed = asyncio.Event()

        def fault(called: str, name: str) -> Exception | None:
            if failed.is_set() or called != verb or part not in name:
                return None
            failed.set()
            return error

        self.fault = fault
        return failed


def faulty(world: World) -> tuple[Platform, Faulty, Faulty]:
    """Return a platform for one client, with its faulty store and cluster."""
    store, cluster = Faulty(world.store), Faulty(world.cluster)
    return replace(world.platform, store=store, cluster=cluster), store, cluster


async def same(x: int) -> int:
    return x


async def first_fails(x: int) -> int:
    if x:
        await asyncio.Event().wait()
    raise ValueError(x)


# --- waiting for a batch ---


@VIRTUAL
async def test_an_outcome_that_may_not_be_read_is_among_the_results(
    client: aio.Client, world: World
) -> None:
    batch = await client.run_async_map(same, range(4))
    await world.until_started(4)
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as other:
        observed = await other.attach_batch(batch.group_id)
        store.once("get", "00000002.0001.outcome", REFUSED)
        waiting = asyncio.create_task(observed.results(cleanup=False, return_exceptions=True))
        await asyncio.sleep(0.5)
        world.gate.set()
        assert await waiting == [0, 1, REFUSED, 3]
        assert await observed.results(cleanup=False) == [0, 1, 2, 3], "readable by now"


@VIRTUAL
async def test_a_store_that_is_silent_when_a_batch_ends_is_waited_for(
    client: aio.Client, world: World
) -> None:
    batch = await client.run_async_map(same, range(4))
    await world.until_started(4)
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as other:
        observed = await other.attach_batch(batch.group_id)
        waiting = asyncio.create_task(observed.results(cleanup=False))
        await asyncio.sleep(5)
        store.fault = lambda verb, name: SILENT
        world.gate.set()
        await asyncio.sleep(300)
        assert not waiting.done()
        store.fault = lambda verb, name: None
        assert await waiting == [0, 1, 2, 3]


@VIRTUAL
async def test_the_submitter_repeats_a_refused_read(world: World) -> None:
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(4), max_concurrent=2)
        await world.until_started(2)
        store.once("get", "00000001.0001.outcome", REFUSED)
        world.gate.set()
        assert await asyncio.wait_for(batch.results(cleanup=False), 1000) == [0, 1, 2, 3]


@VIRTUAL
async def test_results_are_not_cut_short_by_a_client_that_closes(world: World) -> None:
    client = aio.Client(platform=world.platform)
    batch = await client.run_async_map(same, range(4), max_concurrent=2)
    await world.until_started(2)
    waiting = asyncio.create_task(batch.results())
    await asyncio.sleep(1)
    await client.aclose()
    with pytest.raises(errors.KineticError, match="closed"):
        await waiting


# --- waiting for a job ---


@VIRTUAL
async def test_an_attached_client_waits_through_one_error(client: aio.Client, world: World) -> None:
    job = await client.submit(same, 3)
    await world.until_started(1)
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as other:
        attached = await other.attach(job.job_id)
        waiting = asyncio.create_task(attached.result(cleanup=False))
        await asyncio.sleep(5)
        await store.once("list", "attempts/", SILENT).wait()
        world.gate.set()
        assert await waiting == 3


@VIRTUAL
async def test_an_attached_client_reports_a_store_that_stays_silent(
    client: aio.Client, world: World
) -> None:
    job = await client.submit(same, 3)
    await world.until_started(1)
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as other:
        attached = await other.attach(job.job_id)
        waiting = asyncio.create_task(attached.result(cleanup=False))
        await asyncio.sleep(5)
        store.fault = lambda verb, name: SILENT if verb == "list" else None
        before = asyncio.get_running_loop().time()
        with pytest.raises(errors.Unavailable, match="503"):
            await waiting
        assert 60 <= asyncio.get_running_loop().time() - before <= 90
        store.fault = lambda verb, name: None
        world.gate.set()
        assert await attached.result(cleanup=False) == 3


@VIRTUAL
async def test_the_submitter_of_a_job_waits_while_its_outcome_may_not_be_read(world: World) -> None:
    """A login may expire while a job runs for days."""
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(same, 3)
        waiting = asyncio.create_task(job.result(cleanup=False))
        await world.until_started(1)
        store.fault = lambda verb, name: REFUSED if "attempts/" in name else None
        world.gate.set()
        await asyncio.sleep(3600)
        assert not waiting.done()
        store.fault = lambda verb, name: None
        assert await waiting == 3


# --- stops ---


def no_room_for(part: str) -> Callable[[str, str], Exception | None]:
    return lambda verb, name: FULL if verb == "create" and part in name else None


async def stoppable(client: aio.Client, cause: str) -> aio.BatchHandle[int]:
    """Submit five items, two at a time, that *cause* stops; `fail_fast` also ends running ones."""
    fast = cause == "fail_fast"
    return await client.run_async_map(
        first_fails if fast else same,
        range(5),
        max_concurrent=2,
        batch_timeout=10.0 if cause == "timeout" else None,
        fail_fast=fast,
        cancel_running_on_fail=fast,
    )


@VIRTUAL
@pytest.mark.parametrize("cause", ["cancel", "timeout", "fail_fast"])
async def test_a_stop_ends_a_batch_whose_jobs_may_not_be_deleted(world: World, cause: str) -> None:
    platform, _, cluster = faulty(world)
    cluster.fault = lambda verb, name: REFUSED if verb == "delete" else None
    async with aio.Client(platform=platform) as client:
        batch = await stoppable(client, cause)
        await world.until_started(2)
        waiting = asyncio.create_task(batch.cancel() if cause == "cancel" else batch.wait())
        await asyncio.sleep(20)
        world.gate.set()
        await asyncio.wait_for(waiting, 1000)
        results = await batch.results(cleanup=False, return_exceptions=True)
    assert world.started == 2
    first = ValueError if cause == "fail_fast" else errors.JobCancelled
    assert [type(result) for result in results] == [first] + [errors.JobCancelled] * 4


@VIRTUAL
async def test_all_callers_get_the_error_when_a_stop_cannot_be_verified(world: World) -> None:
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(5), max_concurrent=2)
        await world.until_started(2)
        waiting = asyncio.create_task(batch.wait())
        await asyncio.sleep(1)
        store.fault = lambda verb, name: REFUSED if "attempts/" in name else None
        with pytest.raises(errors.AuthError):
            await asyncio.wait_for(batch.cancel(), 1000)
        with pytest.raises(errors.AuthError):
            await asyncio.wait_for(waiting, 1000)


@VIRTUAL
async def test_the_end_of_endless_inputs_that_cannot_be_stored_is_reported(world: World) -> None:
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, iter(range(10**9)), max_concurrent=2)
        await world.until_started(2)
        store.fault = no_room_for("/inputs/")
        with pytest.raises(errors.StoreFull):
            await asyncio.wait_for(batch.cancel(), 1000)
        with pytest.raises(errors.StoreFull):
            await asyncio.wait_for(batch.wait(), 1000)


@VIRTUAL
async def test_a_cancel_that_cannot_be_stored_stops_nothing(world: World) -> None:
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(5), max_concurrent=2)
        await world.until_started(2)
        waiting = asyncio.create_task(batch.results())
        store.fault = no_room_for("/control/")
        with pytest.raises(errors.StoreFull):
            await batch.cancel()
        world.gate.set()
        assert await asyncio.wait_for(waiting, 1000) == [0, 1, 2, 3, 4]


@VIRTUAL
async def test_an_automatic_stop_that_cannot_be_stored_is_reported(world: World) -> None:
    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as client:
        batch = await stoppable(client, "timeout")
        await world.until_started(2)
        store.fault = no_room_for("/control/")
        with pytest.raises(errors.StoreFull):
            await asyncio.wait_for(batch.wait(), 1000)
        assert world.started == 2


@VIRTUAL
async def test_a_lease_that_cannot_be_renewed_is_named_once_per_cause(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> int:
        return sum("can't renew the lease" in message for message in caplog.messages)

    platform, store, _ = faulty(world)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(2))
        await world.until_started(2)
        for error, count in ((FULL, 1), (SILENT, 2), (None, 2), (SILENT, 3)):
            store.fault = lambda verb, name, error=error: error if verb == "replace" else None
            await asyncio.sleep(60)
            assert warnings() == count
        store.fault = lambda verb, name: None
        world.gate.set()
        assert await batch.results() == [0, 1]


# --- damage ---


async def forges(run: Run) -> int | None:
    """Store for item 1 an outcome that is signed with a wrong attempt."""
    order = run.spec.order
    if order.index != 1:
        return await carry_out(run)
    attempt = (order.scope, order.index, order.attempt)
    await claim(run)
    forged = wire.Outcome(kind=wire.Kind.VALUE, executor=run.executor).signed(b"x" * 32, *attempt)
    await run.store.create(wire.attempt_key(*attempt, "outcome"), b"", forged)
    return wire.EXIT_VALUE


async def until_forged(world: World, group_id: str) -> None:
    name = wire.attempt_key(f"batches/{group_id}/", 1, 1, "outcome")
    async with asyncio.timeout(1000):
        while await world.platform.store.look(name) is None:
            await asyncio.sleep(0.01)


async def forges_later(run: Run) -> int | None:
    """The first attempt of item 1 dies without an outcome; that of the second is forged."""
    order = run.spec.order
    return 9 if (order.index, order.attempt) == (1, 1) else await forges(run)


async def write_outcome(run: Run, metadata: dict[str, str]) -> int | None:
    """Give item 1's first attempt a claim and an outcome with *metadata* but no body."""
    order = run.spec.order
    if (order.index, order.attempt) != (1, 1):
        return await carry_out(run)
    attempt = (order.scope, order.index, order.attempt)
    await claim(run)
    await run.store.create(wire.attempt_key(*attempt, "outcome"), b"", metadata)
    return wire.EXIT_VALUE


async def write_empty_outcome(run: Run) -> int | None:
    """Simulate what a power cut leaves."""
    return await write_outcome(run, {})


async def write_undecodable_signature(run: Run) -> int | None:
    return await write_outcome(run, {"header": "\udc80", "mac": "ä"})


@VIRTUAL
@pytest.mark.parametrize("work", [write_empty_outcome, write_undecodable_signature, forges])
async def test_retry_failed_retries_an_outcome_that_cannot_be_verified(work: Any) -> None:
    """It fails its item at once, despite retries; retry_failed() starts the next attempt."""
    world = World(work)
    world.gate.set()
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, range(3), retries=2)
        live = {item.index: item.outcome async for item in batch.outcomes()}
        assert [live[0].unwrap(), live[2].unwrap()] == [0, 2]
        with pytest.raises(errors.WireError):
            live[1].unwrap()
        await batch.retry_failed()
        results = await batch.results(timeout=1000, cleanup=False, return_exceptions=True)
        if work is forges:  # the next attempt's outcome is forged too
            assert isinstance(results.pop(1), errors.WireError)
        assert results in ([0, 1, 2], [0, 2])


class Swapping(Faulty):
    """A store that replaces the bodies of outcomes."""

    async def create(
        self, name: str, body: bytes, metadata: Mapping[str, str] | None = None, **kwargs: Any
    ) -> bool:
        if name.endswith(".outcome"):
            metadata = {**(metadata or {}), wire.BODY: base64.b64encode(b"X").decode()}
        created: bool = await self.port.create(name, body, metadata, **kwargs)
        return created


async def swaps(run: Run) -> int | None:
    """Store for item 1 a value that its job hasn't signed."""
    if run.spec.name.endswith("-1-1"):
        store: Any = Swapping(run.store)
        run.store = store
    return await carry_out(run)


class Unreported(Faulty):
    """A cluster whose watches never report item 1."""

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        async for seen in self.port.watch(labels):
            if not seen.name.endswith("-1-1"):
                yield seen


@VIRTUAL
@pytest.mark.parametrize("work", [forges, swaps])
@pytest.mark.parametrize("reported", [True, False])
async def test_damage_is_the_end_of_its_item_and_of_no_other(work: Any, reported: bool) -> None:
    world = World(work)
    platform = world.platform
    if not reported:
        cluster: Any = Unreported(platform.cluster)
        platform = replace(platform, cluster=cluster)
    async with (
        aio.Client(platform=platform) as client,
        aio.Client(platform=world.platform) as other,
    ):
        batch = await client.run_async_map(same, range(4), max_concurrent=2)
        observed = await other.attach_batch(batch.group_id)
        waiting = asyncio.create_task(observed.results(cleanup=False, return_exceptions=True))
        await world.until_started(2)
        world.gate.set()
        own_results = await batch.results(timeout=1000, cleanup=False, return_exceptions=True)
        for results in (own_results, await asyncio.wait_for(waiting, 1000)):
            assert [type(result) for result in results] == [int, errors.WireError, int, int]
        damaged = await observed.job(1)
        if work is forges:  # a swapped body shows only when the value is read
            assert observed.unavailable_children == {1: damaged.job_id}
        with pytest.raises(errors.WireError):
            await (await batch.job(1)).result(cleanup=False)
        await asyncio.wait_for(batch.wait(), 1000)
        assert batch.finished


@VIRTUAL
async def test_damage_is_reported_to_every_later_reader() -> None:
    world = World(forges_later)
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, range(4), retries=1)
        world.gate.set()
        for _ in range(2):
            results = await batch.results(timeout=1000, cleanup=False, return_exceptions=True)
            assert [type(result) for result in results] == [int, errors.WireError, int, int]


@VIRTUAL
async def test_a_batch_with_a_forged_outcome_can_be_cancelled() -> None:
    world = World(forges)
    cluster: Any = Unreported(world.platform.cluster)
    async with aio.Client(platform=replace(world.platform, cluster=cluster)) as client:
        batch = await client.run_async_map(same, range(40), max_concurrent=2)
        await world.until_started(2)
        world.gate.set()
        await until_forged(world, batch.group_id)
        await batch.cancel()
        await batch.cancel()
        results = await batch.results(timeout=1000, cleanup=False, return_exceptions=True)
        assert isinstance(results[1], errors.WireError)
        assert {type(result) for result in results} <= {int, errors.WireError, errors.JobCancelled}


class Silent(Faulty):
    """A cluster that accepts every request but whose watches report nothing."""

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        await asyncio.Event().wait()
        yield Observation(name="", phase=Phase.GONE)


@VIRTUAL
async def test_damage_blocks_no_waiting_after_the_submitter_left() -> None:
    """The submitter leaves once item 1 of four has a forged outcome."""
    world = World(forges)
    cluster: Any = Silent(world.platform.cluster)
    async with aio.Client(platform=replace(world.platform, cluster=cluster)) as client:
        batch = await client.run_async_map(same, range(4), max_concurrent=2)
        await world.until_started(2)
        world.gate.set()
        await until_forged(world, batch.group_id)
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        assert await (await found.job(0)).result(timeout=1000, cleanup=False) == 0
        with pytest.raises(errors.WireError):
            await (await found.job(1)).result(timeout=1000, cleanup=False)
        results = await found.results(timeout=1000, cleanup=False, return_exceptions=True)
        assert [type(result) for result in results] == [int, errors.WireError, int, int]


@VIRTUAL
async def test_a_cancellation_after_the_inputs_failed_needs_no_report() -> None:
    world = World()
    cluster: Any = Silent(world.platform.cluster)

    async def inputs() -> AsyncIterator[int]:
        yield 0
        await world.until_started(1)
        raise ValueError("no more")

    async with aio.Client(platform=replace(world.platform, cluster=cluster)) as client:
        batch = await client.run_async_map(same, inputs(), max_concurrent=1)
        with pytest.raises(ValueError, match="no more"):
            await batch.wait(timeout=1000)
        async with asyncio.timeout(1000):
            await batch.cancel()
        assert await batch.status_counts() == {"NOT_FOUND": 1}


class Babbling(Faulty):
    """A cluster whose log is one very long line in pieces."""

    async def logs(self, name: str, **options: Any) -> AsyncIterator[str]:
        for number in range(200):
            yield f"{number:04}" * (1 << 18)


@VIRTUAL
async def test_the_last_lines_of_a_job_take_no_memory_however_long_they_are() -> None:
    world = World(dies)
    world.gate.set()
    cluster: Any = Babbling(world.platform.cluster)
    async with aio.Client(platform=replace(world.platform, cluster=cluster)) as client:
        job = await client.submit(same, 1)
        tracemalloc.start()
        try:
            with pytest.raises(errors.JobLost, match=r"(?m)01990199$"):
                await job.result(timeout=1000)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 100 << 20


# --- a client that is closed ---


@VIRTUAL
async def test_attaching_while_the_client_closes_raises_client_closed(
    client: aio.Client, world: World
) -> None:
    world.gate.set()
    batch = await client.run_async_map(same, [1])
    platform, _, cluster = faulty(world)
    requested = asyncio.Event()

    async def root_key() -> bytes:
        requested.set()
        await asyncio.Event().wait()
        return b""

    cluster.root_key = root_key  # type: ignore[attr-defined]
    other = aio.Client(platform=platform)
    attaching = asyncio.create_task(other.attach_batch(batch.group_id))
    await requested.wait()
    await other.aclose()
    with pytest.raises(errors.ClientClosed, match="open another"):
        await attaching


async def test_requests_to_a_closed_client_are_not_repeated() -> None:
    async def request() -> None:
        raise errors.ClientClosed("the client is closed")

    with pytest.raises(errors.ClientClosed):
        await retry_forever(request, "asking")


class Unfit:
    """A value whose class ends the process that rebuilds it."""

    def __init__(self, end: str) -> None:
        self.end = end

    def __reduce__(self) -> Any:
        return exec, (f"raise {self.end}",)


@pytest.mark.parametrize("end", ["SystemExit(3)", "KeyboardInterrupt", "GeneratorExit"])
async def test_a_value_that_can_not_be_rebuilt_ends_no_program(end: str) -> None:
    world = World()
    world.gate.set()
    async with aio.Client(platform=world.platform) as client:
        job = await client.submit(Unfit, end)
        with pytest.raises(errors.JobFailed, match="cannot be rebuilt"):
            await job.result(timeout=1000, cleanup=False)
