"""Taking a batch away: in an order in which no late pod ever starts anything."""

from __future__ import annotations

import asyncio

from kinetic._runner import wire
from kinetic.aio import _launch, _lease
from kinetic.aio._requests import Requests
from kinetic.aio._session import LABEL_SUBMISSION, Session
from kinetic.aio._submission import Identity
from kinetic.errors import Unavailable

__all__ = ["remove_batch"]

GONE_S = 180.0


async def remove_batch(
    session: Session,
    identity: Identity,
    *,
    jobs: bool = True,
    objects: bool = True,
    alone: bool = False,
) -> None:
    """Stop it, delete its jobs until there are none, then its objects, the manifest last.

    A late pod finds the stop, or finds no inputs, at every moment in between.
    Whoever submits it is waited for, until the stop has been seen there; not
    when nobody can, who is *alone* with a batch that was just made, or comes
    after another removal.

    Raises:
        BackendError: Its jobs do not end within 180 s, or somebody does not answer.

    Cancelled: run it again; it goes on where it was.
    """
    store, cluster, scope = session.platform.store, session.platform.cluster, identity.scope
    # The manifest goes after everything that can be waited for, and comes before the lease.
    nobody = alone or not await store.list(identity.entry)
    if objects and (alone or not nobody):
        stop = wire.Request(kind="stop", cause=wire.CLEANUP)
        await Requests(store, scope, identity.key).append(stop)
    labels = {LABEL_SUBMISSION: identity.id}
    if jobs:
        await cluster.delete(labels=labels)
        await _launch.until_gone(session, (), GONE_S, labels=labels)
    if not objects:
        return
    if not nobody:
        await _until_let_go(session, identity)
        if jobs:  # it may have started something in between
            await cluster.delete(labels=labels)
            await _launch.until_gone(session, (), GONE_S, labels=labels)
    for part in ("inputs/", "done/", "attempts/", "values/", "arrays/", "control/", "lease"):
        await store.delete([one.name for one in await store.list(f"{scope}{part}")])
    await store.delete([identity.entry])
    await cluster.drop_secret([identity.id])
    await store.delete([wire.group_key(identity.id)])


async def _until_let_go(session: Session, identity: Identity) -> None:
    """Wait until nobody submits it any more."""
    store, clock, scope = session.platform.store, session.platform.clock, identity.scope
    try:
        async with asyncio.timeout(GONE_S):
            await _lease.until_abandoned(store, scope, identity.submitter, clock)
    except TimeoutError:
        found = await _lease.read(store, scope)
        owner = found[0].owner if found else identity.submitter
        who = f"process {owner.pid} on {owner.host}" if owner else "its submitter"
        raise Unavailable(
            f"{identity.id} was stopped, but {who} holds it for more than {GONE_S:g} s: its "
            "objects are left; clean up again when that process has ended",
            retryable=True,
        ) from None
