"""How long a request is tried again, and how long it waits in between.

The rules are those Cloud Storage asks of its clients: only what may pass is
tried again, the wait doubles and is random, and the server's own wish counts
more. What has made progress starts afresh: a transfer that is cut every minute
comes to its end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity
from absl import logging

from kinetic.aio.stores._gcs_errors import Refusal, is_damage, is_passing

__all__ = ["Patience", "persist"]

T = TypeVar("T")

DAMAGED_TRIES = 3
QUIET_S = 5.0
"""Failing for longer than this is told to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: how long to go on without progress, and the bounds of one random wait."""

    total_s: float = 120.0
    first_s: float = 0.2
    longest_s: float = 10.0


class _Trying:
    """One piece of work under way: since when it fails, and how often it has."""

    def __init__(self, patience: Patience, progress: Callable[[], int] | None, what: str) -> None:
        self._patience = patience
        self._progress = progress
        self._what = what
        self._reached = progress() if progress else 0
        self._since: float | None = None
        self._failures = 0
        self._damaged = 0
        self._told = False

    def retries(self, failure: BaseException) -> bool:
        if is_damage(failure):
            self._damaged += 1
            return self._damaged < DAMAGED_TRIES
        return is_passing(failure)

    def wait(self, state: tenacity.RetryCallState) -> float:
        now = asyncio.get_running_loop().time()
        if self._progress and (reached := self._progress()) > self._reached:
            self._reached, self._failures, self._since = reached, 0, None
        if self._since is None:
            self._since = now
        self._failures += 1
        ceiling = self._patience.first_s * 2 ** min(self._failures - 1, 30)
        jittered = random.uniform(0, min(self._patience.longest_s, ceiling))
        wished = getattr(_failure(state), "wait_s", None)
        return jittered if wished is None else wished + random.uniform(0, self._patience.first_s)

    def stop(self, state: tenacity.RetryCallState) -> bool:
        now = asyncio.get_running_loop().time()
        since = now if self._since is None else self._since
        return now + state.upcoming_sleep - since > self._patience.total_s

    def tell(self, state: tenacity.RetryCallState) -> None:
        failure, failing = _failure(state), 0.0
        if self._since is not None:
            failing = asyncio.get_running_loop().time() - self._since
        if failing > QUIET_S and not self._told:
            self._told = True
            why = f"it answers {failure.status}" if isinstance(failure, Refusal) else failure
            logging.warning(
                "Cloud Storage fails at %s for %.0f s now (%s); trying on for up to %.0f s",
                self._what,
                failing,
                why,
                self._patience.total_s - failing,
            )


def _failure(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


async def persist(
    work: Callable[[], Awaitable[T]],
    patience: Patience,
    *,
    what: str,
    progress: Callable[[], int] | None = None,
) -> T:
    """Do *work* until it succeeds, fails for good, or patience ends; then its last failure.

    *progress* counts what is done already; as long as it grows, patience does not end.
    """
    trying = _Trying(patience, progress, what)
    try:
        return await work()
    except Exception as exc:
        if not (is_passing(exc) or is_damage(exc)):
            raise
        failed: Exception | None = exc

    async def again() -> T:
        """The first time it is what has failed already: most requests never come here."""
        nonlocal failed
        if failed is not None:
            failure, failed = failed, None
            raise failure
        return await work()

    retrying = tenacity.AsyncRetrying(
        sleep=asyncio.sleep,
        retry=tenacity.retry_if_exception(trying.retries),
        wait=trying.wait,
        stop=trying.stop,
        before_sleep=trying.tell,
        reraise=True,
    )
    return await retrying(again)
