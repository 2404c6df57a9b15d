"""Simulate a process that vanishes: after the cut, its requests reach nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation

__all__ = ["Severed", "on_loop_time", "severed"]


def on_loop_time(platform: Platform) -> Platform:
    """Return *platform* with its leases on the clock of the event loop."""
    return replace(platform, clock=asyncio.get_running_loop().time)


class Severed:
    """Pass requests on to a store or a cluster until the cut; later ones never return."""

    def __init__(self, port: Any, cut: asyncio.Event, last: str) -> None:
        self._port = port
        self._cut = cut
        self._last = last

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._connected()
            answer = await method(*args, **kwargs)
            if self._last and name in ("create", "begin") and args[0].endswith(self._last):
                self._cut.set()
            await self._connected()
            return answer

        return call

    async def _connected(self) -> None:
        if self._cut.is_set():
            await asyncio.get_running_loop().create_future()

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        async for seen in self._port.watch(labels):
            await self._connected()
            yield seen

    async def aclose(self) -> None:
        """Do nothing: this port holds nothing."""


def severed(platform: Platform, last: str = "") -> tuple[Platform, asyncio.Event]:
    """Return *platform* for a process that vanishes, and the event that makes it vanish.

    Creating an object whose name ends with *last* sets the event.
    """
    cut = asyncio.Event()
    store: Any = Severed(platform.store, cut, last)
    cluster: Any = Severed(platform.cluster, cut, "")
    return replace(platform, store=store, cluster=cluster), cut
