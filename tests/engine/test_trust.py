"""Whoever can write to the store, and has no key, steers nothing: it is verified before it acts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import frames, pickles, signing, wire
from kinetic.aio.ports import Object
from kinetic.job_status import JobStatus
from tests.engine.world import VIRTUAL, World

RAN: list[str] = []


class Trap:
    """Rebuilding it runs code: what somebody who replaces a pickle wants."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, ("somebody else's code",)


async def put(world: World, name: str, body: bytes, metadata: dict[str, str]) -> None:
    """Write what is in nobody's way, as who can write to the store."""
    await world.platform.store.delete([name])
    assert await world.platform.store.create(name, body, metadata)


async def change(world: World, name: str, change: Callable[[Object], bytes]) -> None:
    """Replace the content of an object, and leave what is beside it."""
    there = await world.platform.store.get(name)
    await put(world, name, change(there), dict(there.metadata))


async def left(world: World, name: str) -> list[str]:
    return [one.name for one in await world.platform.store.list("") if name in one.name]


@pytest.fixture
async def world() -> World:
    """Nothing is held up in it."""
    RAN.clear()
    world = World()
    world.gate.set()
    return world


def same(x: Any) -> Any:
    return x


def trap(there: Object) -> bytes:
    """The same inputs, but for the first: it runs code, and the footer has its digest or not."""
    held = frames.unpack(there.body)
    bad = pickles.dumps(((Trap(),), {}))
    return frames.pack([bad, *held.frames[1:]], held.fields)


def trap_with_digest(there: Object) -> bytes:
    held = frames.unpack(there.body)
    bad = pickles.dumps(((Trap(),), {}))
    digests = [hashlib.sha256(bad).hexdigest(), *held.fields["digests"][1:]]
    return frames.pack([bad, *held.frames[1:]], {**held.fields, "digests": digests})


def trap_of_equal_length(there: Object) -> bytes:
    """Also its offsets are those that were signed."""
    held = frames.unpack(there.body)
    bad = pickles.dumps(((Trap(),), {}))
    assert len(bad) <= len(held.frames[0])
    part = bad + bytes(len(held.frames[0]) - len(bad))  # what follows a pickle's end is not read
    return frames.pack([part, *held.frames[1:]], held.fields)


@VIRTUAL
@pytest.mark.parametrize("how", [trap, trap_with_digest, trap_of_equal_length])
async def test_a_replaced_input_runs_nothing_in_the_client(
    world: World,
    client: aio.Client,
    how: Callable[[Object], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = await client.run_async_map(same, ["long" * 100, "two"])
    await batch.wait()
    name = wire.input_key(f"batches/{batch.group_id}/", 0)
    await change(world, name, how)
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        given = {one.index: (one.input, one.outcome.unwrap()) async for one in found.outcomes()}
        with pytest.raises(errors.WireError, match="is not what the submitter of"):
            await found._batch.input_of(0)
    assert given[0] == (None, "long" * 100)  # its outcome is signed by itself
    assert "inputs/00000000 is not what the submitter" in caplog.text
    assert RAN == []


def other_command(there: Object) -> bytes:
    manifest = json.loads(there.body)
    manifest["placed"]["image"]["command"] = ["/bin/sh", "-c", "touch /tmp/chosen"]
    return json.dumps(manifest).encode()


def other_function(there: Object) -> bytes:
    manifest = json.loads(there.body)
    manifest["placed"]["function"]["name"] = "functions/chosen.pkl"
    return json.dumps(manifest).encode()


@VIRTUAL
@pytest.mark.parametrize("how", [other_command, other_function])
async def test_a_changed_manifest_starts_nothing(
    world: World, how: Callable[[Object], bytes]
) -> None:
    world.gate.clear()
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, range(4), max_concurrent=1)
        await world.begun(1)
    begun = world.started
    await change(world, f"batches/{batch.group_id}/manifest", how)
    async with aio.Client(platform=world.platform) as other:
        with pytest.raises(errors.WireError) as refusal:
            await (await other.attach_batch(batch.group_id)).resume(force=True)
        assert "is not what its submitter signed" in str(refusal.value)
        assert f"kinetic.cleanup({batch.group_id!r})" in str(refusal.value)
        with pytest.raises(errors.WireError, match="is not what its submitter signed"):
            await other.attach(f"{batch.group_id}-0")
        await asyncio.sleep(100)
        assert world.started == begun
        await other.cleanup(batch.group_id)
        assert await left(world, batch.group_id) == []


@VIRTUAL
async def test_a_job_whose_record_was_changed_is_refused_and_can_be_removed(
    world: World, client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    world.gate.clear()
    job = await client.submit(same, 1)
    name = f"jobs/{job.job_id}/handle.json"
    record = json.loads((await world.platform.store.get(name)).body)
    assert record["job_id"] == job.job_id  # the object is the JSON that it always was
    changed = json.dumps({**record, "output_dir": "/elsewhere"}).encode()
    await change(world, name, lambda there: changed)
    async with aio.Client(platform=world.platform) as other:
        with pytest.raises(errors.WireError, match="is not what its submitter signed"):
            await other.attach(job.job_id)
        unbound = aio.JobHandle.from_dict(record).bound(other.follow_record)
        for what in (unbound.status, unbound.result, unbound.cancel, unbound.reason):
            with pytest.raises(errors.WireError, match="is not what its submitter signed"):
                await what()
        assert await other.list_jobs() == []
        assert name in caplog.text
        await other.cleanup(job.job_id)
        assert await left(world, job.job_id) == []
        assert await world.platform.cluster.find() == []


@VIRTUAL
async def test_forged_requests_say_nothing(
    world: World, client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither to who submits the batch, nor to its jobs, nor to who observes it; later ones do."""
    world.gate.clear()
    batch = await client.run_async_map(same, range(3), max_concurrent=1)
    await world.begun(1)
    scope = f"batches/{batch.group_id}/"
    stop = wire.Request(kind="stop", cause=wire.CLEANUP)
    elsewhere = signing.submission_key(await world.platform.cluster.root_key(), "batches/grp-x/")
    for slot, (body, metadata) in enumerate(
        [
            (stop.to_bytes(), {}),
            stop.signed(b"x" * 32, scope, wire.control_key(scope, 1)),
            stop.signed(elsewhere, "batches/grp-x/", wire.control_key("batches/grp-x/", 2)),
            (b"no request at all", {}),
            (wire.Request(kind="unheard of", must=True).to_bytes(), {"mac": "\udc80"}),
        ]
    ):
        name = wire.control_key(scope, slot)
        assert await world.platform.store.create(name, body, metadata)
    await asyncio.sleep(60)
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        assert await (await found.job(0)).status() is JobStatus.RUNNING
        world.gate.set()
        assert await batch.results() == [0, 1, 2]
        assert await found.results() == [0, 1, 2]
    told = [one for one in caplog.records if "is not signed by anybody" in one.getMessage()]
    assert len(told) == 2 * 5  # each process that reads it, once


@VIRTUAL
async def test_a_request_after_a_forged_one_is_heeded(world: World, client: aio.Client) -> None:
    world.gate.clear()
    batch = await client.run_async_map(same, range(3), max_concurrent=1)
    await world.begun(1)
    scope = f"batches/{batch.group_id}/"
    stop = wire.Request(kind="stop").to_bytes()
    assert await world.platform.store.create(wire.control_key(scope, 0), stop)
    async with aio.Client(platform=world.platform) as other:
        await (await other.attach_batch(batch.group_id)).cancel()
    assert await world.platform.store.look(wire.control_key(scope, 1)) is not None
    await batch.wait()
    assert {await (await batch.job(index)).status() for index in range(3)} == {JobStatus.NOT_FOUND}


async def test_what_is_no_id_is_not_cleaned_up(client: aio.Client) -> None:
    with pytest.raises(errors.ConfigurationError, match="isn't a valid ID"):
        await client.cleanup("../x")
    with pytest.raises(errors.ConfigurationError, match=r"cleanup\('grp-123456789012'\)"):
        await client.cleanup("grp-123456789012-3")


async def test_cleaning_up_what_is_not_there_does_nothing(world: World, client: aio.Client) -> None:
    await client.cleanup("job-123456789012")
    await client.cleanup("grp-123456789012")
    assert await world.platform.store.list("") == []
