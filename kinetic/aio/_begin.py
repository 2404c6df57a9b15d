"""How a batch comes to this process: made here, found by its id, or listed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from absl import logging

from kinetic._runner import seals, wire
from kinetic._runner.frames import MALFORMED
from kinetic.aio import _launch, _lease, _manifest, _removal, _submit
from kinetic.aio._batch import Batch, feed_of
from kinetic.aio._inputs import check_there
from kinetic.aio._owner import Owner
from kinetic.aio._release import all_or_none, in_thread, release
from kinetic.aio._session import Session
from kinetic.aio._submission import Identity, Submission
from kinetic.aio._terms import Terms
from kinetic.errors import NotFound, SubmitterLost, WireError

__all__ = ["attach", "list_batches", "start"]

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
    identity = await _identity(
        session,
        _launch.new_id("grp", session.platform.marker),
        wire.Budgets(user=terms.retries),
        time.time(),
        Owner.me(),
    )
    submission = Submission(identity, session.platform.store, session.platform.cluster)
    submission.closes = True
    manifest = _manifest.batch_manifest(session, identity, placed, terms, feed.length)
    session.follow(submission, ours=True)
    try:
        hold = await _found(session, identity, placed, manifest)
        batch = Batch(session, submission, manifest)
        batch.hold(hold, placed, feed, terms)
    except SubmitterLost:  # this process has slept in between, and somebody goes on with it
        session.forget(submission)
        raise
    except BaseException:
        session.forget(submission)
        removal = _removal.remove_batch(session, identity, jobs=False, alone=True)
        await release(removal, what=f"removing the half-made batch {identity.id}")
        raise
    session.batches[identity.id] = batch
    _submit.log_choice(session, placed)
    logging.info("Started batch %s: %s", identity.id, call.name)
    return batch


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
    name, body = f"{scope}manifest", json.dumps(manifest, sort_keys=True).encode()
    await store.create(name, seals.signed_json(identity.key, scope, name, body))
    return await _lease.begin(store, scope, session.platform.clock)


async def _identity(
    session: Session, group_id: str, budgets: wire.Budgets, created: float, submitter: Owner | None
) -> Identity:
    scope = f"batches/{group_id}/"
    return Identity(
        id=group_id,
        scope=scope,
        single=False,
        key=await session.key(scope),
        budgets=budgets,
        created=created,
        submitter=submitter,
    )


async def _identity_of(session: Session, manifest: Mapping[str, Any]) -> Identity:
    return await _identity(
        session,
        manifest["group_id"],
        wire.Budgets(**manifest["budgets"]),
        float(manifest["created"]),
        Owner.named(manifest.get("submitter")),
    )


async def attach(session: Session, group_id: str) -> Batch:
    """Observe a batch that was submitted elsewhere.

    Raises:
        NotFound: There is no such batch.
        WireError: Nobody who may submit here has signed it, or its format is unknown.
    """
    name = f"batches/{group_id}/manifest"
    manifest = await _manifest.read_manifest(session, name, group_id)
    if (known := session.batches.get(group_id)) is not None:
        await (known.refresh() if known.holding else known.look())
        await known.look_again()
        return known
    identity = await _identity_of(session, manifest)
    if (known := session.batches.get(group_id)) is not None:
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
    if (known := session.batches.get(group_id)) is not None:
        return known
    try:
        name = f"batches/{group_id}/manifest"
        manifest = await _manifest.read_manifest(session, name, group_id)
    except NotFound:
        return None
    except WireError as exc:
        refused[group_id] = exc
        return None
    identity = await _identity_of(session, manifest)
    if (known := session.batches.get(group_id)) is not None:
        return known
    submission = Submission(identity, session.platform.store, session.platform.cluster)
    batch = Batch(session, submission, manifest, followed=False)
    try:
        await batch.stock.read()  # how much is stored, which whoever resumes it has to know
    except WireError as exc:
        refused[group_id] = exc
        return None
    return session.batches.setdefault(group_id, batch)
