"""One submission: its items by store and platform, and whoever waits for them.

The store is the truth, the platform's word a hint that it is time to look. A
single job is a submission with one item. Nothing here starts attempts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from absl import logging

from kinetic._runner import results, wire
from kinetic.aio._closing import closing
from kinetic.aio._facts import BatchIdentity, Facts, Identity
from kinetic.aio._patience import PATIENCE_S, is_passing
from kinetic.aio.ports import Cluster, Observation, Phase, Store
from kinetic.errors import BackendError, KineticError, NotFound, WireError
from kinetic.job_status import JobStatus

__all__ = ["BatchIdentity", "Identity", "Submission"]

FIRST_RECHECK_S, RECHECK_S = 1.0, 10.0

LOG_LINES = 20
LOG_S = 15.0
"""The end of an attempt is told without what takes longer: a log is lost with its node."""


@dataclass(slots=True)
class _Abandonment:
    """Why nothing more will come of *items*; None: of any of them, whatever this process does."""

    error: KineticError
    items: set[int] | None

    def concerns(self, index: int) -> bool:
        """Whether it is about this item."""
        return self.items is None or index in self.items


class Submission(Facts):
    """The items of one submission, as far as this process has seen them.

    ``fence`` is that of the lease this process has, or has had.
    """

    def __init__(self, identity: Identity, store: Store, cluster: Cluster) -> None:
        super().__init__(identity, store)
        self.closes = not identity.leased  # by convention the holder closes, and whoever is alone
        self.observed = False
        self.ours = False  # launched by this client, which watched from before that
        self.fence = 1
        self._cleaned_round: int | None = None
        self._cluster = cluster
        self._seen: dict[int, Observation] = {}
        self._unsure: set[int] = set()
        self._waiters: dict[int, list[asyncio.Future[wire.Item]]] = {}
        self._abandonment: _Abandonment | None = None
        self._troubles: dict[int, Exception] = {}
        self._refused: dict[int, Exception] = {}  # also of what has failed by that since

    # --- what is known ---

    @property
    def settled_items(self) -> int:
        """How many items are final, or cannot be found out about; not those nobody submits."""
        return self.ended + sum(not is_passing(error) for error in self._troubles.values())

    @property
    def abandoned(self) -> KineticError | None:
        """Why nothing more comes of it, or of some of its items."""
        return self._abandonment.error if self._abandonment is not None else None

    @property
    def removed(self) -> bool:
        """Whether it was cleaned up."""
        return isinstance(self.abandoned, NotFound)

    def touched(self, known: int) -> list[int]:
        """The items below *known* that anything was heard of, in order."""
        stuck = (self._abandonment.items if self._abandonment is not None else None) or ()
        found = {*self._items, *self._refused, *self._troubles, *stuck}
        return sorted(index for index in found if index < known)

    def observation(self, index: int) -> Observation | None:
        """The platform's last word on an item that is open."""
        return self._seen.get(index)

    def observations(self) -> dict[int, Observation]:
        """The platform's last words on all items that are open, as they are now."""
        return {**self._seen}

    def is_sure(self, index: int, number: int) -> bool:
        """Whether the platform's word on this attempt can still be relied on: it is repeated."""
        seen = self._seen.get(index)
        if seen is None or index in self._unsure:
            return False
        return seen.name == self.identity.attempt_name(index, number)

    def doubt_all(self) -> None:
        """The watch was interrupted: what has ended meanwhile may be gone, and never be named."""
        self._unsure = {*self._seen}

    def trouble(self, index: int) -> Exception | None:
        """Why nothing more will be heard of an item that is open."""
        if self._abandonment is not None and self._abandonment.concerns(index):
            return self._abandonment.error
        return self._refused.get(index) or self._troubles.get(index)

    def lasting_trouble(self, index: int) -> Exception | None:
        """The same, where asking again would bring the same answer."""
        error = self._troubles.get(index)
        return None if error is None or is_passing(error) else error

    def troubled(self) -> list[int]:
        """The items that nothing more can be found out about, in order."""
        unverified = (
            index
            for index, item in self._items.items()
            if item.outcome is not None and item.outcome.reason == wire.UNVERIFIED
        )
        lasting = (index for index in self._troubles if self.lasting_trouble(index) is not None)
        return sorted({*lasting, *unverified})

    def is_damaged(self, index: int) -> bool:
        """Whether what there is of the item is forged, or damaged: it stays so."""
        return isinstance(self.lasting_trouble(index), WireError)

    def refusal(self, index: int) -> Exception | None:
        """Why the item was never submitted."""
        return self._refused.get(index)

    @property
    def refusals(self) -> dict[int, Exception]:
        """The items that this process could not submit, with the reason."""
        return self._refused

    def status(self, index: int) -> JobStatus:
        """What a user sees, from what is known now."""
        match item.state if (item := self._items.get(index)) else wire.ItemState.OPEN:
            case wire.ItemState.SUCCEEDED:
                return JobStatus.SUCCEEDED
            case wire.ItemState.FAILED:
                return JobStatus.FAILED
            case wire.ItemState.CANCELLED | wire.ItemState.CANCELLING:
                return JobStatus.NOT_FOUND
            case wire.ItemState.OPEN:
                seen = self._seen.get(index)
                running = seen is not None and seen.phase is Phase.RUNNING
                return JobStatus.RUNNING if running else JobStatus.PENDING

    @property
    def cleaned(self) -> bool:
        """Whether this process has taken all its jobs off the platform, and none was made since."""
        return self._cleaned_round == self.requests.round

    def note_cleaned(self) -> None:
        """All its jobs are off the platform, until some are tried again."""
        self._cleaned_round = self.requests.round

    def refuse_removed(self) -> None:
        """Nothing can be asked of what is not there.

        Raises:
            NotFound: It was cleaned up.
        """
        if self.removed:
            raise self.identity.gone

    # --- requests ---

    async def read_requests(self) -> list[wire.Request]:
        """The control slots, in order; only new ones are read."""
        return await self.requests.read()

    async def look_for_requests(self) -> None:
        """The same, by whoever looks now and again: mostly there is nothing new."""
        await self.requests.look()

    async def append(self, request: wire.Request) -> int:
        """Add a request at exactly the next slot, and return its round."""
        return await self.requests.append(request)

    # --- telling ---

    def _set(self, index: int, item: wire.Item) -> None:
        abandoned = self._abandonment
        if abandoned is not None and abandoned.items and item != self.item(index):
            abandoned.items.discard(index)  # somebody has gone on with it
        super()._set(index, item)
        if item.state.final:
            self.hope(index)
            self._seen.pop(index, None)
        else:
            self._refused.pop(index, None)

    def _tell(self, index: int, item: wire.Item | None) -> None:
        super()._tell(index, item)
        if index not in self._waiters:
            return
        if item is not None and item.state.final:
            for waiter in self._woken(index):
                waiter.set_result(item)
        elif (trouble := self.trouble(index)) is not None:
            for waiter in self._woken(index):
                waiter.set_exception(trouble)

    def _woken(self, index: int) -> list[asyncio.Future[wire.Item]]:
        return [waiter for waiter in self._waiters.pop(index) if not waiter.done()]

    def fail(self, index: int, error: Exception) -> None:
        """What happened to the item cannot be found out: tell those who wait, and who will."""
        item = self.item(index)
        if item is None or not item.state.final:
            self._troubles[index] = error
            self._unsure.add(index)  # the platform may have said its last word about it
            self._tell(index, None)

    def hope(self, index: int) -> None:
        """It can be found out again."""
        self._troubles.pop(index, None)

    def refuse(self, index: int, error: Exception) -> None:
        """The item was not submitted: *error* says more than its outcome does."""
        self._refused[index] = error
        self._tell(index, None)

    def abandon(self, error: KineticError, items: Iterable[int] | None = None) -> None:
        """Tell everybody who waits for *items*, for any without them, that nothing more comes."""
        concerned = None if items is None else {*items}
        self._abandonment = _Abandonment(error, concerned)
        for index in [*self._waiters, 0] if concerned is None else [*concerned]:
            self._tell(index, None)

    def reclaim(self) -> None:
        """Somebody submits it again."""
        if self._abandonment is not None and self._abandonment.items is not None:
            self._abandonment = None

    def held_up(self) -> str:
        """What the platform says of an item that waits; empty if it says nothing, or one runs."""
        waits = ""
        for seen in self._seen.values():
            if seen.phase is Phase.RUNNING:
                return ""
            if seen.phase is Phase.PENDING:
                waits = waits or seen.message
        return waits

    # --- the platform's word ---

    def note(self, index: int, number: int, seen: Observation) -> None:
        """The platform says that an attempt waits or runs."""
        self._unsure.discard(index)
        if self.concerns(index, number) and self._seen.get(index) != seen:
            self._seen[index] = seen
            self._tell(index, None)

    def note_found(
        self, index: int, number: int, seen: Observation, before: Observation | None
    ) -> None:
        """`note` of an answer, unless the platform's word is not *before* any more: it is newer."""
        if self._seen.get(index) is before:
            self.note(index, number, seen)

    def is_over(
        self, index: int, number: int, seen: Observation | None, before: Observation | None
    ) -> bool:
        """What the platform answered about an attempt: whether that has ended; else it is noted.

        It has ended, too, when somebody has claimed it and nothing of it is there.
        """
        if seen is None:
            return self._claimed(index, number)
        if seen.phase in (Phase.ENDED, Phase.GONE):
            return True
        self.note_found(index, number, seen, before)
        return False

    async def look_at_each(self, indices: Collection[int]) -> None:
        """`look_at_all`, where a forged outcome fails its item and is no trouble of the others.

        Raises:
            WireError: A request is damaged, which concerns them all.
        """
        try:
            await self.look_at_all(indices)
        except WireError:
            await self.read_requests()
            for index in indices:
                try:
                    await self.look(index)
                except WireError as exc:
                    self.fail(index, exc)

    async def settle(
        self, index: int, number: int, seen: Observation | None, claimant: str | None = None
    ) -> wire.Item:
        """Attempt *number* is over for the platform: find its outcome, or close it.

        *claimant* is who was known to have claimed it before the platform was asked.
        """
        item = await self._sound_outcome(index, number) or await self.look(index)
        open_here = not item.state.final and item.attempt == number
        if open_here and (self.closes or item.state is wire.ItemState.CANCELLING):
            alive = await self._close(index, number, seen, claimant)
            item = await self.look(index)
            if not (item.state.final or alive):
                self._unsure.add(index)  # that word closed nothing, and it may have been the last
        return item

    async def _sound_outcome(self, index: int, number: int) -> wire.Item | None:
        """`look_at_outcome`; of a damaged body the signed header counts, which a look reads."""
        try:
            return await self.look_at_outcome(index, number)
        except WireError as exc:
            logging.warning("%s: %s", self.identity.attempt_name(index, number), exc)
            return None

    async def reconcile(self, index: int) -> wire.Item:
        """Look at an item, and ask the platform about it when it is open."""
        item = await self.look(index)
        self.hope(index)
        if item.state.final:
            return item
        before = self._seen.get(index)
        seen = (await self._find([(index, item.attempt)])).get((index, item.attempt))
        never_comes = self.identity.settled and not self.identity.leased
        if self.is_over(index, item.attempt, seen, before) or (seen is None and never_comes):
            await self.settle(index, item.attempt, seen)
        return self._items[index]

    async def keep_looking(self, index: int) -> None:
        """Look now and then until the item is final, for what the platform had no chance to tell.

        It may never have been launched, or be gone since before it was watched. Who
        waits is told what is definite, and that nobody has answered for a minute.
        """
        owner, pause = self.identity.submitter, FIRST_RECHECK_S
        clock = asyncio.get_running_loop().time
        answered = clock()
        while True:
            try:
                if (await self.reconcile(index)).state.final:
                    return
                answered = clock()
            except KineticError as exc:
                if not is_passing(exc) or clock() - answered >= PATIENCE_S:
                    self.fail(index, exc)
                    return
                what = self.identity.job_id(index)
                logging.warning("looking at %s failed: %s; trying again", what, exc)
            unseen = owner is not None and index not in self._seen
            await (owner.ended(pause) if owner and unseen else asyncio.sleep(pause))
            pause = min(RECHECK_S, pause * 2)

    def _claimed(self, index: int, number: int) -> bool:
        return self.attempt(index, number).executor is not None

    async def see_through(self, indices: Collection[int]) -> list[int]:
        """Nobody holds the submission: close what has ended, and say what never will.

        What still runs commits its own outcome; the platform will tell. What
        was stopped and still runs is taken off the platform. What is forged
        has its own error.
        """
        self.closes = True
        await self.look_at_each(indices)
        claimants = {
            (index, item.attempt): self.attempt(index, item.attempt).executor
            for index in indices
            if not self.is_damaged(index) and not (item := self._items[index]).state.final
        }
        found = await self._find(claimants)
        await self.look_at_each([one[0] for one in claimants if one not in found])  # late ones
        stuck: list[int] = []
        stopped: list[str] = []
        for (index, number), claimant in claimants.items():
            seen = found.get((index, number))
            if seen is not None and seen.phase not in (Phase.ENDED, Phase.GONE):
                cancelling = self._items[index].state is wire.ItemState.CANCELLING
                if cancelling and self.requests.standing(index).unwanted:
                    stopped.append(seen.name)
                continue
            if seen is not None or self._claimed(index, number):
                await self.settle(index, number, seen, claimant)  # who may have been closed by now
            if not (self._items[index].state.final or self.is_sure(index, number)):
                stuck.append(index)
        if stopped:
            await self._cluster.delete(names=stopped)
        return stuck

    async def _find(
        self, attempts: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Observation]:
        """What the platform says of *attempts*, asked at once."""
        names = {self.identity.attempt_name(*one): one for one in attempts}
        found = await self._cluster.find(names=[*names]) if names else []
        return {names[seen.name]: seen for seen in found}

    async def _close(
        self, index: int, number: int, seen: Observation | None, known: str | None
    ) -> bool:
        """Close it if the evidence allows that; True when it turns out to be alive."""
        if seen is not None and seen.name != self.identity.attempt_name(index, number):
            return False  # the end of another attempt says nothing about this one
        claimant = self.attempt(index, number).executor
        if claimant not in (None, wire.VOID, known) and (seen is None or not seen.executor):
            # What names no process may be of a job that was there before the claimant's.
            before = self._seen.get(index)
            seen = (await self._find([(index, number)])).get((index, number))
            if not self.is_over(index, number, seen, before):
                return True
        death = closing(self.attempt(index, number), seen)
        if death is None:
            return False
        if not (self.identity.leased or await self._store.look(self.identity.entry)):
            raise self.identity.gone  # whoever had its value has removed it, and how it ended
        if claimant is None:
            if not await self._void(index, number):
                await self.look(index)
                claimant = self.attempt(index, number).executor
                if seen is not None and claimant is not None and seen.executor == claimant:
                    await self._close(index, number, seen, known)  # told before its claim
                return False  # else the next word on it will close it
            claimant = wire.VOID
        await self._store_closed(index, number, claimant, death)
        return False

    async def _void(self, index: int, number: int) -> bool:
        """Claim an attempt that is not to begin any more; False when somebody has claimed it."""
        claim = {"executor": wire.VOID, "fence": str(self.fence)}
        name = wire.attempt_key(self.identity.scope, index, number, "claim")
        return await self._store.create(name, b"", claim)

    async def _store_closed(
        self, index: int, number: int, claimant: str, death: results.Death
    ) -> wire.Outcome:
        """Close an attempt whose claim was seen; if it has its outcome, that stays."""
        place = (self.identity.scope, index, number)
        item = await self.look(index)  # requests are read after the claim was seen
        silent = item.stopped or death.reason == wire.SUBMISSION  # there is no log, or no use of it
        log = "" if silent else await self._log_tail(index, number)
        outcome, body = results.closed(death, item, claimant, self.fence, log)
        metadata = outcome.signed(self.identity.key, *place)
        await self._store.create(wire.attempt_key(*place, "outcome"), body, metadata)
        return outcome

    async def _log_tail(self, index: int, number: int) -> str:
        name = self.identity.attempt_name(index, number)
        lines: deque[str] = deque(maxlen=LOG_LINES)  # a long one comes in pieces, which are more
        try:
            async with (
                asyncio.timeout(LOG_S),
                aclosing(self._cluster.logs(name, tail=LOG_LINES)) as log,
            ):
                async for line in log:
                    lines.append(line)  # what was read by then counts
        except (BackendError, TimeoutError) as exc:
            logging.debug("no log of %s: %s", self.identity.job_id(index), exc)
        return "\n".join(lines)[-8192:]

    async def close_refused(self, index: int, number: int, error: Exception) -> bool:
        """Close an attempt that cannot be submitted; False when it has begun all the same.

        Whoever looks later, from anywhere, finds that the item failed and why.
        """
        if not await self._void(index, number):
            there = await self.look(index)
            if there.state.final:
                return there.state is wire.ItemState.FAILED
            if self.attempt(index, number).executor != wire.VOID:
                return False
        text = results.error_text(error, phase="submission")
        death = results.Death(
            kind=wire.Kind.ERROR,
            reason=wire.SUBMISSION,
            message=text.message,
            phase=text.phase,
            qualname=text.qualname,
            traceback=text.traceback,
        )
        outcome = await self._store_closed(index, number, wire.VOID, death)
        if outcome.kind is wire.Kind.ERROR:
            self._refused[index] = error  # before anybody is told that it failed
        item = await self.look(index)
        if item.state is wire.ItemState.FAILED:
            self.refuse(index, error)
        return True

    # --- waiting ---

    async def closed(self, index: int) -> wire.Item:
        """Wait until the item is final.

        Raises:
            SubmitterLost: Nobody will start it.
            KineticError: What became of it cannot be found out.
        """
        item = self._items.get(index)
        if item is not None and item.state.final:
            return item
        if (trouble := self.trouble(index)) is not None:
            raise trouble
        waiter: asyncio.Future[wire.Item] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(index, []).append(waiter)
        try:
            return await waiter
        finally:
            waiters = self._waiters.get(index, [])
            if waiter in waiters:
                waiters.remove(waiter)
