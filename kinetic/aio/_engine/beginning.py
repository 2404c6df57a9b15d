"""Begin a submission: name it, store what it needs, and remove all of it if that fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from absl import logging

from kinetic._runner.protocol import signing, wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._tasks import release
from kinetic.aio._engine import job_spec, prepare
from kinetic.aio._engine.ids import BatchIdentity, Identity, scope_of
from kinetic.aio._engine.manifest import manifest_of, record_of
from kinetic.aio._engine.relaunch import relaunch
from kinetic.aio._engine.session import JobRef, Session, Submission
from kinetic.aio._process_identity import ProcessIdentity
from kinetic.errors import Conflict, SubmitterLost


async def start_job(
    session: Session, packed: prepare.PackedCall, placed: prepare.UploadedCall
) -> tuple[dict[str, Any], JobRef]:
    """Start a single job, within the client's limit.

    Returns the fields of its handle, and where it is followed.

    Cancelled: the job is removed; shared content stays in the store.
    """
    await session.limit.acquire()
    try:
        replaced = session.platform.restarts or session.platform.relaunches
        budgets = RetryBudgets(infrastructure=3 if replaced else 0)
        identity = await new_identity(session, placed, "job", budgets)
        name = identity.attempt_name(0, 1)
        undo = functools.partial(job_spec.undo, session, identity.scope, name)
        async with begun(session, placed, identity, undo) as submission:
            submission.relaunched = submission.relaunching = session.platform.relaunches
            record = record_of(session, identity, placed, 0)
            specs, arguments = await _launch_only(session, identity, packed, placed, record)
            if session.platform.relaunches:
                relaunching = relaunch(session, submission, specs, arguments)
                session.spawn(relaunching, name=f"relaunch {identity.id}")
    except BaseException:
        session.limit.release()
        raise
    if session.limit.bounded:
        waiting = session.spawn(session.closed(submission, 0), name=f"slot of {identity.id}")
        waiting.add_done_callback(functools.partial(_on_closed, session))
    return record, JobRef(session=session, submission=submission, index=0)


async def _launch_only(
    session: Session,
    identity: Identity,
    packed: prepare.PackedCall,
    placed: prepare.UploadedCall,
    record: dict[str, Any],
) -> tuple[job_spec.JobSpecBuilder, wire.Input]:
    """Store what a single job needs, launch its first attempt, and return what others need."""
    store, content = session.platform.store, packed.arguments
    assert content is not None
    manifest = manifest_of(record, identity, placed)
    manifest = signing.signed_json(identity.key, identity.scope, identity.entry, manifest)
    if not await store.create(identity.entry, manifest):
        raise Conflict(f"{identity.id} exists already in {store.url}; submit again")
    name = wire.input_key(identity.scope, 0)
    await store.create(name, content.content)
    arguments = wire.Input(name=name, start=0, stop=content.size, digest=content.digest)
    specs = job_spec.JobSpecBuilder(session, identity, placed)
    await specs.launch(job_spec.AttemptSpec(0, 1, arguments))
    return specs, arguments


def _on_closed(session: Session, waiting: asyncio.Task[wire.Item]) -> None:
    if not waiting.cancelled():
        waiting.exception()  # mark it as read: `result()` raises it
    session.limit.release()


@contextlib.asynccontextmanager
async def begun(
    session: Session,
    placed: prepare.UploadedCall,
    identity: Identity,
    undo: Callable[[], Coroutine[Any, Any, None]],
) -> AsyncGenerator[Submission]:
    """Follow a new submission while the block creates it; if the block fails, remove all of it."""
    submission = Submission(identity, session.platform.store, session.platform.cluster)
    submission.closes = True
    session.follow(submission, ours=True)
    try:
        yield submission
    except (Conflict, SubmitterLost):  # another process owns it; its objects must stay
        session.forget(submission)
        raise
    except BaseException:
        session.forget(submission)
        await release(undo(), what=f"removing the half-made {identity.id}")
        raise
    prepare.log_choice(session, placed)
    logging.info("Started %s: %s", identity.id, placed.call.name)


async def new_identity(
    session: Session, placed: prepare.UploadedCall, kind: str, budgets: RetryBudgets
) -> Identity:
    """Make the identity of a new ``job`` or batch (``grp``)."""
    new = job_spec.new_id(kind, session.platform.marker)
    return _kind_of(new)(
        id=new,
        key=await session.key(scope_of(new)),
        budgets=budgets,
        created=time.time(),
        submitter=ProcessIdentity.me(),
        output_base=job_spec.output_base(session, placed, new),
    )


async def identity_of(
    session: Session, submission: str, manifest: Mapping[str, Any] | None = None
) -> Identity:
    """Return the identity of a job or batch; without *manifest*, it serves only to remove it."""
    said = manifest or {}
    return _kind_of(submission)(
        id=submission,
        key=await session.key(scope_of(submission)),
        budgets=RetryBudgets(**said.get("budgets", {})),
        created=float(said.get("created", 0.0)),
        submitter=ProcessIdentity.named(said.get("submitter")),
        output_base=said.get("output_dir", ""),
    )


def _kind_of(submission: str) -> type[Identity]:
    return BatchIdentity if submission.startswith("grp-") else Identity
