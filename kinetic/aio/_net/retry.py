"""The one retry policy: which failures to retry, how long, and what to log during an outage."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

SILENCE_LIMIT_S = 60.0
"""After this many seconds without an answer of the store, a call that waits for an item fails."""


def growing_pauses(
    first_pause_s: float, longest_pause_s: float, factor: float = 2.0, *, jitter: float = 0.0
) -> Iterator[float]:
    """Yield the pauses of a polling loop, in seconds, without end.

    The first is *first_pause_s*. Each of the others is *factor* times the one before, up to
    *longest_pause_s*. The fraction *jitter* of each pause is random.
    """
    pause = first_pause_s
    while True:
        yield pause * random.uniform(1.0 - jitter, 1.0) if jitter else pause
        pause = min(longest_pause_s, pause * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to retry, and how long to pause before a retry, in seconds.

    The pause before a retry is random, so that clients which failed at the same moment don't
    all retry at the same moment. The pause's upper bound doubles from ``first_pause_s`` up to
    ``longest_pause_s``. `retry` gives up ``total_s`` after the first failure, and warns after
    ``warn_after_s``.
    """

    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0
    total_s: float = 120.0
    warn_after_s: float = 5.0


NO_RETRIES = RetryPolicy(total_s=0.0)
"""The policy while a person waits, who can run the command again."""


class Outage:
    """Logs one warning when *subject*, a service or operation, fails, and one when it works again.

    All calls to *subject* share this object, so an outage logs one warning, not one per call.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._warned = False
        self._failing_calls = 0

    @contextlib.contextmanager
    def failing(self) -> Generator[None]:
        """Count one more call that fails, until it succeeds or gives up."""
        self._failing_calls += 1
        try:
            yield
        finally:
            self._failing_calls -= 1

    def warn(self, failure: Exception, failing_s: float) -> None:
        """Warn about *failure*, unless this outage has been reported."""
        if not self._warned:
            self._warned = True
            logging.warning("%s", self.warning_text(failure, failing_s))

    def report_success(self) -> None:
        """Report the end of the outage after a success, unless other calls still fail."""
        if self._warned and not self._failing_calls:
            self._warned = False
            logging.warning("%s", self.recovery_text())

    def warning_text(self, failure: Exception, failing_s: float) -> str:
        """Return the warning that `warn` logs."""
        return f"{self.subject} has failed for {failing_s:.0f} s: {failure}; retrying"

    def recovery_text(self) -> str:
        """Return the message that `report_success` logs."""
        return f"{self.subject} works again"


def is_retryable(failure: Exception) -> bool:
    """Return whether the adapter that raised *failure* marked it as worth a retry."""
    return bool(getattr(failure, "retryable", False))


async def retry(
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    outage: Outage,
    *,
    should_retry: Callable[[Exception], bool] = is_retryable,
    progress: Callable[[], object] | None = None,
) -> T:
    """Await ``call()`` until it succeeds; retry the failures that *should_retry* accepts.

    The time limit starts with the first failure, and again with each failure before which
    *progress* has returned a new value. If a failure has ``retry_after``, the pause in seconds that
    the server asks for, this pause replaces the random pause.

    Raises:
        Exception: The last failure, when the time limit ends or *should_retry* rejects a failure.
    """
    try:
        result = await call()
    except Exception as exc:
        if not should_retry(exc):
            raise
        first_failure = exc
    else:
        outage.report_success()
        return result
    # Importing tenacity takes 20 ms, and each use 40 µs, so the first try goes without it.
    with outage.failing():
        result = await _retry_with_tenacity(
            first_failure, call, policy, outage, should_retry, progress or (lambda: None)
        )
    outage.report_success()
    return result


async def _retry_with_tenacity(
    first_failure: Exception,
    call: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    outage: Outage,
    should_retry: Callable[[Exception], bool],
    progress: Callable[[], object],
) -> T:
    """Retry, with tenacity, a call whose first try has failed with *first_failure*."""
    from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

    random_pause = wait_random_exponential(
        multiplier=policy.first_pause_s, max=policy.longest_pause_s
    )
    # tenacity measures time by time.monotonic(), which the tests' virtual loop doesn't move.
    clock = asyncio.get_running_loop().time
    started, last_progress = clock(), progress()
    pending_failures = [first_failure]

    async def raise_or_call() -> T:
        if pending_failures:  # what tenacity takes for the first try: then it begins with a pause
            raise pending_failures.pop()
        return await call()

    def wait(state: RetryCallState) -> float:
        wait_s = getattr(_failure(state), "retry_after", None)
        if wait_s is None:
            return random_pause(state)
        return float(wait_s) + random.uniform(0, policy.first_pause_s)

    def stop(state: RetryCallState) -> bool:
        nonlocal started, last_progress
        if (current := progress()) != last_progress:
            started, last_progress = clock(), current
        return clock() + state.upcoming_sleep > started + policy.total_s

    def warn(state: RetryCallState) -> None:
        failing_s = clock() - started
        if failing_s >= policy.warn_after_s:
            outage.warn(_failure(state), failing_s)

    retrying = AsyncRetrying(
        sleep=asyncio.sleep,
        retry=retry_if_exception(lambda exc: isinstance(exc, Exception) and should_retry(exc)),
        wait=wait,
        stop=stop,
        before_sleep=warn,
        reraise=True,
    )
    result: T = await retrying(raise_or_call)
    return result


def _failure(state: RetryCallState) -> Exception:
    failure = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(failure, Exception)
    return failure


def is_final(error: BackendError) -> bool:
    """Return whether a retry of the request would fail with the same error."""
    return isinstance(error, (AuthError, ClientClosed, NotFound, Conflict, Refused, StoreFull))


def is_refusal(error: KineticError) -> bool:
    """Return whether *error* proves that the service refused the request and created nothing."""
    return not isinstance(error, BackendError) or isinstance(error, Throttled) or is_final(error)


def is_temporary(error: Exception) -> bool:
    """Return whether a retry may succeed, because the store may answer or have space later."""
    if isinstance(error, StoreFull):  # final for one request, but a user may free some space
        return True
    return isinstance(error, BackendError) and not is_final(error)


FOREVER = RetryPolicy(total_s=math.inf)


async def retry_forever(request: Callable[[], Awaitable[T]], operation: str) -> T:
    """Await ``request()`` and retry until the store answers; *operation* is its name in messages.

    Raises:
        BackendError: The store refused the request, and a retry can't change that.
    """
    return await retry(
        request,
        FOREVER,
        Outage(operation),
        should_retry=lambda exc: isinstance(exc, BackendError) and not is_final(exc),
    )


async def create_object(
    store: Store, name: str, body: bytes, metadata: Mapping[str, str] | None = None
) -> bool:
    """Create an object and retry until the store answers; return False if it existed before.

    Raises:
        BackendError: The store refused the request, and a retry can't change that.
    """
    metadata_with_nonce = {**(metadata or {}), "nonce": os.urandom(8).hex()}

    async def create_once() -> bool:
        if await store.create(name, body, metadata_with_nonce):
            return True
        # If only a reply was lost, the object has the nonce of this call.
        stored = await store.look(name)
        return stored is not None and stored.metadata.get("nonce") == metadata_with_nonce["nonce"]

    return await retry_forever(create_once, f"creating {name}")
