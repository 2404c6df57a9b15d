"""A store that records which objects its clients create."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from kinetic.aio.local.store import DirectoryStore

BIG = os.urandom(1 << 20) + b"big"


class Watched(DirectoryStore):
    """Await `before`, if set, and record the names of created objects; count the deletions."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.created: list[str] = []
        self.deletions = 0
        self.before: Callable[[str], Awaitable[None]] | None = None

    async def create(self, name: str, *content: Any, **options: Any) -> bool:
        if self.before is not None:
            await self.before(name)
        self.created.append(name)
        return await super().create(name, *content, **options)

    async def delete(self, names: Collection[str]) -> None:
        self.deletions += 1
        await super().delete(names)
