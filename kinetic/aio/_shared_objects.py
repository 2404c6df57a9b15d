"""Content that many submissions share in the store.

No cleanup deletes such content, because other submissions may use it. `kinetic gc` and a lifecycle
rule of the bucket delete content that was unused for long. So a submission renews the time of last
use of the content that it uses, if that time is older than `RENEW_AFTER_S`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from kinetic._runner.protocol import directory_urls
from kinetic._tasks import SharedCalls, running_loop
from kinetic.aio.ports import ObjectInfo, Store
from kinetic.errors import BackendError, NotFound

if TYPE_CHECKING:
    from kinetic._collector import ListedObject

T = TypeVar("T")
R = TypeVar("R")

MAX_CONCURRENT_REQUESTS = 16
"""Maximum number of concurrent requests while `kinetic gc` collects a store."""

DAY_S = 24 * 3600.0
RENEW_AFTER_S = DAY_S / 2
"""Renew content before use if its last renewal is older than this. `kinetic gc` deletes content
after a day without renewal, so half a day is left to store the manifest that refers to it."""

CONFIRMATION_S = 600.0
"""How long, in seconds, kinetic assumes that an image or object it has found still exists."""


class Confirmations:
    """The names that this process has found; it asks for each again after *lifetime_s* seconds."""

    def __init__(self, lifetime_s: float = CONFIRMATION_S) -> None:
        self._lifetime_s = lifetime_s
        self._found_at: dict[str, float] = {}
        self._calls = SharedCalls[bool]()

    async def once(
        self, name: str, find: Callable[[], Coroutine[Any, Any, bool]], *, grace: float = 30.0
    ) -> bool:
        """Return ``find()``, or False if it succeeded for *name* not long ago.

        Concurrent callers share one call; see `SharedCalls.run` for a cancellation.
        """
        if time.monotonic() - self._found_at.get(name, -math.inf) < self._lifetime_s:
            return False
        answer = await self._calls.run(name, find, operation=name, grace=grace)
        now = time.monotonic()
        self._found_at.pop(name, None)  # so that the oldest name is the first one
        self._found_at[name] = now
        while now - self._found_at[oldest := next(iter(self._found_at))] > self._lifetime_s:
            del self._found_at[oldest]
        return answer


_confirmations: WeakKeyDictionary[Store, Confirmations] = WeakKeyDictionary()
"""By store, which belongs to one client and its loop."""


def is_fresh(info: ObjectInfo, within: float = RENEW_AFTER_S) -> bool:
    """Return whether the object was created or renewed in the last *within* seconds."""
    return info.used is not None and time.time() - info.used < within


async def ensure(store: Store, name: str, content: bytes | Path) -> bool:
    """Make sure that the store has content-addressed *name*; return whether it was uploaded.

    A check costs less than an upload. An object of another size is damaged, as by a power cut, and
    is replaced. Cancelled: the object is there whole, or not at all.
    """

    async def find() -> bool:
        stored = await store.look(name)
        size = len(content) if isinstance(content, bytes) else content.stat().st_size  # noqa: ASYNC240
        if stored is not None and stored.size != size:
            await store.delete([name])
        elif stored is not None and (is_fresh(stored) or not await store.renew([name])):
            return False
        return await store.create(name, content, shared=True)

    return await once(store, name, find)


def forget(store: Store) -> None:
    """Forget what *store* has: the next submission asks again."""
    _confirmations.pop(store, None)


async def once(store: Store, name: str, find: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
    """Call `Confirmations.once` for what *store* has."""
    confirmations = _confirmations.get(store)
    if confirmations is None:
        # A collection of a store with a size limit may remove an object within minutes.
        lifetime_s = 0.0 if has_size_limit(store) else CONFIRMATION_S
        confirmations = _confirmations[store] = Confirmations(lifetime_s)
    return await confirmations.once(name, find)


def has_size_limit(store: Store) -> bool:
    """Return whether a collection removes content of *store* that was used within a day."""
    return directory_urls.directory_of(store.url) is not None


async def hold(store: Store, names: Sequence[str], *, waited: float = 0.0) -> None:
    """Renew what a new manifest names, if its upload may be too long ago.

    A collection removes nothing that a manifest names, but it may have looked for manifests before.
    In a store with a size limit, it also removes what was used not long ago. The submission has
    *waited* for this many seconds since the upload.

    Raises:
        BackendError: A collection has removed one of *names*.
    """
    is_limited = has_size_limit(store)
    if not is_limited and waited < CONFIRMATION_S:
        return
    if missing := await store.renew(names):
        advice = ". If this happens often, raise KINETIC_CACHE_SIZE_MB" if is_limited else ""
        raise BackendError(
            f"a collection removed {min(missing)} from {store.url} during the submission; submit "
            f"again{advice}"
        )


class BlockingStore:
    """Adapt a store to `kinetic._collector.Objects`, for a thread that waits for the loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop = running_loop()

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Implement `Objects.list`."""
        return self._wait(self._store.list(prefix))

    def content(self, name: str, start: int) -> bytes:
        """Implement `Objects.content`."""
        try:
            return self._wait(self._store.get(name, limit=None, start=start)).body
        except NotFound:
            raise KeyError(name) from None

    def collect(self, objects: Sequence[ListedObject]) -> bool:
        """Implement `Objects.collect`; *objects* are from this adapter's `list`."""

        async def collect() -> bool:
            try:
                return await self._store.collect(cast("Sequence[ObjectInfo]", objects))
            finally:
                forget(self._store)

        return self._wait(collect())

    def delete(self, names: Iterable[str]) -> None:
        """Implement `Objects.delete`."""
        self._wait(self._store.delete([*names]))

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Implement `Objects.map`."""
        # Python can't load this module in a thread that outlives the main thread.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            return [*pool.map(work, items)]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
