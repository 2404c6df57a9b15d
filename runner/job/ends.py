"""Describe how the process of an attempt ended that left no outcome."""

from __future__ import annotations

import signal
from typing import NamedTuple

from ..protocol import wire
from ..protocol.outcomes import Death
from .opening import timeout_message


class End(NamedTuple):
    """How a process ended: its status, and what its guard did to it before.

    ``status`` is an exit code, or a negative signal. ``called`` says that the user's function was
    called, so that its timeout had begun.
    """

    status: int
    stopped: bool = False
    timed_out: bool = False
    killed: bool = False
    out_of_memory: bool = False
    called: bool = True


def death_of(order: wire.Order, end: End) -> Death:
    """Return the cause and the message of an attempt whose process ended like this."""
    status = end.status
    if end.timed_out:
        message = f"{timeout_message(order, end.called)}, and did not end when asked to"
        return Death(
            message=f"the job {message}", reason="deadline", kind=wire.Kind.ERROR, exit_code=status
        )
    if end.stopped and (end.killed or status in (-signal.SIGTERM, -signal.SIGKILL)):
        message = "the job was asked to stop" + (" and did not end in time" if end.killed else "")
        return Death(message=message, reason="preempted", kind=wire.Kind.ERROR, exit_code=status)
    if end.out_of_memory:
        message = (
            "the job's process was killed, because the container, or the machine, ran out of memory"
        )
        return Death(message=message, reason="out of memory", exit_code=status)
    if status < 0:
        number = -status
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        message = f"the job's process was killed by {name}"
    else:
        message = f"the job's process exited with code {status} and left no outcome"
    return Death(message=message, reason="lost", exit_code=status)
