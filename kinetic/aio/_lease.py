"""Leases: objects of the store that say which one process does something, for as long as it lives.

Their holder renews them. An observer never compares clocks with the holder, it
only sees that the beat has stood still on a clock of its own, one that goes on
while a laptop sleeps. On the holder's own machine its death is seen at once.

Leases are the only objects that are ever overwritten. That of a batch says who
submits it; being fenced out ends nothing but the right to start attempts.
Whoever builds an image has one, too.
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
from typing import Any, Generic, Self, TypeVar

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
        """The one a manifest names; those of earlier versions name nobody.

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
START_S = 30.0
"""While the last renewal that was acknowledged is older, its holder starts nothing."""

EXPIRY_S = 45.0
"""An observer who has seen the beat of a lease stand still for so long takes it as expired."""

LOOK_S, AGAIN_S = 5.0, 2.0

Clock = Callable[[], float]

UNKNOWN = ProcessIdentity("an unknown machine", "", 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of a lease; ``beat`` counts what its holder has written.

    A kind of lease adds fields of its own, each with a default of its type.
    """

    owner: ProcessIdentity
    beat: int = 0

    @property
    def holding(self) -> str:
        """What tells one holding of it from every other."""
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        """As the object's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """The inverse of `to_bytes`; unknown fields are ignored.

        What cannot be read, whether it is damaged or forged, is `unreadable`.
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
        """What stands for it when it cannot be read: an owner that nobody knows."""
        return cls(owner=UNKNOWN)

    @property
    def who(self) -> str:
        """Its owner, for messages."""
        return f"process {self.owner.pid} on {self.owner.host}"


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Place(Generic[R]):
    """Where a lease lies, and of which kind it is."""

    store: Store
    name: str
    kind: type[R]

    async def read(self) -> tuple[R, int] | None:
        """The lease as it is now, with its generation; None when there is none."""
        try:
            there = await self.store.get(self.name)
        except NotFound:
            return None
        return self.kind.from_bytes(there.body), there.generation

    async def claim(self, mine: R, over: int | None) -> int | None:
        """Write *mine* where no lease is, or *over* this generation of one.

        Returns the new generation; None when somebody else was faster.

        Raises:
            WireError: Something that is no object lies in its place.
        """
        if over is None:
            made = await self.store.begin(self.name, mine.to_bytes())
            if made is not None:
                return made
        else:
            try:
                return await self.store.replace(self.name, mine.to_bytes(), generation=over)
            except NotFound:
                return None
            except Conflict:
                pass
        there = await self.read()  # it may be ours, and only the reply was lost
        if there is None and over is None:
            # Removed since, or no object at all: then nobody can ever take it.
            if (made := await self.store.begin(self.name, mine.to_bytes())) is not None:
                return made
            if (there := await self.read()) is None:
                raise displaced(self.name, self.store)
        return there[1] if there is not None and there[0].holding == mine.holding else None


class Sight(Generic[R]):
    """What one who does not hold a lease sees of it."""

    def __init__(self, place: Place[R], clock: Clock, expiry: float = EXPIRY_S) -> None:
        self.seen: tuple[R, int] | None = None
        self._place = place
        self._clock = clock
        self._expiry = expiry
        self._since = clock()

    async def look(self) -> bool:
        """Read it; whether it has changed."""
        now = await self._place.read()
        if now == self.seen:
            return False
        self.seen, self._since = now, self._clock()
        return True

    @property
    def expired(self) -> bool:
        """Whether nobody has written it for so long that its holder may be taken for gone."""
        return self._clock() - self._since >= self._expiry


class Holding(Generic[R]):
    """A lease in the hands of this process, until it lets go of it or somebody else takes it."""

    def __init__(
        self, place: Place[R], record: R, generation: int, clock: Clock, sent: float
    ) -> None:
        self._place = place
        self._record = record
        self._generation = generation
        self._clock = clock
        self._sent = sent  # the last writing that was acknowledged
        self._turn = asyncio.Lock()

    async def keep(self, period: float = RENEW_S) -> None:
        """Renew it every *period* seconds until cancelled; after a failure, sooner."""
        pause = period
        while True:
            await asyncio.sleep(pause)
            pause = period
            try:
                await self.renew()
            except BackendError as exc:
                logging.warning("the lease %s could not be renewed: %s", self._place.name, exc)
                pause = min(period, AGAIN_S)

    async def renew(self) -> None:
        """Say that this process is there.

        Raises:
            BackendError: The store does not answer.
        """
        async with self._turn:
            await self._write()

    async def _write(self, **changes: Any) -> R | None:
        """Replace the object; None when it is not this process's any more.

        If its generation has moved on only because an earlier try of our own arrived
        without a reply, try again over that.

        Raises:
            Exception: Whatever the subclass's `_lost_to` raises, if it raises.
        """
        record = replace(self._record, beat=self._record.beat + 1, **changes)
        while True:
            sent = self._clock()
            try:
                generation = await self._place.store.replace(
                    self._place.name, record.to_bytes(), generation=self._generation
                )
            except (Conflict, NotFound):
                there = await self._place.read()
                if there is None or there[0].holding != record.holding:
                    self._lost_to(there[0] if there is not None else None)
                    return None
                self._generation = there[1]  # it was our own, and its reply was lost
                continue
            self._record, self._generation, self._sent = record, generation, sent
            return record

    def _lost_to(self, now: R | None) -> None:
        """Another process holds it *now*, or it was removed."""
        raise NotImplementedError


# --- the lease of a batch ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Record):
    """Who submits a batch.

    ``nonce`` tells one holding of it from every other, ``control_seen`` is how
    many requests the holder had read when it released the lease.
    """

    fence: int = 1
    held: bool = True
    control_seen: int = 0
    nonce: str = ""

    @property
    def holding(self) -> str:
        """As `Record.holding`."""
        return self.nonce

    @classmethod
    def unreadable(cls) -> Self:
        """Nobody holds it: it can be taken."""
        return cls(owner=UNKNOWN, held=False)


def name_of(scope: str) -> str:
    """Where the lease of a batch lies."""
    return f"{scope}lease"


def _place(store: Store, scope: str) -> Place[Lease]:
    return Place(store, name_of(scope), Lease)


async def read(store: Store, scope: str) -> tuple[Lease, int] | None:
    """The lease as it is now, with its generation; None when there is none."""
    return await _place(store, scope).read()


class HeldLease(Holding[Lease]):
    """The right to submit a batch."""

    def __init__(
        self, store: Store, scope: str, lease: Lease, generation: int, clock: Clock, sent: float
    ) -> None:
        super().__init__(_place(store, scope), lease, generation, clock, sent)
        self.scope = scope
        self._changed = asyncio.Event()
        self._behind = False
        self.lost: SubmitterLost | None = None

    @property
    def fence(self) -> int:
        """The number of this holding; a later one has a greater."""
        return self._record.fence

    @property
    def may_start(self) -> bool:
        """Whether an attempt may be started now; to be asked right before each."""
        young = self._clock() - self._sent < START_S
        return young and self._record.held and not self._behind and self.lost is None

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

    async def renew(self) -> None:
        """Say that this process is there.

        Raises:
            SubmitterLost: As `until_may_start`.
            BackendError: The store does not answer.
        """
        async with self._turn:
            if self._record.held:
                await self._write()

    async def release(self, control_seen: int = 0) -> None:
        """Let go of it; whoever wants the batch need not wait.

        Raises:
            SubmitterLost: As `until_may_start`.
            BackendError: The store does not answer; the lease will run out.
        """
        async with self._turn:
            if self._record.held and self.lost is None:
                await self._write(held=False, control_seen=control_seen)

    async def retake(self) -> None:
        """Take it again after `release`, with the next fence; start nothing before `catch_up`.

        Raises:
            SubmitterLost: Somebody else was faster.
            BackendError: The store does not answer.
        """
        async with self._turn:
            self._behind = True
            await self._write(fence=self.fence + 1, held=True)

    def catch_up(self) -> None:
        """The requests that came while nobody had the lease were read: attempts may start again."""
        self._behind = False
        self._changed.set()

    async def _write(self, **changes: Any) -> Lease | None:
        try:
            return await super()._write(**changes)
        finally:
            self._changed.set()

    def _lost_to(self, now: Lease | None) -> None:
        self.lost = self._fenced_out(now)
        raise self.lost from None

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
    sight = Sight(_place(store, scope), clock)
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
    sight = Sight(_place(store, scope), clock)
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
    generation = await _place(store, scope).claim(lease, over)
    return None if generation is None else HeldLease(store, scope, lease, generation, clock, sent)
