"""Limit the attempts that a client has under way, and cancel its calls when it closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from kinetic._tasks import running_loop
from kinetic.errors import ClientClosed

CLOSED = "this client is closed; open another one"


class AttemptLimit:
    """Limit how many attempts without an outcome a client may have at once.

    If *most* is None, there is no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._free = asyncio.Semaphore(most) if most is not None else None

    @property
    def bounded(self) -> bool:
        """Whether there is a limit."""
        return self._free is not None

    async def acquire(self) -> None:
        """Wait until one more attempt may start."""
        if self._free is not None:
            await self._free.acquire()

    def release(self) -> None:
        """Let another attempt start: one has its outcome, or was not started."""
        if self._free is not None:
            self._free.release()


class InFlight:
    """The running blocks of code that use a client; `end` cancels them when the client closes."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._none = asyncio.Event()

    @contextlib.asynccontextmanager
    async def block(self) -> AsyncGenerator[None]:
        """Run a block; `end` cancels it as a timeout does.

        Raises:
            ClientClosed: `end` was called.
            PortalError: The block doesn't run on asyncio.
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
        """Cancel all blocks, and wait until they have cleaned up."""
        loop = asyncio.get_running_loop()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(loop.time())
        while self._limits:
            self._none.clear()
            await self._none.wait()
