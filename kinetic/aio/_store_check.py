"""Check a store: whether objects can be listed, written, read, and removed."""

from __future__ import annotations

import secrets
import time

import anyio

from kinetic.aio.ports import Store

FOLDER = "doctor/"

OLD_S = 3600.0
"""Minimum age at which an object of a check counts as left by a killed process."""

REMOVAL_S = 10.0
"""Maximum time to remove the object after a failure or a cancellation."""


async def check_listing(store: Store) -> None:
    """List a folder of *store*, and remove what killed checks left in it.

    Raises:
        KineticError: The store doesn't exist, or refuses the request.
    """
    found = [info.name for info in await store.list(FOLDER)]
    if left := [name for name in found if _is_old(name)]:
        await store.delete(left)


async def check_use(store: Store) -> bool:
    """Create, read, and remove an object; return whether it was created once and read unchanged.

    Raises:
        KineticError: The store refuses one of these requests.

    Cancelled: the object is removed.
    """
    body = b"kinetic doctor"
    name = f"{FOLDER}{int(time.time())}-{secrets.token_hex(8)}"
    try:
        await store.create(name, body)
        created_again = await store.create(name, b"another")
        content = (await store.get(name)).body
        await store.delete([name])
    except BaseException:
        with anyio.move_on_after(REMOVAL_S, shield=True):
            await store.delete([name])
        raise
    return content == body and not created_again


def _is_old(name: str) -> bool:
    written = name.removeprefix(FOLDER).partition("-")[0]
    return not written.isdecimal() or time.time() - int(written) > OLD_S
