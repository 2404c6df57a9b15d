"""A fake store for tests: its objects are in memory, and it counts its requests."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from kinetic.aio.ports import RECORD_BYTES, Object, ObjectInfo
from kinetic.errors import Conflict, NotFound

MANY = 100
"""From this many deletions on, sorting the names again takes less time than removing each."""


class MemoryStore:
    """A `kinetic.aio.ports.Store` in memory; ``requests`` counts calls by method.

    Example::

        store = MemoryStore()
        await store.create("a/b", b"content")
        assert store.requests == {"create": 1}
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self._objects: dict[str, Object] = {}
        self._used: dict[str, float] = {}
        self._names: list[str] = []  # sorted, so that a listing needn't look at all names

    @property
    def url(self) -> str:
        """A URL that no runner can open."""
        return "memory:"

    def plain(self) -> MemoryStore:
        """Implement `Store.plain`."""
        return self

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
        check: Callable[[], object] | None = None,
    ) -> bool:
        """Implement `Store.create`."""
        self.requests["create"] += 1
        content = body if isinstance(body, bytes) else body.read_bytes()  # noqa: ASYNC240
        if check is not None:
            check()
        if name in self._objects:
            return False
        self._objects[name] = Object(
            name=name, body=content, metadata=dict(metadata or {}), generation=1
        )
        self._used[name] = time.time()
        bisect.insort(self._names, name)
        return True

    async def begin(self, name: str, body: bytes) -> int | None:
        """Implement `Store.begin`."""
        return 1 if await self.create(name, body) else None

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        """Implement `Store.replace`."""
        self.requests["replace"] += 1
        if self._get(name).generation != generation:
            raise Conflict(f"{name} is no longer of generation {generation}")
        self._objects[name] = Object(name=name, body=body, metadata={}, generation=generation + 1)
        return generation + 1

    async def get(self, name: str, *, limit: int | None = RECORD_BYTES, start: int = 0) -> Object:
        """Implement `Store.get`."""
        self.requests["get"] += 1
        stored = self._get(name)
        stored = stored._replace(body=stored.body[start:]) if start else stored
        return stored if limit is None or len(stored.body) <= limit else stored._replace(body=b"")

    async def get_many(self, names: Collection[str]) -> dict[str, Object]:
        """Implement `Store.get_many`."""
        found = dict[str, Object]()
        for name in names:
            with contextlib.suppress(NotFound):
                found[name] = await self.get(name)
        return found

    async def fetch(self, name: str, path: Path) -> None:
        """Implement `Store.fetch`."""
        self.requests["fetch"] += 1
        with path.open("xb") as file:
            file.write(self._get(name).body)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """Implement `Store.list`."""
        self.requests["list"] += 1
        found: list[ObjectInfo] = []
        for index in range(bisect.bisect_left(self._names, prefix), len(self._names)):
            if not self._names[index].startswith(prefix):
                break
            found.append(self._info(self._names[index]))
        return found

    async def look(self, name: str) -> ObjectInfo | None:
        """Implement `Store.look`."""
        self.requests["look"] += 1
        return self._info(name) if name in self._objects else None

    async def renew(self, names: Collection[str]) -> set[str]:
        """Implement `Store.renew`."""
        self.requests["renew"] += 1
        present = {name for name in names if name in self._objects}
        self._used |= dict.fromkeys(present, time.time())
        return {*names} - present

    async def collect(self, objects: Sequence[ObjectInfo]) -> bool:
        """Implement `Store.collect`."""
        self.requests["collect"] += 1
        if any(info.used != self._used.get(info.name, info.used) for info in objects):
            return False
        await self.delete([info.name for info in objects])
        return True

    async def delete(self, names: Collection[str]) -> None:
        """Implement `Store.delete`."""
        self.requests["delete"] += 1
        present = [name for name in names if self._objects.pop(name, None) is not None]
        for name in present:
            self._used.pop(name, None)
        if len(present) < MANY:
            for name in present:
                del self._names[bisect.bisect_left(self._names, name)]
        else:
            self._names = sorted(self._objects)

    async def aclose(self) -> None:
        """Do nothing: the store holds no connection."""

    def _info(self, name: str) -> ObjectInfo:
        stored = self._objects[name]
        return ObjectInfo(
            name=name,
            size=len(stored.body),
            metadata=stored.metadata,
            generation=stored.generation,
            used=self._used.get(name),
        )

    def _get(self, name: str) -> Object:
        if name not in self._objects:
            raise NotFound(f"there is no {name}")
        return self._objects[name]
