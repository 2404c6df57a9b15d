"""Check a bucket: whether it exists, and whether objects can be written, read, and removed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import anyio

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.gcs.http import Limits
from kinetic.aio.gcs.store import GcsStore
from kinetic.doctor.checks import Check, Finding, failed, ok

GROUP = "store"
FOLDER = "doctor/"

OLD_S = 3600.0
"""Age from which on an object of the doctor is a leftover of a killed process."""

REMOVAL_S = 10.0
"""Maximum time to remove the object after a failure or a cancellation."""

LIMITS = Limits(connect_s=10.0, idle_s=20.0, retry=RetryPolicy(total_s=0.0))


class Bucket:
    """Check a bucket, or a folder of one; *name* is the name of its checks."""

    def __init__(self, name: str, url: str, environ: Mapping[str, str]) -> None:
        self._name = name
        self._store = GcsStore(url, environ, limits=LIMITS)

    def checks(self, *, after: tuple[str, ...]) -> list[Check]:
        """Return the checks; they need the checks *after*."""
        return [
            Check(name=self._name, group=GROUP, look=self._exists, needs=after),
            Check(name=f"{self._name}: use", group=GROUP, look=self._use, needs=(self._name,)),
        ]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._store.aclose()

    async def _exists(self) -> Finding:
        found = [one.name for one in await self._store.list(FOLDER)]
        if left := [name for name in found if _is_old(name)]:
            await self._store.delete(left)
        return ok(f"{self._store.url} exists and can be listed")

    async def _use(self) -> Finding:
        body = b"kinetic doctor"
        name = f"{FOLDER}{int(time.time())}-{secrets.token_hex(8)}"
        try:
            await self._store.create(name, body)
            read = (await self._store.get(name)).body
            await self._store.delete([name])
        except BaseException:
            with anyio.move_on_after(REMOVAL_S, shield=True):
                await self._store.delete([name])
            raise
        if read != body:
            return failed("an object had other content when it was read")
        return ok("objects can be written, read, and removed")


def _is_old(name: str) -> bool:
    written = name.removeprefix(FOLDER).partition("-")[0]
    return not written.isdecimal() or time.time() - int(written) > OLD_S
