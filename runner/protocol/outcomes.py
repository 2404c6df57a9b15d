"""The outcome of an attempt: a value, or an error as text.

The body of an outcome is one `frames` container. The text of an error is in the container's
fields, outside any pickle. So a client can read the text even if it can't rebuild the exception.
"""

from __future__ import annotations

import hashlib
import pickle
import signal
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import failures, frames, notes, pickles, wire
from .retry_budgets import SUBMISSION
from .spool import Spool, Spooled

TEXT_LIMIT = 64 * 1024
REPR_LIMIT = 20_000
PLAIN_CHARACTERS = 4096

LAST_LINES = "\nLast lines of the job's log:\n"
"""What comes before the end of the log in the message of a lost job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """An exception as text; ``qualname`` begins with its module.

    ``log`` has the last lines of the job's log, if the platform doesn't keep the log. ``withheld``
    says why the exception itself is missing.
    """

    qualname: str
    message: str
    traceback: str
    phase: str = "execute"
    result_repr: str = ""
    log: str = ""
    withheld: str = ""

    @property
    def note(self) -> notes.Note:
        """The note for the outcome's header; see `notes`."""
        return notes.note_of_error(self.qualname if self.phase == "execute" else "", self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of an attempt whose process died before it stored an outcome, or never started."""

    reason: str
    message: str
    kind: wire.Kind = wire.Kind.LOST
    exit_code: int | None = None
    phase: str = "lost"
    qualname: str = ""
    traceback: str = ""


def death_of_input(message: str) -> Death:
    """Return the end of an item whose input the submitter couldn't encode."""
    return Death(
        kind=wire.Kind.ERROR,
        reason=SUBMISSION,
        message=message,
        phase="submission",
        qualname="SubmissionError",
    )


def outcome_of_death(
    death: Death, item: wire.Item, executor: str, log: str = ""
) -> tuple[wire.Outcome, bytes]:
    """Build the outcome that another process writes for a dead attempt, and its body.

    *executor* is the process that claimed the attempt. Read *item* after that claim: if the item
    was stopped by then, the attempt counts as cancelled, whatever ended its process. *log* has the
    last lines of the attempt's output.
    """
    content, note = b"", None
    if not item.stopped:
        text = ErrorText(
            qualname=death.qualname,
            message=death.message,
            traceback=death.traceback,
            phase=death.phase,
            log=log,
        )
        note = text.note
        message = death.message + (f"{LAST_LINES}{log}" if log else "")
        content = frames.pack([], {"error": fields_of(replace(text, message=message))})
    outcome = wire.Outcome(
        kind=wire.Kind.CANCELLED if item.stopped else death.kind,
        reason="cancelled" if item.stopped else death.reason,
        executor=executor,
        phase="cancelled" if item.stopped else death.phase,
        exit_code=death.exit_code,
        ended=time.time(),
        body=digest(content),
        note=note,
    )
    return outcome, content


class End(NamedTuple):
    """How a process ended: its status, and what its guard did to it before.

    ``status`` is an exit code, or a negative signal. ``called`` says that the user's function was
    called, so that its timeout had begun. ``in_init`` says that a function of ``init`` ran.
    """

    status: int
    stopped: bool = False
    timed_out: bool = False
    killed: bool = False
    out_of_memory: bool = False
    called: bool = False
    in_init: bool = False


def death_of(order: wire.Order, end: End) -> Death:
    """Return the cause and the message of an attempt whose process ended like this."""
    status, kind = end.status, wire.Kind.LOST
    step = "init= failed: " if end.in_init else ""
    if end.timed_out:
        reason, kind = "deadline", wire.Kind.ERROR
        limit = timeout_message(order, end.called)
        message = f"the job {limit}, and did not end when asked to"
    elif end.stopped and (end.killed or status in (-signal.SIGTERM, -signal.SIGKILL)):
        reason, kind = "preempted", wire.Kind.ERROR
        message = "the job was asked to stop" + (" and did not end in time" if end.killed else "")
    elif end.out_of_memory:
        reason = "out of memory"
        cause = "because the container, or the machine, ran out of memory"
        message = f"{step}its process was killed, {cause}"
    else:
        reason, message = "lost", f"{step}{wire.exit_text(status)}"
    phase = "init" if end.in_init else "lost"
    return Death(reason=reason, message=message, kind=kind, exit_code=status, phase=phase)


def timeout_message(order: wire.Order, called: bool) -> str:
    """Return the message about a job that ran out of time before or after its function's call."""
    if called:
        return f"ran longer than its timeout of {order.timeout:g} s"
    limit = wire.start_allowance(order.debug_s) + (order.timeout or 0.0)
    return f"had not called its function after {limit:g} s: its start takes too long"


def is_plain(value: Any) -> bool:
    """Return whether *value* is small and of a plain type, so that `pickle` alone suffices."""
    kind: Any = value.__class__
    if kind is str:
        return len(value) < PLAIN_CHARACTERS
    return value is None or kind in (bool, float) or (kind is int and value.bit_length() < 64)


def digest(content: bytes) -> str:
    """Return the SHA-256 of *content* as hex."""
    return hashlib.sha256(content).hexdigest()


def encode_value(value: Any, spool: str | Path, limit: int = wire.INLINE_BYTES) -> Spooled:
    """Pickle a result; write a pickle of more than *limit* bytes to the file *spool*.

    Raises:
        Exception: Pickling the value failed.
    """
    if is_plain(value):
        content = frames.pack([pickle.dumps(value, protocol=5)])
        return Spooled(content, "", len(content))  # who stores it computes the digest
    sink = Spool(lambda: spool, limit)
    try:
        pickles.dump(value, sink)
        return sink.finish()
    except BaseException:
        sink.discard()
        raise


def encode_error(text: ErrorText, error: BaseException | None) -> Spooled:
    """Encode an error as text, with the exception itself or the reason why it's missing."""
    parts: list[bytes] = []
    if error is not None:
        try:
            parts.append(failures.dumps(error, wire.INLINE_BYTES))
        except Exception as exc:  # the class may raise anything; then send the text alone
            text = replace(text, withheld=_clip(f"{type(exc).__name__}: {_message_of(exc)}", 1000))
    body = frames.pack(parts, {"error": fields_of(text)})
    return Spooled(body, digest(body), len(body))


def fields_of(text: ErrorText) -> dict[str, str]:
    """Return an error as the text fields of an outcome's body."""
    return {name: getattr(text, name) for name in ErrorText.__slots__}


def error_text(error: BaseException, *, phase: str, own_frames: int = 0) -> ErrorText:
    """Describe an exception as text, without the runner's *own_frames* outermost frames."""
    trace = error.__traceback__
    for _ in range(own_frames):
        trace = trace.tb_next if trace is not None else None
    kind = type(error)
    qualname = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        qualname = f"{kind.__module__}.{qualname}"
    message = _clip(_message_of(error), TEXT_LIMIT)
    try:
        lines = [*traceback.TracebackException(kind, error, trace, compact=True).format()]
    except Exception:  # the class is the user's; or a SyntaxError has a line number that is text
        lines = [*traceback.format_tb(trace), f"{qualname}: {message}\n"]
    return ErrorText(
        qualname=qualname, message=message, traceback=_clip("".join(lines), TEXT_LIMIT), phase=phase
    )


def stop_text(
    stopped: BaseException, message: str, *, phase: str, own_frames: int = 0
) -> ErrorText:
    """Describe where a signal stopped a job, in the user's frames alone.

    Leave out of the traceback the runner's *own_frames* outermost frames, and the innermost frame,
    which raised *stopped* when the signal came.
    """
    stack = traceback.StackSummary.from_list(
        traceback.extract_tb(stopped.__traceback__)[own_frames:-1]
    )
    lines = ["Traceback (most recent call last):\n", *stack.format(), f"Stopped: {message}"]
    text = "".join(lines) if stack else ""
    return ErrorText(qualname="", message=message, traceback=_clip(text, TEXT_LIMIT), phase=phase)


def result_repr(value: Any) -> str:
    """Return the repr of a value that could not be pickled, at most 20,000 characters."""
    try:
        return _clip(repr(value), REPR_LIMIT)
    except Exception as exc:
        return f"<{type(value).__qualname__} whose repr raised {type(exc).__name__}>"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as exc:
        return f"<its message raised {type(exc).__name__}>"


def _clip(text: str, limit: int) -> str:
    # UTF-8 has no lone surrogates
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= limit else f"… {len(text) - limit} characters …\n{text[-limit:]}"
