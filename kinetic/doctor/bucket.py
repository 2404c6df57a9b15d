"""Checks of the buckets: whether they are there, and what may be done in them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import anyio

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.gcs.http import Limits
from kinetic.aio.gcs.store import GcsStore
from kinetic.doctor.checks import Check, Finding, State

GROUP = "store"
FOLDER = "doctor/"
OLD_S = 3600.0
LEAVING_S = 10.0
"""How long removing its object may take one that fails, or is cancelled."""

LIMITS = Limits(connect_s=10.0, idle_s=20.0, retry=RetryPolicy(total_s=0.0))


class Bucket:
    """One bucket, or folder of one; *name* is what its checks are called."""

    def __init__(self, name: str, url: str, environ: Mapping[str, str]) -> None:
        self._name = name
        self._store = GcsStore(url, environ, limits=LIMITS)

    def checks(self, *, after: tuple[str, ...]) -> list[Check]:
        """Those of the bucket, which is asked *after* other checks."""
        return [
            Check(name=self._name, group=GROUP, look=self._there, needs=after),
            Check(name=f"{self._name}: use", group=GROUP, look=self._use, needs=(self._name,)),
        ]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._store.aclose()

    async def _there(self) -> Finding:
        found = [one.name for one in await self._store.list(FOLDER)]
        if left := [name for name in found if _is_old(name)]:  # by a doctor that was killed
            await self._store.delete(left)
        return Finding(State.OK, f"{self._store.url} is there, and can be listed")

    async def _use(self) -> Finding:
        body = b"kinetic doctor"
        name = f"{FOLDER}{int(time.time())}-{secrets.token_hex(8)}"
        try:
            await self._store.create(name, body)
            read = (await self._store.get(name)).body
            await self._store.delete([name])
        except BaseException:
            with anyio.move_on_after(LEAVING_S, shield=True):
                await self._store.delete([name])
            raise
        if read != body:
            return Finding(State.FAILED, "what was written there was read as something else")
        return Finding(State.OK, "objects can be written, read and removed")


def _is_old(name: str) -> bool:
    """Whether no doctor works with it any more."""
    written = name.removeprefix(FOLDER).partition("-")[0]
    return not written.isdecimal() or time.time() - int(written) > OLD_S
