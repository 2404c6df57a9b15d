"""One opened platform of a client, and the submissions that the client follows there."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from absl import logging

from kinetic._messages import described
from kinetic._runner.protocol import outcomes, signing, wire
from kinetic._runner.protocol.retry_budgets import SUBMISSION, UNVERIFIED
from kinetic._tasks import bounded, shared
from kinetic.aio._engine.ids import Identity
from kinetic.aio._engine.in_flight import AttemptLimit
from kinetic.aio._engine.item_states import ItemStates, closing
from kinetic.aio._net.retry import PATIENCE_S, growing, is_passing
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Cluster, Observation, Phase, Store, displaced
from kinetic.configuration import Target
from kinetic.errors import (
    BackendError,
    ConfigurationError,
    KineticError,
    NotFound,
    Unavailable,
    WireError,
)
from kinetic.job_status import JobStatus, Reason

REREAD_S = 10.0, 60.0
"""How often store and platform are read again while somebody waits: at first, and later."""

DOUBT_S = 0.2, 10.0
"""How often they are while an attempt is in doubt: it has ended, or may never come."""

SPREAD = 0.2
"""The random part of these pauses: submissions that began together are read one by one."""

FEW_NAMES = 500
"""Above this count, ask the platform for all jobs of the submission, not for each by its name."""

RELAUNCH_S = 60.0
"""So long after an attempt has ended its submitter may take to launch the next one."""

CLOCKS_S = 600.0
"""The clocks of two machines differ by less."""

_OF_A_HOST = re.compile(r"host [1-9]\d* of \d+: ")

LOG_LINES = 20
LOG_S = 15.0
"""How long an error waits for the last lines of its job's log: a lost node never gives them."""


@dataclass(slots=True)
class Ended:
    """An attempt that has ended for the platform.

    ``seen`` None says that the platform knows no such job. ``claimant`` is who was known to have
    claimed the attempt before the platform was asked. ``since`` is the loop's time when the first
    question how it ended got no answer.
    """

    index: int
    number: int
    seen: Observation | None
    claimant: str | None = None
    since: float | None = None

    def is_about(self, executor: str | None) -> bool:
        """Whether what was seen is the end of the very process *executor*."""
        seen = self.seen
        if seen is None or executor is None or seen.phase is Phase.RUNNING:
            return False
        return seen.executor == executor


@dataclass(slots=True)
class _Abandonment:
    """Why nothing more will come of *items*; None means of all of them, for good."""

    error: KineticError
    items: set[int] | None

    def concerns(self, index: int) -> bool:
        """Whether it is about this item."""
        return self.items is None or index in self.items


class Submission(ItemStates):
    """The items of one submission, as far as this process has seen them.

    ``fence`` is that of the lease this process has, or has had.
    """

    def __init__(self, identity: Identity, store: Store, cluster: Cluster) -> None:
        super().__init__(identity, store)
        self.closes = not identity.leased
        """Whether this process closes dead attempts. Those of a batch are closed by its submitter,
        or by whoever sees that there is none; that of a stopped item by anybody."""
        self.ours = False  # launched by this client, which watched from before that
        self.relaunched = False
        """Whether the submitter of this job replaces what was disrupted, and not the platform."""
        self.relaunching = False
        """Whether this process does, now."""
        self.launched = 0
        """The last attempt that it has launched so: if that is not there, it is gone."""
        self.fence = 1
        self.values: Mapping[int, Any] = {}
        """What this process has collected of it, before it removed the objects."""
        self.deleting = 0
        """How many of its jobs, if they were many, this process is still about to delete."""
        self.awaited = 0
        """How many wait for it: while there are any, the session reads it again and again."""
        self.batch_reader: Callable[[], Awaitable[None]] | None = None
        """Reads all that is open, if it is a batch."""
        self.doubtful: dict[int, Ended] = {}
        """By item, an attempt that has ended while nobody could say how, or that may never come."""
        self._doubted = asyncio.Event()
        self._cleaned_round: int | None = None
        self._cluster = cluster
        self._seen: dict[int, Observation] = {}
        self._waiters: dict[int, list[asyncio.Future[wire.Item]]] = {}
        self._abandonment: _Abandonment | None = None
        self._errors: dict[int, Exception] = {}
        self._host_ends: dict[tuple[int, int], Observation | None] = {}
        self._stranded: dict[tuple[int, int], float] = {}  # attempts nobody launched: since when
        self._refused: dict[int, Exception] = {}
        """Kept also after the item has its FAILED outcome because of it."""

    # --- what is known ---

    @property
    def settled_items(self) -> int:
        """How many items are final, or have an error that looking again will not change."""
        return self.ended + sum(not is_passing(error) for error in self._errors.values())

    @property
    def abandoned(self) -> KineticError | None:
        """The error of those who wait for items that nobody submits any more."""
        return self._abandonment.error if self._abandonment is not None else None

    @property
    def removed(self) -> bool:
        """Whether it was cleaned up."""
        return isinstance(self.abandoned, NotFound)

    def touched(self, known: int) -> list[int]:
        """The items below *known* that anything was heard of, in order."""
        stuck = (self._abandonment.items if self._abandonment is not None else None) or ()
        found = {*self._items, *self._refused, *self._errors, *stuck}
        return sorted(index for index in found if index < known)

    @property
    def has_started(self) -> bool:
        """Whether the platform has ever taken an attempt of it, as far as this process knows."""
        claims = (one.executor for of in self._attempts.values() for one in of.values())
        ends = (item.outcome for item in self._items.values())
        return bool(
            self._seen
            or any(executor not in (None, wire.VOID) for executor in claims)
            or any(outcome is not None and outcome.reason != SUBMISSION for outcome in ends)
        )

    def observation(self, index: int) -> Observation | None:
        """What the platform last said of an open item."""
        return self._seen.get(index)

    def observations(self) -> dict[int, Observation]:
        """What the platform last said of each open item."""
        return {**self._seen}

    def error(self, index: int) -> Exception | None:
        """Why nothing more will be heard of an item that is open."""
        if self._abandonment is not None and self._abandonment.concerns(index):
            return self._abandonment.error
        return self._refused.get(index) or self._errors.get(index)

    def final_error(self, index: int) -> Exception | None:
        """Why the item's objects cannot be read, if reading them again would not help."""
        error = self._errors.get(index)
        return None if error is None or is_passing(error) else error

    def unreadable(self) -> list[int]:
        """The items whose outcome cannot be read, in order."""
        unverified = (
            index
            for index, item in self._items.items()
            if item.outcome is not None and item.outcome.reason == UNVERIFIED
        )
        lasting = (index for index in self._errors if self.final_error(index) is not None)
        return sorted({*lasting, *unverified})

    def is_damaged(self, index: int) -> bool:
        """Whether the item's objects are forged or damaged, which does not change."""
        return isinstance(self.final_error(index), WireError)

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
        """All requests, in order; only new ones are read from the store."""
        return await self.requests.read()

    async def look_for_requests(self) -> None:
        """As `read_requests`, with one small request when there is nothing new."""
        await self.requests.look()

    async def append(self, request: wire.Request) -> int:
        """Add a request to the log; returns how many retry requests come before it."""
        return await self.requests.append(request)

    # --- telling ---

    def _set(self, index: int, item: wire.Item) -> None:
        abandoned = self._abandonment
        if abandoned is not None and abandoned.items and item != self.item(index):
            abandoned.items.discard(index)  # somebody has gone on with it
        super()._set(index, item)
        doubt = self.doubtful.get(index)
        if doubt is not None and (item.state.final or item.attempt > doubt.number):
            del self.doubtful[index]
        if item.state.final:
            self.clear_error(index)
            self._seen.pop(index, None)
        else:
            self._refused.pop(index, None)

    def _notify(self, index: int, item: wire.Item | None) -> None:
        super()._notify(index, item)
        if index not in self._waiters:
            return
        if item is not None and item.state.final:
            for waiter in self._woken(index):
                waiter.set_result(item)
        elif (error := self.error(index)) is not None:
            for waiter in self._woken(index):
                waiter.set_exception(error)

    def _woken(self, index: int) -> list[asyncio.Future[wire.Item]]:
        return [waiter for waiter in self._waiters.pop(index) if not waiter.done()]

    def set_error(self, index: int, error: Exception) -> None:
        """The item's end cannot be read: raise *error* for those who wait, now and later."""
        item = self.item(index)
        if item is None or not item.state.final:
            self._errors[index] = error
            self._notify(index, None)

    def clear_error(self, index: int) -> None:
        """The item can be read again."""
        self._errors.pop(index, None)

    def fail_waiters(self, error: Exception) -> None:
        """Raise *error* for all who wait now: their items cannot be read."""
        for index in [*self._waiters]:
            self.set_error(index, error)

    def refuse(self, index: int, error: Exception) -> None:
        """The item could not be submitted; *error* says more than its outcome."""
        self._refused[index] = error
        self._notify(index, None)

    def abandon(self, error: KineticError, items: Iterable[int] | None = None) -> None:
        """Nobody submits *items* (None: any) any more: raise *error* where they are awaited."""
        concerned = None if items is None else {*items}
        self._abandonment = _Abandonment(error, concerned)
        for index in [*self._waiters, 0] if concerned is None else [*concerned]:
            self._notify(index, None)

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
        if self.concerns(index, number) and self._seen.get(index) != seen:
            self._seen[index] = seen
            self._notify(index, None)

    def note_found(
        self, index: int, number: int, seen: Observation, before: Observation | None
    ) -> None:
        """`note` what a query has answered, unless something else was noted since it was sent.

        *before* is what was noted last at that time.
        """
        now = self._seen.get(index)
        if now is before or (now is not None and _is_as(now, seen)):
            self.note(index, number, seen)

    def is_over(
        self, index: int, number: int, seen: Observation | None, before: Observation | None
    ) -> bool:
        """Whether the platform's answer says that the attempt has ended; if not, it is noted.

        It has ended, too, when somebody has claimed it and the platform knows no job of that name.
        """
        if seen is None:
            return self._claimed(index, number)
        if seen.phase in (Phase.ENDED, Phase.GONE):
            return True
        self.note_found(index, number, seen, before)
        return False

    async def look_at_each(self, indices: Collection[int]) -> None:
        """`look_at_all`; a forged outcome is the error of its item, not of the others.

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
                    self.set_error(index, exc)

    async def resolve_attempt(
        self, index: int, number: int, seen: Observation | None, claimant: str | None = None
    ) -> wire.Item:
        """Attempt *number* is over for the platform: find its outcome, or close it.

        *claimant* is who was known to have claimed it before the platform was asked.
        """
        if seen is not None and _OF_A_HOST.match(seen.message):
            self._host_ends[index, number] = seen
        receipt = seen.receipt if seen is not None else None
        item = await self._sound_outcome(index, number, receipt) or await self.look(index)
        open_here = not item.state.final and item.attempt == number
        if open_here and (self.closes or item.state is wire.ItemState.CANCELLING):
            await self._close(index, number, seen, claimant)
            item = await self.look(index)
        going_on = not (item.state.final or self.identity.leased or self.relaunched)
        if going_on and seen is not None and seen.last:
            return await self._not_replaced(index, seen)
        return item

    async def _not_replaced(self, index: int, seen: Observation | None) -> wire.Item:
        """Whatever is open of it has ended, and no other attempt comes by itself.

        The platform replaces the attempts of a job of its own. When it does so no more,
        the job ends as its last attempt did.
        """
        item = await self.look(index)
        while not item.state.final:
            if (claimant := self.attempt(index, item.attempt).executor) is not None:
                name = self.identity.attempt_name(index, item.attempt)
                over = replace(seen, name=name, executor="") if seen is not None else None
                await self._close(index, item.attempt, over, claimant)
            else:
                gone = "who has submitted it" if self.relaunched else "its job"
                told = seen.message if seen is not None else f"{gone} is gone"
                await self.give_up(index, f"not replaced: {told}")
            item = await self.look(index)
        return item

    def _awaits_submitter(self, index: int, number: int) -> bool:
        """Whether the one who has submitted a job may still be about to launch attempt *number*.

        It may have died, or sleep: a minute after somebody first looked the job ends as its last
        attempt did, and at once when that ended so long ago that no two clocks differ as much.
        """
        if not self.relaunched or self.relaunching:
            return self.relaunching
        ended, now = self.attempt(index, number - 1).outcome, time.time()
        if ended is not None and ended.ended is not None and now - ended.ended > CLOCKS_S:
            return False
        return now - self._stranded.setdefault((index, number), now) < RELAUNCH_S

    async def give_up(self, index: int, why: str) -> None:
        """Let a job end as its last attempt did: no other can be launched, for *why*."""
        request = wire.Request(kind="stop", items=(index,), cause=why, keep_running=True)
        await self.append(request)
        await self.look(index)

    async def _sound_outcome(
        self, index: int, number: int, receipt: wire.Receipt | None
    ) -> wire.Item | None:
        """`look_at_outcome`; None if its body is damaged: `look` reads the signed header then."""
        for copy in (receipt, None) if receipt is not None else (None,):
            try:
                return await self.look_at_outcome(index, number, copy)
            except WireError as exc:
                logging.warning("%s: %s", self.identity.attempt_name(index, number), exc)
        return None

    async def host_end(self, index: int, number: int, *, asking: bool) -> Observation | None:
        """What the platform says that another host than the first has ended an attempt with.

        The first host, whose outcome counts, knows only that it was asked to stop. None for a
        job on one host, and where the platform has not said it and, if *asking*, does not know.
        """
        if (index, number) not in self._host_ends and asking:
            found = (await self._find([(index, number)])).get((index, number))
            of_a_host = found is not None and _OF_A_HOST.match(found.message)
            self._host_ends[index, number] = found if of_a_host else None
        return self._host_ends.get((index, number))

    async def reconcile(self, index: int, *, explained: bool = False) -> wire.Item:
        """Look at an item, and ask the platform about it when it is open.

        *explained* asks it as well why the item waits.
        """
        item = await self.look(index)
        self.clear_error(index)
        if item.state.final:
            return item
        if not self.identity.leased:
            return await self._reconcile_alone(index, item.attempt, explained)
        before, asked = self._seen.get(index), (index, item.attempt)
        seen = (await self._find([asked], explained=explained)).get(asked)
        if self.is_over(index, item.attempt, seen, before):
            await self.resolve_attempt(index, item.attempt, seen)
        return self._items[index]

    async def _reconcile_alone(self, index: int, number: int, explained: bool) -> wire.Item:
        """`reconcile` of a job of its own, attempt *number* of which is open.

        The platform may have replaced that one, and will perhaps replace it no more.
        """
        self.doubtful.pop(index, None)
        before, most = self._seen.get(index), number + self.identity.budgets.infrastructure
        launched = number <= self.launched  # before the platform was asked
        attempts = [(index, one) for one in range(1, most + 1)]
        found = await self._find(attempts, explained=explained)
        seen = found.get((index, number))
        last = next((one for one in found.values() if one.last), None)
        if seen is None and any(one > number for _, one in found):
            name = self.identity.attempt_name(index, number)
            words = "its process is gone, and was replaced by the platform"
            seen = Observation(name=name, phase=Phase.GONE, reason=Reason.PREEMPTED, message=words)
        never_comes = seen is None and (launched or (not found and self.identity.settled))
        # What is left of the attempt before says that the platform may still replace that one,
        # unless this is left to the submitter.
        decided = self.relaunched or last is not None or not found
        if seen is None and number > 1 and decided and not launched:
            if not self._awaits_submitter(index, number):
                await self._not_replaced(index, last)
        elif self.is_over(index, number, seen, before) or never_comes:
            await self.resolve_attempt(index, number, seen)
        self._doubt_unseen(index)
        return self._items[index]

    def _doubt_unseen(self, index: int) -> None:
        """Doubt that the open attempt of a single job comes, as long as nobody has seen it."""
        item, seen = self._items[index], self._seen.get(index)
        name = self.identity.attempt_name(index, item.attempt)
        if not item.state.final and (seen is None or seen.name != name):
            self._doubt(Ended(index, item.attempt, None))

    def _doubt(self, ended: Ended) -> None:
        item = self._items.get(ended.index)
        if item is None or not (item.state.final or item.attempt > ended.number):
            self.doubtful[ended.index] = ended
            self._doubted.set()

    def _claimed(self, index: int, number: int) -> bool:
        return self.attempt(index, number).executor is not None

    async def ask_platform(self, indices: Collection[int]) -> dict[int, Observation]:
        """Ask the platform about open items in one request, and settle what has ended.

        The caller has looked at the items just before. Returns what waits or runs.
        """
        asked: dict[tuple[int, int], tuple[str | None, Observation | None]] = {}
        for index in indices:
            item = self._items.get(index)
            if item is not None and not (item.state.final or self.is_damaged(index)):
                claimant = self.attempt(index, item.attempt).executor
                asked[index, item.attempt] = claimant, self._seen.get(index)
        found = await self._find(asked)
        # What is not there may have committed and gone since the caller looked.
        if absent := [index for index, number in asked if (index, number) not in found]:
            await self.look_at_each(absent)
        over: list[Ended] = []
        for (index, number), (claimant, before) in asked.items():
            seen = found.get((index, number))
            if self._is_open(index, number):
                executor = self.attempt(index, number).executor
                told = self.doubtful.pop(index, None)  # this answer decides, or leaves it in doubt
                void = executor == wire.VOID  # its closer may have died
                if seen is None and told is not None and told.is_about(executor):
                    over.append(told)  # it says more than that the job is gone by now
                elif void or self.is_over(index, number, seen, before):
                    over.append(Ended(index, number, seen, claimant, told.since if told else None))
        await bounded(self.settle, over, at_once=SETTLING)
        ended = {one.index for one in over if one.seen is not None}
        alive: dict[int, Observation] = {}
        for (index, number), (_, before) in asked.items():
            now = self._seen.get(index)
            fresh = (index, number) in found or now is not before  # told since it was asked
            if now is not None and fresh and self._is_open(index, number) and index not in ended:
                alive[index] = now
        return alive

    def _is_open(self, index: int, number: int) -> bool:
        """Whether attempt *number* of the item is open, as far as is known."""
        item = self._items[index]
        return item.attempt == number and not item.state.final

    async def see_through(self, indices: Collection[int]) -> list[int]:
        """Close what has ended of a submission without a submitter.

        Returns the items that will not end unless somebody submits it again.

        What still runs commits its own outcome. What was stopped and still runs is taken off the
        platform. What is forged has its own error.
        """
        self.closes = True
        await self.look_at_each(indices)
        alive = await self.ask_platform(indices)
        stopped = [
            seen.name
            for index, seen in alive.items()
            if self._items[index].state is wire.ItemState.CANCELLING
            and self.requests.standing(index).unwanted
        ]
        if stopped:
            await self._cluster.delete(names=stopped)
        return [
            index
            for index in indices
            if not (index in alive or self._items[index].state.final or self.is_damaged(index))
        ]

    async def reread(self) -> None:
        """Read what is open again: the store, and what the platform says.

        Raises:
            KineticError: They cannot be read.
        """
        if self.batch_reader is not None:
            await self.batch_reader()
        elif not self.is_final(0):
            await self.reconcile(0)

    async def settle(self, ended: Ended) -> None:
        """Find out how an attempt has ended; what nobody can say now is asked again later."""
        index, number = ended.index, ended.number
        try:
            item = await self.resolve_attempt(index, number, ended.seen, ended.claimant)
        except Exception as exc:
            if self._may_pass(ended, exc):
                self._doubt(ended)
            return
        ended.since = None
        self.clear_error(index)
        if not (item.state.final or item.attempt != number or self.closes):
            self._doubt(ended)  # who submits the batch is about to close it
            return
        self.doubtful.pop(index, None)
        if not self.identity.leased:
            self._doubt_unseen(index)

    def _may_pass(self, ended: Ended, error: Exception) -> bool:
        """Log why nobody can say how an attempt has ended; whether to ask again.

        Whoever waits is told at once what will last, and anything else after a minute.
        """
        name = self.identity.attempt_name(ended.index, ended.number)
        if isinstance(error, KineticError) and not is_passing(error):
            logging.error("cannot find out how %s ended: %s", name, error)
            self.set_error(ended.index, error)
            # What is damaged or removed stays so; a right may be granted.
            return isinstance(error, BackendError) and not isinstance(error, NotFound)
        if isinstance(error, KineticError):
            logging.warning("cannot find out yet how %s ended: %s; retrying", name, error)
        else:  # a defect, or what no adapter has translated
            logging.error("cannot find out yet how %s ended; retrying", name, exc_info=error)
        now = asyncio.get_running_loop().time()
        ended.since = now if ended.since is None else ended.since
        if now - ended.since >= PATIENCE_S:
            self.set_error(ended.index, _unanswered(name, error))
        return True

    async def until_doubted(self, timeout: float) -> bool:
        """Wait until an attempt is in doubt, *timeout* seconds at most; whether one is."""
        if not self.doubtful:
            self._doubted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._doubted.wait()
        return bool(self.doubtful)

    async def _find(
        self, attempts: Collection[tuple[int, int]], *, explained: bool = False
    ) -> dict[tuple[int, int], Observation]:
        """What the platform says of *attempts*, in one request."""
        names = {self.identity.attempt_name(*one): one for one in attempts}
        if len(names) > FEW_NAMES:
            found = await self._cluster.find(labels={LABEL_SUBMISSION: self.identity.id})
        else:
            found = await self._cluster.find(names=[*names], explained=explained) if names else []
        return {names[seen.name]: seen for seen in found if seen.name in names}

    async def _close(
        self, index: int, number: int, seen: Observation | None, known: str | None
    ) -> None:
        """Close the attempt if it is proven to be over.

        *known* is who was known to have claimed it before the platform was asked.
        """
        if seen is not None and seen.name != self.identity.attempt_name(index, number):
            return  # the end of another attempt says nothing about this one
        claimant = self.attempt(index, number).executor
        if claimant not in (None, wire.VOID, known) and (seen is None or not seen.executor):
            # An answer that names no process may be about an earlier job of the same name.
            before = self._seen.get(index)
            seen = (await self._find([(index, number)])).get((index, number))
            if not self.is_over(index, number, seen, before):
                return
        death = closing(self.attempt(index, number), seen)
        if death is None:
            return
        await self._refuse_cleaned()
        if claimant is None:
            if not await self._void(index, number):
                await self.look(index)
                claimant = self.attempt(index, number).executor
                if claimant is None and self._is_open(index, number):
                    await self._refuse_displaced(index, number, "claim")
                if seen is not None and claimant is not None and seen.executor == claimant:
                    await self._close(index, number, seen, known)  # claimed since *seen* was told
                return  # else the next word on it will close it
            claimant = wire.VOID
        await self._store_closed(index, number, claimant, death)

    async def _void(self, index: int, number: int) -> bool:
        """Claim an attempt that is not to begin any more; False when somebody has claimed it."""
        claim = wire.claim_metadata(wire.VOID, self.fence)
        name = wire.attempt_key(self.identity.scope, index, number, "claim")
        return await self._store.create(name, b"", claim)

    async def _store_closed(
        self, index: int, number: int, claimant: str, death: outcomes.Death
    ) -> wire.Outcome:
        """Close an attempt whose claim was seen; if it has its outcome, that stays."""
        place = (self.identity.scope, index, number)
        item = await self.look(index)  # requests are read after the claim was seen
        silent = item.stopped or death.reason == SUBMISSION  # there is no log, or no use of it
        log = "" if silent else await self._log_tail(index, number)
        outcome, body = outcomes.closed(death, item, claimant, self.fence, log)
        metadata = outcome.signed(self.identity.key, *place)
        await self._refuse_cleaned()  # to read its log took a while
        if not await self._store.create(wire.attempt_key(*place, "outcome"), body, metadata):
            await self._refuse_displaced(index, number, "outcome")
        return outcome

    async def _refuse_displaced(self, index: int, number: int, what: str) -> None:
        """Check an object that could not be created, for its name is taken.

        Raises:
            WireError: There is no such object: the attempt can never be closed.
        """
        name = wire.attempt_key(self.identity.scope, index, number, what)
        if await self._store.look(name) is None and await self._store.look(self.identity.entry):
            raise displaced(name, self._store)

    async def _refuse_cleaned(self) -> None:
        """Write nothing of a job that was cleaned up, as `result()` does once it has the value.

        Raises:
            NotFound: It was.
        """
        if not (self.identity.leased or await self._store.look(self.identity.entry)):
            raise self.identity.gone

    async def _log_tail(self, index: int, number: int) -> str:
        """Read the end of the log; whatever fails, an outcome doesn't need it."""
        name = self.identity.attempt_name(index, number)
        # A long line comes in several pieces, so more than LOG_LINES of them may come.
        lines: deque[str] = deque(maxlen=LOG_LINES)
        try:
            async with (
                asyncio.timeout(LOG_S),
                aclosing(self._cluster.logs(name, tail=LOG_LINES)) as log,
            ):
                async for line in log:
                    lines.append(line)  # what was read by then counts
        except Exception as exc:
            logging.debug("no log of %s: %s", self.identity.job_id(index), exc)
        if not lines:
            try:
                lines.extend(await self.kept_log(index, number))
            except Exception as exc:
                logging.debug("no kept log of %s: %s", self.identity.job_id(index), exc)
        return "\n".join(lines)[-8192:]

    async def kept_log(self, index: int, number: int) -> list[str]:
        """What the runner has kept of an attempt's output; of several hosts, one after the other.

        Empty where nothing is kept.
        """
        prefix = wire.log_prefix(self.identity.scope, index, number)
        names = [one.name for one in await self._store.list(prefix)]
        kept: list[str] = []
        for name in names:
            try:
                found = await self._store.get(name, limit=wire.LOG_BYTES)
            except NotFound:  # it is removed in this moment
                continue
            key, scope = self.identity.key, self.identity.scope
            if not signing.is_signed(found.metadata, key, scope, name, found.body):
                logging.warning("the log %s is forged or damaged; it is not shown", name)
                continue
            lines = found.body.decode(errors="replace").removesuffix("\n").split("\n")
            host = f"[{int(name.removeprefix(prefix))}] " if len(names) > 1 else ""
            kept += [host + line for line in lines]
        return kept

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
        text = outcomes.error_text(error, phase="submission")
        death = outcomes.Death(
            kind=wire.Kind.ERROR,
            reason=SUBMISSION,
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
        if (error := self.error(index)) is not None:
            raise error
        waiter: asyncio.Future[wire.Item] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(index, []).append(waiter)
        try:
            return await waiter
        finally:
            waiters = self._waiters.get(index, [])
            if waiter in waiters:
                waiters.remove(waiter)


def _is_as(one: Observation, other: Observation) -> bool:
    """Whether they differ at most in their words."""
    return (one.name, one.phase, one.executor) == (other.name, other.phase, other.executor)


T = TypeVar("T")

LABEL_SUBMISSION = "kinetic.dev/submission"
LABEL_CLIENT = "kinetic.dev/client"
LABEL_INDEX = "kinetic.dev/index"
LABEL_ATTEMPT = "kinetic.dev/attempt"

LABEL_ROUND = "kinetic.dev/round"
"""How many retry requests its batch had, as far as the process that launched it had read."""

SETTLING = 64
"""Outcomes that are read at once; each is a request or two to the store."""

TURN = 64
"""How many are read in one turn of the loop, by a store that answers at once."""

LISTED = 8
"""More than so many that were stopped are listed together: alone, each takes four requests."""

MANY_WATCHES = 8
"""With so many, further submissions of other processes share one watch over everything."""

OWN, ALL = "", "all jobs"
"""Watches that are about more than one submission."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""How long a watch that was interrupted waits before it begins again."""


class Parting(Protocol):
    """What must stop submitting before the session ends.

    Whoever makes a batch registers it in `Session.batches`.
    """

    async def part(self, why: str) -> None:
        """Stop submitting at once."""
        ...


class Session:
    """One opened platform: its watches, and the submissions that are followed by them.

    What this client starts carries its label and needs one watch; a submission
    of another process gets a watch of its own. Batches and submissions are
    known here for as long as somebody holds a handle, waits, or submits.
    """

    def __init__(
        self, target: Target, platform: Platform, client_id: str, limit: AttemptLimit
    ) -> None:
        self.target = target
        self.platform = platform
        self.client_id = client_id
        self.limit = limit
        self.batches: weakref.WeakValueDictionary[str, Parting] = weakref.WeakValueDictionary()
        self._submissions: weakref.WeakValueDictionary[str, Submission]
        self._submissions = weakref.WeakValueDictionary()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._rereading: dict[str, asyncio.Task[None]] = {}
        self._unsettled: deque[tuple[Submission, Ended]] = deque()
        self._resolvers = 0
        self._resolver_comes = False
        self._root_key: asyncio.Task[bytes] | None = None
        self._closed = False
        self.loop = asyncio.get_running_loop()

    async def key(self, scope: str) -> bytes:
        """What the outcomes under *scope* are signed with."""
        asked = self._root_key
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception())):
            asked = self._root_key = self.spawn(self.platform.cluster.root_key(), name="root key")
        return signing.submission_key(await shared(asked, "the client"), scope)

    def follow(self, submission: Submission, *, ours: bool) -> Submission:
        """Keep *submission* current from now on.

        Returns it, or the one of its id that is followed already.
        """
        known = self._submissions.setdefault(submission.identity.id, submission)
        if ours:
            known.ours = True
            self._ensure_watch(OWN, {LABEL_CLIENT: self.client_id})
        elif known is submission:
            if len(self._watches) >= MANY_WATCHES:
                self._ensure_watch(ALL, {"app": self.platform.app})
            else:
                self.watch(submission)
        return known

    def watch(self, submission: Submission) -> None:
        """Follow all its attempts, also those that other clients start."""
        label = {LABEL_SUBMISSION: submission.identity.id}
        self._ensure_watch(submission.identity.id, label)

    def followed(self, submission_id: str) -> Submission | None:
        """The submission of this id, if it is followed."""
        return self._submissions.get(submission_id)

    async def closed(self, submission: Submission, index: int) -> wire.Item:
        """Wait until the item is final, whether or not the platform tells of its end.

        Raises:
            SubmitterLost: Nobody will start it.
            KineticError: What became of it cannot be found out.
        """
        with self.awaiting(submission):
            return await submission.closed(index)

    @contextlib.contextmanager
    def awaiting(self, submission: Submission) -> Generator[None]:
        """Read the submission again at intervals while the block runs.

        The watch tells sooner; what it never tells is found out so.
        """
        identity = submission.identity.id
        submission.awaited += 1
        try:
            if submission.awaited == 1 and not self._closed:
                work = self._keep_reading(submission)
                self._rereading[identity] = self.spawn(work, name=f"waiting for {identity}")
            yield
        finally:
            submission.awaited -= 1
            if not submission.awaited and (task := self._rereading.pop(identity, None)):
                task.cancel()

    async def _keep_reading(self, submission: Submission) -> None:
        """Read store and platform again and again; sooner while an end is in doubt."""
        clock = asyncio.get_running_loop().time
        slow, quick = growing(*REREAD_S, jitter=SPREAD), growing(*DOUBT_S)
        failing: float | None = None  # since when
        while True:
            if failing is not None or submission.doubtful:
                await asyncio.sleep(next(quick))
            else:
                quick = growing(*DOUBT_S)
                if await submission.until_doubted(next(slow)):
                    continue
            try:
                await submission.reread()
            except Exception as exc:
                failing = clock() if failing is None else failing
                self._note_failure(submission, exc, clock() - failing)
            else:
                failing = None

    def _note_failure(self, submission: Submission, error: Exception, silent_s: float) -> None:
        """Tell those who wait that nothing can be read.

        Whoever has submitted a job, which may run for days, waits through any outage, and hears
        only that the job is gone or damaged.
        """
        identity = submission.identity.id
        if isinstance(error, KineticError):
            logging.warning("cannot read %s: %s; retrying", identity, error)
        else:
            logging.exception("cannot read %s; retrying", identity)
        damaged = isinstance(error, KineticError) and not isinstance(error, BackendError)
        lasting = isinstance(error, KineticError) and not is_passing(error)
        told = not submission.ours and (lasting or silent_s >= PATIENCE_S)
        if damaged or told or isinstance(error, NotFound):
            submission.fail_waiters(error)

    def forget(self, submission: Submission) -> None:
        """Its objects are gone: nothing more will be asked about it."""
        submission.abandon(submission.identity.gone)
        self._submissions.pop(submission.identity.id, None)
        self.batches.pop(submission.identity.id, None)
        if (watch := self._watches.pop(submission.identity.id, None)) is not None:
            watch.cancel()

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """A task that lives no longer than the session.

        Raises:
            ConfigurationError: The session is closed.
        """
        if self._closed:
            work.close()
            raise ConfigurationError("this client is closed; open another one")
        task = asyncio.get_running_loop().create_task(work, name=f"kinetic {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Stop submitting, end the watches and close the platform; jobs go on."""
        batches = tuple(self.batches.values())
        try:
            await asyncio.gather(*(batch.part("the client is closed") for batch in batches))
        finally:
            await self._end()

    async def _end(self) -> None:
        self._closed = True
        for submission in tuple(self._submissions.values()):
            submission.abandon(
                KineticError(
                    f"the client was closed while {submission.identity.id} went on; "
                    "attach to it to find its outcome"
                )
            )
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.platform.aclose()

    def _ensure_watch(self, name: str, labels: Mapping[str, str]) -> None:
        if name not in self._watches:
            for known in tuple(self._watches):
                if known not in (OWN, ALL) and known not in self._submissions:
                    self._watches.pop(known).cancel()  # nobody asks about it any more
            watching = self._watch(dict(labels))
            self._watches[name] = self.spawn(watching, name=f"watch {name or 'own jobs'}")

    async def _watch(self, labels: Mapping[str, str]) -> None:
        pauses = growing(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                async with aclosing(self.platform.cluster.watch(labels)) as news:
                    async for seen in news:
                        pauses = growing(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                        self._route(seen)
            except (
                NotFound
            ) as exc:  # what makes such jobs is not there: whoever starts one hears so
                logging.info("no jobs are watched: %s", exc)
            except KineticError as exc:
                logging.warning("watching jobs was interrupted: %s; trying again", exc)
            except Exception:  # the only source of news must not end
                logging.exception("watching jobs was interrupted; trying again")
            await asyncio.sleep(next(pauses))

    def _route(self, seen: Observation) -> None:
        submission = self._submissions.get(seen.labels.get(LABEL_SUBMISSION, ""))
        if submission is None:
            return
        index, number = int(seen.labels[LABEL_INDEX]), int(seen.labels[LABEL_ATTEMPT])
        # That no other attempt follows is news of a single job, whichever attempt it is told of.
        last = seen.last and not (submission.identity.leased or submission.is_final(index))
        if not (last or submission.concerns(index, number)):
            return
        if seen.leaving or seen.phase in (Phase.ENDED, Phase.GONE):
            self.resolve_attempt(submission, index, number, seen)
        else:
            submission.note(index, number, seen)

    def resolve_attempt(
        self,
        submission: Submission,
        index: int,
        number: int,
        seen: Observation | None,
        claimant: str | None = None,
    ) -> None:
        """Queue an attempt that has ended, to find out how; *seen* None: its job is not there.

        *claimant* is who was known to have claimed it before the platform was asked.
        """
        self._unsettled.append((submission, Ended(index, number, seen, claimant)))
        self._call_resolver()

    def _call_resolver(self) -> None:
        """In the next turn of the loop, start one more worker if there is work left."""
        if not self._resolver_comes:
            self._resolver_comes = True
            asyncio.get_running_loop().call_soon(self._send_resolver)

    def _send_resolver(self) -> None:
        self._resolver_comes = False
        if self._unsettled and self._resolvers < SETTLING and not self._closed:
            self._resolvers += 1
            self.spawn(self._resolve_some(), name="settler")

    async def _resolve_some(self) -> None:
        """Work until the queue is empty; a task for each attempt would cost more than the work."""
        count = 0
        try:
            while self._unsettled:
                submission, together = self._next_ended()
                self._call_resolver()  # should these have to wait for the store
                if len(together) > LISTED:
                    together = await self._not_cancelled(submission, together)
                for ended in together:
                    await submission.settle(ended)
                    count += 1
                    if count % TURN == 0:
                        await asyncio.sleep(0)
        finally:
            self._resolvers -= 1

    def _next_ended(self) -> tuple[Submission, list[Ended]]:
        """The next one; if it was stopped, all that follow of its submission and were, too."""
        submission, ended = self._unsettled.popleft()
        together = [ended]
        if _is_stopped(submission, ended):
            while self._unsettled and self._unsettled[0][0] is submission:
                if not _is_stopped(*self._unsettled[0]):
                    break
                together.append(self._unsettled.popleft()[1])
        return submission, together

    async def _not_cancelled(self, submission: Submission, together: list[Ended]) -> list[Ended]:
        """Those whose item may have begun: of most that are stopped it has not, which is listed."""
        with contextlib.suppress(KineticError):  # then it is asked about each of them
            await submission.look_at_each({ended.index for ended in together})
        return [ended for ended in together if not submission.is_final(ended.index)]


def _is_stopped(submission: Submission, ended: Ended) -> bool:
    """Whether nobody wants its item any more, as far as the requests were read."""
    return submission.requests.standing(ended.index).unwanted


def _unanswered(name: str, error: Exception) -> Unavailable:
    return Unavailable(
        f"{name} has ended, and for {PATIENCE_S:g} s nobody could say how: {described(error)}; "
        "kinetic keeps checking: wait again when the store answers",
        retryable=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """One item of a submission, on an opened platform."""

    session: Session
    submission: Submission
    index: int

    @property
    def output_dir(self) -> str:
        """What its job sees as ``KINETIC_OUTPUT_DIR``."""
        return self.submission.identity.output_dir(self.index)
