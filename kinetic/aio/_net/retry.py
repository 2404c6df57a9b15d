"""Ask a store or a platform again that does not answer now."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from absl import logging

from kinetic.aio.ports import Store
from kinetic.errors import (
    AuthError,
    BackendError,
    ClientClosed,
    Conflict,
    NotFound,
    Refused,
    StoreFull,
)

__all__ = ["PATIENCE_S", "create", "is_definite", "is_passing", "retry_forever"]

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0

PATIENCE_S = 60.0
"""Who waits for an item is told when nobody has answered for so long."""


def is_definite(error: BackendError) -> bool:
    """Whether asking again would bring the same answer."""
    return isinstance(error, (AuthError, ClientClosed, NotFound, Conflict, Refused, StoreFull))


def is_passing(error: Exception) -> bool:
    """Whether who only looks should ask again: there may be an answer soon, or room."""
    if isinstance(error, StoreFull):
        return True
    return isinstance(error, BackendError) and not is_definite(error)


async def retry_forever(ask: Callable[[], Awaitable[T]], what: str) -> T:
    """Await ``ask()`` until it answers, with growing pauses; *what* is for the log.

    Raises:
        BackendError: The answer is definite.
    """
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except BackendError as exc:
            if is_definite(exc):
                raise
            logging.warning("%s did not work: %s; trying again", what, exc)
            await asyncio.sleep(max(exc.retry_after or 0.0, pause * random.uniform(0.5, 1.0)))
            pause = min(LONGEST_PAUSE_S, pause * 2)


async def create(
    store: Store, name: str, body: bytes, metadata: Mapping[str, str] | None = None
) -> bool:
    """Create an object, asking until the store answers; False when somebody else has it.

    A nonce tells what an earlier try has made, whose reply was lost, from
    what others have.

    Raises:
        BackendError: The answer is definite.
    """
    marked = {**(metadata or {}), "nonce": os.urandom(8).hex()}

    async def ask() -> bool:
        if await store.create(name, body, marked):
            return True
        there = [one for one in await store.list(name) if one.name == name]
        return bool(there) and there[0].metadata.get("nonce") == marked["nonce"]

    return await retry_forever(ask, f"creating {name}")
