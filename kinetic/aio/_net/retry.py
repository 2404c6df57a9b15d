"""Ask a server again that does not answer now: for how long, how often, and what a user is told."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from absl import logging

from kinetic.aio.ports import Store
from kinetic.errors import (
    AuthError,
    BackendError,
    ClientClosed,
    Conflict,
    KineticError,
    NotFound,
    Refused,
    StoreFull,
    Throttled,
)

T = TypeVar("T")

PATIENCE_S = 60.0
"""Who waits for an item is told when nobody has answered for so long."""


def growing(
    first_s: float, longest_s: float, factor: float = 2.0, *, jitter: float = 0.0
) -> Iterator[float]:
    """Pauses in seconds without end, each *factor* times the one before, up to *longest_s*.

    Of each, the part *jitter* is random.
    """
    pause = first_s
    while True:
        yield pause * random.uniform(1.0 - jitter, 1.0) if jitter else pause
        pause = min(longest_s, pause * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Seconds: the bounds of one pause, how long to go on failing, when a user is told of it."""

    first_s: float = 0.1
    longest_s: float = 10.0
    total_s: float = 120.0
    quiet_s: float = 5.0

    def pauses(self) -> Iterator[float]:
        """Growing, and half of each random, so that those who failed together come apart."""
        return growing(self.first_s, self.longest_s, jitter=0.5)


class Outage:
    """Tells a user that *what* fails: after a while, once for all who ask it, and when it works."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._told = False
        self._failing = 0

    def begin(self) -> None:
        """One more call has failed."""
        self._failing += 1

    def tell(self, failure: Exception, failing_s: float) -> None:
        """Log *failure*, if it is the first to be told."""
        if not self._told:
            self._told = True
            logging.warning("%s", self.failing(failure, failing_s))

    def end(self) -> None:
        """A call that had failed is over, one way or the other."""
        self._failing -= 1

    def works(self) -> None:
        """A call has succeeded; others may be failing still."""
        if self._told and not self._failing:
            self._told = False
            logging.warning("%s", self.over())

    def failing(self, failure: Exception, failing_s: float) -> str:
        """What `tell` says."""
        return f"{self.what} has failed for {failing_s:.0f} s: {failure}; trying again"

    def over(self) -> str:
        """What `works` says."""
        return f"{self.what} works again"


def is_retryable(failure: Exception) -> bool:
    """Whether the adapter that saw the answer says that the same request may work later."""
    return bool(getattr(failure, "retryable", False))


async def retry(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    outage: Outage,
    *,
    is_passing: Callable[[Exception], bool] = is_retryable,
    progress: Callable[[], int] | None = None,
) -> T:
    """Await ``call()`` until it succeeds, fails for good, or patience ends; then its last failure.

    Patience begins with the first failure, and afresh whenever *progress*,
    which counts what is done already, has grown. A failure's ``retry_after``,
    the server's own wish in seconds, goes before the pauses of *policy*.
    """
    clock = asyncio.get_running_loop().time
    since, reached, pauses = None, 0, policy.pauses()
    try:
        while True:
            try:
                result = await call()
                break
            except Exception as exc:
                if not is_passing(exc):
                    raise
                now, done = clock(), progress() if progress else 0
                if since is None:
                    outage.begin()
                if since is None or done > reached:
                    since, reached, pauses = now, done, policy.pauses()
                pause, wish = next(pauses), getattr(exc, "retry_after", None)
                if wish is not None:
                    pause = wish + random.uniform(0, policy.first_s)
                if now + pause > since + policy.total_s:
                    raise
                if now - since >= policy.quiet_s:
                    outage.tell(exc, now - since)
            await asyncio.sleep(pause)
    finally:
        if since is not None:
            outage.end()
    outage.works()
    return result


def is_definite(error: BackendError) -> bool:
    """Whether asking again would bring the same answer."""
    return isinstance(error, (AuthError, ClientClosed, NotFound, Conflict, Refused, StoreFull))


def is_answer(error: KineticError) -> bool:
    """Whether what was asked for was refused for certain, so that nothing was made."""
    return not isinstance(error, BackendError) or isinstance(error, Throttled) or is_definite(error)


def is_passing(error: Exception) -> bool:
    """Whether who only looks should ask again: there may be an answer soon, or room."""
    if isinstance(error, StoreFull):
        return True
    return isinstance(error, BackendError) and not is_definite(error)


FOREVER = RetryPolicy(total_s=math.inf)


async def retry_forever(ask: Callable[[], Awaitable[T]], what: str) -> T:
    """Await ``ask()`` until it answers; *what* is for the log.

    Raises:
        BackendError: The answer is definite.
    """

    def passes(failure: Exception) -> bool:
        return isinstance(failure, BackendError) and not is_definite(failure)

    return await retry(ask, FOREVER, Outage(what), is_passing=passes)


async def create(
    store: Store, name: str, body: bytes, metadata: Mapping[str, str] | None = None
) -> bool:
    """Create an object, asking until the store answers; False when somebody else has it.

    A nonce tells what an earlier try has made, whose reply was lost, from
    what others have.

    Raises:
        BackendError: The answer is definite.
    """
    marked = {**(metadata or {}), "nonce": os.urandom(8).hex()}

    async def ask() -> bool:
        if await store.create(name, body, marked):
            return True
        there = [one for one in await store.list(name) if one.name == name]
        return bool(there) and there[0].metadata.get("nonce") == marked["nonce"]

    return await retry_forever(ask, f"creating {name}")
