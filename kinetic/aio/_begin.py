"""How a batch, or a job, comes to this process: made here, found by its id, or listed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from dataclasses import replace
from typing import Any

from absl import logging

from kinetic._runner import seals, wire
from kinetic._runner.frames import MALFORMED
from kinetic.aio import _ids, _launch, _lease, _manifest, _removal, _submit
from kinetic.aio._batch import Batch, feed_of
from kinetic.aio._following import Following
from kinetic.aio._inputs import check_there
from kinetic.aio._owner import Owner
from kinetic.aio._release import all_or_none, in_thread, release
from kinetic.aio._session import Session
from kinetic.aio._submission import BatchIdentity, Identity, Submission
from kinetic.aio._terms import Terms
from kinetic.errors import Conflict, NotFound, SubmitterLost, WireError

__all__ = ["attach", "identity_of", "known_batch", "list_batches", "start", "start_job"]

LISTING = 32
"""Manifests that are read at once."""


async def start(
    session: Session,
    call: _submit.Call,
    inputs: Iterable[Any] | AsyncIterable[Any],
    terms: Terms,
) -> Batch:
    """Pack once, write the manifest, take the lease, and start submitting.

    Cancelled: what was made of the batch is removed; shared content stays in the store.
    """
    feed = feed_of(inputs, terms)
    terms.check_length(feed.length)
    if feed.there is not None and call.function is not None:
        await in_thread(check_there, call.function, feed.there, feed.mode)
    packed = await _submit.pack(replace(call, inputs=feed.there or ()))
    try:
        placed = await _submit.place(session, packed)
    finally:
        shutil.rmtree(packed.spool, ignore_errors=True)
    identity = await _new_identity(session, "grp", wire.Budgets(user=terms.retries))
    manifest = _manifest.batch_manifest(session, identity, placed, terms, feed.length)
    removal = functools.partial(_removal.remove_batch, session, identity, jobs=False, alone=True)
    async with _begun(session, placed, identity, removal) as submission:
        hold = await _found(session, identity, placed, manifest)
        batch = session.batches[identity.id] = Batch(session, submission, manifest)
        batch.hold(hold, placed, feed, terms)
    return batch


async def start_job(
    session: Session, packed: _submit.Packed, placed: _submit.Placed
) -> tuple[dict[str, Any], Following]:
    """Start a job of its own, when the client's limit lets it; its handle's fields, and itself.

    Cancelled: the job is removed; shared content stays in the store.
    """
    await session.limit.acquire()
    try:
        budgets = wire.Budgets(infrastructure=3 if session.platform.restarts else 0)
        identity = await _new_identity(session, "job", budgets)
        name = identity.attempt_name(0, 1)
        undo = functools.partial(_launch.undo, session, identity.scope, name)
        async with _begun(session, placed, identity, undo) as submission:
            output_dir = _launch.output_base(session, placed, identity.id)
            record = _manifest.record_of(session, identity, placed, 0)
            await _launch_only(session, identity, packed, placed, record, output_dir)
    except BaseException:
        session.limit.release()
        raise
    if session.limit.bounded:
        waiting = session.spawn(submission.closed(0), name=f"slot of {identity.id}")
        waiting.add_done_callback(functools.partial(_on_closed, session))
    at = Following(session=session, submission=submission, index=0, output_dir=output_dir)
    return record, at


async def _launch_only(
    session: Session,
    identity: Identity,
    packed: _submit.Packed,
    placed: _submit.Placed,
    record: dict[str, Any],
    output_dir: str,
) -> None:
    """Store what a job of its own needs, and launch its first attempt: nobody holds a lease."""
    store, content = session.platform.store, packed.arguments
    assert content is not None
    manifest = _manifest.manifest_of(record, identity, placed, output_dir)
    manifest = seals.signed_json(identity.key, identity.scope, identity.entry, manifest)
    if not await store.create(identity.entry, manifest):
        raise Conflict(f"{identity.id} exists already in {store.url}; submit again")
    name = wire.input_key(identity.scope, 0)
    await store.create(name, content.content)
    arguments = wire.Input(name=name, start=0, stop=content.size, digest=content.digest)
    orders = _launch.Orders(session, identity, placed)
    await orders.launch(_launch.Launch(0, 1, arguments, output_dir))


def _on_closed(session: Session, waiting: asyncio.Task[wire.Item]) -> None:
    if not waiting.cancelled():
        waiting.exception()  # whoever holds the handle will hear of it
    session.limit.release()


@contextlib.asynccontextmanager
async def _begun(
    session: Session,
    placed: _submit.Placed,
    identity: Identity,
    undo: Callable[[], Coroutine[Any, Any, None]],
) -> AsyncGenerator[Submission]:
    """The submission that the block makes; what was made of it is undone when that fails."""
    submission = Submission(identity, session.platform.store, session.platform.cluster)
    submission.closes = True
    session.follow(submission, ours=True)
    try:
        yield submission
    except (Conflict, SubmitterLost):  # somebody else has it: it stays as it is
        session.forget(submission)
        raise
    except BaseException:
        session.forget(submission)
        await release(undo(), what=f"removing the half-made {identity.id}")
        raise
    _submit.log_choice(session, placed)
    logging.info("Started %s: %s", identity.id, placed.call.name)


async def _found(
    session: Session, identity: Identity, placed: _submit.Placed, manifest: Mapping[str, Any]
) -> _lease.Hold:
    """Everything that makes a batch, in the order in which a crash leaves no riddle."""
    store, scope = session.platform.store, identity.scope
    environment = json.dumps(dict(placed.environment)).encode()
    await session.platform.cluster.keep_secret(identity.id, environment)
    entry = {
        "name": manifest["name"] or "",
        "tags": json.dumps(manifest["tags"]),
        "created": f"{identity.created:017.6f}",  # sorts as text, also within a second
    }
    await store.create(wire.group_key(identity.id), b"", entry)
    name, body = identity.entry, json.dumps(manifest, sort_keys=True).encode()
    await store.create(name, seals.signed_json(identity.key, scope, name, body))
    return await _lease.begin(store, scope, session.platform.clock)


async def _new_identity(session: Session, kind: str, budgets: wire.Budgets) -> Identity:
    """One that nobody else has, for a ``job`` or a batch (``grp``)."""
    return await _identity(
        session, _launch.new_id(kind, session.platform.marker), budgets, time.time(), Owner.me()
    )


def known_batch(session: Session, group_id: str) -> Batch | None:
    """The batch of this id, while somebody here holds a handle of it, waits, or submits it."""
    known = session.batches.get(group_id)
    return known if isinstance(known, Batch) else None


async def identity_of(
    session: Session, submission: str, manifest: Mapping[str, Any] | None = None
) -> Identity:
    """That of a job or a batch by its id; without its manifest it can only be removed."""
    said = manifest or {}
    budgets, submitter = wire.Budgets(**said.get("budgets", {})), Owner.named(said.get("submitter"))
    return await _identity(session, submission, budgets, float(said.get("created", 0.0)), submitter)


async def _identity(
    session: Session,
    submission: str,
    budgets: wire.Budgets,
    created: float,
    submitter: Owner | None,
) -> Identity:
    kind = BatchIdentity if submission.startswith("grp-") else Identity
    key = await session.key(_ids.scope_of(submission))
    return kind(id=submission, key=key, budgets=budgets, created=created, submitter=submitter)


async def attach(session: Session, group_id: str) -> Batch:
    """Observe a batch that was submitted elsewhere.

    Raises:
        NotFound: There is no such batch.
        WireError: Nobody who may submit here has signed it, or its format is unknown.
    """
    manifest = await _manifest.read_manifest(session, group_id)
    if (known := known_batch(session, group_id)) is not None:
        await (known.refresh() if known.holding else known.look())
        await known.look_again()
        return known
    identity = await identity_of(session, group_id, manifest)
    if (known := known_batch(session, group_id)) is not None:
        return known  # somebody else attached meanwhile
    store, cluster = session.platform.store, session.platform.cluster
    submission = session.follow(Submission(identity, store, cluster), ours=False)
    batch = session.batches[group_id] = Batch(session, submission, manifest)
    try:
        await batch.look()
    except BaseException:
        session.batches.pop(group_id, None)  # whoever tries again begins anew
        raise
    if not (submission.closes or batch.finished):
        batch.observe()
    return batch


async def list_batches(
    session: Session,
    name: str | None,
    tags: Mapping[str, str] | None,
    count: int | None,
) -> list[Batch]:
    """The newest *count* batches that carry *name* and *tags*; followed when they are asked.

    Entries whose manifest is missing are left out; of those that cannot be
    read or verified, a warning has the names.
    """
    refused: dict[str, WireError] = {}
    found: list[tuple[str, str]] = []
    for one in await session.platform.store.list(wire.group_key("")):
        group_id = one.name.rpartition("/")[2]
        try:
            carried = (tags or {}).items() <= json.loads(one.metadata["tags"]).items()
        except MALFORMED:
            refused[group_id] = WireError(f"its entry {one.name} is damaged")
            continue
        if carried and (name is None or one.metadata.get("name") == name):
            found.append((one.metadata.get("created", ""), group_id))
    found.sort(reverse=True)
    listed: list[Batch] = []
    for at in range(0, len(found), LISTING):
        ids = [group_id for _, group_id in found[at : at + LISTING]]
        opened = await all_or_none(*(_listed(session, group_id, refused) for group_id in ids))
        listed += [batch for batch in opened if batch is not None]
        if count is not None and len(listed) >= count:
            break
    if refused:
        names, first = ", ".join(refused), next(iter(refused.values()))
        logging.warning("%d batches were left out, %s: %s", len(refused), names, first)
    return listed[:count]


async def _listed(
    session: Session,
    group_id: str,
    refused: dict[str, WireError],
) -> Batch | None:
    if (known := known_batch(session, group_id)) is not None:
        return known
    try:
        manifest = await _manifest.read_manifest(session, group_id)
    except NotFound:
        return None
    except WireError as exc:
        refused[group_id] = exc
        return None
    identity = await identity_of(session, group_id, manifest)
    if (known := known_batch(session, group_id)) is not None:
        return known
    submission = Submission(identity, session.platform.store, session.platform.cluster)
    batch = Batch(session, submission, manifest, followed=False)
    try:
        await batch.stock.read()  # how much is stored, which whoever resumes it has to know
    except WireError as exc:
        refused[group_id] = exc
        return None
    if (known := known_batch(session, group_id)) is not None:
        return known  # somebody else has listed or attached it meanwhile
    session.batches[group_id] = batch
    return batch
