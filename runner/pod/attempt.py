"""Run one attempt in a pod.

If an earlier pod of the attempt vanished, or the job's process died, this module stores a failure
as the outcome. At the end it writes the receipt: the outcome, in the pod's termination message.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..job.attempt import Attempt
from ..job.opening import Opening, out_of_time
from ..protocol import signing, wire
from ..protocol.outcomes import Death, closed
from ..protocol.retry_budgets import INFRASTRUCTURE
from ..protocol.spool import Stored
from ..stores.objects import Objects
from .guard import Ended

OOM_EVENTS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
)
"""Where the kernel counts the processes that it killed for lack of memory, in cgroups v2 and v1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often Kubernetes has restarted the job, and the file for the receipt."""

    failures: int = 0
    disruptions: int = 0
    receipt: str = ""

    @property
    def total(self) -> int:
        """The number of pods before this one."""
        return self.failures + self.disruptions


class PodAttempt(Attempt):
    """An attempt whose exit code controls whether Kubernetes starts another pod.

    It stores its *output* before its outcome, so a cleanup after the outcome finds all objects.
    """

    trusts_claim = True
    receipt = ""
    host = 0
    output: Callable[[], bytes]

    def beside(self, done: str) -> int:
        """Run the call on a host other than the first: create *done*, or commit the failure."""
        outcome, body = self._invoke()
        if outcome.kind is wire.Kind.VALUE:
            keep_log(self._order, self._key, self.host, self.output(), self._objects)
            self._objects.create(done, b"")
            return wire.EXIT_VALUE
        if self._stopping.requested and self._was_stopped():
            outcome = self._cancelled("cancelled")
        return self._commit(outcome, body)

    def _commit(self, outcome: wire.Outcome, body: Stored) -> int:
        keep_log(self._order, self._key, self.host, self.output(), self._objects)
        return super()._commit(outcome, body)

    def _code(
        self, outcome: wire.Outcome, metadata: Mapping[str, str] | None, content: bytes
    ) -> int:
        return _leave_with(self._opening, self._order, outcome, metadata, content, self.receipt)


def keep_log(order: wire.Order, key: bytes, host: int, output: bytes, objects: Objects) -> None:
    """Store the job's output on *host*, if there is any, so that the log outlives the pod."""
    if not output:
        return
    name = wire.log_key(order.scope, order.index, order.attempt, host)
    try:
        objects.create(name, output, {"mac": signing.sign(key, order.scope, name, output)})
    except OSError as exc:
        print(f"kinetic: cannot store the end of this log: {exc}", file=sys.stderr)


def _leave_with(
    opening: Opening,
    order: wire.Order,
    outcome: wire.Outcome,
    metadata: Mapping[str, str] | None,
    content: bytes,
    receipt: str,
) -> int:
    """Write the receipt of the committed outcome, and return the exit code."""
    if metadata is not None:
        _write_receipt(order, metadata, content, receipt)
        if outcome.kind is wire.Kind.VALUE:
            return wire.EXIT_VALUE
        if outcome.kind is wire.Kind.CANCELLED:
            return wire.EXIT_FINAL
    return code_of(opening)


def code_of(opening: Opening) -> int:
    """Read the item's objects, and return the exit code for the item's state."""
    try:
        item = opening.item()
    except (OSError, ValueError) as exc:
        print(f"kinetic: cannot read the item's attempts: {exc}", file=sys.stderr)
        return wire.EXIT_RETRY
    if item.state is wire.ItemState.SUCCEEDED:
        return wire.EXIT_VALUE
    return wire.EXIT_RETRY if item.state is wire.ItemState.OPEN else wire.EXIT_FINAL


def _write_receipt(
    order: wire.Order, metadata: Mapping[str, str], content: bytes, path: str
) -> None:
    if not path:
        return
    receipt = wire.Receipt(
        index=order.index, attempt=order.attempt, metadata=metadata, body=content
    )
    with contextlib.suppress(OSError):  # the receipt only saves a request
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(receipt.to_text().encode())


# --- earlier pods -------------------------------------------------------------------------


def close_earlier(
    order: wire.Order, key: bytes, first: int, restarts: Restarts, objects: Objects
) -> None:
    """Store a failure for each attempt from *first* to the one before this that has no outcome.

    The controller starts a pod only after the pod before it has ended, so these attempts are over.
    Only the controller's count tells how many pods a disruption ended.

    Raises:
        OSError: The store doesn't answer.
    """
    if first >= order.attempt:
        return
    names = wire.attempt_keys(order.scope, order.index, order.attempt)
    entries = [(one.name, one.metadata) for one in objects.look_up(names)]
    known = wire.attempts_of(entries, key, order.scope).get(order.index, {})
    outcomes = [known[n].outcome for n in range(first, order.attempt) if n in known]
    disrupted = sum(1 for one in outcomes if one is not None and one.reason in INFRASTRUCTURE)
    for number in range(first, order.attempt):
        there = known.get(number, wire.Attempt())
        if there.outcome is not None:
            continue
        preempted = disrupted < restarts.disruptions
        disrupted += preempted
        how = "its pod was evicted or its node removed" if preempted else "its pod ended"
        words = f"the job ended without an outcome: {how}; Kubernetes restarted it"
        death = Death(message=words, reason="preempted" if preempted else "lost")
        _close(order, key, number, there.executor, death, objects)


def _close(
    order: wire.Order,
    key: bytes,
    number: int,
    executor: str | None,
    death: Death,
    objects: Objects,
    log: str = "",
) -> tuple[wire.Outcome, Mapping[str, str] | None, bytes]:
    """Close attempt *number*; return no metadata if it already had an outcome."""
    place = (order.scope, order.index, number)
    if executor is None:
        claim = wire.claim_metadata(wire.VOID, order.fence)
        name = wire.attempt_key(*place, "claim")
        if objects.create(name, b"", claim):
            executor = wire.VOID
        else:
            executor = objects.stat(name).metadata.get("executor", "")
    # Read after the claim, so that an earlier request to stop counts.
    item = Opening(order, key, executor, objects).item()
    outcome, content = closed(death, item, executor, order.fence, log)
    metadata = outcome.signed(key, *place)
    created = objects.create(wire.attempt_key(*place, "outcome"), content, metadata)
    return outcome, metadata if created else None, content


def close_restarted(
    order: wire.Order, key: bytes, executor: str, host: str, objects: Objects
) -> int:
    """Close this attempt, which *executor* began before *host* restarted."""
    words = f"{host} ended without an outcome and restarted; kinetic does not run it twice"
    death = Death(message=words, reason="lost")
    _close(order, key, order.attempt, executor, death, objects)
    return code_of(Opening(order, key, executor, objects))


# --- a job that died without an outcome -----------------------------------------------------


def death_of(ended: Ended, order: wire.Order, *, memory: bool) -> Death:
    """Describe how a process *ended*; *memory* says that it ran out of memory."""
    status = ended.status
    if ended.killed and ended.out_of_time:
        words = f"{out_of_time(order, ended.called)}, and did not end when asked to"
        return Death(
            message=f"the job {words}", reason="deadline", kind=wire.Kind.ERROR, exit_code=status
        )
    if ended.stopped and (ended.killed or status in (-signal.SIGTERM, -signal.SIGKILL)):
        words = "the job was asked to stop" + (" and did not end in time" if ended.killed else "")
        return Death(message=words, reason="preempted", kind=wire.Kind.ERROR, exit_code=status)
    if memory:
        words = "the job's process was killed: it exceeded its pod's memory limit"
        return Death(message=words, reason="out of memory", exit_code=status)
    if status < 0:
        number = -status
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        words = f"the job's process was killed by {name}"
    else:
        words = f"the job's process exited with code {status} and left no outcome"
    return Death(message=words, reason="lost", exit_code=status)


def oom_kills(places: Sequence[str] = OOM_EVENTS) -> int:
    """Return how many processes of this container the kernel killed for memory; 0 if unknown."""
    for place in places:
        with contextlib.suppress(OSError, ValueError), open(place) as file:
            for line in file:
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def close_dead(
    order: wire.Order,
    key: bytes,
    executor: str,
    death: Death,
    ended: Ended,
    host: int,
    receipt: str,
    objects: Objects,
) -> int:
    """Commit the failure *death* as this attempt's outcome; return the pod's exit code."""
    opening = Opening(order, key, executor, objects)
    try:
        if not opening.claim():
            return wire.EXIT_RETRY  # another pod claimed the attempt and may still run it
        if not opening.inputs_there():
            opening.withdraw()  # the batch was cleaned up meanwhile
            return wire.EXIT_FINAL
        keep_log(order, key, host, ended.output, objects)
        outcome, metadata, content = _close(
            order, key, order.attempt, executor, death, objects, ended.log
        )
    except OSError as exc:
        print(f"kinetic: can't write the outcome: {exc}", file=sys.stderr)
        return wire.EXIT_UNCOMMITTED
    return _leave_with(opening, order, outcome, metadata, content, receipt)
