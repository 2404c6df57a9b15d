"""Check whether jobs can use their store, a bucket or a directory."""

from __future__ import annotations

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio._store_check import check_listing, check_use
from kinetic.aio.gcs.http import Limits
from kinetic.aio.ports import Store
from kinetic.doctor.checks import Check, Finding, failed, ok

GROUP = "store"

LIMITS = Limits(connect_s=10.0, idle_s=20.0, retry=RetryPolicy(total_s=0.0))


def checks(name: str, store: Store, *, after: tuple[str, ...]) -> list[Check]:
    """Return the checks of *store*, whose names begin with *name*; they need the checks *after*."""

    async def find_store() -> Finding:
        await check_listing(store)
        return ok(f"{store.url} exists and can be listed")

    async def use_store() -> Finding:
        if not await check_use(store):
            return failed("the store changed or replaced an existing object")
        return ok("objects can be written, read, and removed")

    return [
        Check(name=name, group=GROUP, probe=find_store, needs=after),
        Check(name=f"{name}: use", group=GROUP, probe=use_store, needs=(name,)),
    ]
