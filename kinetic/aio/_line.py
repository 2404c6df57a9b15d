"""What is to be done by any of several workers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Line"]

T = TypeVar("T")


class Line(Generic[T]):
    """First come, first served; of the workers that wait, one is woken for a whole burst.

    It wakes the next as it takes something, which comes to its turn when this
    one has to wait itself. A queue that wakes one for each thing costs several
    times as much when nothing has to be waited for. None is no thing.
    """

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._called: asyncio.Future[None] | None = None

    def put(self, thing: T) -> None:
        """Add one at the end."""
        self._things.append(thing)
        self._call()

    def take(self) -> T | None:
        """The first, if there is one now."""
        if not self._things:
            return None
        thing = self._things.popleft()
        self._call()
        return thing

    async def get(self) -> T:
        """Take the first, as soon as there is one."""
        while (thing := self.take()) is None:
            call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(call)
            try:
                await call
            except asyncio.CancelledError:
                if call is self._called:
                    self._called = None
                    self._call()
                raise
            self._called = None
        return thing

    def _call(self) -> None:
        while self._things and self._idle and self._called is None:
            call = self._idle.popleft()
            if not call.done():
                self._called = call
                call.set_result(None)
