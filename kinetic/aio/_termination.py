"""SIGTERM while this process waits for jobs that it owns: they are ended, then it dies of it.

Only the main thread can handle a signal, and only one that nobody else handles
is ours: a server's own handler, and a process that ignores SIGTERM, stay as they are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["awaited"]

_stops: list[Callable[[], object]] = []


class _Handler:
    """Tells all who wait; ``came`` once there was a signal for this very process."""

    def __init__(self) -> None:
        self.came = False
        self._process = os.getpid()
        self._ready: list[asyncio.Future[None]] = []

    def __call__(self, number: int, frame: object) -> None:
        self.came = True
        if os.getpid() != self._process:  # a forked child: the jobs are its parent's
            _die()
        for stop in tuple(_stops):
            stop()

    async def all_ready(self) -> None:
        """After the signal: return when whoever waits in this loop has ended its job.

        Who goes first may end the loop, and with it what the others still do.
        """
        if self.came and len(self._ready) + 1 < len(_stops):
            self._ready.append(asyncio.get_running_loop().create_future())
            await self._ready[-1]
        for one in self._ready:
            if not one.done():
                one.set_result(None)


@contextmanager
def awaited(stop: Callable[[], object]) -> Generator[_Handler | None]:
    """Have SIGTERM call *stop* in the main thread; this process dies of it when the block is left.

    Where several blocks are open each is told, and the last to be left ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler is signal.SIG_DFL:
        handler = _Handler()
        signal.signal(signal.SIGTERM, handler)
    if not isinstance(handler, _Handler):
        yield None
        return
    _stops.append(stop)
    try:
        yield handler
    finally:
        _stops.remove(stop)
        if not _stops and handler.came:
            _die()
        if not _stops and signal.getsignal(signal.SIGTERM) is handler:  # nobody has taken it over
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
