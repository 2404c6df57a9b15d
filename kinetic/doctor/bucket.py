"""Check whether jobs can use a bucket, or the directory that takes its place."""

from __future__ import annotations

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio._store_check import check_listing, check_use
from kinetic.aio.gcs.http import Limits
from kinetic.aio.ports import Store
from kinetic.doctor.checks import Check, Finding, failed, ok

GROUP = "store"

LIMITS = Limits(connect_s=10.0, idle_s=20.0, retry=RetryPolicy(total_s=0.0))


class Bucket:
    """Check *store*; *name* is the name of its checks."""

    def __init__(self, name: str, store: Store) -> None:
        self._name = name
        self._store = store

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
        await check_listing(self._store)
        return ok(f"{self._store.url} exists and can be listed")

    async def _use(self) -> Finding:
        if not await check_use(self._store):
            return failed("an object had other content when it was read")
        return ok("objects can be written, read, and removed")
