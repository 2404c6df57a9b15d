"""Who builds an image: one process at a time, of all that want it, on any machine.

A marker in the store, created if it is absent, says who does. Its holder
renews it; whoever waits takes it over once it has not changed for `PATIENCE_S`
on his own clock, or at once when the holder was a process of this machine that
is gone. The marker names the build as soon as there is one, so that the next
holder goes on with it instead of starting a second.

A holder that fails leaves the marker with what went wrong. Those who saw it
build do not try the same again; who comes later does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from absl import logging

from kinetic._runner.frames import MALFORMED
from kinetic.aio._owner import Owner, lifetime
from kinetic.aio._release import release
from kinetic.aio.ports import Object, Store
from kinetic.errors import BackendError, BuildError, Conflict, NotFound

__all__ = ["Held", "Pace", "turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between renewals, between looks, and until a marker standing still is given up."""

    beat_s: float = 10.0
    look_s: float = 3.0
    patience_s: float = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marker:
    """The content of a marker. ``token`` tells one holder's turn from another."""

    token: str
    owner: dict[str, Any]
    build: str = ""
    beat: int = 0
    over: bool = False
    failure: str = ""
    log_url: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> _Marker:
        """The inverse of `to_bytes`; what cannot be read is nobody's, and is given up in time."""
        try:
            fields = json.loads(content)
            marker = cls(**{name: fields[name] for name in cls.__slots__ if name in fields})
            Owner.named(marker.owner or None)
        except MALFORMED:
            return cls(token="", owner={})
        texts = (marker.token, marker.build, marker.failure, marker.log_url)
        if type(marker.beat) is not int or not all(type(text) is str for text in texts):
            return cls(token="", owner={})
        return marker

    def gone(self) -> bool:
        """Whether its holder has certainly ended."""
        owner = Owner.named(self.owner or None)
        return owner is not None and owner.dead


class Held:
    """It is our turn. ``build`` is what the holder before us had under way, or empty."""

    def __init__(self, store: Store, name: str, marker: _Marker, generation: int) -> None:
        self.build = marker.build
        self._store, self._name = store, name
        self._marker = marker
        self._generation = generation
        self._lost = False
        self._writing = asyncio.Lock()

    async def note(self, build: str) -> None:
        """Tell others which build it is."""
        await self._write(build=build)

    async def fail(self, message: str, log_url: str) -> None:
        """Tell those who wait why there will be no image."""
        await self._write(over=True, failure=message[:8000], log_url=log_url)

    async def keep(self, beat_s: float) -> None:
        """Renew it for ever."""
        while True:
            await asyncio.sleep(beat_s)
            try:
                await self._write(beat=self._marker.beat + 1)
            except BackendError as exc:
                logging.info("the marker %s was not renewed: %s", self._name, exc)

    async def end(self) -> None:
        """Let the next one have it."""
        if self._marker.failure:
            return
        await self._write(over=True)  # marked, nobody takes it before it is gone
        if self._lost:  # or a renewal was cut short, and it is still ours
            await _forget(self._store, self._name, self._marker.token)
        else:
            await self._store.delete([self._name])

    async def _write(self, **changes: Any) -> None:
        async with self._writing:
            if self._lost:
                return
            self._marker = dataclasses.replace(self._marker, **changes)
            content = self._marker.to_bytes()
            try:
                self._generation = await self._store.replace(
                    self._name, content, generation=self._generation
                )
            except (Conflict, NotFound):
                self._lost = True
                logging.warning("another process has taken over %s; the build goes on", self._name)


@contextlib.asynccontextmanager
async def turn(
    store: Store,
    name: str,
    done: Callable[[], Awaitable[bool]],
    *,
    pace: Pace | None = None,
    clock: Callable[[], float] = lifetime,
) -> AsyncGenerator[Held | None]:
    """Wait until it is our turn, or until *done* says that there is nothing left to do: None.

    Raises:
        BuildError: The process that built it failed while we waited.
    """
    pace = pace or Pace()
    mine = _Marker(token=uuid.uuid4().hex, owner=dataclasses.asdict(Owner.me()))
    held = await _taken(store, name, done, mine, pace, clock)
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
    store: Store,
    name: str,
    done: Callable[[], Awaitable[bool]],
    mine: _Marker,
    pace: Pace,
    clock: Callable[[], float],
) -> Held | None:
    seen, since, waited_for = 0, clock(), ""
    while not await done():
        generation = await _created(store, name, mine)
        if generation is not None:
            held = Held(store, name, mine, generation)
            try:
                if not await done():
                    return held
            except BaseException:
                await release(held.end(), what=f"giving up {name}")
                raise
            await held.end()  # between our look and our turn somebody else had his
            return None
        try:
            there = await store.get(name)
        except NotFound:
            continue
        marker = _Marker.from_bytes(there.body)
        if marker.failure and marker.token == waited_for:
            raise _failed_elsewhere(marker)
        if there.generation != seen:
            seen, since = there.generation, clock()
        free = bool(marker.failure) or marker.gone() or clock() - since >= pace.patience_s
        if free:
            taken = dataclasses.replace(mine, build="" if marker.over else marker.build)
            generation = await _replaced(store, name, there, taken)
            if generation is not None:
                return Held(store, name, taken, generation)
            continue
        if waited_for != marker.token:
            waited_for = marker.token
            logging.info("another process builds this image (build %s)", marker.build or "to come")
        await asyncio.sleep(pace.look_s)
    return None


async def _created(store: Store, name: str, mine: _Marker) -> int | None:
    """The generation of our marker; None if there is one of somebody else's."""
    try:
        return await store.begin(name, mine.to_bytes())
    except BaseException:
        await release(_forget(store, name, mine.token), what=f"giving up {name}")
        raise


async def _replaced(store: Store, name: str, there: Object, taken: _Marker) -> int | None:
    """The generation of the marker that we took over; None if somebody else was faster."""
    try:
        return await store.replace(name, taken.to_bytes(), generation=there.generation)
    except (Conflict, NotFound):
        return None
    except BaseException:
        await release(_give_back(store, name, there, taken), what=f"giving up {name}")
        raise


async def _give_back(store: Store, name: str, there: Object, taken: _Marker) -> None:
    """Undo `_replaced`, if it took effect without our knowing."""
    if not taken.build:
        await _forget(store, name, taken.token)
        return
    with contextlib.suppress(Conflict, NotFound):
        now = await store.get(name)
        if _Marker.from_bytes(now.body).token == taken.token:  # that build goes on
            await store.replace(name, there.body, generation=now.generation)


async def _forget(store: Store, name: str, token: str) -> None:
    """Remove the marker, if it became ours without our knowing."""
    with contextlib.suppress(NotFound):
        if _Marker.from_bytes((await store.get(name)).body).token == token:
            await store.delete([name])


async def _ended(keeping: asyncio.Task[None], held: Held) -> None:
    await asyncio.wait({keeping})
    await held.end()


def _failed_elsewhere(marker: _Marker) -> BuildError:
    host = str(marker.owner.get("host", "another machine"))
    return BuildError(
        f"{marker.failure}\n(built by another process, on {host})",
        build_id=marker.build,
        log_url=marker.log_url,
    )
