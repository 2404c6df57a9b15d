"""The output of a job as it goes on: of one attempt after the other, each line once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kinetic._runner import wire
from kinetic.aio._following import Following
from kinetic.errors import NoLog, NotFound

__all__ = ["followed", "of_attempt"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
"""How long to wait for word of an attempt that is about to start, before looking for it."""


async def followed(at: Following) -> AsyncGenerator[str]:
    """The lines of the attempt that is under way, and of all after it, until the item has ended.

    Attempts whose log is gone, or that never ran, are passed over.

    Raises:
        NotFound: There is no log at all: it has not started, or was removed.
    """
    submission = at.submission
    item = submission.item(at.index) or await submission.look(at.index)
    number, told, closed, pause = item.attempt, False, False, FIRST_PAUSE_S
    while True:
        name = submission.identity.attempt_name(at.index, number)
        try:
            async with aclosing(at.session.platform.cluster.logs(name, follow=True)) as lines:
                async for line in lines:
                    told = True
                    yield line
            told = True
        except NotFound:
            item = await submission.look(at.index)
            if item.attempt == number and not told:
                raise
            if not closed and not _is_hopeless(at):  # it is about to start, or just has
                closed = item.attempt > number or item.state.final
                if not closed:
                    await _change(at, pause)
                    pause = min(LONGEST_PAUSE_S, pause * 2)
                continue
        if not await _goes_on(at, number):
            return
        number, closed, pause = number + 1, False, FIRST_PAUSE_S


async def of_attempt(at: Following, number: int, *, follow: bool) -> AsyncGenerator[str]:
    """The lines of attempt *number* only.

    Raises:
        NoLog: It has not been, or its log is gone.
    """
    item, cluster = await at.submission.look(at.index), at.session.platform.cluster
    who = at.submission.identity.job_id(at.index)
    if number > item.attempt:
        raise NoLog(f"{who} has no attempt {number}: it is at attempt {item.attempt}")
    name, told = at.submission.identity.attempt_name(at.index, number), False
    gone = NoLog(
        f"attempt {number} of {who} has no log: it never started, or the platform does not "
        f"keep it any more; logs() has that of attempt {item.attempt}"
    )
    try:
        async with aclosing(cluster.logs(name, follow=follow)) as lines:
            async for line in lines:
                told = True
                yield line
    except NotFound as exc:
        raise gone from exc
    if not told and not await cluster.find(names=[name]):
        raise gone


async def _goes_on(at: Following, number: int) -> bool:
    """Whether there is an attempt after this one, which has ended for the platform."""
    item = at.submission.item(at.index)
    while True:
        if item is not None and (item.attempt > number or item.state.final):
            return item.attempt > number
        if _is_hopeless(at):
            return False
        await _change(at, LONGEST_PAUSE_S)
        item = await at.submission.look(at.index)


def _is_hopeless(at: Following) -> bool:
    """Whether nothing more will be heard of it here."""
    return bool(at.submission.trouble(at.index) or at.submission.abandoned)


async def _change(at: Following, timeout: float) -> None:
    """Wait for word of the item, *timeout* seconds at most."""
    changed = asyncio.Event()

    def hear(index: int, item: wire.Item | None) -> None:
        if index == at.index or item is None:
            changed.set()

    stop = at.submission.listen(hear)
    try:
        async with asyncio.timeout(timeout):
            await changed.wait()
    except TimeoutError:
        return
    finally:
        stop()
