"""Begin a submission: name it and store what it needs; on a failure, remove what was stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from absl import logging

from kinetic._runner.protocol import signing, wire
from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE, RetryBudgets
from kinetic._tasks import all_or_none, release
from kinetic.aio._engine import ending, job_spec
from kinetic.aio._engine.session import JobRef, Session
from kinetic.aio._net.retry import Outage, RetryPolicy, retry, retry_forever
from kinetic.aio._preparing import calls
from kinetic.aio._process_identity import ProcessIdentity
from kinetic.aio._submissions.ids import BatchIdentity, Identity, scope_of
from kinetic.aio._submissions.manifest import manifest_of, record_of
from kinetic.aio._submissions.submission import Submission
from kinetic.errors import Conflict, KineticError, SubmitterLost

RELAUNCH_POLICY = RetryPolicy(total_s=50.0)
"""Retry a relaunch for 50 s: after 60 s, other processes end the job."""


async def start_job(
    session: Session, packed: calls.PackedCall, uploaded: calls.UploadedCall
) -> tuple[dict[str, Any], JobRef]:
    """Start a single job, as soon as the client's limit of attempts allows it.

    Returns the fields of the job's handle, and a reference to the job.

    Cancelled: kinetic removes the job; shared content stays in the store.
    """
    options, on_cluster = uploaded.call.options, not session.platform.cluster.shows_items
    uploaded_at = session.platform.clock()
    await session.limit.acquire()
    try:
        budgets = RetryBudgets(infrastructure=3 if on_cluster else 0)
        identity = await new_identity(session, uploaded, "job", budgets)
        record = record_of(session, identity, uploaded)
        async with new_submission(session, uploaded, identity) as submission:
            content = packed.pickled_arguments
            assert content is not None
            name = wire.input_key(identity.scope, 0)
            await all_or_none(
                store_manifest(session, identity, manifest_of(record, identity, uploaded)),
                session.platform.store.create(name, content.content),
            )
            waited = session.platform.clock() - uploaded_at
            await calls.hold_shared(session, uploaded, waited=waited)
            arguments = wire.Input(name=name, start=0, stop=content.size, digest=content.digest)
            builder = job_spec.JobSpecBuilder(session, identity, uploaded)
            # A supervisor forks the process of a job faster from its warm parent than by a worker.
            by_worker = on_cluster or options.isolation != "process" or uploaded.init is not None

            async def launch(number: int) -> None:
                await builder.launch(number, arguments, by_worker=by_worker)
                submission.last_launched = number

            await launch(1)
    except BaseException:
        session.limit.release()
        raise
    if submission.relaunches or session.limit.is_bounded:
        work = _until_ended(session, submission, launch)
        session.spawn(work, name=f"end of {identity.id}")
    return record, JobRef(session=session, submission=submission, index=0)


async def _until_ended(
    session: Session, submission: Submission, launch: Callable[[int], Awaitable[None]]
) -> None:
    """Wait until a single job has ended, and then free its place in the client's limit of attempts.

    If the platform replaces no disrupted attempt, launch each attempt after the first. If this
    process ends or is too slow, another process that waits for the job ends it by a stop request
    (see `ending`).
    """
    changed = asyncio.Event()
    stop_listening = submission.listen(lambda index, item: changed.set())
    try:
        with session.awaiting(submission):
            while not (submission.is_final(0) or submission.abandoned or submission.final_error(0)):
                changed.clear()
                # The outcome of a disrupted attempt opens the next one, which nobody has launched.
                if (
                    submission.relaunches
                    and (item := submission.item(0))
                    and item.state is wire.ItemState.OPEN
                    and item.attempt > submission.last_launched
                ):
                    await _launch_again(session, submission, launch, item.attempt)
                await changed.wait()
    except KineticError as exc:
        submission.set_error(0, exc)  # so that `result()` raises it
    finally:
        stop_listening()
        session.limit.release()


async def _launch_again(
    session: Session, submission: Submission, launch: Callable[[int], Awaitable[None]], number: int
) -> None:
    """Launch attempt *number*, or else end the job with the outcome of the previous attempt."""
    cluster, identity = session.platform.cluster, submission.identity
    name, previous = identity.attempt_name(0, number), identity.attempt_name(0, number - 1)

    async def replace() -> None:
        await cluster.delete(names=[previous])  # the other hosts of a disrupted set are left
        await launch(number)

    async def is_needed() -> bool:
        item = await submission.read_item(0)
        if item.attempt < number or item.stopped:
            return False
        return await session.platform.store.look(identity.manifest_name) is not None

    why = ""
    try:
        # The first host writes the outcome. If another host failed, only the platform knows why.
        end = await retry(
            lambda: ending.host_end(submission, 0, number - 1),
            RELAUNCH_POLICY,
            Outage(f"asking how {previous} ended"),
        )
        if end is not None and end.reason not in (None, *INFRASTRUCTURE):
            why = end.message
        else:
            logging.info("%s was disrupted; launching it again as %s", previous, name)
            await retry(replace, RELAUNCH_POLICY, Outage(f"launching {name}"))
            if await retry_forever(is_needed, f"checking whether {name} is needed"):
                return
    except KineticError as exc:
        logging.warning("can't launch %s: %s", name, exc)
        why = str(exc)
    # The attempt isn't needed, or could not be launched: remove what a launch may have left.
    await release(cluster.delete(names=[name]), operation=f"removing {name}")
    if why:
        await retry_forever(
            lambda: ending.give_up(submission, 0, f"not launched again: {why}"),
            f"ending {identity.id}",
        )


@contextlib.asynccontextmanager
async def new_submission(
    session: Session, uploaded: calls.UploadedCall, identity: Identity
) -> AsyncGenerator[Submission]:
    """Follow a new submission while the block creates it; if the block fails, remove it."""
    submission = Submission(identity, session.platform)
    submission.closes = True
    session.follow(submission, is_own=True)
    try:
        yield submission
    except (Conflict, SubmitterLost):  # another process owns the batch; its objects must stay
        session.forget(submission)
        raise
    except BaseException:
        # Import this only on a failure, because most submissions succeed.
        from kinetic.aio._engine import removal

        session.forget(submission)
        undoing = removal.undo(session, identity)
        await release(undoing, operation=f"removing the half-made {identity.id}")
        raise
    calls.log_choice(session, uploaded)
    logging.info("Started %s: %s", identity.id, uploaded.call.name)


async def store_manifest(session: Session, identity: Identity, fields: Mapping[str, Any]) -> None:
    """Sign the manifest of a new submission, and store it."""
    store, name = session.platform.store, identity.manifest_name
    body = json.dumps(fields, sort_keys=True).encode()
    if not await store.create(name, signing.signed_json(identity.key, identity.scope, name, body)):
        raise Conflict(f"{identity.id} exists already in {store.url}; submit again")


async def new_identity(
    session: Session, uploaded: calls.UploadedCall, kind: str, budgets: RetryBudgets
) -> Identity:
    """Make the identity of a new submission; *kind* is ``job``, or ``grp`` for a batch."""
    submission_id = f"{kind}-{session.platform.id_marker}{os.urandom(6).hex()}"
    return _identity_class(submission_id)(
        id=submission_id,
        key=await session.key(scope_of(submission_id)),
        budgets=budgets,
        created=time.time(),
        submitter=ProcessIdentity.current(),
        output_base=job_spec.output_base(session, uploaded, submission_id),
    )


async def identity_of(
    session: Session, submission_id: str, manifest: Mapping[str, Any] | None = None
) -> Identity:
    """Return the identity of a job or batch; without *manifest*, use it only for a removal."""
    fields = manifest or {}
    return _identity_class(submission_id)(
        id=submission_id,
        key=await session.key(scope_of(submission_id)),
        budgets=RetryBudgets(**fields.get("budgets", {})),
        created=float(fields.get("created", 0.0)),
        submitter=ProcessIdentity.from_fields(fields.get("submitter")),
        output_base=fields.get("output_dir", ""),
    )


def _identity_class(submission_id: str) -> type[Identity]:
    return BatchIdentity if submission_id.startswith("grp-") else Identity
