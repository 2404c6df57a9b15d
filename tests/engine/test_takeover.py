"""A batch outlives its submitter: another process continues it without repeating anything."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import signing, wire
from kinetic.aio import _lease
from kinetic.aio.ports import JobSpec
from kinetic.testing import MemoryCluster, Run, carry_out
from tests.engine.severed import severed
from tests.engine.world import VIRTUAL, Passing, World, platform_with, until


@pytest.fixture
async def world() -> World:
    """A world whose gate is open until a test closes it."""
    world = World()
    world.gate.set()
    return world


def square(x: int) -> int:
    return x * x


async def abandoned(world: World, inputs: Any, **terms: Any) -> tuple[aio.Client, str]:
    """Start a batch whose submitter vanishes while it runs."""
    platform, cut = severed(world.platform)
    client = aio.Client(platform=platform)
    world.gate.clear()
    batch = await client.run_async_map(square, inputs, **terms)
    await until(lambda: world.started >= min(3, terms.get("max_concurrent", 3)))
    cut.set()
    world.gate.set()
    return client, batch.group_id


@VIRTUAL
async def test_another_client_finishes_what_the_first_began(world: World) -> None:
    vanished, group = await abandoned(world, range(20), max_concurrent=3)
    async with aio.Client(platform=world.platform) as client:
        batch = await client.attach_batch(group)
        began = asyncio.get_running_loop().time()
        assert await batch.resume() is batch
        waited = asyncio.get_running_loop().time() - began
        assert 40 <= waited <= 60, "the resume waits until the lease expires"
        assert await batch.results() == [x * x for x in range(20)]
    assert set(world.starts.values()) == {1}, "nothing ran twice"
    await vanished.aclose()


@VIRTUAL
async def test_force_resumes_at_once_and_the_old_submitter_gets_an_error(world: World) -> None:
    world.gate.clear()
    async with aio.Client(platform=world.platform) as first:
        batch = await first.run_async_map(square, range(10), max_concurrent=2)
        await until(lambda: world.started == 2)
        async with aio.Client(platform=world.platform) as second:
            other = await second.attach_batch(batch.group_id)
            await other.resume(force=True)
            waiting = asyncio.create_task(batch.results())
            await asyncio.sleep(15)
            world.gate.set()
            with pytest.raises(errors.SubmitterLost, match="fence 2, here 1"):
                await waiting
            assert await other.results() == [x * x for x in range(10)]
    assert set(world.starts.values()) == {1}


class Fences(MemoryCluster):
    """A cluster that notes under which fences clients ask for workers."""

    fences: tuple[int, ...] = ()

    async def scale(self, job: JobSpec, *args: Any, **kwargs: Any) -> int:
        self.fences += (job.order.fence,)
        return await super().scale(job, *args, **kwargs)


@VIRTUAL
async def test_workers_are_asked_for_under_the_fence_of_the_lease() -> None:
    """So the platform knows the newest client, and an older one doesn't remove its secrets."""
    go = asyncio.Event()

    async def work(run: Run) -> int | None:
        await go.wait()
        return await carry_out(run)

    platform, cluster = platform_with(Fences, work)
    async with aio.Client(platform=platform) as first, aio.Client(platform=platform) as second:
        batch = await first.run_async_map(square, range(3), max_concurrent=1)
        other = await second.attach_batch(batch.group_id)
        await other.resume(force=True)
        await until(lambda: len(cluster.fences) == 2)
        go.set()
        assert await other.results() == [0, 1, 4]
    assert cluster.fences == (1, 2)


@VIRTUAL
async def test_a_live_holder_keeps_its_lease(world: World) -> None:
    go_on = asyncio.Event()

    async def inputs() -> AsyncIterator[int]:
        yield 0
        await go_on.wait()
        for number in range(1, 4):
            yield number

    world.gate.clear()
    async with aio.Client(platform=world.platform) as first:
        batch = await first.run_async_map(square, inputs(), max_concurrent=1)
        async with aio.Client(platform=world.platform) as second:
            other = await second.attach_batch(batch.group_id)
            with pytest.raises(errors.Conflict, match="alive"):
                await other.resume()
            go_on.set()
            world.gate.set()
            assert await other.results(cleanup=False) == [0, 1, 4, 9]
        assert await batch.results() == [0, 1, 4, 9]


@VIRTUAL
@pytest.mark.full
async def test_the_sleep_of_a_machine_does_not_end_the_lease_of_its_processes(world: World) -> None:
    """After it, an observer may read the lease before the holder has renewed it."""
    go_on = asyncio.Event()
    loop, asleep = asyncio.get_running_loop(), 0.0

    async def inputs() -> AsyncIterator[int]:
        yield 0
        await go_on.wait()
        yield 1

    world.gate.set()
    platform = replace(world.platform, clock=lambda: loop.time() + asleep)
    async with aio.Client(platform=platform) as first, aio.Client(platform=platform) as second:
        batch = await first.run_async_map(square, inputs(), max_concurrent=1)
        other = await second.attach_batch(batch.group_id)
        waiting = asyncio.create_task(other.results(cleanup=False))
        for _ in range(20):
            await asyncio.sleep(61)
            asleep += 8 * 3600.0
        go_on.set()
        assert await waiting == [0, 1]
        assert await batch.results() == [0, 1]


@VIRTUAL
async def test_running_jobs_count_against_max_concurrent_after_a_resume(world: World) -> None:
    vanished, group = await abandoned(world, range(12), max_concurrent=3)
    world.gate.clear()
    async with aio.Client(platform=world.platform) as client:
        batch = await client.attach_batch(group)
        await batch.resume(force=True)
        await asyncio.sleep(5)
        assert world.started <= 6, "three started earlier, and three took their slots"
        world.gate.set()
        assert await batch.results() == [x * x for x in range(12)]
    await vanished.aclose()


@VIRTUAL
async def test_a_batch_without_a_lease_can_be_taken(world: World) -> None:
    """Its submitter vanished right after it wrote the manifest."""
    platform, cut = severed(world.platform, "/manifest")
    client = aio.Client(platform=platform)
    starting = asyncio.create_task(client.run_async_map(square, range(3)))
    await cut.wait()
    [stored] = await world.platform.store.list("batches/")
    group = stored.name.split("/")[1]
    starting.cancel()
    assert await _lease.read(world.platform.store, f"batches/{group}/") is None
    async with aio.Client(platform=world.platform) as other:
        batch = await other.attach_batch(group)
        await batch.resume()
        with pytest.raises(errors.InputsUnfinished) as caught:
            await batch.results()
        assert caught.value.stored == batch.stored == 0
        await batch.resume(inputs=range(3))
        assert await batch.results() == [0, 1, 4]
    with pytest.raises(asyncio.CancelledError):
        await starting
    await client.aclose()


@VIRTUAL
async def test_two_that_resume_at_once_do_not_both_submit(world: World) -> None:
    vanished, group = await abandoned(world, range(9), max_concurrent=2)
    world.gate.clear()
    async with (
        aio.Client(platform=world.platform) as first,
        aio.Client(platform=world.platform) as second,
    ):
        batches = [await client.attach_batch(group) for client in (first, second)]
        await asyncio.gather(*(batch.resume() for batch in batches))
        assert sorted(batch._batch.submits for batch in batches) == [False, True]
        world.gate.set()
        for batch in batches:
            assert await batch.results(cleanup=False) == [x * x for x in range(9)]
    assert set(world.starts.values()) == {1}
    await vanished.aclose()


@VIRTUAL
async def test_lists_batches_by_name_and_tags(world: World) -> None:
    async with aio.Client(platform=world.platform) as client:
        for number in range(3):
            tags = {"k": str(number % 2)}
            await (await client.run_async_map(square, [1], name=f"n{number}", tags=tags)).wait()
        assert {batch.name for batch in await client.list_batches()} == {"n0", "n1", "n2"}
        assert [batch.name for batch in await client.list_batches(name="n1")] == ["n1"]
        found = await client.list_batches(tags={"k": "0"})
        assert {batch.name for batch in found} == {"n0", "n2"}
        assert len(await client.list_batches(limit=2)) == 2
    async with aio.Client(platform=world.platform) as other:
        [found] = await other.list_batches(name="n2")
        assert await found.results() == [1]
        await found.cleanup()
        assert await other.list_batches(name="n2") == []


class Forgetful(Passing):
    """A store that loses the replies to its next ``lost`` replacements."""

    def __init__(self, store: Any, lost: int) -> None:
        super().__init__(store)
        self.lost = lost

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        replaced: int = await self.port.replace(name, body, generation=generation)
        if self.lost > 0:
            self.lost -= 1
            raise errors.Unavailable("the reply was lost")
        return replaced


@VIRTUAL
async def test_a_renewal_whose_reply_was_lost_is_its_holders_own(world: World) -> None:
    store: Any = Forgetful(world.platform.store, 0)
    hold = await _lease.begin(store, "batches/b/", world.platform.clock)
    store.lost = 1
    with pytest.raises(errors.Unavailable):
        await hold.renew()
    await hold.renew()
    assert hold.lost is None
    store.lost = 1
    with pytest.raises(errors.Unavailable):
        await hold.release(3)
    await hold.release(3)
    lease = await _lease.read(world.platform.store, "batches/b/")
    assert lease is not None
    assert (lease[0].held, lease[0].control_seen) == (False, 3)


@VIRTUAL
async def test_nothing_starts_while_the_lease_is_in_doubt(world: World) -> None:
    hold = await _lease.begin(world.platform.store, "batches/b/", world.platform.clock)
    await asyncio.sleep(29)
    assert hold.may_start
    await asyncio.sleep(2)
    assert not hold.may_start
    waiting = asyncio.create_task(hold.until_may_start())
    await asyncio.sleep(100)
    assert not waiting.done()
    await hold.renew()
    await waiting
    other = await _lease.acquire(
        world.platform.store, "batches/b/", None, world.platform.clock, force=True
    )
    assert other.fence == 2
    with pytest.raises(errors.SubmitterLost, match="now submits batch"):
        await hold.renew()
    with pytest.raises(errors.SubmitterLost):
        await hold.until_may_start()


@VIRTUAL
async def test_a_batch_in_another_format_is_refused(world: World) -> None:
    vanished, group = await abandoned(world, range(6), max_concurrent=2)
    await vanished.aclose()
    name = f"batches/{group}/manifest"
    stored = await world.platform.store.get(name)
    manifest = json.loads(stored.body) | {"version": 2}
    manifest.pop("mac")
    scope, body = f"batches/{group}/", json.dumps(manifest).encode()
    key = signing.submission_key(await world.platform.cluster.root_key(), scope)
    await world.platform.store.delete([name])
    await world.platform.store.create(name, signing.signed_json(key, scope, name, body))
    async with aio.Client(platform=world.platform) as client:
        with pytest.raises(errors.WireError, match="format 2"):
            await client.attach_batch(group)


@VIRTUAL
async def test_a_request_that_must_not_be_ignored_stops_the_holder(world: World) -> None:
    world.gate.clear()
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(square, range(3), max_concurrent=1)
        await until(lambda: world.started == 1)
        for number, must in enumerate([False, True]):
            scope = f"batches/{batch.group_id}/"
            key = signing.submission_key(await world.platform.cluster.root_key(), scope)
            name = wire.control_key(scope, number)
            request = wire.Request(kind="hibernate", must=must)
            await world.platform.store.create(name, *request.signed(key, scope, name))
        with pytest.raises(errors.WireError, match="hibernate"):
            await batch.wait()


class RemovedBetween(Passing):
    """A store where another process requests the removal right after the lease is released."""

    def __init__(self, store: Any, root: bytes) -> None:
        super().__init__(store)
        self._root = root
        self.released = False
        self.holdings = 0

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        replaced: int = await self.port.replace(name, body, generation=generation)
        held = json.loads(body)["held"]
        self.holdings += held and self.released  # renewals before the release don't count
        if not held:
            self.released = True
            scope = name.removesuffix("lease")
            key = signing.submission_key(self._root, scope)
            stop = wire.Request(kind="stop", cause=wire.CLEANUP)
            for number in itertools.count():  # the workers may have said that their round is over
                slot = wire.control_key(scope, number)
                if await self.port.create(slot, *stop.signed(key, scope, slot)):
                    break
        return replaced


@VIRTUAL
async def test_nothing_is_written_into_a_batch_that_is_being_removed(world: World) -> None:
    """A process that released the lease doesn't take it again for a request to remove the batch."""
    root = await world.platform.cluster.root_key()
    store: Any = RemovedBetween(world.platform.store, root)
    async with aio.Client(platform=replace(world.platform, store=store)) as client:
        batch = await client.run_async_map(square, range(3))
        await batch.wait()
        await batch.results(cleanup=False)
    assert store.holdings == 0, "the lease was taken again"
