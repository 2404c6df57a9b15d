"""One iteration over a batch: its items as they end, or in their order; each once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from absl import logging

from kinetic._runner import wire
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic.aio._batch import Batch
    from kinetic.aio._window import Delivery

__all__ = ["Consumer"]

FIRST_LOOK_S, LONGEST_LOOK_S = 1.0, 10.0
RECHECK_S = 5.0
STARTING = 1024
"""Items of a large batch that are looked through in one turn of the loop."""


class Consumer:
    """What has ended of a batch and was not taken yet; any number may consume at once.

    ``ready`` are the indices to be taken, also of inputs that could not be
    submitted. With *ordered* an index is there only when all before it were;
    what ends before its turn is remembered by its index, and its value stays
    in the store. With *windowed* no more is submitted than the window's
    items beyond what was `delivered`. Used as an async context manager.
    """

    def __init__(self, batch: Batch, *, ordered: bool = False, windowed: bool = True) -> None:
        self.ready: deque[int] = deque()
        self._batch = batch
        self._ordered = ordered
        self._windowed = windowed
        self._delivery: Delivery | None = None
        self._delivered = 0
        self._told = bytearray()  # by index: whether it was ready once
        self._turn = 0
        self._awake = asyncio.Event()
        self._doubt: asyncio.Task[None] | None = None
        self._let_go = batch.submission.listen(self._note)
        batch.watchers.append(self._awake)

    async def __aenter__(self) -> Self:
        self._join()
        try:
            if self._batch.holder is None:
                name = f"doubt about {self._batch.group_id}"
                self._doubt = self._batch.session.spawn(self._keep_looking(), name=name)
                await self._batch.look_again()
                await self._batch.look()
            submission = self._batch.submission
            for place, index in enumerate(submission.touched(self._batch.known), start=1):
                self._note(index, submission.item(index))
                if place % STARTING == 0:
                    await asyncio.sleep(0)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._let_go()
        if self._delivery is not None:
            self._delivery.end()
        if self._doubt is not None:
            self._doubt.cancel()
        self._batch.watchers.remove(self._awake)

    def _join(self) -> None:
        holder = self._batch.holder  # which there may be later: this process may take over
        if self._windowed and self._delivery is None and holder is not None:
            self._delivery = holder.window.begin(self._delivered)

    def delivered(self) -> None:
        """One more item has reached whom it is for."""
        self._delivered += 1
        if self._delivery is not None:
            self._delivery.add()

    def take(self) -> int | None:
        """The next that is ready; None when there is none but what runs again since."""
        while self.ready:
            index = self.ready.popleft()
            item = self._batch.submission.item(index)
            if self._ordered or item is None or item.state.final or self._is_over(index):
                return index
            self._told[index] = False  # a retry has opened it: it will end once more
        return None

    async def more(self) -> bool:
        """Wait until something is ready; False when nothing more will be.

        Raises:
            SubmitterLost: Nobody submits the rest of it any more.
            BaseException: What ended this process's own submitting.
        """
        batch = self._batch
        while not self.ready:
            self._join()
            if batch.finished:
                if batch.holder is not None and batch.holder.error is not None:
                    raise batch.holder.error
                if batch.holder is None or batch.holder.complete:
                    return False  # else it was let go of: what comes of it is about to be told
            if batch.submission.abandoned is not None:
                raise batch.submission.abandoned
            self._awake.clear()
            with contextlib.suppress(TimeoutError):  # a wake that is missed costs time, no more
                async with asyncio.timeout(RECHECK_S):
                    await self._awake.wait()
        return True

    def _note(self, index: int, item: wire.Item | None) -> None:
        if not ((item is not None and item.state.final) or self._is_over(index)):
            return
        told = self._told
        if index >= len(told):
            told.extend(bytes(index + 1 - len(told)))
        elif told[index]:
            return
        told[index] = True
        if not self._ordered:
            self.ready.append(index)
            return
        while self._turn < len(told) and told[self._turn]:
            self.ready.append(self._turn)
            self._turn += 1

    def _is_over(self, index: int) -> bool:
        """Whether an item that is open by its objects is over all the same."""
        submission = self._batch.submission
        if submission.refusal(index) is not None:
            return True
        if submission.lasting_trouble(index) is None:
            return False
        return submission.is_damaged(index) or not self._batch.holding  # which asks further

    async def _keep_looking(self) -> None:
        """Look now and then, for what was gone from the platform before it was watched."""
        pause = FIRST_LOOK_S
        while not self._batch.finished:
            await asyncio.sleep(pause)
            pause = min(LONGEST_LOOK_S, pause * 2)
            try:
                await self._batch.look()
            except KineticError as exc:
                what = self._batch.group_id
                logging.warning("looking at %s failed: %s; trying again", what, exc)
        self._batch.wake()
