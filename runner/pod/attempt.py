"""Run one attempt in the pod of one of several hosts.

If the job's process dies, this module stores a failure as the outcome. At the end it writes the
receipt: a copy of the outcome, in the pod's termination message.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping

from ..job.attempt import Attempt
from ..job.opening import Opening
from ..protocol import signing, wire
from ..protocol.outcomes import Death, outcome_of_death
from ..protocol.spool import Spooled
from ..stores.objects import Objects
from .guard import last_lines


class PodAttempt(Attempt):
    """An attempt whose exit code controls whether Kubernetes starts another pod.

    ``output`` returns the end of the job's output. The output is stored before the outcome,
    so that a cleanup after the outcome finds all objects.
    """

    receipt = ""
    host = 0
    output: Callable[[], bytes]

    def run_on_other_host(self, done_name: str) -> int:
        """Make the call on a host other than the first; create *done_name* after a success.

        Otherwise commit the failure. Returns the exit code.
        """
        outcome, body = self._invoke(self._opening.arguments)
        if outcome.kind is wire.Kind.VALUE:
            self._store_log()
            self._objects.create(done_name, b"")
            return wire.EXIT_VALUE
        return self._commit(self._outcome_under_stop(outcome), body)

    def close_dead(self, death: Death) -> int:
        """Commit the failure *death* as this attempt's outcome; return the pod's exit code."""
        order = self._order
        try:
            if not self._opening.claim():
                return wire.EXIT_RETRY  # another pod claimed the attempt and may still run it
            if not self._opening.inputs_exist():
                self._opening.withdraw()  # a cleanup has removed the inputs
                return wire.EXIT_FINAL
            self._store_log()
            log = last_lines(self.output())
            outcome, metadata, content = close_attempt(
                order, self._key, order.attempt, self._executor, death, self._objects, log
            )
        except OSError as exc:
            print(f"kinetic: can't write the outcome: {exc}", file=sys.stderr)
            return wire.EXIT_UNCOMMITTED
        return self._exit_code(outcome, metadata, content)

    def _commit(self, outcome: wire.Outcome, body: Spooled) -> int:
        self._store_log()
        return super()._commit(outcome, body)

    def _store_log(self) -> None:
        """Store the job's output on this host, if there is any, so that it outlives the pod."""
        output, order = self.output(), self._order
        if not output:
            return
        name = wire.log_key(order.scope, order.index, order.attempt, self.host)
        mac = signing.sign(self._key, order.scope, name, output)
        try:
            self._objects.create(name, output, {"mac": mac})
        except OSError as exc:
            print(f"kinetic: cannot store the end of the job's log: {exc}", file=sys.stderr)

    def _exit_code(
        self, outcome: wire.Outcome, metadata: Mapping[str, str] | None, content: bytes
    ) -> int:
        """Write the receipt of an outcome that this process committed; return the exit code."""
        if metadata is not None:
            self._write_receipt(metadata, content)
            if outcome.kind is wire.Kind.VALUE:
                return wire.EXIT_VALUE
            if outcome.kind is wire.Kind.CANCELLED:
                return wire.EXIT_FINAL
        return exit_code_for(self._opening)

    def _write_receipt(self, metadata: Mapping[str, str], content: bytes) -> None:
        index, attempt = self._order.index, self._order.attempt
        receipt = wire.Receipt(index=index, attempt=attempt, metadata=metadata, body=content)
        write_receipt(self.receipt, receipt)


def write_receipt(path: str, receipt: wire.Receipt) -> None:
    """Write *receipt* to the file of the pod's termination message; an empty *path* is no file."""
    if not path:
        return
    with contextlib.suppress(OSError):  # the receipt only saves a request
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(receipt.to_text().encode())


def exit_code_for(opening: Opening) -> int:
    """Read the item's objects, and return the exit code for the item's state."""
    try:
        item = opening.item_from_listing()
    except (OSError, ValueError) as exc:
        print(f"kinetic: cannot read the item's attempts: {exc}", file=sys.stderr)
        return wire.EXIT_RETRY
    if item.state is wire.ItemState.SUCCEEDED:
        return wire.EXIT_VALUE
    return wire.EXIT_RETRY if item.state is wire.ItemState.OPEN else wire.EXIT_FINAL


def close_attempt(
    order: wire.Order,
    key: bytes,
    number: int,
    executor: str | None,
    death: Death,
    objects: Objects,
    log: str = "",
) -> tuple[wire.Outcome, Mapping[str, str] | None, bytes]:
    """Store the outcome of dead attempt *number*; return the outcome, its metadata, and its body.

    The outcome is *death*, or cancelled if the item was stopped. If *executor* is None, claim the
    attempt as void first. The metadata are None if the attempt already had an outcome.
    """
    attempt_id = (order.scope, order.index, number)
    if executor is None:
        claim = wire.claim_metadata(wire.VOID, order.fence)
        name = wire.attempt_key(*attempt_id, "claim")
        if objects.create(name, b"", claim):
            executor = wire.VOID
        else:
            executor = objects.stat(name).metadata.get("executor", "")
    # Read the item after the claim, so that a stop request from before the claim counts.
    item = Opening(order, key, executor, objects).item_from_listing()
    outcome, content = outcome_of_death(death, item, executor, order.fence, log)
    metadata = outcome.signed(key, *attempt_id)
    created = objects.create(wire.attempt_key(*attempt_id, "outcome"), content, metadata)
    return outcome, metadata if created else None, content
