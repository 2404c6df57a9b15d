"""When may an attempt without an outcome be closed, and as what? A pure decision.

Only evidence closes: the platform says that the very process named in the
claim has ended or is gone. Another process's end proves nothing.
"""

from __future__ import annotations

import signal

from kinetic._runner import wire
from kinetic._runner.results import Death
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import Reason

__all__ = ["closing"]


def closing(attempt: wire.Attempt, seen: Observation | None) -> Death | None:
    """What the evidence allows to be said of it, or None when it allows nothing.

    *seen* None says that a consistent read found nothing under the attempt's
    name: neither the job nor any process of it.
    """
    if attempt.outcome is not None:
        return None
    if attempt.executor != wire.VOID and seen is not None:
        if seen.phase not in (Phase.ENDED, Phase.GONE):
            return None
        if attempt.executor is not None and seen.executor not in ("", attempt.executor):
            return None  # a duplicate's end says nothing about the claimant
    reason = seen.reason if seen is not None and seen.reason is not None else Reason.LOST
    return Death(
        message=_message(seen, started=attempt.executor not in (None, wire.VOID)),
        reason=reason.value,
        kind=wire.Kind.CANCELLED if reason is Reason.CANCELLED else wire.Kind.LOST,
        exit_code=seen.exit_code if seen is not None else None,
    )


def _message(seen: Observation | None, *, started: bool) -> str:
    how = "its process" if started else "it never started, and its job"
    if seen is None or seen.phase is Phase.GONE:
        return (seen.message if seen is not None else "") or f"{how} is gone from the platform"
    if seen.message:
        return seen.message
    code = seen.exit_code
    if code is None:
        return f"{how} ended"
    killed = -code if code < 0 else code - 128 if code > 128 else 0
    name = signal.Signals(killed).name if killed in signal.valid_signals() else ""
    return f"{how} was killed by {name}" if name else f"{how} ended with exit code {code}"
