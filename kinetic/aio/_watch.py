"""Counts a batch as it goes: feeds a tally with what is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from kinetic import _steps
from kinetic._runner import frames, wire
from kinetic._tally import State, Tally
from kinetic._words import one_line
from kinetic.aio._consumer import Consumer
from kinetic.job_status import JobStatus
from kinetic.progress import Progress

if TYPE_CHECKING:
    from kinetic.aio._batch import Batch

__all__ = ["Watch", "state_of"]

AT_ONCE = 500
"""Items that are counted in one turn of the loop."""

READING_S = 1.0
"""How long the last value waits for the message of the first failure."""


def state_of(item: wire.Item | None, status: JobStatus, *, refused: bool) -> State:
    """Where an item is, from its objects and what the platform said of it."""
    match item.state if item is not None else wire.ItemState.OPEN:
        case wire.ItemState.SUCCEEDED:
            return State.SUCCEEDED
        case wire.ItemState.CANCELLED:
            return State.CANCELLED
        case wire.ItemState.FAILED:
            outcome = item.outcome if item is not None else None
            lost = outcome is not None and outcome.kind is wire.Kind.LOST
            return State.LOST if lost else State.FAILED
        case wire.ItemState.CANCELLING:
            return State.RUNNING  # until it has ended
        case wire.ItemState.OPEN:
            if refused:
                return State.FAILED
            return State.RUNNING if status is JobStatus.RUNNING else State.WAITING


class Watch:
    """A batch that is being counted, within ``async with``; ``changed`` is set by every change.

    With *looking*, a batch that another process submits is looked at now and
    then, as by everybody who waits for it. *clock* gives seconds; it is the
    loop's unless another is named.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        looking: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.changed = asyncio.Event()
        self._batch = batch
        self._clock = clock or asyncio.get_running_loop().time
        age = time.time() - batch.submission.identity.created
        self._tally = Tally(self._clock(), age=age)
        self._looking = looking and batch.holder is None
        self._message: tuple[int, str] | None = None  # of the first failure, and whose it is
        self._reading: asyncio.Task[None] | None = None
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        batch = self._batch
        async with self._open as opening:
            opening.callback(batch.submission.listen(self._note))
            batch.watchers.append(self.changed)
            opening.callback(batch.watchers.remove, self.changed)
            if self._looking:
                await opening.enter_async_context(Consumer(batch))
            for index in range(batch.known):
                self._note(index)
                if index % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
            self._tally.start(self._clock())
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._open.aclose()

    @property
    def over(self) -> bool:
        """Whether nothing more will change: it is finished, or nobody goes on with it."""
        return self._batch.finished or self._batch.submission.abandoned is not None

    def value(self) -> Progress:
        """How far it is now."""
        total = self._batch.total
        return self._tally.value(
            self._clock(),
            total=total if total is not None else self._batch.manifest["total"],
            known=self._batch.known,
            first_failure=self._first_failure(),
            step=_steps.current() or one_line(self._batch.submission.held_up()),
        )

    async def last(self) -> Progress:
        """How far it came, with the message of the first failure if that can be had soon."""
        self._first_failure()
        if self._reading is not None and not self._reading.done():
            await asyncio.wait({self._reading}, timeout=READING_S)
        return self.value()

    def _note(self, index: int, item: wire.Item | None = None) -> None:
        submission = self._batch.submission
        item = submission.item(index)
        refused = submission.refusal(index) is not None
        if item is None and not refused and index >= self._batch.known:
            return  # not an item: a word to everybody who waits
        state = state_of(item, submission.status(index), refused=refused)
        self._tally.put(index, state, item.attempt - 1 if item is not None else 0, self._clock())

    def _first_failure(self) -> str:
        index = self._tally.first_bad
        if index is None:
            return ""
        if self._message is not None and self._message[0] == index:
            return self._message[1]
        if self._reading is None or self._reading.done():
            reading = self._read(index)
            self._reading = asyncio.create_task(reading, name="first failure of a batch")
        return ""  # it is not known yet

    async def _read(self, index: int) -> None:
        try:
            words = f"item {index}{_given(self._batch, index)}: {await _words(self._batch, index)}"
        except Exception as exc:  # the numbers are right without the words
            words = f"item {index}: what it said cannot be read: {exc}"
        self._message = (index, one_line(words))
        self.changed.set()


def _given(batch: Batch, index: int) -> str:
    """The item's input, cut short, where this process still has it."""
    intake = batch.holder.intake if batch.holder is not None else None
    here = intake.input_of(index) if intake is not None else None
    return f" ({one_line(reprlib.repr(here[0]), 40)})" if here is not None else ""


async def _words(batch: Batch, index: int) -> str:
    """What the item's last attempt said, without rebuilding its exception."""
    submission = batch.submission
    if (refusal := submission.refusal(index)) is not None:
        return f"{type(refusal).__name__}: {refusal}"
    item = submission.item(index)
    if item is None or item.outcome is None:
        return "failed"
    outcome, body = await submission.outcome(index, item.attempt)
    text = frames.unpack(body).fields.get("error", {})
    kind, message = str(text.get("qualname", "")), str(text.get("message", ""))
    if outcome.kind is wire.Kind.LOST:
        return f"lost ({outcome.reason}): {message}"
    return f"{kind.removeprefix('builtins.')}: {message}" if kind else message
