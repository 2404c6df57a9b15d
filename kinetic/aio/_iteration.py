"""What is open while somebody iterates over a batch: a consumer, and the display."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from kinetic.aio._consumer import Consumer
from kinetic.aio._progress import shown
from kinetic.errors import KineticError, ResultTimeout

if TYPE_CHECKING:
    from kinetic.aio._batch import Batch

__all__ = ["Iteration"]


class Iteration:
    """Gives a consumer, and the loop's time at which *timeout* is over, within ``async with``.

    It is made of no generator: a loop that ends closes all there are at once, and the iteration
    of a user, which is one, would find its inner one closed already.
    """

    def __init__(
        self,
        batch: Batch,
        wanted: bool | None,
        timeout: float | None,
        *,
        ordered: bool,
        windowed: bool,
    ) -> None:
        self._batch = batch
        self._timeout = timeout
        self._ordered = ordered
        self._windowed = windowed
        self._display = shown(batch, wanted)
        self._consumer: Consumer | None = None

    async def __aenter__(self) -> tuple[Consumer, float | None]:
        now, timeout = asyncio.get_running_loop().time(), self._timeout
        await self._display.__aenter__()
        try:
            consumer = Consumer(self._batch, ordered=self._ordered, windowed=self._windowed)
            self._consumer = await consumer.__aenter__()
        except BaseException:
            await self._display.__aexit__()
            raise
        return self._consumer, None if timeout is None else now + timeout

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._consumer is not None:
                await self._consumer.__aexit__(kind, error, trace)
        finally:
            await self._display.__aexit__()
        if self._timeout is None or not isinstance(error, TimeoutError):
            return
        if not isinstance(error, KineticError):
            raise ResultTimeout(
                f"batch {self._batch.group_id} has not ended after {self._timeout:g} s; it goes "
                "on, and its handle stays valid",
                job_id=self._batch.group_id,
            ) from None
