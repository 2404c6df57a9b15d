"""Read what a job needs to begin: the state of its item, and its inputs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ..protocol import wire

if TYPE_CHECKING:
    from ..stores.objects import Objects

REQUEST_BYTES = 64 * 1024 * 1024
"""Maximum bytes to read of a request; a longer request counts as unsigned."""


def read_item(order: wire.Order, key: bytes, objects: Objects) -> wire.Item:
    """Return the state of an item from all its attempts and all requests."""
    slots = objects.list(f"{order.scope}control/")
    if order.attempt == 1 and not slots and not objects.exists(order.part_name("outcome")):
        # Most jobs are like this, and each function that runs costs a fork memory.
        return wire.Item(wire.ItemState.OPEN, 1)
    requests = [
        wire.Request.verified(
            objects.get(slot.name, 0, REQUEST_BYTES)[0], slot.metadata, key, order.scope, slot.name
        )
        for slot in slots
    ]
    names = wire.attempt_keys(order.scope, order.index, order.attempt)
    entries = [(entry.name, entry.metadata) for entry in objects.look_up(names)]
    attempts = wire.attempts_of(entries, key, order.scope).get(order.index, {})
    return wire.item_state(wire.standing(order.index, requests), attempts, order.budgets)


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
