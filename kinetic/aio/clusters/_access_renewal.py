"""Passes that end: renewed in time, once for all who wait, and at once when they are refused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from absl import logging

from kinetic.aio._release import shared
from kinetic.aio.clusters._access import Pass
from kinetic.errors import AuthError, ConfigurationError, Unavailable

__all__ = ["Fresh", "OtherCluster", "Renewal"]

PAUSE_S = 10.0
"""After a renewal beside a request has failed, the next is tried this much later."""


class OtherCluster(AuthError):
    """What gave the passes of one cluster is about another one now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """A new pass: when to look for a newer one, and until when it is good; in `time.time`."""

    shown: Pass
    early: float = math.inf
    late: float = math.inf


class Renewal:
    """Gives out what *renew* brings; cancelling one who waits for it leaves the others waiting.

    A pass that is still good is renewed beside the requests; one that is not
    holds them up.
    """

    def __init__(
        self,
        renew: Callable[[], Awaitable[Fresh]],
        name: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._renew = renew
        self._name = name
        self._clock = clock
        self._fresh: Fresh | None = None
        self._had = False
        self._pause_until = -math.inf
        self._renewing: asyncio.Task[Pass] | None = None

    async def first(self) -> None:
        """Get one now; nothing is left behind if that fails, or is cancelled."""
        try:
            await self.get()
        except BaseException:
            await self.aclose()
            raise

    async def get(self) -> Pass:
        """A pass that is valid now, or the error of *renew*."""
        now, fresh = self._clock(), self._fresh
        if fresh is not None and now < fresh.late:
            if now >= max(fresh.early, self._pause_until):
                self._start()
            return fresh.shown
        return await shared(self._start(), f"the client of {self._name}")

    def forget(self, shown: Pass) -> None:
        """The server has refused *shown*: get another one before the next request."""
        if self._fresh is not None and self._fresh.shown is shown:
            self._fresh = None

    async def aclose(self) -> None:
        """End a renewal under way."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})

    def _start(self) -> asyncio.Task[Pass]:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._once(), name=f"kinetic pass of {self._name}")
            self._renewing.add_done_callback(self._ended)
        return self._renewing

    async def _once(self) -> Pass:
        try:
            fresh = self._fresh = await self._renew()
        except (AuthError, ConfigurationError) as exc:
            if not self._had or isinstance(exc, OtherCluster):
                raise
            # What worked before may work again: without a network, plugins fail as well.
            raise Unavailable(f"{exc} (they were there before)", retryable=True) from exc
        self._had = True
        return fresh.shown

    def _ended(self, task: asyncio.Task[Pass]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None and self._fresh:
            self._pause_until = self._clock() + PAUSE_S
            logging.info("the credentials of %s were not renewed yet: %s", self._name, failure)
