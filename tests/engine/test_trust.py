"""An attacker who can write to the store but has no key can't steer anything."""

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
    """Unpickling it runs code, like a pickle from an attacker."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, ("somebody else's code",)


async def put(world: World, name: str, body: bytes, metadata: dict[str, str]) -> None:
    """Replace an object, like an attacker with access to the store."""
    await world.platform.store.delete([name])
    assert await world.platform.store.create(name, body, metadata)


async def change(world: World, name: str, edit: Callable[[Object], bytes]) -> None:
    """Replace the content of an object and keep its metadata."""
    stored = await world.platform.store.get(name)
    await put(world, name, edit(stored), dict(stored.metadata))


async def objects_of(world: World, name: str) -> list[str]:
    return [stored.name for stored in await world.platform.store.list("") if name in stored.name]


@pytest.fixture
async def world() -> World:
    """A world whose gate is open."""
    RAN.clear()
    world = World()
    world.gate.set()
    return world


def same(x: Any) -> Any:
    return x


def trap(stored: Object) -> bytes:
    """Replace the first input by one that runs code, under the old digest."""
    held = frames.unpack(stored.body)
    bad = pickles.dumps(((Trap(),), {}))
    return frames.pack([bad, *held.frames[1:]], held.fields)


def trap_with_digest(stored: Object) -> bytes:
    """Replace the first input and its digest."""
    held = frames.unpack(stored.body)
    bad = pickles.dumps(((Trap(),), {}))
    digests = [hashlib.sha256(bad).hexdigest(), *held.fields["digests"][1:]]
    return frames.pack([bad, *held.frames[1:]], {**held.fields, "digests": digests})


def trap_of_equal_length(stored: Object) -> bytes:
    """Replace the first input under the old digest and at the old offsets."""
    held = frames.unpack(stored.body)
    bad = pickles.dumps(((Trap(),), {}))
    assert len(bad) <= len(held.frames[0])
    part = bad + bytes(len(held.frames[0]) - len(bad))  # unpickling ignores bytes after the end
    return frames.pack([part, *held.frames[1:]], held.fields)


@VIRTUAL
@pytest.mark.parametrize("tampered", [trap, trap_with_digest, trap_of_equal_length])
async def test_a_replaced_input_runs_nothing_in_the_client(
    world: World,
    client: aio.Client,
    tampered: Callable[[Object], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = await client.run_async_map(same, ["long" * 100, "two"])
    await batch.wait()
    name = wire.input_key(f"batches/{batch.group_id}/", 0)
    await change(world, name, tampered)
    async with aio.Client(platform=world.platform) as other:
        found = await other.attach_batch(batch.group_id)
        seen = {item.index: (item.input, item.outcome.unwrap()) async for item in found.outcomes()}
        with pytest.raises(errors.WireError, match="is not what the submitter of"):
            await found._batch.input_of(0)
    assert seen[0] == (None, "long" * 100)  # the outcome has its own signature
    assert "inputs/00000000 is not what the submitter" in caplog.text
    assert RAN == []


def other_command(stored: Object) -> bytes:
    manifest = json.loads(stored.body)
    manifest["placed"]["image"]["command"] = ["/bin/sh", "-c", "touch /tmp/chosen"]
    return json.dumps(manifest).encode()


def other_function(stored: Object) -> bytes:
    manifest = json.loads(stored.body)
    manifest["placed"]["function"]["name"] = "functions/chosen.pkl"
    return json.dumps(manifest).encode()


@VIRTUAL
@pytest.mark.parametrize("tampered", [other_command, other_function])
async def test_a_changed_manifest_starts_nothing(
    world: World, tampered: Callable[[Object], bytes]
) -> None:
    world.gate.clear()
    async with aio.Client(platform=world.platform) as client:
        batch = await client.run_async_map(same, range(4), max_concurrent=1)
        await world.until_started(1)
    started = world.started
    await change(world, f"batches/{batch.group_id}/manifest", tampered)
    async with aio.Client(platform=world.platform) as other:
        with pytest.raises(errors.WireError) as refusal:
            await (await other.attach_batch(batch.group_id)).resume(force=True)
        assert "is not what its submitter signed" in str(refusal.value)
        assert f"kinetic.cleanup({batch.group_id!r})" in str(refusal.value)
        with pytest.raises(errors.WireError, match="is not what its submitter signed"):
            await other.attach(f"{batch.group_id}-0")
        await asyncio.sleep(100)
        assert world.started == started
        await other.cleanup(batch.group_id)
        assert await objects_of(world, batch.group_id) == []


@VIRTUAL
async def test_a_job_whose_record_was_changed_is_refused_and_can_be_removed(
    world: World, client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    world.gate.clear()
    job = await client.submit(same, 1)
    name = f"jobs/{job.job_id}/handle.json"
    record = json.loads((await world.platform.store.get(name)).body)
    assert record["job_id"] == job.job_id  # the record is still plain JSON
    changed = json.dumps({**record, "output_dir": "/elsewhere"}).encode()
    await change(world, name, lambda stored: changed)
    async with aio.Client(platform=world.platform) as other:
        with pytest.raises(errors.WireError, match="is not what its submitter signed"):
            await other.attach(job.job_id)
        unbound = aio.JobHandle.from_dict(record).bound(other.follow_record)
        for request in (unbound.status, unbound.result, unbound.cancel, unbound.reason):
            with pytest.raises(errors.WireError, match="is not what its submitter signed"):
                await request()
        assert await other.list_jobs() == []
        assert name in caplog.text
        await other.cleanup(job.job_id)
        assert await objects_of(world, job.job_id) == []
        assert await world.platform.cluster.find() == []


@VIRTUAL
async def test_forged_requests_say_nothing(
    world: World, client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The submitter, the jobs and observers of the batch all ignore them."""
    world.gate.clear()
    batch = await client.run_async_map(same, range(3), max_concurrent=1)
    await world.until_started(1)
    scope = f"batches/{batch.group_id}/"
    stop = wire.Request(kind="stop", cause=wire.CLEANUP)
    other_key = signing.submission_key(await world.platform.cluster.root_key(), "batches/grp-x/")
    for slot, (body, metadata) in enumerate(
        [
            (stop.to_bytes(), {}),
            stop.signed(b"x" * 32, scope, wire.control_key(scope, 1)),
            stop.signed(other_key, "batches/grp-x/", wire.control_key("batches/grp-x/", 2)),
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
    warnings = [message for message in caplog.messages if "no valid signature" in message]
    assert len(warnings) == 2 * 5  # one per process and request


@VIRTUAL
async def test_a_request_after_a_forged_one_is_heeded(world: World, client: aio.Client) -> None:
    world.gate.clear()
    batch = await client.run_async_map(same, range(3), max_concurrent=1)
    await world.until_started(1)
    scope = f"batches/{batch.group_id}/"
    stop = wire.Request(kind="stop").to_bytes()
    assert await world.platform.store.create(wire.control_key(scope, 0), stop)
    async with aio.Client(platform=world.platform) as other:
        await (await other.attach_batch(batch.group_id)).cancel()
    assert await world.platform.store.look(wire.control_key(scope, 1)) is not None
    await batch.wait()
    assert {await (await batch.job(index)).status() for index in range(3)} == {JobStatus.NOT_FOUND}


async def test_what_is_no_id_is_not_cleaned_up(client: aio.Client) -> None:
    with pytest.raises(errors.NotFound, match="no job or batch has the ID"):
        await client.cleanup("../x")
    with pytest.raises(errors.ConfigurationError, match=r"cleanup\('grp-123456789012'\)"):
        await client.cleanup("grp-123456789012-3")


async def test_cleaning_up_what_is_not_there_only_says_so(
    world: World, client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for submission in ("job-123456789012", "grp-123456789012"):
        await client.cleanup(submission)
        assert submission in caplog.messages.pop()
    assert await world.platform.store.list("") == []
    job = await client.submit(abs, -1)
    await client.cleanup(job.job_id[:-1])
    assert f"beginning of {job.job_id}" in caplog.messages.pop()
