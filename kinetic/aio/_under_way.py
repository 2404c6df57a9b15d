"""What a client has under way, and undoes before it closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from kinetic._running import running_loop
from kinetic.errors import ClientClosed

__all__ = ["CLOSED", "UnderWay"]

CLOSED = "this client is closed; open another one"


class UnderWay:
    """Blocks that must not go on when what they use is closed."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._none = asyncio.Event()

    @contextlib.asynccontextmanager
    async def block(self) -> AsyncGenerator[None]:
        """One of them; `end` cancels it as a timeout does.

        Raises:
            ClientClosed: It was ended.
            PortalError: It does not run on asyncio.
        """
        running_loop()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            if limit.expired():
                raise ClientClosed(CLOSED) from None
            raise
        finally:
            self._limits.discard(limit)
            if not self._limits:
                self._none.set()

    async def end(self) -> None:
        """Cancel all, and wait until they have cleaned up."""
        loop = asyncio.get_running_loop()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(loop.time())
        while self._limits:
            self._none.clear()
            await self._none.wait()
