"""What an attempt in a pod does besides: earlier pods' ends, the receipt, a silent death."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import receipts, wire
from .attempt import Attempt
from .objects import Objects
from .opening import Opening
from .pod_guard import Ended
from .results import Death, closed

__all__ = [
    "PodAttempt",
    "Restarts",
    "close_dead",
    "close_earlier",
    "close_restarted",
    "code_of",
    "death_of",
    "oom_kills",
]

OOM_EVENTS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
)
"""Where the kernel counts them: control groups of version 2, and of version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often Kubernetes has started the job anew, and where a receipt goes."""

    failures: int = 0
    disruptions: int = 0
    receipt: str = ""

    @property
    def total(self) -> int:
        """The number of pods before this one."""
        return self.failures + self.disruptions


class PodAttempt(Attempt):
    """An attempt whose exit code says what becomes of its item, by all attempts there were."""

    receipt = ""

    def beside(self, done: str) -> int:
        """The part of a host that does not lead: it creates *done*, or commits what went wrong."""
        outcome, body = self._invoke()
        if outcome.kind is wire.Kind.VALUE:
            self._objects.create(done, b"")
            return wire.EXIT_VALUE
        if self._stopping.requested and self._was_stopped():
            outcome = self._cancelled("cancelled")
        return self._commit(outcome, body)

    def _code(
        self, outcome: wire.Outcome, metadata: Mapping[str, str] | None, content: bytes
    ) -> int:
        return _leave_with(self._opening, self._order, outcome, metadata, content, self.receipt)


def _leave_with(
    opening: Opening,
    order: wire.Assignment,
    outcome: wire.Outcome,
    metadata: Mapping[str, str] | None,
    content: bytes,
    receipt: str,
) -> int:
    """Write the receipt of what was committed, and say what to leave with."""
    if metadata is not None:
        _write_receipt(order, metadata, content, receipt)
        if outcome.kind is wire.Kind.VALUE:
            return wire.EXIT_VALUE
        if outcome.kind is wire.Kind.CANCELLED:
            return wire.EXIT_FINAL
    return code_of(opening)


def code_of(opening: Opening) -> int:
    """What to leave with, by what the objects say of the item."""
    try:
        item = opening.item()
    except (OSError, ValueError) as exc:
        print(f"kinetic: what is left of the item's tries cannot be read: {exc}", file=sys.stderr)
        return wire.EXIT_RETRY
    if item.state is wire.ItemState.SUCCEEDED:
        return wire.EXIT_VALUE
    return wire.EXIT_RETRY if item.state is wire.ItemState.OPEN else wire.EXIT_FINAL


def _write_receipt(
    order: wire.Assignment, metadata: Mapping[str, str], content: bytes, path: str
) -> None:
    if not path:
        return
    receipt = receipts.Receipt(
        index=order.index, attempt=order.attempt, metadata=metadata, body=content
    )
    with contextlib.suppress(OSError):  # it is a copy that only saves time
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(receipt.to_text().encode())


# --- earlier pods -------------------------------------------------------------------------


def close_earlier(
    order: wire.Assignment, key: bytes, first: int, restarts: Restarts, objects: Objects
) -> None:
    """Close the attempts from *first* to the one before that of *order* that are still open.

    That their successor runs is the evidence that their pods have ended: a
    controller replaces a pod when it has. Of a disruption no pod can tell
    afterwards, but the controller's count does.

    Raises:
        OSError: The store does not do it.
    """
    if first >= order.attempt:
        return
    names = wire.attempt_keys(order.scope, order.index, order.attempt)
    entries = [(one.name, one.metadata) for one in objects.look_up(names)]
    known = wire.attempts_of(entries, key, order.scope).get(order.index, {})
    told = [known[n].outcome for n in range(first, order.attempt) if n in known]
    disrupted = sum(1 for one in told if one is not None and one.reason in wire.INFRASTRUCTURE)
    for number in range(first, order.attempt):
        there = known.get(number, wire.Attempt())
        if there.outcome is not None:
            continue
        preempted = disrupted < restarts.disruptions
        disrupted += preempted
        how = "its node was taken away, or it had to make way" if preempted else "its pod ended"
        words = f"the job ended without an outcome: {how}; Kubernetes started it again"
        death = Death(message=words, reason="preempted" if preempted else "lost")
        _close(order, key, number, there.executor, death, objects)


def _close(
    order: wire.Assignment,
    key: bytes,
    number: int,
    executor: str | None,
    death: Death,
    objects: Objects,
    log: str = "",
) -> tuple[wire.Outcome, Mapping[str, str] | None, bytes]:
    """Close attempt *number*; without metadata when it had its outcome already."""
    place = (order.scope, order.index, number)
    if executor is None:
        claim = {"executor": wire.VOID, "fence": str(order.fence)}
        name = wire.attempt_key(*place, "claim")
        if objects.create(name, b"", claim):
            executor = wire.VOID
        else:
            executor = objects.stat(name).metadata.get("executor", "")
    # After the claim was seen: a stop counts from here on.
    item = Opening(order, key, executor, objects).item()
    outcome, content = closed(death, item, executor, order.fence, log)
    metadata = outcome.signed(key, *place)
    created = objects.create(wire.attempt_key(*place, "outcome"), content, metadata)
    return outcome, metadata if created else None, content


def close_restarted(
    order: wire.Assignment, key: bytes, executor: str, who: str, objects: Objects
) -> int:
    """Close the own attempt, which *executor* had begun before *who* was started again."""
    words = f"{who} ended without an outcome, and was started again; nothing runs twice"
    death = Death(message=words, reason="lost")
    _close(order, key, order.attempt, executor, death, objects)
    return code_of(Opening(order, key, executor, objects))


# --- a death without a word ---------------------------------------------------------------


def death_of(ended: Ended, order: wire.Assignment, *, memory: bool) -> Death:
    """What is to be said of a process that *ended* so; *memory* says that it ran out of that."""
    status = ended.status
    if ended.killed and ended.out_of_time:
        words = f"ran longer than its timeout of {order.timeout:g} s, and did not end when asked to"
        return Death(
            message=f"the job {words}", reason="deadline", kind=wire.Kind.ERROR, exit_code=status
        )
    if ended.stopped and (ended.killed or status in (-signal.SIGTERM, -signal.SIGKILL)):
        words = "the job was asked to stop" + (", and did not end in time" if ended.killed else "")
        return Death(message=words, reason="preempted", kind=wire.Kind.ERROR, exit_code=status)
    if memory:
        words = "the job's process was killed: it took more memory than its pod may have"
        return Death(message=words, reason="out of memory", exit_code=status)
    if status < 0:
        number = -status
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        words = f"the job's process was killed by {name}"
    else:
        words = f"the job's process ended by itself with exit code {status}, without an outcome"
    return Death(message=words, reason="lost", exit_code=status)


def oom_kills(places: Sequence[str] = OOM_EVENTS) -> int:
    """How many processes of this container were killed for memory so far; 0 where unknown."""
    for place in places:
        with contextlib.suppress(OSError, ValueError), open(place) as file:
            for line in file:
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def close_dead(
    order: wire.Assignment,
    key: bytes,
    executor: str,
    death: Death,
    log: str,
    receipt: str,
    objects: Objects,
) -> int:
    """Commit that the own attempt came to *death*, and say what to leave with."""
    opening = Opening(order, key, executor, objects)
    try:
        if not opening.claim():
            return wire.EXIT_RETRY  # it is another's, who may be at work: nothing here is over
        if not opening.inputs_there():
            opening.withdraw()  # the batch was cleaned up meanwhile
            return wire.EXIT_FINAL
        outcome, metadata, content = _close(
            order, key, order.attempt, executor, death, objects, log
        )
    except OSError as exc:
        print(f"kinetic: the outcome could not be written: {exc}", file=sys.stderr)
        return wire.EXIT_UNCOMMITTED
    return _leave_with(opening, order, outcome, metadata, content, receipt)
