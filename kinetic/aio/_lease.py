"""The lease of a batch: the object of the store that names the one process that submits it.

Its holder renews it. An observer never compares clocks with the holder: it measures how long
the beat stands still, on its own clock, which also runs while a laptop sleeps. On the holder's
machine an observer sees its death at once.

A lease is the only object that is ever overwritten. A holder that is fenced out loses the right
to start attempts, and nothing else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import select
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from absl import logging

from kinetic._runner.protocol.frames import MALFORMED
from kinetic.aio.ports import Store, displaced
from kinetic.errors import BackendError, Conflict, NotFound, SubmitterLost


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same number."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def me(cls) -> ProcessIdentity:
        """This process."""
        return cls(platform.node(), _boot(), os.getpid(), _started(os.getpid()))

    @classmethod
    def named(cls, fields: dict[str, Any] | None) -> ProcessIdentity | None:
        """Return the process that a manifest names; None if it names nobody.

        Raises:
            ValueError: That is no process.
        """
        if not fields:
            return None
        try:
            owner = cls(**{name: fields[name] for name in cls.__slots__})
        except (LookupError, TypeError) as exc:
            raise ValueError(f"{fields!r} names no process") from exc
        texts = (owner.host, owner.boot, owner.started)
        if (
            type(owner.pid) is not int
            or owner.pid < 0
            or not all(type(one) is str for one in texts)
        ):
            raise ValueError(f"{fields!r} names no process")
        return owner

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this machine since it was started."""
        return (self.host, self.boot) == (platform.node(), _boot())

    @property
    def alive(self) -> bool:
        """Whether it still runs; only meaningful when it is `here`."""
        return _started(self.pid) == self.started != ""

    @property
    def dead(self) -> bool:
        """Whether it certainly runs no more."""
        return self.here and not self.alive

    async def ended(self, patience: float) -> bool:
        """Wait up to *patience* seconds for its end; whether that is certain now."""
        if self.here:
            return await _ended(self, patience)
        await asyncio.sleep(patience)
        return False


async def _ended(owner: ProcessIdentity, patience: float) -> bool:
    """Wait up to *patience* seconds for a process of this machine to end."""
    if not owner.alive:
        return True
    if not hasattr(os, "pidfd_open"):
        await asyncio.sleep(min(patience, 1.0))
        return not owner.alive
    try:
        fd = os.pidfd_open(owner.pid)
    except (ProcessLookupError, OSError):
        return not owner.alive
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    try:
        if select.select([fd], [], [], 0)[0]:
            return True
        loop.add_reader(fd, over.set)
        try:
            await asyncio.wait_for(over.wait(), patience)
        except TimeoutError:
            return not owner.alive
        finally:
            loop.remove_reader(fd)
        return True
    finally:
        os.close(fd)


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # a container numbers its own
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty when there is none."""
    if not Path("/proc/self/stat").exists():  # not Linux: only whether it is there
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "running"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


RENEW_S = 10.0
"""How often a holder renews its lease."""

START_S = 30.0
"""How old the last acknowledged renewal may be; with an older one the holder starts nothing."""

EXPIRY_S = 45.0
"""How long the beat of a lease must stand still until an observer takes the lease as expired."""

LOOK_S = 5.0
"""How long an observer waits between two looks at a lease."""

AGAIN_S = 2.0
"""How soon a holder tries again after a renewal that failed."""

Clock = Callable[[], float]

UNKNOWN = ProcessIdentity("an unknown machine", "", 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The content of a batch's lease: the process that submits it.

    ``beat`` counts what the holder has written. ``nonce`` tells one holding from every other.
    ``control_seen`` is how many requests the holder had read when it released the lease.
    """

    owner: ProcessIdentity
    beat: int = 0
    fence: int = 1
    held: bool = True
    control_seen: int = 0
    nonce: str = ""

    def to_bytes(self) -> bytes:
        """Return the content of the object."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Read the content of an object; unknown fields are ignored.

        Damaged or forged content gives `unreadable`.
        """
        try:
            given: dict[str, Any] = dict(json.loads(content))
            owner = ProcessIdentity.named(given.pop("owner"))
            known = [one for one in dataclasses.fields(cls) if one.name in given]
            sound = all(type(given[one.name]) is type(one.default) for one in known)
            if owner is None or not sound:
                return cls.unreadable()
            return cls(owner=owner, **{one.name: given[one.name] for one in known})
        except MALFORMED:
            return cls.unreadable()

    @classmethod
    def unreadable(cls) -> Self:
        """Return a lease that nobody holds, so that anybody can take it."""
        return cls(owner=UNKNOWN, held=False)

    @property
    def who(self) -> str:
        """Its owner, for messages."""
        return f"process {self.owner.pid} on {self.owner.host}"


def name_of(scope: str) -> str:
    """Return the name of a batch's lease."""
    return f"{scope}lease"


async def read(store: Store, scope: str) -> tuple[Lease, int] | None:
    """Return the lease as it is now, with its generation; None if there is none."""
    try:
        there = await store.get(name_of(scope))
    except NotFound:
        return None
    return Lease.from_bytes(there.body), there.generation


async def _write_over(store: Store, scope: str, mine: Lease, over: int | None) -> int | None:
    """Write *mine* where no lease is, or *over* this generation of one.

    Return the new generation; None if another process was faster.

    Raises:
        WireError: Something that is no object lies in its place.
    """
    name = name_of(scope)
    if over is None:
        made = await store.begin(name, mine.to_bytes())
        if made is not None:
            return made
    else:
        try:
            return await store.replace(name, mine.to_bytes(), generation=over)
        except NotFound:
            return None
        except Conflict:
            pass
    there = await read(store, scope)  # it may be ours, and only the reply was lost
    if there is None and over is None:
        # It was removed since, or is no object at all: then nobody can ever take it.
        if (made := await store.begin(name, mine.to_bytes())) is not None:
            return made
        if (there := await read(store, scope)) is None:
            raise displaced(name, store)
    return there[1] if there is not None and there[0].nonce == mine.nonce else None


class Sight:
    """What a process that doesn't hold a lease sees of it."""

    def __init__(self, store: Store, scope: str, clock: Clock) -> None:
        self.seen: tuple[Lease, int] | None = None
        self._store = store
        self._scope = scope
        self._clock = clock
        self._since = clock()

    async def look(self) -> bool:
        """Read the lease; return whether it has changed."""
        now = await read(self._store, self._scope)
        if now == self.seen:
            return False
        self.seen, self._since = now, self._clock()
        return True

    @property
    def expired(self) -> bool:
        """Whether the lease has stood still for so long that its holder counts as dead."""
        return self._clock() - self._since >= EXPIRY_S


class HeldLease:
    """The right to submit a batch, until this process releases it or another takes it."""

    def __init__(
        self, store: Store, scope: str, lease: Lease, generation: int, clock: Clock, sent: float
    ) -> None:
        self.scope = scope
        self.lost: SubmitterLost | None = None
        self._store = store
        self._lease = lease
        self._generation = generation
        self._clock = clock
        self._sent = sent  # when the last acknowledged write was sent
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._behind = False

    @property
    def fence(self) -> int:
        """The number of this holding; each later one has a greater number."""
        return self._lease.fence

    @property
    def may_start(self) -> bool:
        """Whether an attempt may start now; ask right before each."""
        young = self._clock() - self._sent < START_S
        return young and self._lease.held and not self._behind and self.lost is None

    async def until_may_start(self) -> None:
        """Return when `may_start`.

        Raises:
            SubmitterLost: Another process holds the lease, or the batch was removed.
        """
        while not self.may_start:
            if self.lost is not None:
                raise self.lost
            self._changed.clear()
            await self._changed.wait()

    async def keep(self, period: float = RENEW_S) -> None:
        """Renew the lease every *period* seconds until cancelled; sooner after a failure."""
        pause = period
        while True:
            await asyncio.sleep(pause)
            pause = period
            try:
                await self.renew()
            except BackendError as exc:
                logging.warning("the lease %s could not be renewed: %s", name_of(self.scope), exc)
                pause = min(period, AGAIN_S)

    async def renew(self) -> None:
        """Write that this process is alive.

        Raises:
            SubmitterLost: As `until_may_start`.
            BackendError: The store does not answer.
        """
        async with self._turn:
            if self._lease.held:
                await self._write()

    async def release(self, control_seen: int = 0) -> None:
        """Release the lease, so that the next process need not wait.

        Raises:
            SubmitterLost: As `until_may_start`.
            BackendError: The store does not answer; the lease will expire.
        """
        async with self._turn:
            if self._lease.held and self.lost is None:
                await self._write(held=False, control_seen=control_seen)

    async def retake(self) -> None:
        """Take the lease again after `release`, with the next fence; `catch_up` before a start.

        Raises:
            SubmitterLost: Another process was faster.
            BackendError: The store does not answer.
        """
        async with self._turn:
            self._behind = True
            await self._write(fence=self.fence + 1, held=True)

    def catch_up(self) -> None:
        """Allow starts again: the requests that came while nobody had the lease were read."""
        self._behind = False
        self._changed.set()

    async def _write(self, **changes: Any) -> None:
        """Replace the object.

        If its generation has moved on only because an earlier write of our own arrived
        without a reply, write over that.

        Raises:
            SubmitterLost: As `until_may_start`.
            BackendError: The store does not answer.
        """
        lease = replace(self._lease, beat=self._lease.beat + 1, **changes)
        try:
            while True:
                sent = self._clock()
                try:
                    generation = await self._store.replace(
                        name_of(self.scope), lease.to_bytes(), generation=self._generation
                    )
                    break
                except (Conflict, NotFound):
                    there = await read(self._store, self.scope)
                    if there is None or there[0].nonce != lease.nonce:
                        self.lost = self._fenced_out(there[0] if there is not None else None)
                        raise self.lost from None
                    self._generation = there[1]
            self._lease, self._generation, self._sent = lease, generation, sent
        finally:
            self._changed.set()

    def _fenced_out(self, now: Lease | None) -> SubmitterLost:
        batch = self.scope.strip("/").rpartition("/")[2]
        if now is None:
            return SubmitterLost(f"batch {batch} was cleaned up meanwhile", job_id=batch)
        return SubmitterLost(
            f"batch {batch} is submitted by {now.who} now (fence {now.fence}, here "
            f"{self.fence}); nothing of it was ended: wait there, or attach to it here",
            job_id=batch,
        )


async def begin(store: Store, scope: str, clock: Clock) -> HeldLease:
    """Hold the lease of a batch that was just made.

    Raises:
        SubmitterLost: Another process was faster.
    """
    hold = await _claim(store, scope, None, clock)
    if hold is None:
        there = await read(store, scope)
        who = there[0].who if there is not None else "another process"
        raise SubmitterLost(f"{scope.strip('/')} is submitted by {who} now; attach to it")
    return hold


async def acquire(
    store: Store,
    scope: str,
    submitter: ProcessIdentity | None,
    clock: Clock,
    *,
    force: bool = False,
) -> HeldLease:
    """Take the lease over: at once when it is free or its holder is dead, else once it has run out.

    *submitter* is the process that the manifest names: it may not have created the
    lease yet, or have died before it could. With *force*, nothing is waited for; a
    holder that lives is fenced out.

    Raises:
        Conflict: Its holder lives.
        NotFound: The batch was removed.
        WireError: Something that is no object lies in the lease's place.
    """
    batch = scope.strip("/").rpartition("/")[2]
    sight = Sight(store, scope, clock)
    await sight.look()
    while True:
        seen = sight.seen
        owner = seen[0].owner if seen is not None else submitter
        free = force or sight.expired or (owner is not None and owner.dead)
        if free or owner is None or (seen is not None and not seen[0].held):
            if (hold := await _claim(store, scope, seen, clock)) is not None:
                return hold
        else:
            await owner.ended(LOOK_S)
        if not await sight.look():
            continue
        if sight.seen is None:
            raise NotFound(f"batch {batch} was cleaned up meanwhile")
        if sight.seen[0].held and not force:
            raise Conflict(
                f"batch {batch} is submitted by {sight.seen[0].who}, which is alive: wait for it, "
                "end it, or take the batch from it by resume(force=True)"
            )


async def until_abandoned(
    store: Store, scope: str, submitter: ProcessIdentity | None, clock: Clock
) -> Lease | None:
    """Wait until nobody submits the batch any more; returns the last lease, if there was one."""
    # The submitter stands in for the lease until one exists.
    lease = Lease(owner=submitter) if submitter is not None else None
    sight = Sight(store, scope, clock)
    if await sight.look():
        lease = sight.seen[0] if sight.seen is not None else None
    while lease is not None and lease.held and not sight.expired:
        dead = await lease.owner.ended(LOOK_S)
        if await sight.look():
            lease = sight.seen[0] if sight.seen is not None else None
        elif dead:
            return lease
    return lease


async def _claim(
    store: Store, scope: str, seen: tuple[Lease, int] | None, clock: Clock
) -> HeldLease | None:
    lease, over, sent = Lease(owner=ProcessIdentity.me(), nonce=os.urandom(8).hex()), None, clock()
    if seen is not None:
        there, over = seen
        lease = replace(lease, fence=there.fence + 1, control_seen=there.control_seen)
    generation = await _write_over(store, scope, lease, over)
    return None if generation is None else HeldLease(store, scope, lease, generation, clock, sent)
