"""A store that records what its clients create."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from kinetic.aio.local.store import DirectoryStore

BIG = os.urandom(1 << 20) + b"big"


class Watched(DirectoryStore):
    """Record what is created, after awaiting *before*."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.created: list[str] = []
        self.before: Callable[[str], Awaitable[None]] | None = None

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
        return await super().create(name, body, metadata, shared=shared)
