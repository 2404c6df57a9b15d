"""When may an attempt without an outcome be closed, and as what? Pure decisions.

Only evidence closes: the platform says that the very process named in the
claim has ended or is gone. Another process's end proves nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from kinetic._runner import frames, wire
from kinetic._runner.results import ErrorText
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import Reason

__all__ = ["Closing", "body_of", "closing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """How to close it; ``void_first`` when nobody has claimed it yet."""

    kind: wire.Kind
    executor: str
    reason: str
    message: str
    exit_code: int | None = None
    void_first: bool = False


def closing(attempt: wire.Attempt, seen: Observation | None) -> Closing | None:
    """What the evidence allows, or None when it allows nothing.

    *seen* None says that a consistent read found nothing under the attempt's
    name: neither the job nor any process of it.
    """
    if attempt.outcome is not None:
        return None
    if attempt.executor == wire.VOID:
        return _lost(wire.VOID, seen, void_first=False)
    if seen is not None and seen.phase not in (Phase.ENDED, Phase.GONE):
        return None
    if attempt.executor is None:
        return _lost(wire.VOID, seen, void_first=True)
    if seen is not None and seen.executor not in ("", attempt.executor):
        return None  # a duplicate's end says nothing about the claimant
    return _lost(attempt.executor, seen, void_first=False)


def _lost(executor: str, seen: Observation | None, *, void_first: bool) -> Closing:
    reason = seen.reason if seen is not None and seen.reason is not None else Reason.LOST
    return Closing(
        kind=wire.Kind.CANCELLED if reason is Reason.CANCELLED else wire.Kind.LOST,
        executor=executor,
        reason=reason.value,
        message=_message(seen, started=executor != wire.VOID),
        exit_code=seen.exit_code if seen is not None else None,
        void_first=void_first,
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


def body_of(closing: Closing, log_tail: str) -> bytes:
    """The body of the outcome: what happened, in words, with the log's last lines."""
    words = closing.message + (f"\nLast lines of its log:\n{log_tail}" if log_tail else "")
    text = ErrorText(qualname="", message=words, traceback="", phase="lost")
    fields = {name: getattr(text, name) for name in ErrorText.__slots__}
    return frames.pack([], {"error": fields})
