"""Jobs that nobody wants any more are taken off the platform.

An item that is stopped before it began is cancelled by the stop request itself; no job has to run
for that. Its job would wait for its turn, and have a machine made for it, only to find the stop;
and what it reads may be gone by then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable

from absl import logging

from kinetic._collector import OF_ITEMS, items_of
from kinetic._runner.protocol import wire
from kinetic._tasks import bounded
from kinetic.aio import _lease
from kinetic.aio._engine import job_spec
from kinetic.aio._engine.control_log import ControlLog
from kinetic.aio._engine.ids import Identity
from kinetic.aio._engine.session import Session
from kinetic.aio._engine.submission import (
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_ROUND,
    LABEL_SUBMISSION,
    Submission,
)
from kinetic.aio._net.retry import retry_forever
from kinetic.aio.ports import Cluster, Phase
from kinetic.errors import KineticError, NotFound, Unavailable

GONE_S = 180.0


async def delete_batch(
    session: Session,
    identity: Identity,
    *,
    jobs: bool = True,
    objects: bool = True,
    alone: bool = False,
) -> None:
    """Stop it, delete its jobs until there are none, then its objects, at last manifest and stop.

    A late pod finds the stop, or finds no inputs, at every moment in between.
    Before it deletes the objects, this waits until the batch has no submitter any
    more. There is none to wait for when the caller is *alone*, which means that it
    has just made the batch itself, or when an earlier removal has taken the manifest.

    Raises:
        BackendError: Its jobs do not end within 180 s, or somebody does not answer.

    Cancelled: run it again; it goes on where it was.
    """
    store, cluster, scope = session.platform.store, session.platform.cluster, identity.scope
    # Without a manifest there is nobody to wait for: it is created before the lease, and deleted
    # after all waiting.
    nobody = alone or not await store.list(identity.entry)
    if objects and (alone or not nobody):
        stop = wire.Request(kind="stop", cause=wire.CLEANUP)
        await ControlLog(store, scope, identity.key).append(stop)
    labels = {LABEL_SUBMISSION: identity.id}
    if jobs:
        await cluster.delete(labels=labels)
        await job_spec.until_gone(session, (), GONE_S, labels=labels)
    if not objects:
        return
    if not nobody:
        await _until_let_go(session, identity)
        if jobs:  # it may have started something in between
            await cluster.delete(labels=labels)
            await job_spec.until_gone(session, (), GONE_S, labels=labels)
    for part in (*OF_ITEMS, "arrays/", "lease"):
        await store.delete([one.name for one in await store.list(f"{scope}{part}")])
    await store.delete([identity.entry])
    # Whoever takes the lease meanwhile finds the stop, or no manifest.
    await store.delete([one.name for one in await store.list(f"{scope}control/")])
    await store.delete([wire.collected_key(scope)])
    await cluster.drop_secret([identity.id])
    await store.delete([wire.group_key(identity.id)])


async def delete_items(session: Session, identity: Identity) -> None:
    """Delete what the store and the platform keep for the items of a collected batch.

    Raises:
        BackendError: Somebody does not answer.

    Cancelled: run it again; it goes on where it was.
    """
    await session.platform.cluster.drop_secret([identity.id])
    store = session.platform.store
    for part in OF_ITEMS:
        found = items_of(await store.list(f"{identity.scope}{part}"))
        await store.delete([one.name for one in found])


async def _until_let_go(session: Session, identity: Identity) -> None:
    """Wait until no process submits it any more, nor ever will."""
    store, clock, scope = session.platform.store, session.platform.clock, identity.scope
    try:
        async with asyncio.timeout(GONE_S):
            lease = await _lease.until_abandoned(store, scope, identity.submitter, clock)
            if lease is not None and lease.held:
                # Its owner may only be asleep, and must not go on once the requests are deleted.
                with contextlib.suppress(NotFound):
                    await _lease.acquire(store, scope, identity.submitter, clock, force=True)
    except TimeoutError:
        found = await _lease.read(store, scope)
        owner = found[0].owner if found else identity.submitter
        who = f"process {owner.pid} on {owner.host}" if owner else "its submitter"
        raise Unavailable(
            f"{identity.id} was stopped, but {who} holds it for more than {GONE_S:g} s: its "
            "objects are left; clean up again when that process has ended",
            retryable=True,
        ) from None


PATIENCE_S = 30.0
"""The batch goes on then: its end must not wait for a platform that is away."""


MANY = 200
"""To delete more jobs than these in one request takes a server longer than it lets a request be."""

CHUNK, AT_ONCE = 50, 16
"""Jobs in a request of many, and such requests at a time."""

REPORT_S = 5.0
"""How often it is told how far the deletion of many jobs is."""


async def delete_all(
    cluster: Cluster,
    submission: Submission,
    last: int,
    live: Collection[tuple[int, int]] = (),
) -> None:
    """Delete all jobs that were launched in rounds up to *last*, the round at the time of the stop.

    By the label of a round, not of the batch: should this request reach the platform late, it does
    not delete the jobs of items that somebody has had tried again since. Those of the attempts that
    are known to be *live*, pairs of item and number, go by their names before, if they are many.

    Raises:
        BackendError: The platform does not answer.
    """
    batch = submission.identity.id
    if len(live) > MANY:
        await _delete_many(cluster, submission, live)
    for number in range(last + 1):  # each retry_failed() begins another
        await cluster.delete(labels={LABEL_SUBMISSION: batch, LABEL_ROUND: str(number)})


async def delete_left(cluster: Cluster, submission: Submission) -> None:
    """Delete the jobs of stopped items that a process which died had not deleted yet.

    Raises:
        BackendError: The platform does not answer.
    """
    requests = submission.requests
    if not requests.all_stopped:
        return
    found = await cluster.find(labels={LABEL_SUBMISSION: submission.identity.id})
    if not found:
        return
    await submission.look_for_requests()  # those that led to what was found were stored before it
    live = [
        (int(seen.labels[LABEL_INDEX]), int(seen.labels[LABEL_ATTEMPT]))
        for seen in found
        if seen.phase in (Phase.PENDING, Phase.RUNNING)
    ]
    unwanted = [one for one in live if requests.standing(one[0]).unwanted]
    if unwanted:
        await _delete_many(cluster, submission, unwanted)


async def _delete_many(
    cluster: Cluster, submission: Submission, live: Collection[tuple[int, int]]
) -> None:
    names = [submission.identity.attempt_name(*one) for one in live]
    chunks = [names[at : at + CHUNK] for at in range(0, len(names), CHUNK)]
    batch, clock = submission.identity.id, asyncio.get_running_loop().time
    submission.deleting, told = len(names), clock()
    logging.info("deleting %d jobs of %s", len(names), batch)

    async def delete(chunk: list[str]) -> None:
        nonlocal told
        await cluster.delete(names=chunk)
        submission.deleting -= len(chunk)
        if clock() - told >= REPORT_S:
            told = clock()
            logging.info("%d jobs of %s are still to be deleted", submission.deleting, batch)

    await bounded(delete, chunks, at_once=AT_ONCE)


async def delete_unwanted(
    cluster: Cluster, submission: Submission, attempts: Iterable[tuple[int, int]]
) -> None:
    """Delete the jobs of *attempts*, pairs of item and number: in one request where possible.

    That is right however late the request reaches the platform: when a stopped item is tried again,
    its next attempt has another number, and so another name.

    It saves time only, since stopped jobs end by themselves: errors are logged, and so is a
    platform that does not answer for half a minute.
    """
    names = [submission.identity.attempt_name(*one) for one in attempts]
    if not names:
        return
    batch = submission.identity.id
    try:
        async with asyncio.timeout(PATIENCE_S):
            await retry_forever(lambda: cluster.delete(names=names), f"deleting jobs of {batch}")
    except (KineticError, TimeoutError) as exc:
        why = str(exc) or "the platform does not answer"
        logging.warning("jobs of %s that were stopped end by themselves: %s", batch, why)


async def withdraw_idle(
    cluster: Cluster, submission: Submission, attempts: Iterable[tuple[int, int]]
) -> None:
    """Delete the jobs of attempts whose item has ended without them.

    The caller must have looked at the items before.
    """
    idle = [
        (index, number)
        for index, number in attempts
        if (item := submission.item(index)) is not None
        and _is_idle(item, number, submission.requests.standing(index).base)
    ]
    await delete_unwanted(cluster, submission, idle)


async def take_back(cluster: Cluster, submission: Submission, index: int, number: int) -> None:
    """Delete a job that was being launched when a stop came, and that the stop missed."""
    stands = submission.requests.standing(index)
    if stands.unwanted or number <= stands.base:
        await delete_unwanted(cluster, submission, [(index, number)])
        return
    try:
        async with asyncio.timeout(PATIENCE_S):
            await retry_forever(lambda: submission.look(index), f"looking at item {index}")
    except (KineticError, TimeoutError) as exc:
        name = submission.identity.attempt_name(index, number)
        logging.warning("%s was stopped while it was launched: %s", name, exc)
        return
    await withdraw_idle(cluster, submission, [(index, number)])


def _is_idle(item: wire.Item, number: int, retired: int) -> bool:
    """Whether *item* has ended, and attempt *number* has not begun and cannot begin any more."""
    if not item.state.final:
        return False
    if item.outcome is not None and item.attempt == number:
        return item.outcome.executor == wire.VOID  # a process that comes finds it closed
    if item.state is wire.ItemState.CANCELLED and item.attempt == number:
        # It has no claim: with one the item would be CANCELLING, and be at the next number
        # as soon as this attempt had its outcome.
        return True
    return item.attempt < number or number <= retired
