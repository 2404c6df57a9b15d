"""Attempts that count as busy and that the platform is silent about.

One that came and went before the watch was listed, or ended and was removed while the watch was
interrupted, is never mentioned: its slot would stay taken.
"""

from __future__ import annotations

import asyncio

from absl import logging

from kinetic._runner import wire
from kinetic.aio import fanout
from kinetic.aio._launching import Launcher
from kinetic.aio._session import Session
from kinetic.aio._submission import Submission
from kinetic.aio.ports import Observation
from kinetic.errors import BackendError

__all__ = ["keep_doubting"]

DOUBT_S = 60.0


async def keep_doubting(
    session: Session, submission: Submission, state: fanout.State, launcher: Launcher
) -> None:
    """Ask about what the watch has not mentioned for a minute or two, until cancelled."""
    silent: set[tuple[int, int]] = set()
    while True:
        await asyncio.sleep(DOUBT_S)
        before, silent = silent, _silent(submission, state, launcher)
        try:
            if doubted := before & silent:
                await _ask(session, submission, launcher, doubted)
        except BackendError as exc:
            logging.warning("%s: %s; trying again", submission.identity.id, exc)


def _silent(
    submission: Submission, state: fanout.State, launcher: Launcher
) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for index, number in state.busy.items():
        void = submission.attempt(index, number).executor == wire.VOID
        known = submission.is_sure(index, number)
        if (void or not known) and index not in launcher.unasked:
            found.add((index, number))
    return found


async def _ask(
    session: Session, submission: Submission, launcher: Launcher, doubted: set[tuple[int, int]]
) -> None:
    await submission.look_at_each([index for index, _ in doubted])
    asked: dict[tuple[int, int], tuple[Observation | None, str | None]] = {}
    for index, number in sorted(doubted):
        item = submission.item(index)
        if item is not None and not item.state.final and item.attempt == number:
            claimant = submission.attempt(index, number).executor
            asked[index, number] = submission.observation(index), claimant
    if not asked:
        return
    names = [submission.identity.attempt_name(*one) for one in asked]
    found = {one.name: one for one in await session.platform.cluster.find(names=names)}
    for name, ((index, number), (before, claimant)) in zip(names, asked.items(), strict=True):
        seen = found.get(name)
        if submission.attempt(index, number).executor == wire.VOID:  # who voided it is gone
            session.settle(submission, index, number, seen)
        elif submission.is_over(index, number, seen, before):
            session.settle(submission, index, number, seen, claimant)
        elif seen is None:  # it never arrived; to ask once more, by the same name, costs nothing
            launcher.start(fanout.Start(index, number))
