"""The event loop of whoever calls: kinetic knows those of asyncio."""

from __future__ import annotations

import asyncio

from kinetic.errors import PortalError

__all__ = ["running_loop"]


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop of whoever calls.

    Raises:
        PortalError: There is none, or it is one of another library.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise PortalError(
            "kinetic.aio runs on asyncio, and no loop of asyncio runs here; under another library "
            "call the sync API in a thread, as in `await trio.to_thread.run_sync(train, 0.1)`"
        ) from None
