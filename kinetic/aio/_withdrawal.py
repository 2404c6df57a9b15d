"""Jobs that nobody wants any more are taken off the platform.

What was stopped before it began has its end by the stop alone. Its job would wait for its turn, and
have a machine made for it, only to find that out; and what it reads may be gone by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from absl import logging

from kinetic._runner import wire
from kinetic.aio._patience import patiently
from kinetic.aio._session import LABEL_ROUND, LABEL_SUBMISSION
from kinetic.aio._submission import Submission
from kinetic.aio.ports import Cluster
from kinetic.errors import KineticError

__all__ = ["delete_all", "take_back", "withdraw", "withdraw_idle"]

PATIENCE_S = 30.0
"""The batch goes on then: its end must not wait for a platform that is away."""


async def delete_all(cluster: Cluster, submission: Submission, last: int) -> None:
    """Delete all jobs that were launched in rounds up to *last*, that of the stop they are under.

    Not by what all jobs of the batch have in common: a request may arrive late, when somebody has
    had the stopped items tried again.

    Raises:
        BackendError: The platform does not answer.
    """
    batch = submission.identity.id
    for number in range(last + 1):  # only who asks for retries makes them more than one
        await cluster.delete(labels={LABEL_SUBMISSION: batch, LABEL_ROUND: str(number)})


async def withdraw(
    cluster: Cluster, submission: Submission, attempts: Iterable[tuple[int, int]]
) -> None:
    """Have the jobs of *attempts*, items with numbers, deleted: in one request where possible.

    However late that arrives: a request to try a stopped item again retires the number it had.

    To be quick: they end by themselves, too, so what goes wrong is only logged, and that nobody
    has answered for half a minute.
    """
    names = [submission.identity.attempt_name(*one) for one in attempts]
    if not names:
        return
    batch = submission.identity.id
    try:
        async with asyncio.timeout(PATIENCE_S):
            await patiently(lambda: cluster.delete(names=names), f"deleting jobs of {batch}")
    except (KineticError, TimeoutError) as exc:
        why = str(exc) or "the platform does not answer"
        logging.warning("jobs of %s that were stopped end by themselves: %s", batch, why)


async def withdraw_idle(
    cluster: Cluster, submission: Submission, attempts: Iterable[tuple[int, int]]
) -> None:
    """`withdraw` those whose item is over without them; to be called after a look at it."""
    idle = [
        (index, number)
        for index, number in attempts
        if (item := submission.item(index)) is not None
        and _is_idle(item, number, submission.requests.standing(index).base)
    ]
    await withdraw(cluster, submission, idle)


async def take_back(cluster: Cluster, submission: Submission, index: int, number: int) -> None:
    """A stop came while a job was asked for: whoever has heeded it found none to delete yet."""
    stands = submission.requests.standing(index)
    if stands.unwanted or number <= stands.base:
        await withdraw(cluster, submission, [(index, number)])
        return
    try:
        async with asyncio.timeout(PATIENCE_S):
            await patiently(lambda: submission.look(index), f"looking at item {index}")
    except (KineticError, TimeoutError) as exc:
        name = submission.identity.attempt_name(index, number)
        logging.warning("%s was stopped while it was launched: %s", name, exc)
        return
    await withdraw_idle(cluster, submission, [(index, number)])


def _is_idle(item: wire.Item, number: int, retired: int) -> bool:
    """Whether *item* has ended, and nobody has begun with attempt *number*, or still may."""
    if not item.state.final:
        return False
    if item.outcome is not None and item.attempt == number:
        return item.outcome.executor == wire.VOID  # a process that comes finds it closed
    if item.state is wire.ItemState.CANCELLED and item.attempt == number:
        return True  # it would be the next one if that had been claimed
    return item.attempt < number or number <= retired
