"""The batches of a store: start one, attach to one, list them, and remove them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from absl import logging

from kinetic._progress.standing import Goal
from kinetic._progress.steps import step
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.frames import MALFORMED
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._tasks import all_or_none, in_thread, release
from kinetic.aio import _lease
from kinetic.aio._engine import beginning, removal
from kinetic.aio._engine.batch import Batch
from kinetic.aio._engine.recovery import read_inputs
from kinetic.aio._engine.session import Session
from kinetic.aio._engine.workers import end_leftovers
from kinetic.aio._preparing import calls
from kinetic.aio._preparing.input_source import Source
from kinetic.aio._preparing.inputs import check_inputs
from kinetic.aio._submissions.ids import Identity
from kinetic.aio._submissions.manifest import batch_manifest, read_manifest
from kinetic.aio._submissions.submission import Submission
from kinetic.errors import AuthError, ConfigurationError, KineticError, NotFound, WireError
from kinetic.options import MapSettings
from kinetic.prices import budget_price, price_of

MANIFESTS_AT_ONCE = 32
"""Maximum number of manifests read at once."""

UNBOUNDED_WARNING_ABOVE = 100
"""Above this number of inputs, kinetic logs a warning about a batch without ``max_concurrent``."""


async def start(
    session: Session,
    call: calls.Call,
    inputs: Iterable[Any] | AsyncIterable[Any],
    settings: MapSettings,
    goal: Goal | None = None,
) -> Batch:
    """Pack the call once, write the manifest, take the lease, and start to submit the batch.

    *goal* is what the batch of a sweep searches for.

    Cancelled: kinetic removes the batch's objects; shared content stays in the store.
    """
    source = Source(inputs, settings.input_mode)
    if source.length == 0:
        raise ConfigurationError("inputs is empty: there is nothing to run")
    if settings.max_concurrent is None and (source.length or 0) > UNBOUNDED_WARNING_ABOVE:
        logging.warning("max_concurrent=None starts all %d jobs at once", source.length)
    if source.known_inputs is not None and call.function is not None:
        known, init = source.known_inputs, call.options.init
        await in_thread(check_inputs, call.function, known, source.mode, init)
    find_price = price_of if settings.budget is None else budget_price
    target, accelerator = session.target, call.options.parsed_accelerator
    price = find_price(accelerator, target.zone, listed=target.backend != "local")
    packed = await calls.pack(session, replace(call, inputs=source.known_inputs or ()))
    try:
        uploaded = await calls.upload_call(session, packed)
    finally:
        packed.spool.remove()
    identity = await beginning.new_identity(
        session, uploaded, "grp", RetryBudgets(user=settings.retries)
    )
    manifest = batch_manifest(session, identity, uploaded, settings, source.length, price, goal)
    async with beginning.new_submission(session, uploaded, identity) as submission:
        lease = await _create(session, identity, uploaded, manifest)
        batch = session.batches[identity.id] = Batch(session, submission, manifest)
        batch.coordinate(lease, uploaded, source, settings)
    try:
        with step(f"storing the inputs of {call.name}"):
            await batch.until_inputs_fixed()
        coordinator, runs_alone = batch.coordinator, batch.submission.runs_alone
        if coordinator is not None and coordinator.pump.has_known_length and runs_alone:
            # Once the platform has the workers, the batch runs even if this process dies.
            await coordinator.launcher.asked.wait()
    except BaseException:
        removing = batch.remove(jobs=True, objects=True)
        await release(removing, operation=f"removing the half-made {identity.id}")
        raise
    return batch


async def _create(
    session: Session, identity: Identity, uploaded: calls.UploadedCall, manifest: Mapping[str, Any]
) -> _lease.HeldLease:
    """Store the objects of a new batch, and take its lease.

    If the process dies between two writes, `remove` with the batch's ID removes the objects.
    """
    store, scope = session.platform.store, identity.scope
    environment = json.dumps(dict(uploaded.environment)).encode()
    await session.platform.cluster.keep_secret(identity.id, environment)
    entry = {
        "name": manifest["name"] or "",
        "tags": json.dumps(manifest["tags"]),
        "created": f"{identity.created:017.6f}",  # zero-padded, so that the texts sort by time
    }
    await store.create(wire.group_key(identity.id), b"", entry)
    await beginning.store_manifest(session, identity, manifest)
    await calls.hold_shared(session, uploaded)
    return await _lease.begin(store, scope, session.platform.clock)


def known_batch(session: Session, group_id: str) -> Batch | None:
    """Return the batch of this ID if this client uses it already, otherwise None."""
    known = session.batches.get(group_id)
    return known if isinstance(known, Batch) else None


async def remove(session: Session, submission_id: str) -> None:
    """Remove the jobs and objects of a job or batch, and stop following it."""
    if (known := known_batch(session, submission_id)) is not None:
        await known.remove(jobs=True, objects=True)
        return
    await removal.remove(session, await beginning.identity_of(session, submission_id))
    if (followed := session.find_followed(submission_id)) is not None:
        session.forget(followed)


async def attach(session: Session, group_id: str) -> Batch:
    """Follow a batch and read its state; if it isn't finished, also watch its lease."""
    batch = await _open_batch(session, group_id)
    batch.follow(observed=False)
    if batch.submits:
        await batch.read_inputs()
        return batch
    # If a step below raises, the session keeps the batch; the next `attach` repeats the steps.
    await batch.read()
    await batch.observe_if_resumed()
    await end_leftovers(batch.submission)
    if not (batch.submission.closes or batch.submission.abandoned or batch.finished):
        batch.observe()
    return batch


async def list_batches(
    session: Session, name: str | None, tags: Mapping[str, str] | None, count: int | None
) -> list[Batch]:
    """Return the newest *count* batches (None: all) with this *name* and *tags*.

    The session doesn't follow a new batch until a method of the batch's handle needs that. The list
    lacks batches without a manifest. A warning names batches that can't be read or verified.
    """
    errors: dict[str, KineticError] = {}
    found: list[tuple[str, str]] = []
    for info in await session.platform.store.list(wire.group_key("")):
        group_id = info.name.rpartition("/")[2]
        try:
            has_tags = (tags or {}).items() <= json.loads(info.metadata["tags"]).items()
        except MALFORMED:
            errors[group_id] = WireError(f"{info.name} is damaged")
            continue
        if has_tags and (name is None or info.metadata.get("name") == name):
            found.append((info.metadata.get("created", ""), group_id))
    found.sort(reverse=True)
    listed: list[Batch] = []
    for start_index in range(0, len(found), MANIFESTS_AT_ONCE):
        ids = [group_id for _, group_id in found[start_index : start_index + MANIFESTS_AT_ONCE]]
        opened = await all_or_none(*(_read_batch(session, group_id, errors) for group_id in ids))
        listed += [batch for batch in opened if batch is not None]
        if count is not None and len(listed) >= count:
            break
    if errors:
        names, first = ", ".join(errors), next(iter(errors.values()))
        logging.warning("can't list %d batches (%s): %s", len(errors), names, first)
    return listed[:count]


async def _read_batch(
    session: Session, group_id: str, errors: dict[str, KineticError]
) -> Batch | None:
    """Return a batch; None if it has no manifest, or if reading it fails: then add to *errors*."""
    try:
        batch = await open_unread(session, group_id)
        if not batch.followed:  # `resume` needs to know how many inputs are stored
            await read_inputs(batch.submission, batch.inputs)
    except NotFound:
        return None
    except (WireError, AuthError, ConfigurationError) as exc:
        errors[group_id] = exc
        return None
    return batch


async def open_unread(session: Session, group_id: str) -> Batch:
    """Return a batch; read at most its manifest, and don't make the session follow it.

    Raises:
        NotFound: There is no such batch.
        WireError: The manifest's signature is wrong, or its format is unknown.
    """
    return known_batch(session, group_id) or await _open_batch(session, group_id)


async def _open_batch(session: Session, group_id: str) -> Batch:
    manifest = await read_manifest(session, group_id)
    identity = await beginning.identity_of(session, group_id, manifest)
    if (known := known_batch(session, group_id)) is not None:
        return known
    submission = Submission(identity, session.platform)
    batch = session.batches[group_id] = Batch(session, submission, manifest, followed=False)
    return batch
