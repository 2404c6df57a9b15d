"""Remove a submission: its jobs from the platform, then its objects from the store.

Of a collected batch, remove only the objects of its items.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Collection, Mapping

from kinetic._runner.protocol import wire
from kinetic._tasks import in_thread
from kinetic.aio._engine.session import Session
from kinetic.aio._net.retry import growing_pauses
from kinetic.aio._submissions.ids import Identity
from kinetic.aio._submissions.submission import Submission
from kinetic.errors import BackendError, NotFound, StoreFull, Unavailable

REMOVAL_TIMEOUT_S = 180.0
"""How long to wait for jobs to end, or for the holder of a batch's lease to stop, in seconds."""

CHECK_PAUSES_S = 0.01, 1.0
"""First and longest pause between two checks whether deleted jobs still exist, in seconds."""

UNDO_TIMEOUT_S = 25.0
"""How long to wait for the end of a job whose submission failed, in seconds."""


async def remove(
    session: Session,
    identity: Identity,
    *,
    names: Collection[str] = (),
    jobs: bool = True,
    objects: bool = True,
    timeout: float = REMOVAL_TIMEOUT_S,
    ended: bool = False,
    fresh: bool = False,
) -> None:
    """Stop a submission, delete its jobs until there are none, and then delete its objects.

    A process that starts late finds the stop request or no inputs, and so can't run the function.
    If the store is too full for the stop request, deleting the jobs is enough to end the processes.

    *names* are the jobs to delete; if *names* is empty, delete all jobs with the submission's
    label. *ended* says that all processes of the submission have ended. *fresh* says that this
    process has just made the submission, and that no other process submits it.

    Cancelled: call `remove` again to remove the rest.
    """
    store = session.platform.store
    if objects and not ended:
        try:
            await _append_stop(session, identity)
        except StoreFull:
            if not jobs:
                raise
    if jobs:
        await _delete_jobs(session, identity, names, timeout, ended=ended)
    if not objects:
        return
    # Without a manifest, no process holds the lease: a submitter creates the manifest before the
    # lease, and a removal deletes the manifest only after `_until_released`.
    if identity.leased and not fresh and await store.look(identity.manifest_name) is not None:
        await _until_released(session, identity)
        if jobs:  # the holder may have started jobs during the wait
            await _delete_jobs(session, identity, names, timeout)
    await _delete_objects(session, identity)
    if not ended:  # a late process may have written objects
        await store.delete([info.name for info in await store.list(identity.scope)])
    if identity.leased:
        await session.platform.cluster.drop_secret([identity.id])
        await store.delete([wire.group_key(identity.id)])


async def undo(session: Session, identity: Identity) -> None:
    """Remove the objects and jobs of a submission that failed before its handle was returned."""
    if identity.leased:  # a batch launches its first job later
        await remove(session, identity, jobs=False, fresh=True)
        return
    try:
        await remove(session, identity, names=[identity.attempt_name(0, 1)], timeout=UNDO_TIMEOUT_S)
    except BackendError:  # without inputs, a process that still starts ends by itself
        await remove(session, identity, jobs=False, ended=True)
        raise


async def remove_items(submission: Submission) -> None:
    """Remove the objects of a batch's items, which all have values; the manifest stays."""
    from kinetic._collector import items_of  # few jobs need it

    store, identity = submission.store, submission.identity
    await submission.cluster.drop_secret([identity.id])
    # Without inputs, a process of the batch that starts late ends.
    inputs = await store.list(f"{identity.scope}inputs/")
    await store.delete([info.name for info in inputs])
    await store.delete(await submission.names_of_values())  # a listing would read these objects
    remaining = await in_thread(items_of, await store.list(identity.scope))
    await store.delete([info.name for info in remaining])


async def until_gone(
    session: Session,
    names: Collection[str],
    timeout: float,
    *,
    labels: Mapping[str, str] | None = None,
    keep_logs: bool = False,
) -> None:
    """Wait until the platform no longer has the jobs that were deleted."""
    deadline, pauses = time.monotonic() + timeout, growing_pauses(*CHECK_PAUSES_S, 1.5)
    while found := await session.platform.cluster.find(names=names, labels=labels):
        if time.monotonic() > deadline:
            raise BackendError(
                f"{found[0].name} was deleted, but the platform still has it after {timeout:g} s"
            )
        await asyncio.sleep(pause := next(pauses))
        if pause == CHECK_PAUSES_S[1]:  # another process may have launched more jobs
            await session.platform.cluster.delete(names=names, labels=labels, keep_logs=keep_logs)


async def _append_stop(session: Session, identity: Identity) -> None:
    """Store a final stop request in the first free slot; no later request has an effect."""
    stop = wire.Request(kind="stop", cause=wire.CLEANUP)
    for slot in itertools.count():
        name = wire.control_key(identity.scope, slot)
        signed = stop.signed(identity.key, identity.scope, name)
        if await session.platform.store.create(name, *signed):
            return


async def _delete_jobs(
    session: Session,
    identity: Identity,
    names: Collection[str],
    timeout: float,
    *,
    ended: bool = False,
) -> None:
    labels = None if names else identity.labels
    await session.platform.cluster.delete(names=names, labels=labels)
    if not ended:
        await until_gone(session, names, timeout, labels=labels)


async def _delete_objects(session: Session, identity: Identity) -> None:
    """Delete the inputs first, and the stop and retry requests last, after the manifest.

    A process that takes the lease during the removal finds the stop request or no manifest. In both
    cases, the process starts nothing.
    """
    store, scope = session.platform.store, identity.scope
    last = (identity.manifest_name, f"{scope}control/", f"{scope}collected")
    listed = [info.name for info in await store.list(scope)]
    inputs = [name for name in listed if name.startswith(f"{scope}inputs/")]
    await store.delete(inputs)
    await store.delete([name for name in listed if not name.startswith((f"{scope}inputs/", *last))])
    await store.delete([identity.manifest_name])
    await store.delete([name for name in listed if name.startswith(last[1:])])


async def _until_released(session: Session, identity: Identity) -> None:
    """Wait until no process submits the batch; then take the lease unless it was released."""
    from kinetic.aio import _lease  # a single job has no lease

    store, clock, scope = session.platform.store, session.platform.clock, identity.scope
    try:
        async with asyncio.timeout(REMOVAL_TIMEOUT_S):
            lease = await _lease.until_abandoned(store, scope, identity.submitter)
            if lease is not None and lease.held:
                # The holder's machine may be suspended. After the removal of the stop request, only
                # the loss of the lease keeps the holder from submitting again.
                with contextlib.suppress(NotFound):
                    await _lease.acquire(store, scope, identity.submitter, clock, force=True)
    except TimeoutError:
        found = await _lease.read(store, scope)
        owner = found[0].owner if found else identity.submitter
        holder = f"process {owner.pid} on {owner.host}" if owner else "its submitter"
        raise Unavailable(
            f"{identity.id} was stopped, but {holder} hasn't released it for "
            f"{REMOVAL_TIMEOUT_S:g} s, so its objects were not deleted; clean up again when that "
            "process has ended",
            retryable=True,
        ) from None
