"""Jobs that nobody wants any more are taken off the platform.

What was stopped before it began has its end by the stop alone. Its job would wait for its turn, and
have a machine made for it, only to find that out; and what it reads may be gone by then.
"""

from __future__ import annotations

from collections.abc import Mapping

from absl import logging

from kinetic._runner import wire
from kinetic.aio._patience import patiently
from kinetic.aio._submission import Submission
from kinetic.aio.ports import Cluster
from kinetic.errors import KineticError

__all__ = ["withdraw", "withdraw_idle"]


async def withdraw(cluster: Cluster, submission: Submission, attempts: Mapping[int, int]) -> None:
    """Have the jobs of *attempts*, numbers by item, deleted: in one request where that is possible.

    To be quick: they end by themselves, too, so what goes wrong is only logged.
    """
    names = [submission.identity.attempt_name(*one) for one in attempts.items()]
    if not names:
        return
    batch = submission.identity.id
    try:
        await patiently(lambda: cluster.delete(names=names), f"deleting jobs of {batch}")
    except KineticError as exc:
        logging.warning("the jobs of %s that were stopped end by themselves: %s", batch, exc)


async def withdraw_idle(
    cluster: Cluster, submission: Submission, attempts: Mapping[int, int]
) -> None:
    """`withdraw` those whose item is over without them; to be called after a look at it."""
    idle = {
        index: number
        for index, number in attempts.items()
        if (item := submission.item(index)) is not None and _is_idle(item, number)
    }
    await withdraw(cluster, submission, idle)


def _is_idle(item: wire.Item, number: int) -> bool:
    """Whether *item* has ended, and nobody had begun with attempt *number* by then."""
    if item.state is wire.ItemState.CANCELLED:
        return item.attempt == number  # it would be the next one if that had been claimed
    return item.state.final and item.attempt < number
