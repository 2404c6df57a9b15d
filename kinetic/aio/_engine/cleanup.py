"""Delete jobs that needn't run any more, because their items were stopped or have ended.

A stop request cancels an item that hasn't begun; its job needn't run. If the job stayed on the
platform, it would wait for a machine, only to find the stop request. By then, the inputs may be
removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from absl import logging

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import Requests
from kinetic.aio._engine.submission import (
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_ROUND,
    LABEL_SUBMISSION,
    Submission,
)
from kinetic.aio._net.retry import retry_forever
from kinetic.aio.ports import Phase
from kinetic.errors import KineticError

TIMEOUT_S = 30.0
"""How long a batch waits for the platform to delete useless jobs, in seconds."""


async def delete_all(submission: Submission, last_round: int) -> None:
    """Delete all jobs up to round *last_round*; the batch's nth retry request begins round n.

    Workers have rounds of their own, and this deletes all of them. Don't call it for workers if an
    item can be retried.

    Each delete request names a round. So if the request reaches the platform late, it doesn't
    delete the jobs of items that were retried in the meantime.
    """
    batch = submission.identity.id
    if submission.workers is not None:
        await submission.cluster.delete(labels={LABEL_SUBMISSION: batch})
        return
    for number in range(last_round + 1):
        await submission.cluster.delete(labels={LABEL_SUBMISSION: batch, LABEL_ROUND: str(number)})


async def end_all(submission: Submission, last_round: int) -> None:
    """End all jobs up to round *last_round*, of a batch whose stop request is stored.

    Workers end the items themselves, and leave. Where `Workers.tell` reaches them, they aren't
    deleted, because that would remove the logs of their items. Elsewhere, the platform asks them to
    end, and they store the logs first.
    """
    batch = submission.identity.id
    if submission.workers is None:
        await delete_all(submission, last_round)
    elif submission.listed:
        if (number := stopped_round(submission)) is None:
            return
        await submission.cluster.delete(labels={LABEL_SUBMISSION: batch, LABEL_ROUND: str(number)})
    else:
        await submission.workers.tell({LABEL_SUBMISSION: batch})


def stopped_round(submission: Submission) -> int | None:
    """Return the round of workers that a stop ends; None if it lets items run, or a retry came."""
    requests = Requests()
    for request in submission.requests.entries:
        requests.add(request)
    is_over = requests.all_stopped and requests.standing(-1).unwanted  # -1: an item without name
    return requests.round if is_over else None


async def delete_leftovers(submission: Submission) -> None:
    """Delete the jobs of stopped items that a process left on the platform when it died."""
    requests = submission.requests
    if not requests.all_stopped:
        return
    found = await submission.cluster.find(labels={LABEL_SUBMISSION: submission.identity.id})
    if not found:
        return
    await submission.requests.look()  # a retry request is stored before its jobs are launched
    if submission.listed:
        await end_all(submission, requests.round)
        return
    live_attempts = [
        (int(observation.labels[LABEL_INDEX]), int(observation.labels[LABEL_ATTEMPT]))
        for observation in found
        if observation.phase in (Phase.PENDING, Phase.RUNNING)
        and LABEL_INDEX in observation.labels  # a worker has none
    ]
    names = [
        submission.identity.attempt_name(*attempt)
        for attempt in live_attempts
        if requests.standing(attempt[0]).unwanted
    ]
    if names:
        await submission.cluster.delete(names=names)


async def delete_unwanted(submission: Submission, attempts: Iterable[tuple[int, int]]) -> None:
    """Delete the jobs of *attempts* (pairs of item and number), if possible in one request.

    A delete request that reaches the platform late does no harm: if a stopped item was retried,
    the next attempt's job has another name.

    Stopped jobs also end by themselves. So if the platform refuses the request, or doesn't answer
    for 30 s, this only logs a warning.
    """
    names = [submission.identity.attempt_name(*attempt) for attempt in attempts]
    if not names:
        return
    batch = submission.identity.id
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await retry_forever(
                lambda: submission.cluster.delete(names=names), f"deleting jobs of {batch}"
            )
    except (KineticError, TimeoutError) as exc:
        why = str(exc) or "the platform does not answer"
        logging.warning("can't delete stopped jobs of %s, which end by themselves: %s", batch, why)


async def withdraw_idle(submission: Submission, attempts: Iterable[tuple[int, int]]) -> None:
    """Delete the jobs of attempts that can't start any more, because their items have ended.

    The caller must have read the items.
    """
    idle = [
        (index, number)
        for index, number in attempts
        if (item := submission.item(index)) is not None
        and _is_idle(item, number, submission.requests.standing(index).base)
    ]
    await delete_unwanted(submission, idle)


async def delete_if_stopped(submission: Submission, index: int, number: int) -> None:
    """Delete the job just launched if a stop came during the launch, and the job needn't run."""
    standing = submission.requests.standing(index)
    if standing.unwanted or number <= standing.base:
        await delete_unwanted(submission, [(index, number)])
        return
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await retry_forever(lambda: submission.look(index), f"looking at item {index}")
    except (KineticError, TimeoutError) as exc:
        name = submission.identity.attempt_name(index, number)
        logging.warning("%s was stopped during its launch; can't read its item: %s", name, exc)
        return
    await withdraw_idle(submission, [(index, number)])


def _is_idle(item: wire.Item, number: int, base: int) -> bool:
    """Return whether *item* has ended without attempt *number*, so that the attempt can't start."""
    if not item.state.final:
        return False
    if item.outcome is not None and item.attempt == number:
        # A process that starts late finds the attempt closed.
        return item.outcome.executor == wire.VOID
    if item.state is wire.ItemState.CANCELLED and item.attempt == number:
        # No process has claimed the attempt. After a claim, the item would be CANCELLING until the
        # attempt had its outcome, and would then be at the next attempt.
        return True
    return item.attempt < number or number <= base
