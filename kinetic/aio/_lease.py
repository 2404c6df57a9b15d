"""Who submits a batch: the one object that is ever overwritten, and the right it gives.

Its holder renews it. An observer never compares clocks with the holder, it
only sees that the beat has stood still on a clock of its own, one that goes on
while a laptop sleeps. On the holder's own machine its death is seen at once.
Being fenced out ends nothing but the right to start attempts.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from absl import logging

from kinetic._runner.frames import MALFORMED
from kinetic.aio._owner import Owner
from kinetic.aio.ports import Store
from kinetic.errors import BackendError, Conflict, NotFound, SubmitterLost

__all__ = ["Hold", "Lease", "acquire", "begin", "name_of", "read", "until_abandoned"]

RENEW_S = 10.0
START_S = 30.0
"""A holder starts nothing so long after it sent the last renewal that was acknowledged."""

EXPIRY_S = 45.0
"""An observer takes a lease as expired whose beat it has seen stand still for so long."""

LOOK_S, AGAIN_S = 5.0, 2.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The content of the object.

    ``beat`` counts renewals, ``nonce`` tells one holding of it from every
    other, ``control_seen`` is how many requests the holder had read when it
    released the lease.
    """

    owner: Owner
    fence: int = 1
    beat: int = 0
    held: bool = True
    control_seen: int = 0
    nonce: str = ""

    def to_bytes(self) -> bytes:
        """As the object's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Lease:
        """The inverse of `to_bytes`; unknown fields are ignored.

        Nobody holds what cannot be read, whether it is damaged or forged: it can be taken.
        """
        try:
            fields: dict[str, Any] = json.loads(content)
            known = {name: fields[name] for name in cls.__slots__ if name in fields}
            known["owner"] = Owner.named(fields["owner"])
            lease = cls(**known)
        except MALFORMED:
            return UNREADABLE
        counts = (lease.fence, lease.beat, lease.control_seen)
        if any(type(one) is not int for one in counts) or type(lease.held) is not bool:
            return UNREADABLE
        return lease if type(lease.nonce) is str else UNREADABLE

    @property
    def who(self) -> str:
        """Its owner, for messages."""
        return f"process {self.owner.pid} on {self.owner.host}"


UNREADABLE = Lease(owner=Owner("an unknown machine", "", 0, ""), held=False)


def name_of(scope: str) -> str:
    """Where the lease of a batch lies."""
    return f"{scope}lease"


async def read(store: Store, scope: str) -> tuple[Lease, int] | None:
    """The lease as it is now, with its generation; None when there is none."""
    try:
        there = await store.get(name_of(scope))
    except NotFound:
        return None
    return Lease.from_bytes(there.body), there.generation


class Hold:
    """The lease, held by this process until it is released or somebody else takes it."""

    def __init__(
        self, store: Store, scope: str, lease: Lease, generation: int, clock: Clock, sent: float
    ) -> None:
        self._store = store
        self.scope = self._scope = scope
        self._lease = lease
        self._generation = generation
        self._clock = clock
        self._sent = sent
        self._changed = asyncio.Event()
        self._behind = False
        self._turn = asyncio.Lock()
        self.lost: SubmitterLost | None = None

    @property
    def fence(self) -> int:
        """The number of this holding; a later one has a greater."""
        return self._lease.fence

    @property
    def may_start(self) -> bool:
        """Whether an attempt may be started now; to be asked right before each."""
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

    async def keep(self) -> None:
        """Renew it every 10 s until cancelled; a store that does not answer is asked again.

        Raises:
            SubmitterLost: As `until_may_start`.
        """
        pause = RENEW_S
        while True:
            await asyncio.sleep(pause)
            pause = RENEW_S
            try:
                await self.renew()
            except BackendError as exc:
                logging.warning("the lease of %s could not be renewed: %s", self._scope, exc)
                pause = AGAIN_S

    async def renew(self) -> None:
        """Say that this process is there.

        Raises:
            SubmitterLost: As `until_may_start`.
            BackendError: The store does not answer.
        """
        async with self._turn:
            if self._lease.held:
                await self._write(replace(self._lease, beat=self._lease.beat + 1))

    async def release(self, control_seen: int = 0) -> None:
        """Let go of it; whoever wants the batch need not wait.

        Raises:
            SubmitterLost: As `until_may_start`.
            BackendError: The store does not answer; the lease will run out.
        """
        async with self._turn:
            if self._lease.held and self.lost is None:
                beat = self._lease.beat + 1
                await self._write(
                    replace(self._lease, beat=beat, held=False, control_seen=control_seen)
                )

    async def retake(self) -> None:
        """Take it again after `release`, with the next fence; start nothing before `catch_up`.

        Raises:
            SubmitterLost: Somebody else was faster.
            BackendError: The store does not answer.
        """
        async with self._turn:
            self._behind = True
            again = replace(self._lease, fence=self.fence + 1, held=True)
            await self._write(again)

    def catch_up(self) -> None:
        """What others have asked for while nobody held it is known."""
        self._behind = False
        self._changed.set()

    async def _write(self, lease: Lease) -> None:
        """Replace the object, whatever became of the replies to earlier tries."""
        while True:
            sent = self._clock()
            try:
                generation = await self._store.replace(
                    name_of(self._scope), lease.to_bytes(), generation=self._generation
                )
            except (Conflict, NotFound):
                there = await read(self._store, self._scope)
                if there is None or there[0].nonce != lease.nonce:
                    self.lost = self._fenced_out(there[0] if there is not None else None)
                    self._changed.set()
                    raise self.lost from None
                self._generation = there[1]  # it was our own, and its reply was lost
                continue
            self._lease, self._generation, self._sent = lease, generation, sent
            self._changed.set()
            return

    def _fenced_out(self, now: Lease | None) -> SubmitterLost:
        batch = self._scope.strip("/").rpartition("/")[2]
        if now is None:
            return SubmitterLost(f"batch {batch} was cleaned up meanwhile", job_id=batch)
        return SubmitterLost(
            f"batch {batch} is submitted by {now.who} now (fence {now.fence}, here "
            f"{self.fence}); nothing of it was ended: wait there, or attach to it here",
            job_id=batch,
        )


async def begin(store: Store, scope: str, clock: Clock) -> Hold:
    """Hold the lease of a batch that was just made.

    Raises:
        SubmitterLost: Another process was faster.
    """
    hold = await _create(store, scope, clock)
    if hold is None:
        there = await read(store, scope)
        who = there[0].who if there is not None else "another process"
        raise SubmitterLost(f"{scope.strip('/')} is submitted by {who} now; attach to it")
    return hold


async def acquire(
    store: Store, scope: str, submitter: Owner | None, clock: Clock, *, force: bool = False
) -> Hold:
    """Take the lease over: at once when it is free, else when it has run out.

    *submitter* is the process that the manifest names: it may not have come to
    making the lease yet, or have died over it. With *force*, nothing is waited
    for; a holder that lives is fenced out.

    Raises:
        Conflict: Its holder lives.
        NotFound: The batch was removed.
    """
    batch = scope.strip("/").rpartition("/")[2]
    seen, since = await read(store, scope), clock()
    while True:
        owner = seen[0].owner if seen is not None else submitter
        free = force or owner is None or owner.dead or clock() - since >= EXPIRY_S
        if seen is None and free:
            if (hold := await _create(store, scope, clock)) is not None:
                return hold
        elif seen is not None and (free or not seen[0].held):
            if (hold := await _replace(store, scope, *seen, clock)) is not None:
                return hold
        else:
            assert owner is not None
            await owner.ended(LOOK_S)
        now = await read(store, scope)
        if now == seen:
            continue
        if now is None:
            raise NotFound(f"batch {batch} was cleaned up meanwhile")
        if now[0].held and not force:
            raise Conflict(
                f"batch {batch} is submitted by {now[0].who}, which is alive: wait for it, end "
                "it, or take the batch from it by resume(force=True)"
            )
        seen, since = now, clock()


async def until_abandoned(
    store: Store, scope: str, submitter: Owner | None, clock: Clock
) -> Lease | None:
    """Wait until nobody submits the batch any more, and return the last lease."""
    first = Lease(owner=submitter) if submitter is not None else None
    there = await read(store, scope)
    seen, since = there[0] if there is not None else first, clock()
    while seen is not None and seen.held and clock() - since < EXPIRY_S:
        dead = await seen.owner.ended(LOOK_S)
        there = await read(store, scope)
        now = there[0] if there is not None else (first if seen is first else None)
        if now == seen and dead:
            return seen
        if now != seen:
            seen, since = now, clock()
    return seen


async def _create(store: Store, scope: str, clock: Clock) -> Hold | None:
    lease, sent = _mine(), clock()
    generation = await store.begin(name_of(scope), lease.to_bytes())
    if generation is None:
        there = await read(store, scope)
        if there is None or there[0].nonce != lease.nonce:
            return None
        generation = there[1]
    return Hold(store, scope, lease, generation, clock, sent)


async def _replace(
    store: Store, scope: str, there: Lease, generation: int, clock: Clock
) -> Hold | None:
    lease = replace(_mine(), fence=there.fence + 1, control_seen=there.control_seen)
    sent = clock()
    try:
        now = await store.replace(name_of(scope), lease.to_bytes(), generation=generation)
    except NotFound:
        return None
    except Conflict:
        won = await read(store, scope)
        if won is None or won[0].nonce != lease.nonce:
            return None
        now = won[1]
    return Hold(store, scope, lease, now, clock, sent)


def _mine() -> Lease:
    return Lease(owner=Owner.me(), nonce=os.urandom(8).hex())
