"""Pause a batch while the platform refuses jobs for a cause that can pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from kinetic import configuration
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.errors import KineticError

T = TypeVar("T")


class Pause(Outage):
    """Warn once that *subject* is paused, and why; log once that it continues."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.patience_s = configuration.number("KINETIC_SUBMIT_PATIENCE", 900.0)
        self.policy = RetryPolicy(
            first_pause_s=0.5, longest_pause_s=10.0, total_s=self.patience_s, warn_after_s=0.0
        )

    def warning_text(self, failure: Exception, failing_s: float) -> str:
        """Return the warning: the refusal and its remedy."""
        return (
            f"{self.subject} is paused: kinetic retries for at most {self.patience_s:g} s "
            f"(KINETIC_SUBMIT_PATIENCE). {failure}"
        )

    def recovery_text(self) -> str:
        """Return the message for the end of the pause."""
        return f"{self.subject} continues"


async def retry_while_refused(
    call: Callable[[], Awaitable[T]],
    pause: Pause,
    *,
    may_wait: Callable[[], bool],
    progress: Callable[[], int] | None = None,
) -> T:
    """Await ``call()``; retry while the platform refuses it temporarily and ``may_wait()`` is true.

    The time limit starts again whenever ``progress()`` has grown.
    """

    def is_retryable(failure: Exception) -> bool:
        return isinstance(failure, KineticError) and failure.passing and may_wait()

    return await retry(call, pause.policy, pause, should_retry=is_retryable, progress=progress)
