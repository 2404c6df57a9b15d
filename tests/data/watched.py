"""A store that records which objects its clients create."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kinetic.aio.local.store import DirectoryStore

BIG = os.urandom(1 << 20) + b"big"


class Watched(DirectoryStore):
    """Await `before`, if set, and record the name of each object that is created."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.created: list[str] = []
        self.before: Callable[[str], Awaitable[None]] | None = None

    async def create(self, name: str, *content: Any, **options: Any) -> bool:
        if self.before is not None:
            await self.before(name)
        self.created.append(name)
        return await super().create(name, *content, **options)
