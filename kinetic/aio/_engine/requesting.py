"""Request something of a batch that another process may submit: a retry, workers, or a pruned end.

The callers check first that the batch exists: nothing would remove an object that is written after
a cleanup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from absl import logging

from kinetic._runner.protocol import metrics, signing, wire
from kinetic._runner.protocol.workers import EXIT_SURPLUS
from kinetic.aio._engine.in_flight import Places
from kinetic.aio._engine.workers import fit, stopped_round
from kinetic.aio._submissions.submission import Submission
from kinetic.aio.ports import Observation
from kinetic.job_status import JobStatus


async def retry_request(submission: Submission, wanted: Iterable[int]) -> wire.Request | None:
    """Return a request to retry the *wanted* items that ended without a value; None without any.

    The caller has just read the items.
    """
    requests, bases = submission.requests, dict[int, int]()
    failed = [
        index
        for index in wanted
        if submission.is_final(index) and submission.status(index) is not JobStatus.SUCCEEDED
    ]
    for index, attempts in (await submission.all_attempts(failed)).items():
        budgets = submission.identity.budgets
        base = wire.retry_base(requests.standing(index), attempts, budgets)
        if base is not None:
            bases[index] = base
    if not bases:
        return None
    return wire.Request(
        kind="retry",
        bases=bases,
        cause="retry_failed",
        # A stop deletes such workers, and its request may arrive after this one.
        opens_round=bool(requests.effect.done)
        or (submission.listed and stopped_round(submission) is not None),
    )


async def request_prune(submission: Submission, index: int, number: int) -> None:
    """Ask attempt *number* of an item to end as pruned."""
    scope = submission.identity.scope
    name = metrics.prune_key(scope, index, number)
    mac = signing.sign(submission.identity.key, scope, name, b"")
    await submission.store.create(name, b"", {"mac": mac})


async def scale_alone(submission: Submission, places: Places, wanted: Callable[[], int]) -> int:
    """Follow a request to scale, in a process that doesn't submit the batch; see `workers.fit`.

    The workers that it asks for take *places*, and give them back as they leave.
    """
    batch = submission.identity.id

    async def allow(more: int) -> int:
        if (taken := await places.take(more)) < more:
            logging.warning(
                "%s gets %d of %d more workers, because this client's max_concurrent allows no "
                "others; scale it again later, or from another client",
                *(batch, taken, more),
            )
        return taken

    def on_worker_gone(worker: Observation) -> None:
        living = len(submission.worker_observations)
        if worker.exit_code == EXIT_SURPLUS or not living:  # otherwise another replaces it
            places.keep(living)

    submission.on_worker_gone = on_worker_gone
    lacking = await fit(submission, wanted, allow)
    places.keep(max(wanted(), len(submission.worker_observations)))
    return lacking
