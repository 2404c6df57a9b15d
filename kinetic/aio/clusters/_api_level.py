"""How many requests at a time an API server is given: as many as it takes without complaint.

The number grows while all of it is in use and nothing is refused, and halves
when the server says that there are too many, as TCP does with its window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from absl import logging

__all__ = ["Level", "Turn"]

FIRST, MOST = 16, 256
SLOW_S = 5.0
"""Whoever has waited longer than this for a turn was held up by the limit: it is told."""
TELL_S = 60.0


class Turn:
    """One request under way; ``refused`` says that the server had too many."""

    __slots__ = ("age", "refused")

    def __init__(self, age: int) -> None:
        self.age = age
        self.refused = False


class Level:
    """The limit of one server, on one event loop.

    Turns are given in the order they are asked for, but those who ask *again*
    go first: else their patience would end while they wait. *cluster* is the
    server's name for the log.
    """

    def __init__(self, cluster: str, *, first: int = FIRST, most: int = MOST) -> None:
        self._cluster = cluster
        self._most = most
        self._level = float(min(first, most))
        self._rushing = True
        self._age = 0
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._told: float | None = None

    @property
    def now(self) -> int:
        """How many requests may be under way at a time."""
        return int(self._level)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, *, again: bool = False) -> AsyncGenerator[Turn]:
        """Wait for one's turn, and have it while the block runs."""
        await self._wait(again)
        turn, full = Turn(self._age), self._busy >= self.now
        worked = False
        try:
            yield turn
            worked = True
        finally:
            self._busy -= 1
            if turn.refused:
                self._halve(turn)
            elif worked and full:
                self._grow()
            self._admit()

    async def _wait(self, again: bool) -> None:
        if self._busy < self.now and not self._waiting:
            self._busy += 1
            return
        loop = asyncio.get_running_loop()
        asked, mine = loop.time(), loop.create_future()
        if again:
            self._waiting.appendleft(mine)
        else:
            self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._busy -= 1  # it was our turn already: it is the next one's
                self._admit()
            elif mine in self._waiting:  # else it was passed over since
                self._waiting.remove(mine)
            raise
        self._tell(loop.time(), loop.time() - asked)

    def _admit(self) -> None:
        while self._waiting and self._busy < self.now:
            one = self._waiting.popleft()
            if not one.done():
                self._busy += 1
                one.set_result(None)

    def _grow(self) -> None:
        step = 1.0 if self._rushing else 1.0 / self._level
        self._level = min(float(self._most), self._level + step)

    def _halve(self, turn: Turn) -> None:
        """Once for all that were under way together: they say the same."""
        if turn.age == self._age:
            self._age += 1
            self._rushing = False
            self._level = max(1.0, self._level / 2)

    def _tell(self, now: float, waited: float) -> None:
        if waited < SLOW_S or (self._told is not None and now - self._told < TELL_S):
            return
        self._told = now
        why = "it refuses more" if not self._rushing else "this client sends no more"
        logging.info(
            "the API server of %s is the limit now: %d requests at a time (%s), %d wait",
            self._cluster,
            self.now,
            why,
            self.waiting,
        )
