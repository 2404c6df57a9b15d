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
    written = {
        info.name: info.name.removeprefix(FOLDER).partition("-")[0]
        for info in await store.list(FOLDER)
    }
    # A younger object may be that of a check that runs now.
    oldest = time.time() - OLD_S
    left = [name for name, at in written.items() if not at.isdecimal() or int(at) < oldest]
    if left:
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
