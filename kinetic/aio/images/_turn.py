"""Who builds an image: one process at a time, of all that want it, on any machine.

A lease in the store, the marker, says who does. Whoever waits takes it over once
it has run out, or at once when its holder was a process of this machine that is
gone. The marker names the build as soon as there is one, so that the next
holder goes on with it instead of starting a second.

A holder that fails leaves the marker with what went wrong. Those who saw it
build do not try the same again; who comes later does.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace

from absl import logging

from kinetic.aio._lease import EXPIRY_S, RENEW_S, Clock, Holding, Place, Record, Sight
from kinetic.aio._owner import Owner, lifetime
from kinetic.aio._release import release
from kinetic.aio.ports import Store
from kinetic.errors import BuildError, Conflict, NotFound

__all__ = ["Held", "Pace", "turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between renewals, between looks, and until a marker standing still is given up."""

    beat_s: float = RENEW_S
    look_s: float = 3.0
    patience_s: float = EXPIRY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marker(Record):
    """The content of a marker. ``token`` tells one holder's turn from another."""

    token: str = ""
    build: str = ""
    over: bool = False
    failure: str = ""
    log_url: str = ""

    @property
    def holding(self) -> str:
        return self.token


class Held(Holding[_Marker]):
    """It is our turn. ``build`` is what the holder before us had under way, or empty."""

    def __init__(
        self, place: Place[_Marker], marker: _Marker, generation: int, clock: Clock
    ) -> None:
        super().__init__(place, marker, generation, clock, clock())
        self.build = marker.build
        self._lost = False

    async def renew(self) -> None:
        """Say that this process is there, unless another one has the marker now."""
        await self._tell()

    async def note(self, build: str) -> None:
        """Tell others which build it is."""
        await self._tell(build=build)

    async def fail(self, message: str, log_url: str) -> None:
        """Tell those who wait why there will be no image."""
        await self._tell(over=True, failure=message[:8000], log_url=log_url)

    async def end(self) -> None:
        """Let the next one have it."""
        if self._record.failure:
            return
        await self._tell(over=True)  # marked, nobody takes it before it is gone
        if not self._lost:
            await self._place.store.delete([self._place.name])

    async def _tell(self, **changes: object) -> None:
        async with self._turn:
            if not self._lost:
                await self._write(**changes)

    def _lost_to(self, now: _Marker | None) -> None:
        self._lost = True
        what = "another process has taken over %s; the build goes on"
        logging.warning(what, self._place.name)


@contextlib.asynccontextmanager
async def turn(
    store: Store,
    name: str,
    done: Callable[[], Awaitable[bool]],
    *,
    pace: Pace | None = None,
    clock: Clock = lifetime,
) -> AsyncGenerator[Held | None]:
    """Wait until it is our turn, or until *done* says that there is nothing left to do: None.

    Raises:
        BuildError: The process that built it failed while we waited.
    """
    pace = pace or Pace()
    mine = _Marker(token=uuid.uuid4().hex, owner=Owner.me())
    held = await _taken(Place(store, name, _Marker), done, mine, pace, clock)
    if held is None:
        yield None
        return
    keeping = asyncio.create_task(held.keep(pace.beat_s), name=f"kinetic keep {name}")
    try:
        yield held
    finally:
        keeping.cancel()
        await release(_ended(keeping, held), what=f"leaving {name}")


async def _taken(
    place: Place[_Marker],
    done: Callable[[], Awaitable[bool]],
    mine: _Marker,
    pace: Pace,
    clock: Clock,
) -> Held | None:
    sight, waited_for = Sight(place, clock, pace.patience_s), ""
    while not await done():
        await sight.look()
        marker = sight.seen[0] if sight.seen is not None else None
        if marker is not None and marker.failure and marker.token == waited_for:
            raise _failed_elsewhere(marker)
        if marker is None or marker.failure or marker.owner.dead or sight.expired:
            build = "" if marker is None or marker.over else marker.build
            held = await _claimed(place, replace(mine, build=build), sight.seen, clock)
            if held is None:
                continue
            try:
                if build or not await done():
                    return held
            except BaseException:
                await release(held.end(), what=f"giving up {place.name}")
                raise
            await held.end()  # between our look and our turn somebody else had his
            return None
        if waited_for != marker.token:
            waited_for = marker.token
            logging.info("another process builds this image (build %s)", marker.build or "to come")
        await asyncio.sleep(pace.look_s)
    return None


async def _claimed(
    place: Place[_Marker], mine: _Marker, seen: tuple[_Marker, int] | None, clock: Clock
) -> Held | None:
    """The marker as ours, also in place of the one *seen*; None if somebody else was faster."""
    before, over = seen if seen is not None else (None, None)
    try:
        generation = await place.claim(mine, over)
    except BaseException:
        before = before if mine.build else None  # that build goes on
        await release(_give_back(place, mine, before), what=f"giving up {place.name}")
        raise
    return None if generation is None else Held(place, mine, generation, clock)


async def _give_back(place: Place[_Marker], mine: _Marker, before: _Marker | None) -> None:
    """Put the marker back as it was, or remove it, if it became ours without our knowing."""
    there = await place.read()
    if there is None or there[0].token != mine.token:
        return
    if before is None:
        await place.store.delete([place.name])
    else:
        with contextlib.suppress(Conflict, NotFound):
            await place.store.replace(place.name, before.to_bytes(), generation=there[1])


async def _ended(keeping: asyncio.Task[None], held: Held) -> None:
    await asyncio.wait({keeping})
    await held.end()


def _failed_elsewhere(marker: _Marker) -> BuildError:
    return BuildError(
        f"{marker.failure}\n(built by another process, on {marker.owner.host})",
        build_id=marker.build,
        log_url=marker.log_url,
    )
