"""Claim an attempt, check whether it may run, and read its inputs.

A claim is an object in the store. Only the process that creates it may run the attempt.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ..protocol import wire

if TYPE_CHECKING:
    from ..stores.objects import Objects

REQUEST_BYTES = 64 * 1024 * 1024
"""Maximum bytes to read of a request; a longer request counts as unsigned."""


READ_AHEAD = 1024 * 1024
"""`Opening.inputs_exist` reads arguments up to this size in bytes, which saves a later request."""


class Opening:
    """Take the steps of one attempt before its function is called.

    This class sends few requests to the store, because each request takes a round trip to a bucket.
    ``arguments`` has the arguments after `inputs_exist` has read them, and is empty before.
    """

    def __init__(self, order: wire.Order, key: bytes, executor: str, objects: Objects) -> None:
        self._order = order
        self._key = key
        self._executor = executor
        self._objects = objects
        self.arguments = b""

    def claim(self) -> bool:
        """Create the claim; return False if another process has claimed the attempt."""
        metadata = wire.claim_metadata(self._executor, self._order.fence)
        name = self._order.part_name("claim")
        if self._objects.create(name, b"", metadata):
            return True
        return self._objects.stat(name).metadata.get("executor") == self._executor

    def withdraw(self) -> None:
        """Delete the claim."""
        self._objects.delete([self._order.part_name("claim")])

    def item_from_listing(self) -> wire.Item:
        """Return the state of the item from a listing of all its attempts."""
        order = self._order
        names = wire.attempt_keys(order.scope, order.index, order.attempt)
        entries = self._objects.look_up(names)
        attempts = wire.attempts_of(
            [(entry.name, entry.metadata) for entry in entries], self._key, order.scope
        )
        standing = wire.standing(order.index, self._read_requests())
        return wire.item_state(standing, attempts.get(order.index, {}), order.budgets)

    def may_run(self) -> bool:
        """Return whether the item waits for exactly this attempt; call it after `claim`."""
        item = self._open_first_item() or self.item_from_listing()
        return (item.state, item.attempt) == (wire.ItemState.OPEN, self._order.attempt)

    def inputs_exist(self) -> bool:
        """Return whether the inputs still exist (a cleanup removes them), and read small inputs."""
        part = self._order.arguments
        if part.stop - part.start > READ_AHEAD:
            return self._objects.exists(part.name)
        try:
            self.arguments = read_input(self._objects, part)
        except KeyError:
            return False
        except ValueError:
            pass  # the inputs are damaged; the next reader reports this
        return True

    def _open_first_item(self) -> wire.Item | None:
        """Return an open item if this is its first attempt, without outcome or requests."""
        if self._order.attempt != 1:
            return None
        if self._objects.exists(self._order.part_name("outcome")):
            return None
        if self._objects.list(f"{self._order.scope}control/"):
            return None
        return wire.Item(wire.ItemState.OPEN, 1)

    def _read_requests(self) -> list[wire.Request]:
        scope = self._order.scope
        return [
            wire.Request.verified(
                self._objects.get(slot.name, 0, REQUEST_BYTES)[0],
                slot.metadata,
                self._key,
                scope,
                slot.name,
            )
            for slot in self._objects.list(f"{scope}control/")
        ]


def read_input(objects: Objects, part: wire.Input) -> bytes:
    """Return the bytes of an input.

    Raises:
        KeyError: The object does not exist.
        ValueError: The content differs from what was submitted.
    """
    content, _ = objects.get(part.name, part.start, part.stop)
    if hashlib.sha256(content).hexdigest() != part.digest:
        raise ValueError(f"{part.name} is not what was submitted: its SHA-256 differs")
    return content


def timeout_message(order: wire.Order, called: bool) -> str:
    """Return the message about a job that ran out of time before or after its function's call."""
    if called:
        return f"ran longer than its timeout of {order.timeout:g} s"
    limit = wire.start_allowance(order.debug_s) + (order.timeout or 0.0)
    return f"had not called its function after {limit:g} s: its start takes too long"
