"""A cluster whose watches drop, delay or repeat one notification."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kinetic.aio.ports import Observation

__all__ = ["FAULTS", "Fault", "Unreliable"]

FAULTS = ("dropped", "delayed", "doubled")


@dataclass
class Fault:
    """Drop, delay or repeat notification number *at*, from 0, of the watches that share this fault.

    A delayed notification comes after *delay_s* seconds; later ones overtake it. ``count`` is
    the number of notifications so far.
    """

    kind: str
    at: int
    delay_s: float = 30.0
    count: int = 0

    @property
    def happened(self) -> bool:
        """Whether the watches reached that notification."""
        return self.count > self.at


class Unreliable:
    """Pass requests on to a cluster whose watches have the *fault*."""

    def __init__(self, cluster: Any, fault: Fault) -> None:
        self._cluster = cluster
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Yield the notifications of the cluster with the fault."""
        loop, fault = asyncio.get_running_loop(), self._fault
        held: tuple[float, Observation] | None = None
        async with aclosing(self._cluster.watch(labels)) as news:
            coming = asyncio.ensure_future(anext(news))
            try:
                while True:
                    pause = None if held is None else max(0.0, held[0] - loop.time())
                    await asyncio.wait({coming}, timeout=pause)
                    if held is not None and loop.time() >= held[0]:
                        seen, held = held[1], None
                        yield seen
                    if not coming.done():
                        continue
                    seen, number = coming.result(), fault.count
                    coming = asyncio.ensure_future(anext(news))
                    fault.count += 1
                    if number != fault.at or fault.kind == "doubled":
                        yield seen
                        if number == fault.at:
                            yield seen
                    elif fault.kind == "delayed":
                        held = loop.time() + fault.delay_s, seen
            finally:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
