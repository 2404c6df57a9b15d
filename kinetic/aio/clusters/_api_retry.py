"""How long one request to a server is tried again, and how long it waits in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from absl import logging

from kinetic.aio.clusters._api_answers import Refusal, is_forbidden, is_passing
from kinetic.errors import BackendError, Unavailable

__all__ = ["News", "Patience", "Trying", "persist"]

T = TypeVar("T")

TELL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: how long to go on failing, the bounds of one wait, when a user is told.

    ``rights_s`` is how long a right that there was may be missing: a server
    that has just been started again knows nobody's for a moment.
    """

    total_s: float = 120.0
    rights_s: float = 15.0
    first_s: float = 0.1
    longest_s: float = 10.0
    quiet_s: float = 5.0


class Trying:
    """One request that has failed: since when, and how often."""

    def __init__(
        self,
        patience: Patience,
        now: float,
        chance: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._patience = patience
        self._chance = chance
        self._since = now
        self._missing_since: float | None = None
        self._failures = 0

    def pause(
        self, now: float, wish_s: float | None = None, *, missing_right: bool = False
    ) -> float | None:
        """Seconds until the next try; None when patience ends. The server's own wish goes first."""
        if missing_right != (self._missing_since is not None):
            self._missing_since = now if missing_right else None
            self._failures = 0  # another trouble than before, which may be short
        ceiling = self._patience.first_s * 2 ** min(self._failures, 30)
        self._failures += 1
        pause = self._chance(0, min(self._patience.longest_s, ceiling))
        if wish_s is not None:
            pause = wish_s + self._chance(0, self._patience.first_s)
        if self._missing_since is not None:
            end = self._missing_since + self._patience.rights_s
        else:
            end = self._since + self._patience.total_s
        return None if now + pause > end else pause

    def failing_s(self, now: float) -> float:
        """For how long it has failed."""
        return now - self._since


class News:
    """When a user is told that a server fails: after a while, and not for each request."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._told: float | None = None

    def tell(self, failure: BackendError, failing_s: float, now: float) -> None:
        """Log *failure* if that is due."""
        if failing_s <= self._patience.quiet_s:
            return
        if self._told is None or now - self._told >= TELL_S:
            self._told = now
            logging.warning("%s (failing for %.0f s now; trying on)", failure, failing_s)


async def persist(
    work: Callable[[], Awaitable[T]],
    patience: Patience,
    explain: Callable[[Refusal], BackendError],
    news: News,
    had_right: Callable[[], bool] = bool,
) -> T:
    """Do *work* until it succeeds, fails for good, or patience ends; then its last failure.

    *had_right* says whether the right it takes was there before.
    """
    trying: Trying | None = None
    while True:
        try:
            return await work()
        except Refusal as refusal:
            failure = explain(refusal)
            missing = is_forbidden(refusal.answer) and had_right()
            if not (missing or is_passing(refusal.answer)):
                raise failure from None
            wish = refusal.answer.wait_s
        except Unavailable as exc:
            failure, wish, missing = exc, exc.retry_after, False
        now = asyncio.get_running_loop().time()
        trying = trying or Trying(patience, now)
        pause = trying.pause(now, wish, missing_right=missing)
        if pause is None:
            raise failure
        news.tell(failure, trying.failing_s(now), now)
        await asyncio.sleep(pause)
