"""The lease of a batch: an object in the store that names the one process that submits the batch.

The holder renews the lease, and knows by a clock that also runs while a laptop sleeps how old its
last renewal is. An observer reads no clock: it counts in how many looks the lease is unchanged. So
neither the sleep of its machine nor an outage makes a living holder look dead. An observer on the
holder's machine also sees when the holder's process ends.

kinetic overwrites no object except a lease. A process that has lost the lease may no longer
start attempts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from absl import logging

from kinetic._runner.protocol.frames import MALFORMED
from kinetic._runner.protocol.google_refusals import is_retained
from kinetic.aio._process_identity import ProcessIdentity
from kinetic.aio.ports import Store, displaced
from kinetic.errors import BackendError, Conflict, NotFound, Refused, SubmitterLost

RENEW_S = 10.0
"""Seconds between two renewals by the holder."""

START_S = 30.0
"""A holder asks for workers only if its last acknowledged renewal is younger than this, in seconds.
It is less than `EXPIRY_S`, so that it asks for none once another process takes over."""

EXPIRY_S = 45.0
"""Seconds for which a lease must stay unchanged before an observer takes it as expired."""

LOOK_S = 5.0
"""Seconds between two reads of a lease by an observer."""

RETRY_S = 2.0
"""Seconds after which a holder retries a failed renewal."""

Clock = Callable[[], float]

UNKNOWN = ProcessIdentity("an unknown machine", "", 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The content of the object.

    ``beat`` counts the writes of the holder. ``fence`` grows with each holder. ``nonce`` is random
    and identifies one period of holding. ``control_seen`` is how many requests the holder had
    read when it released the lease.
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
        """Read the content of an object; any process can take a damaged or forged lease."""
        unreadable = cls(owner=UNKNOWN, held=False)
        try:
            fields: dict[str, Any] = dict(json.loads(content))
            owner = ProcessIdentity.from_fields(fields.pop("owner"))
        except MALFORMED:
            return unreadable
        known = [field for field in dataclasses.fields(cls) if field.name in fields]
        are_valid = all(type(fields[field.name]) is type(field.default) for field in known)
        if owner is None or not are_valid:
            return unreadable
        return cls(owner=owner, **{field.name: fields[field.name] for field in known})

    @property
    def holder_name(self) -> str:
        """The holder, for messages."""
        return f"process {self.owner.pid} on {self.owner.host}"


StoredLease = tuple[Lease, int]
"""A lease that was read, and the object's generation."""


async def read(store: Store, scope: str) -> StoredLease | None:
    """Read the current lease, with its generation; None if there is none."""
    try:
        stored = await store.get(_object_name(scope))
    except NotFound:
        return None
    return Lease.from_bytes(stored.body), stored.generation


def _object_name(scope: str) -> str:
    return f"{scope}lease"


def _batch_id(scope: str) -> str:
    return scope.strip("/").rpartition("/")[2]


class HeldLease:
    """The holder's side of the lease: the right to submit, until it is released or taken over."""

    def __init__(
        self, store: Store, scope: str, lease: Lease, generation: int, clock: Clock, sent: float
    ) -> None:
        self.lost: SubmitterLost | None = None
        self._store = store
        self.scope = scope
        self._lease = lease
        self._generation = generation
        self._clock = clock
        self._sent = sent  # when the last acknowledged write was sent
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        # Whether requests may have come while no process held the lease, and aren't read yet.
        self._has_unread_requests = False

    @property
    def fence(self) -> int:
        """The fence of this period of holding; each later period has a greater number."""
        return self._lease.fence

    @property
    def may_start(self) -> bool:
        """Whether to ask for workers now; check it right before each request."""
        if self.lost is not None or self._has_unread_requests or not self._lease.held:
            return False
        # After a longer silence, another process may be about to take over.
        return self._clock() - self._sent < START_S

    async def until_may_start(self) -> None:
        """Wait until `may_start`; raise `SubmitterLost` if another process has the lease."""
        while not self.may_start:
            if self.lost is not None:
                raise self.lost
            self._changed.clear()
            await self._changed.wait()

    async def keep(self, period: float = RENEW_S) -> None:
        """Renew the lease every *period* seconds until cancelled; sooner after a failure.

        Warn once of failures of one kind in a row.

        Raises:
            Refused: The bucket keeps each object as it is.
        """
        pause = period
        warned: type[BackendError] | None = None
        while True:
            await asyncio.sleep(pause)
            pause = period
            try:
                await self.renew()
                warned = None
            except BackendError as exc:
                # A retention policy lets nothing be replaced, so no later renewal can succeed.
                if isinstance(exc, Refused) and is_retained(exc.answer.get("error")):
                    raise
                if type(exc) is not warned:
                    logging.warning("can't renew the lease of %s: %s", _batch_id(self.scope), exc)
                warned = type(exc)
                pause = min(period, RETRY_S)

    async def renew(self) -> None:
        """Record that this process is alive; raise like `until_may_start`, or a `BackendError`."""
        async with self._lock:
            if self._lease.held:
                await self._write()

    async def release(self, control_seen: int = 0) -> None:
        """Release the lease, so that another process can take it at once; raise like `renew`."""
        async with self._lock:
            if self._lease.held and self.lost is None:
                await self._write(held=False, control_seen=control_seen)

    async def retake(self) -> None:
        """Take the lease again after `release`, with the next fence; starts wait for `catch_up`."""
        async with self._lock:
            self._has_unread_requests = True
            await self._write(fence=self.fence + 1, held=True)

    def catch_up(self) -> None:
        """Allow starts again: the caller has read the requests that came without a holder."""
        self._has_unread_requests = False
        self._changed.set()

    async def _write(self, **changes: Any) -> None:
        """Overwrite the lease with *changes*; raise `SubmitterLost` if another process has it."""
        lease = replace(self._lease, beat=self._lease.beat + 1, **changes)
        try:
            while True:
                sent = self._clock()
                try:
                    generation = await self._store.replace(
                        _object_name(self.scope), lease.to_bytes(), generation=self._generation
                    )
                    break
                except (Conflict, NotFound):
                    stored = await read(self._store, self.scope)
                    if stored is None or stored[0].nonce != lease.nonce:
                        self.lost = self._replaced_by(stored[0] if stored is not None else None)
                        raise self.lost from None
                    self._generation = stored[1]  # this process wrote it, and the reply was lost
            self._lease, self._generation, self._sent = lease, generation, sent
        finally:
            self._changed.set()

    def _replaced_by(self, lease: Lease | None) -> SubmitterLost:
        batch = _batch_id(self.scope)
        if lease is None:
            return SubmitterLost(f"batch {batch} was cleaned up meanwhile", job_id=batch)
        return SubmitterLost(
            f"{lease.holder_name} now submits batch {batch} (fence {lease.fence}, here "
            f"{self.fence}); the jobs keep running: wait for the batch there, or attach to it here",
            job_id=batch,
        )


async def begin(store: Store, scope: str, clock: Clock) -> HeldLease:
    """Take the lease of a batch that was just made, or raise `SubmitterLost`."""
    held = await _take(store, scope, None, clock)
    if held is None:
        stored = await read(store, scope)
        holder_name = stored[0].holder_name if stored is not None else "another process"
        raise SubmitterLost(
            f"batch {_batch_id(scope)} is submitted by {holder_name} now; attach to it"
        )
    return held


async def acquire(
    store: Store,
    scope: str,
    submitter: ProcessIdentity | None,
    clock: Clock,
    *,
    force: bool = False,
) -> HeldLease:
    """Take the lease over once it is free, its holder is dead, or it has expired.

    *submitter* is the process that the batch's manifest names. It is the holder until a lease
    exists, and may have died before it created one. With *force*, take the lease at once, even from
    a living holder.

    Raises:
        Conflict: The holder is alive.
        NotFound: The batch was removed.
    """
    observer = _Observer(store, scope)
    await observer.read()
    while True:
        holder = _holder(observer.seen, submitter)
        if force or observer.expired or holder is None:
            if (held := await _take(store, scope, observer.seen, clock)) is not None:
                return held
            has_changed = await observer.read()
        else:
            has_changed = await observer.read_later(holder)
        if not has_changed:
            continue
        if observer.seen is None:
            raise NotFound(f"batch {_batch_id(scope)} was cleaned up meanwhile")
        lease = observer.seen[0]
        if lease.held and not force:
            raise Conflict(
                f"batch {_batch_id(scope)} is submitted by {lease.holder_name}, which is alive: "
                "wait for it, end it, or take the batch from it with resume(force=True)"
            )


async def is_free(store: Store, scope: str) -> bool:
    """Return whether no living process has the lease; wait until that is certain."""
    observer = _Observer(store, scope)
    await observer.read()
    while (holder := _holder(observer.seen, None)) is not None and not observer.expired:
        if await observer.read_later(holder):  # the holder has renewed the lease, or released it
            return _holder(observer.seen, None) is None
    return True


async def is_abandoned(store: Store, scope: str, submitter: ProcessIdentity | None) -> bool:
    """Return whether one read of the lease shows that no process submits the batch."""
    return _holder(await read(store, scope), submitter) is None


def _holder(seen: StoredLease | None, submitter: ProcessIdentity | None) -> ProcessIdentity | None:
    """Return the process that submits the batch, unless it certainly has ended."""
    # The submitter counts as the holder until it has created the lease.
    lease = seen[0] if seen is not None else None
    holder = submitter if lease is None else lease.owner if lease.held else None
    return None if holder is None or holder.is_dead else holder


async def until_abandoned(
    store: Store, scope: str, submitter: ProcessIdentity | None
) -> Lease | None:
    """Wait until no process submits the batch; return the last lease, if there was one."""
    observer = _Observer(store, scope)
    await observer.read()
    while (holder := _holder(observer.seen, submitter)) is not None and not observer.expired:
        if await observer.read_later(holder) and observer.seen is None:
            return None  # the batch was removed
    if observer.seen is not None:
        return observer.seen[0]
    return Lease(owner=submitter) if submitter is not None else None


class _Observer:
    """Watch a lease without holding it."""

    def __init__(self, store: Store, scope: str) -> None:
        self.seen: StoredLease | None = None
        self._store = store
        self._scope = scope
        self._unchanged = 0  # in how many looks in a row

    async def read(self) -> bool:
        """Read the lease; return whether it has changed."""
        current = await read(self._store, self._scope)
        if current == self.seen:
            return False
        self.seen, self._unchanged = current, 0
        return True

    async def read_later(self, holder: ProcessIdentity) -> bool:
        """Read the lease `LOOK_S` later, or when *holder* has ended; return whether it changed."""
        await holder.wait_for_end(LOOK_S)
        self._unchanged += 1
        return await self.read()

    @property
    def expired(self) -> bool:
        """Whether looks found the lease unchanged for `EXPIRY_S`: its holder counts as dead."""
        return self._unchanged * LOOK_S >= EXPIRY_S


async def _take(
    store: Store, scope: str, seen: StoredLease | None, clock: Clock
) -> HeldLease | None:
    """Replace the lease *seen* with one of this process; None if another process was faster."""
    lease = Lease(owner=ProcessIdentity.current(), nonce=os.urandom(8).hex())
    name, sent = _object_name(scope), clock()
    generation: int | None = None
    if seen is None:
        generation = await store.begin(name, lease.to_bytes())
    else:
        old_lease, old_generation = seen
        lease = replace(lease, fence=old_lease.fence + 1, control_seen=old_lease.control_seen)
        try:
            generation = await store.replace(name, lease.to_bytes(), generation=old_generation)
        except NotFound:
            return None
        except Conflict:
            pass
    if generation is None:
        stored = await read(store, scope)  # if only the reply was lost, this process has the lease
        if stored is not None and stored[0].nonce == lease.nonce:
            generation = stored[1]
        elif stored is None and seen is None:
            generation = await store.begin(name, lease.to_bytes())  # the other lease was removed
            if generation is None and await read(store, scope) is None:
                raise displaced(name, store)
    return None if generation is None else HeldLease(store, scope, lease, generation, clock, sent)
