"""Further attempts of a job of its own, where the platform does not make them by itself.

As long as the process that has submitted it lives it launches another attempt when one was
disrupted. When it is gone, or too slow, whoever waits for the job decides that none comes
(`Submission.reconcile`): the stop that says so is read again after each launch.
"""

from __future__ import annotations

import asyncio

from absl import logging

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic._tasks import release
from kinetic.aio._engine.job_spec import AttemptSpec, JobSpecBuilder
from kinetic.aio._engine.session import Session, Submission
from kinetic.aio._net.retry import Outage, RetryPolicy, retry, retry_forever
from kinetic.aio.ports import Observation
from kinetic.errors import KineticError, NotFound

PATIENCE = RetryPolicy(total_s=50.0)
"""Others give the job up a minute after its last attempt has ended."""


async def relaunch(
    session: Session, submission: Submission, specs: JobSpecBuilder, arguments: wire.Input
) -> None:
    """Launch each attempt after the first, until the job has ended, or is removed; see the module.

    Cancelled: no further attempt is launched; one whose launch was under way may be there.
    """
    changed = asyncio.Event()
    ignore = submission.listen(lambda index, item: changed.set())
    launched = 1
    try:
        with session.awaiting(submission):
            while (item := submission.item(0)) is None or not item.state.final:
                wanted = item is not None and item.state is wire.ItemState.OPEN
                if item is not None and wanted and item.attempt > launched:
                    launched = item.attempt
                    await _next(session, submission, specs, AttemptSpec(0, launched, arguments))
                if isinstance(submission.error(0), NotFound):
                    return
                changed.clear()
                if submission.item(0) == item:
                    await changed.wait()
    finally:
        submission.relaunching = False
        ignore()


async def _next(
    session: Session, submission: Submission, specs: JobSpecBuilder, spec: AttemptSpec
) -> None:
    """Replace the attempt before *spec*, which somebody else may still be about to make again."""
    cluster, identity = session.platform.cluster, submission.identity
    name = identity.attempt_name(spec.index, spec.attempt)
    before = identity.attempt_name(spec.index, spec.attempt - 1)

    async def launched() -> None:
        await cluster.delete(names=[before])
        await specs.launch(spec)
        submission.launched = spec.attempt

    async def end_of_host() -> Observation | None:
        return await submission.host_end(spec.index, spec.attempt - 1, asking=True)

    async def wanted() -> bool:
        item = await submission.look(spec.index)
        if item.attempt < spec.attempt or item.stopped:
            return False
        return await session.platform.store.look(identity.entry) is not None

    try:
        # The first host's outcome says that it was asked to stop; the platform may know why.
        told = await retry(end_of_host, PATIENCE, Outage(f"asking how {before} ended"))
        if told is not None and told.reason is not None and told.reason not in INFRASTRUCTURE:
            await _give_up(submission, spec, told.message)
            return
        logging.info("%s was disrupted; launching it again as %s", before, name)
        await retry(launched, PATIENCE, Outage(f"launching {name}"))
        if await retry_forever(wanted, f"looking whether {name} is wanted"):
            return
        failure = None
    except KineticError as exc:
        logging.warning("%s cannot be launched again: %s", identity.id, exc)
        failure = exc
    # Refused, or launched for a job that was stopped or removed: nobody else knows of it.
    await release(cluster.delete(names=[name]), what=f"removing {name}")
    if failure is not None:
        await _give_up(submission, spec, str(failure))


async def _give_up(submission: Submission, spec: AttemptSpec, why: str) -> None:
    """End the job as its last attempt did; in this process nobody else does."""

    async def end() -> None:
        await submission.give_up(spec.index, f"not launched again: {why}")

    try:
        await retry_forever(end, f"ending {submission.identity.id}")
    except KineticError as exc:
        submission.set_error(spec.index, exc)
