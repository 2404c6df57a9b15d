"""What many submissions share in the store: there when it is needed, and collected by its age.

No cleanup deletes shared content, for nobody knows who else uses it. `kinetic gc` and
a bucket's own rule do, by the time it was created or renewed last. So whoever uses it
renews that time, not on each use but once it is older than `RENEWED_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kinetic._tasks import running_loop
from kinetic.aio.ports import ObjectInfo, Store
from kinetic.errors import NotFound

if TYPE_CHECKING:
    from kinetic._collector import Listed

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
"""Requests to a store that is collected that are under way at once."""

DAY_S = 24 * 3600.0
RENEWED_S = DAY_S / 2
"""What was renewed within this time is used as it is. `kinetic gc` waits for a day: this, and as
long again until the manifest that refers to it is stored."""


def is_fresh(info: ObjectInfo, within: float = RENEWED_S) -> bool:
    """Whether it was created or renewed in the last *within* seconds."""
    return info.used is not None and time.time() - info.used < within


async def ensure(store: Store, name: str, content: bytes | Path) -> bool:
    """Have content-addressed *name* in the store for some time to come; whether it was sent.

    A look at it costs less than its body. One of another size is none, and is written anew:
    a power cut has emptied it, or somebody else put it there. Cancelled: it is there whole or
    not at all.
    """
    there = await store.look(name)
    size = len(content) if isinstance(content, bytes) else content.stat().st_size  # noqa: ASYNC240
    if there is not None and there.size != size:
        await store.delete([name])
    elif there is not None and (is_fresh(there) or not await store.renew([name])):
        return False
    return await store.create(name, content, shared=True)


class Blocking:
    """`kinetic._collector.Objects` of a store, for threads, which wait for the loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop = running_loop()

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """See the protocol."""
        return self._wait(self._store.list(prefix))

    def content(self, name: str, start: int) -> bytes:
        """See the protocol."""
        try:
            return self._wait(self._store.get(name, limit=None, start=start)).body
        except NotFound:
            raise KeyError(name) from None

    def collect(self, objects: Sequence[Listed]) -> bool:
        """See the protocol; *objects* are from a listing of this."""
        return self._wait(self._store.collect(cast("Sequence[ObjectInfo]", objects)))

    def delete(self, names: Iterable[str]) -> None:
        """See the protocol."""
        self._wait(self._store.delete([*names]))

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """See the protocol."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [*pool.map(work, items)]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
