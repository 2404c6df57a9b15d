"""How far a batch is: as a stream of values, and on this process's display."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from absl import logging

from kinetic import _steps
from kinetic.aio._watch import Watch
from kinetic.progress import Progress

if TYPE_CHECKING:
    from kinetic._display import Entry
    from kinetic.aio._batch import Batch

__all__ = ["Shown", "progress", "shown", "title_of"]

INTERVAL_S = 0.1
BEAT_S = 1.0
"""Time alone changes the rate."""

LAST_WORD_S = 1.0
"""How long the end of the waiting waits for the last line, on a terminal that may be stopped."""


async def progress(
    batch: Batch,
    *,
    interval: float = INTERVAL_S,
    looking: bool = True,
    clock: Callable[[], float] | None = None,
) -> AsyncGenerator[Progress, None]:
    """The numbers now, and again whenever one has changed, until the batch is over.

    Values are at least *interval* seconds apart; a slow reader misses those in
    between and gets the newest. The last value is that of the end.
    """
    loop = asyncio.get_running_loop()
    async with Watch(batch, looking=looking, clock=clock) as watch:
        while not watch.over:
            watch.changed.clear()
            value = watch.value()
            rest = loop.time() + interval
            yield value
            await watch.changed.wait()
            while not watch.over and (left := rest - loop.time()) > 0:
                watch.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await watch.changed.wait()
        yield await watch.last()


class _Showing:
    """One batch on the display, however many wait for it."""

    def __init__(self, batch: Batch, entry: Entry) -> None:
        self.waiting = 0
        self._batch = batch
        self._entry = entry
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._feed(), name=f"progress of {batch.group_id}")

    async def _feed(self) -> None:
        async with Watch(self._batch) as watch:
            while not (watch.over or self._ending.is_set()):
                watch.changed.clear()
                self._entry.value = watch.value()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._ending.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await watch.changed.wait()
            last_word = watch.over and self._entry.drawn
            self._entry.value = await watch.last() if last_word else watch.value()

    async def end(self) -> None:
        """Take it off the display, and wait until its last line is there."""
        from kinetic._display import DISPLAY

        try:
            self._ending.set()
            self._batch.wake()
            await asyncio.wait({self._task}, timeout=2 * LAST_WORD_S)
        finally:
            self._task.cancel()
            drawn = asyncio.Event()
            DISPLAY.close(self._entry, _setting(drawn))
        if self._task.done() and not self._task.cancelled() and self._task.exception() is not None:
            logging.warning("progress was not counted: %s", self._task.exception())
        if self._entry.drawn:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await drawn.wait()


def _setting(event: asyncio.Event) -> Callable[[], None]:
    """What sets *event* from any thread."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(event.set)

    return tell


_SHOWN: dict[Batch, _Showing] = {}


def shown(batch: Batch, wanted: bool | None = None) -> Shown:
    """Show how far *batch* is within ``async with``; *wanted* None: if the sync face asks."""
    return Shown(batch, _steps.WANTED.get() is not None if wanted is None else wanted)


class Shown:
    """A batch that is on the display while the block runs, if it is *wanted*.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has a value that means nothing.
    """

    def __init__(self, batch: Batch, wanted: bool) -> None:
        self._batch = batch
        self._wanted = wanted
        self._showing: _Showing | None = None

    async def __aenter__(self) -> None:
        self._showing = _put_up(self._batch) if self._wanted else None
        if self._showing is not None:
            self._showing.waiting += 1

    async def __aexit__(self, *exc_info: object) -> None:
        showing = self._showing
        if showing is None:
            return
        showing.waiting -= 1
        if not showing.waiting:
            _SHOWN.pop(self._batch, None)
            await showing.end()


def _put_up(batch: Batch) -> _Showing | None:
    if (there := _SHOWN.get(batch)) is not None:
        return there
    from kinetic._display import DISPLAY

    entry = DISPLAY.open(title_of(batch))
    if entry is None:
        return None
    showing = _SHOWN[batch] = _Showing(batch, entry)
    return showing


def title_of(batch: Batch) -> str:
    """What a person calls it: its name, or that of its function."""
    manifest = batch.manifest
    named = manifest.get("name") or manifest.get("record", {}).get("func_name")
    return str(named or batch.group_id)
