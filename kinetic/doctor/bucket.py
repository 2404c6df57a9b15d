"""Check whether jobs can use their store, a bucket or a directory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kinetic.aio._store_check import check_listing, check_use
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.ports import Store
from kinetic.doctor.checks import Check, Finding, failed, ok, skipped
from kinetic.errors import BackendError

GROUP = "store"


def checks(name: str, store: Store, *, after: tuple[str, ...]) -> list[Check]:
    """Return the checks of *store*, whose names begin with *name*; they need the checks *after*."""

    async def find_store() -> Finding:
        await check_listing(store)
        return ok(f"{store.url} exists and can be listed")

    async def use_store() -> Finding:
        if not await check_use(store):
            return failed("the store changed or replaced an existing object")
        return ok("objects can be written, read, and removed")

    table = [Check(name=name, group=GROUP, probe=find_store, needs=after)]
    before_use = name
    if isinstance(store, GcsStore):
        before_use = f"{name}: retention"
        retention = _retention(store)
        table.append(Check(name=before_use, group=GROUP, probe=retention, needs=(name,)))
    use = Check(name=f"{name}: use", group=GROUP, probe=use_store, needs=(name, before_use))
    return [*table, use]


def _retention(store: GcsStore) -> Callable[[], Awaitable[Finding]]:
    """Return a probe that finds out whether the bucket lets kinetic replace and delete objects."""
    bucket = f"gs://{store.url.removeprefix('gs://').partition('/')[0]}"
    instead = "let KINETIC_STORE name a bucket without it"

    async def probe() -> Finding:
        try:
            settings = await store.settings()
        except BackendError as exc:
            return skipped(f"the bucket's settings can't be read ({exc})")
        if settings.get("defaultEventBasedHold"):
            return failed(
                f"{bucket} puts a hold on each new object, so kinetic can't replace or delete any",
                f"{instead}, or run gcloud storage buckets update {bucket} "
                "--no-default-event-based-hold",
            )
        policy: dict[str, Any] = settings.get("retentionPolicy") or {}
        if seconds := policy.get("retentionPeriod"):
            locked = bool(policy.get("isLocked"))
            clear = f"gcloud storage buckets update {bucket} --clear-retention-period"
            return failed(
                f"{bucket} keeps each object for {seconds} s, by a "
                f"{'locked ' if locked else ''}retention policy, so kinetic can't replace its "
                "lease of a batch or clean up",
                instead if locked else f"{instead}, or run {clear}",
            )
        return ok("no retention policy or default hold keeps objects")

    return probe
