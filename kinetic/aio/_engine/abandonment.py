"""Find out that no process submits a batch any more, and which of its items then won't end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kinetic.aio import _lease
from kinetic.aio._engine import ending
from kinetic.aio._engine.recovery import read_inputs
from kinetic.aio._engine.session import Session
from kinetic.aio._net.retry import FOREVER, Outage, retry, retry_forever
from kinetic.aio._submissions.inputs import InputIndex
from kinetic.aio._submissions.submission import LABEL_SUBMISSION, Submission
from kinetic.errors import KineticError, SubmitterLost, Unavailable


class Abandonment(NamedTuple):
    """A batch that no process submits, and why it can't end by itself.

    ``stuck`` are the items that won't end. If only workers are missing, any process may start them,
    and there is no ``error``. Otherwise, ``error`` is for the waiters; None if they may wait.
    """

    stuck: Sequence[int]
    error: SubmitterLost | None
    lacks_workers: bool = False


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
    if submission.runs_alone:
        found = await retry_forever(
            lambda: platform.cluster.find(labels={LABEL_SUBMISSION: identity.id}),
            f"asking for the workers of {identity.id}",
        )
        if any(not it.phase.is_over for it in found):
            # Workers run the items whose inputs are stored.
            stuck = [] if is_sealed else [*range(inputs.count, inputs.announced)]
        elif stuck and is_sealed:
            return Abandonment(stuck, None, lacks_workers=True)
    else:
        is_sealed = is_sealed or inputs.total is not None or inputs.expected is not None
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


async def _close_dead(submission: Submission, inputs: InputIndex) -> Sequence[int]:
    """Close attempts that have died; return the items that won't end without a submitter."""
    if inputs.total is None:
        await read_inputs(submission, inputs)
    items = range(inputs.announced)
    submission.closes = True
    await submission.read_each(items)
    alive = await ending.ask(submission, items)
    ended = [it for it in items if submission.is_final(it) or submission.is_damaged(it)]
    await submission.requests.read()
    if submission.doubtful:
        raise Unavailable("the ends of some items can't be read", retryable=True)
    if inputs.total is None and inputs.expected is None and submission.requests.all_stopped:
        inputs.total = inputs.announced
    return sorted({*items}.difference(alive, ended))
