"""Read how far a batch was submitted, and find out what is left if no process submits it.

Then this process submits the rest, or says why some items won't end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kinetic._runner.protocol.wire import DataRef
from kinetic._tasks import for_each
from kinetic.aio import _lease, _shared_objects
from kinetic.aio._engine import ending
from kinetic.aio._engine.session import Session
from kinetic.aio._net.retry import FOREVER, Outage, retry, retry_forever
from kinetic.aio._preparing import calls, data_upload
from kinetic.aio._preparing.calls import UploadedCall
from kinetic.aio._submissions.inputs import InputIndex
from kinetic.aio._submissions.manifest import read_manifest
from kinetic.aio._submissions.submission import Submission
from kinetic.aio.ports import Store
from kinetic.errors import KineticError, NotFound, SubmitterLost, Unavailable

MAX_CONCURRENT_RENEWALS = 16


async def renew_shared(
    store: Store, uploaded: UploadedCall, data: Iterable[DataRef] = ()
) -> list[str]:
    """Renew the shared objects that jobs of *uploaded* read; return the names of missing ones."""
    uris = {ref.uri: None for ref in (*uploaded.data, *data) if "://" not in ref.uri}
    missing: list[str] = []

    async def renew(name: str) -> None:
        if name in uris:
            exists = await data_upload.renew(store, name)
        else:
            info = await store.look(name)
            is_fresh = info is not None and _shared_objects.is_fresh(info)
            exists = is_fresh or (info is not None and not await store.renew([name]))
        if not exists:
            missing.append(name)

    await for_each(renew, [*uploaded.shared_names, *uris], limit=MAX_CONCURRENT_RENEWALS)
    return sorted(missing)


async def load_environment(
    session: Session,
    submission: Submission,
    inputs: InputIndex,
    manifest: Mapping[str, Any],
    own: Mapping[str, str],
) -> Mapping[str, str]:
    """Return the jobs' environment from the platform, or if it has none, from this process."""
    batch, secret = submission.identity.id, session.platform.cluster.secret
    try:
        content = await retry_forever(lambda: secret(batch), "reading the environment")
    except NotFound:
        await read_manifest(session, batch)
        await read_inputs(submission, inputs)
        await submission.read_each(submission.unfinished(range(inputs.announced)))
        total = inputs.expected if inputs.total is None else inputs.total
        if total is not None and submission.ended >= total:
            return {}  # every item has ended, so no job needs the environment
        names: list[str] = manifest["placed"]["captured"]
        output_dir: str = manifest["output_dir"] or ""
        return own or calls.capture_again(session, batch, names, output_dir)
    environment: dict[str, str] = json.loads(content)
    return environment


async def recover(
    session: Session,
    submission: Submission,
    inputs: InputIndex,
    lease: _lease.HeldLease,
    uploaded: UploadedCall,
) -> NotFound | None:
    """Read the batch's state while a task renews *lease*.

    Return the error for items that are still to run, if the store lacks what they need.

    Raises:
        NotFound: The batch was cleaned up.
        SubmitterLost: Another process has taken the lease meanwhile.
    """
    renewal = session.spawn(lease.keep(), name=f"lease of {submission.identity.id}")
    try:
        missing = await retry_forever(
            lambda: renew_shared(submission.store, uploaded), "renewing shared objects"
        )
        await _recover_state(submission, inputs)
    finally:
        renewal.cancel()
        await asyncio.wait({renewal})
    if lease.lost is not None:
        raise lease.lost
    if not missing:
        return None
    return NotFound(
        f"the {missing[0].partition('/')[0]} of {submission.identity.id} is not in the store any "
        "more: a collection or the bucket's lifecycle rule has removed it; submit the remaining "
        "inputs in a new batch"
    )


async def _recover_state(submission: Submission, inputs: InputIndex) -> None:
    """Read requests, inputs, and attempts, in this order.

    Close the attempts of workers that have died. If a new stop or retry request came meanwhile,
    read everything again: what was read lacks its effect.
    """
    store, identity, requests = submission.store, submission.identity, submission.requests
    batch = identity.id
    while True:
        await retry_forever(requests.read, f"reading the requests of {batch}")
        # While the manifest exists, no request is missing: a removal deletes requests last.
        entry = await retry_forever(
            lambda: store.look(identity.manifest_name), f"looking for {batch}"
        )
        if entry is None:
            raise identity.gone_error
        known_requests = len(requests.entries)
        count = await _read_items(submission, inputs)
        await retry_forever(requests.read, f"reading the requests of {batch}")
        # Another task may have read more inputs.
        if len(requests.entries) == known_requests and count == inputs.known:
            return


async def _read_items(submission: Submission, inputs: InputIndex) -> int:
    """Read inputs and attempts, and close those of workers that have died; count the items."""
    batch = submission.identity.id
    await retry_forever(lambda: read_inputs(submission, inputs), f"reading the inputs of {batch}")
    count = inputs.known
    unknown = submission.unfinished(range(count))
    await retry_forever(
        lambda: ending.reconcile_items(submission, unknown), f"reading the attempts of {batch}"
    )
    return count


async def read_inputs(submission: Submission, inputs: InputIndex) -> None:
    """Read how many inputs are stored, or, if `results()` removed them, how many there were."""
    await inputs.read()
    if inputs.total is None and await submission.read_collected():
        inputs.total = submission.collected


# --- without a submitter ---


class Abandonment(NamedTuple):
    """A batch that no process submits, and why it can't end by itself.

    ``stuck`` are the items that won't end, and ``error`` is for their waiters. If only workers are
    missing, any process may start them, and there is no ``error``.
    """

    stuck: Sequence[int]
    error: SubmitterLost | None


async def until_abandoned(
    session: Session, submission: Submission, inputs: InputIndex, *, is_resumable_sweep: bool
) -> Abandonment:
    """Wait until no process submits the batch; close attempts that have died."""
    identity, platform = submission.identity, session.platform
    lease = await retry_forever(
        lambda: _lease.until_abandoned(platform.store, identity.scope, identity.submitter),
        f"reading the lease of {identity.id}",
    )
    # Waiters depend on this answer, so every error that kinetic knows is retried.
    stuck = await retry(
        lambda: _close_dead(submission, inputs),
        FOREVER,
        Outage(f"reading {identity.id}"),
        should_retry=lambda failure: isinstance(failure, KineticError),
    )
    is_sealed = inputs.sealed or submission.collected is not None
    found = await retry_forever(
        lambda: platform.cluster.find(labels=identity.labels),
        f"asking for the workers of {identity.id}",
    )
    living = {it.executor for it in found if not it.phase.is_over}
    if not submission.runs_alone:  # nobody replaces these workers, and each runs one item
        stuck = [index for index in stuck if submission.claimant(index) not in living]
        is_sealed = is_sealed or inputs.total is not None or inputs.expected is not None
    elif living:  # they run the items whose inputs are stored
        stuck = [] if is_sealed else [*range(inputs.count, inputs.announced)]
    elif stuck and is_sealed:
        return Abandonment(stuck, None)
    takes_inputs = not (is_sealed or submission.requests.all_stopped)
    if not (stuck or takes_inputs):
        return Abandonment(stuck, None)
    missing = [f"{len(stuck)} of its items have no outcome"] if stuck else []
    missing += [] if is_sealed else ["the end of its inputs isn't known"]
    if is_resumable_sweep:  # `resume` would end its proposals
        advice = (
            "To continue the sweep, run its program again with resume=True; no ended trial runs "
            "again"
        )
    else:
        seal, option = ("", "") if is_sealed else ("seal=True", " --seal")
        resume = f"kinetic.attach_batch({identity.id!r}).resume"
        advice, condition = "", "To continue with the stored inputs"
        if takes_inputs:
            advice = f"To add the inputs from number {inputs.count} on, call {resume}(inputs=...). "
            condition = "If there are no more"
        advice += (
            f"{condition}, call {resume}({seal}), or run "
            f"`kinetic batches resume {identity.id}{option}`; no ended item runs again"
        )
    holder = lease.holder_name if lease is not None else "its submitter"
    error = SubmitterLost(
        f"batch {identity.id}: {holder} does not submit it any more, and "
        f"{' and '.join(missing)}. {advice}",
        job_id=identity.id,
    )
    return Abandonment(stuck, error)


async def _close_dead(submission: Submission, inputs: InputIndex) -> list[int]:
    """Close attempts that have died; return the items that are still open."""
    if inputs.total is None:
        await read_inputs(submission, inputs)
    submission.closes = True
    open_items = await ending.reconcile_items(submission, range(inputs.announced))
    await submission.requests.read()
    if submission.doubtful:
        raise Unavailable("the ends of some items can't be read", retryable=True)
    if inputs.total is None and inputs.expected is None and submission.requests.all_stopped:
        inputs.total = inputs.announced
    return [index for index in open_items if not submission.is_damaged(index)]
