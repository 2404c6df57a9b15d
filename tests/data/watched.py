"""A store that tells of what it is asked for before it does it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.ports import Object, ObjectInfo

Plant = Callable[..., Path]
BIG = os.urandom(1 << 20) + b"big"


class Watched:
    """A store that tells of each create before it is made, and waits for the answer."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store
        self.created: list[str] = []
        self.before: Callable[[str], Awaitable[None]] | None = None

    @property
    def url(self) -> str:
        return self._store.url

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
    ) -> bool:
        if self.before is not None:
            await self.before(name)
        self.created.append(name)
        return await self._store.create(name, body, metadata, shared=shared)

    async def begin(self, name: str, body: bytes) -> int | None:
        self.created.append(name)
        return await self._store.begin(name, body)

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        return await self._store.replace(name, body, generation=generation)

    async def get(self, name: str, **where: Any) -> Object:
        return await self._store.get(name, **where)

    async def fetch(self, name: str, path: Path) -> None:
        await self._store.fetch(name, path)

    async def look(self, name: str) -> ObjectInfo | None:
        return await self._store.look(name)

    async def renew(self, names: Collection[str]) -> set[str]:
        return await self._store.renew(names)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self._store.list(prefix)

    async def delete(self, names: Collection[str]) -> None:
        await self._store.delete(names)

    async def aclose(self) -> None:
        await self._store.aclose()
