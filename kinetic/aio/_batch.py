"""What a batch is behind its handle: its items, who submits them, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from absl import logging

from kinetic._runner import wire
from kinetic.aio import _lease, _manifest, _removal, _submit, fanout
from kinetic.aio._following import Following
from kinetic.aio._holder import Holder
from kinetic.aio._inputs import Source, size_of
from kinetic.aio._intake import Feed
from kinetic.aio._launching import Order
from kinetic.aio._patience import patiently
from kinetic.aio._release import release
from kinetic.aio._renewal import renewed
from kinetic.aio._session import Session
from kinetic.aio._stock import Stock
from kinetic.aio._submission import Submission
from kinetic.aio._takeover import since, survey
from kinetic.aio._terms import Terms
from kinetic.aio._withdrawal import delete_all
from kinetic.errors import ConfigurationError, Conflict, KineticError, NotFound, SubmitterLost
from kinetic.job_status import JobStatus

__all__ = ["Batch", "feed_of"]

LONGEST_LOOK_S = 10.0

PARTING_S = 15.0
"""With a lease that cannot be released, it is still less than a closing client waits."""


class Batch:
    """One batch as this process sees it; with a holder, this process submits it."""

    def __init__(
        self,
        session: Session,
        submission: Submission,
        manifest: Mapping[str, Any],
        *,
        followed: bool = True,
    ) -> None:
        self.session = session
        self.submission = submission
        self.manifest = manifest
        self.holder: Holder | None = None
        self.watchers: list[asyncio.Event] = []
        identity = submission.identity
        self.stock = Stock(session.platform.store, identity.scope, identity.key)
        self._followed = followed
        self._taking_over = asyncio.Lock()
        self._mourning: asyncio.Task[None] | None = None
        self._asked: wire.Request | None = None
        submission.listen(self.wake)
        submission.requests.listeners.append(self._on_request)

    @property
    def group_id(self) -> str:
        """Its id."""
        return self.submission.identity.id

    def following(self, index: int) -> Following:
        """Where the job of an item is followed."""
        return Following(
            session=self.session,
            submission=self.submission,
            index=index,
            output_dir=f"{self.manifest['output_dir']}/{index}",
        )

    # --- what is there ---

    @property
    def holding(self) -> bool:
        """Whether this process submits it now."""
        return self.holder is not None and not self.holder.over.is_set()

    @property
    def total(self) -> int | None:
        """How many items there are, once that is known."""
        if self.stock.total is not None:
            return self.stock.total
        if self.holder is not None and self.holder.state.sealed:
            return self.holder.state.total
        total: int | None = self.manifest["total"]
        return total if self.holder is None else None

    @property
    def known(self) -> int:
        """How many items there are so far."""
        if self.stock.total is not None:
            return self.stock.total  # a length may be wrong that the inputs said beforehand
        return max(self.stock.count, self.total or 0, self.manifest["total"] or 0)

    @property
    def stored(self) -> int:
        """How many inputs are stored."""
        return self.stock.count

    @property
    def refused(self) -> dict[int, Exception]:
        """Items that could not be submitted at all."""
        return self.submission.refusals

    def submitted(self, index: int) -> bool:
        """Whether an attempt of the item was asked for."""
        if self.submission.refusal(index) is not None:
            return False
        if self.holder is None:
            return True
        return self.submission.begun(index) or index in self.holder.state.busy

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen."""
        if self.holder is not None:
            settled = self.submission.settled_items >= (self.total or 0)  # a retry opens some
            return (self.holder.complete and settled) or self.holder.over.is_set()
        return self.total is not None and self.submission.settled_items >= self.total

    @property
    def complete(self) -> bool:
        """Whether every item has its outcome, as opposed to nobody submitting it any more."""
        return self.finished if self.holder is None else self.holder.complete

    def follow(self) -> None:
        """Keep it current from now on, if that was put off until somebody asks."""
        if not self._followed:
            self._followed = True
            self.session.follow(self.submission, ours=False)
            self.observe()

    async def refresh(self) -> None:
        """Learn how many items there are, when another process submits them."""
        self.follow()
        if not self.holding and self.stock.total is None:
            await self.stock.read()

    async def look(self) -> None:
        """Read the objects of all items that are not final."""
        await self.refresh()
        if self.submission.ended == 0 and await self.submission.read_done():
            return
        left = [index for index in range(self.known) if not self._is_final(index)]
        await self.submission.look_at_each(left)
        # The requests, which that look has read, may have reopened what was final until then.
        reopened = {*self.submission.requests.reopened}.difference(left)
        if again := [index for index in reopened if not self._is_final(index)]:
            await self.submission.look_at_each(again)

    def _is_final(self, index: int) -> bool:
        return self.submission.is_final(index)

    async def statuses(self) -> list[tuple[int, JobStatus]]:
        """Index and status of what was submitted, read from the store now."""
        submitted = [index for index in range(self.known) if self.submitted(index)]
        await self.look()
        submitted = submitted if self.holder is not None else [*range(self.known)]
        return [(index, self.submission.status(index)) for index in submitted]

    async def input_of(self, index: int) -> Any:
        """The input of an item: the very object while it is here, else one rebuilt from the store.

        Raises:
            NotFound: It is not stored, or not any more.
            SubmissionError: It could not be pickled.
            Exception: What rebuilding it raises; `Data` in it cannot be rebuilt.
        """
        intake = self.holder.intake if self.holder is not None else None
        if intake is not None and (here := intake.input_of(index)) is not None:
            return here[0]
        await self.refresh()
        return await self.stock.value(index)

    # --- waiting ---

    def wake(self, index: int = 0, item: wire.Item | None = None) -> None:
        """Something changed: let those who wait look again."""
        for awake in self.watchers:
            awake.set()

    async def submitted_all(self) -> None:
        """Wait until every item was asked for once, or never will be."""
        while self.holder is not None and not (self.finished or self.holder.all_asked_for):
            awake = asyncio.Event()
            self.watchers.append(awake)
            try:
                await awake.wait()
            finally:
                self.watchers.remove(awake)

    # --- submitting ---

    def hold(
        self,
        hold: _lease.Hold,
        placed: _submit.Placed,
        feed: Feed | None,
        terms: Terms,
        events: Iterable[fanout.Event] = (),
    ) -> None:
        """Submit it from now on; what a survey has found comes first."""
        submission = self.submission
        submission.closes, submission.fence = True, hold.fence
        submission.reclaim()
        order = Order(
            session=self.session,
            submission=submission,
            placed=placed,
            stock=self.stock,
            hold=hold,
            output_dir=self.manifest["output_dir"],
        )
        length = feed.length if feed is not None else self.manifest["total"]
        holder = Holder(order, terms.policy, feed, terms.window_for(length), self.wake)
        self.holder = holder
        for event in events:
            holder.post(event)
            for news in since(submission, event):
                holder.post(news)
        self.session.spawn(self._submitting(holder), name=f"batch {self.group_id}")
        if (deadline := self.manifest.get("deadline")) is not None:
            if submission.requests.reopened:  # what is tried again has the whole time again
                deadline = time.time() + (terms.batch_timeout or 0.0)
            self.session.spawn(self._end_at(holder, deadline), name=f"timeout of {self.group_id}")

    async def _submitting(self, holder: Holder) -> None:
        """Have *holder* at work, and hear of what goes on elsewhere when it is over.

        Not if it has ended with an error of its own: that is what everybody hears then.
        """
        await holder.run()
        requests, lost = self.submission.requests, holder.hold.lost is not None
        if self.holder is not holder or requests.removing or not (lost or holder.complete):
            return
        if not all(map(self._is_final, requests.reopened)):
            self._observe_again()
        elif lost:
            self.session.watch(self.submission)  # who waits for a job hears of it further on
            self.observe()

    def _on_request(self, request: wire.Request) -> None:
        """What somebody has tried again after this process had submitted it all runs elsewhere.

        What this process asks for, or finds while it takes the batch over, it is about to serve.
        """
        if request.kind != "retry" or request == self._asked or self._taking_over.locked():
            return
        if self.holder is not None and not self.holding:
            self._observe_again()

    async def _end_at(self, holder: Holder, deadline: float) -> None:
        """The batch's own timeout, whoever submits it."""
        try:
            await asyncio.wait_for(holder.over.wait(), max(0.0, deadline - time.time()))
        except TimeoutError:
            logging.warning("batch %s is cancelled: its batch_timeout is over", self.group_id)
            holder.stop_beside("timeout", keep_running=False)

    async def take_over(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any] | None = None,
        *,
        seal: bool = False,
        force: bool = False,
    ) -> None:
        """Submit the rest of it, when nobody else does.

        Raises:
            Conflict: Somebody submits it, and is alive.
            ConfigurationError: *inputs* are given, and the batch has its end.
            NotFound: It was cleaned up.
            WireError: It is of a format that this version does not know.
        """
        async with self._taking_over:
            await self.refresh()
            self._refuse_more(inputs)
            if (holder := self.holder) is not None and self.holding:
                if not await holder.is_replaced():
                    if inputs is None and not seal and not force:
                        return
                    raise Conflict(
                        f"this client submits {self.group_id} already: it need not resume"
                    )
                await holder.over.wait()
            environment = await self._environment()
            placed = _manifest.placed_of(self.manifest, environment)
            identity, platform = self.submission.identity, self.session.platform
            hold = await _lease.acquire(
                platform.store, identity.scope, identity.submitter, platform.clock, force=force
            )
            try:
                await self._hold_again(hold, placed, inputs, seal=seal)
            except BaseException:
                with contextlib.suppress(ConfigurationError):  # the client is closed
                    self.observe()
                await release(hold.release(), what=f"releasing {self.group_id}")
                raise

    async def _environment(self) -> dict[str, str]:
        try:
            secret = self.session.platform.cluster.secret
            content = await patiently(lambda: secret(self.group_id), "reading the environment")
        except NotFound as exc:
            await _manifest.read_manifest(self.session, self.group_id)
            await self.look()
            if self.total is not None and self.submission.ended >= self.total:
                return {}  # nothing will run
            raise NotFound(
                f"the environment of {self.group_id} is not kept by the platform any more: its "
                "jobs would not run as the first ones did; submit what is left in a new batch"
            ) from exc
        environment: dict[str, str] = json.loads(content)
        return environment

    async def _hold_again(
        self,
        hold: _lease.Hold,
        placed: _submit.Placed,
        inputs: Iterable[Any] | AsyncIterable[Any] | None,
        *,
        seal: bool,
    ) -> None:
        keeping = self.session.spawn(hold.keep(), name=f"lease of {self.group_id}")
        if self._mourning is not None:  # two that close the same attempts get in each other's way
            self._mourning.cancel()
        try:
            if self._mourning is not None:
                await asyncio.wait({self._mourning})
            self.submission.closes, self.submission.fence = True, hold.fence
            self.session.watch(self.submission)
            store = self.session.platform.store
            gone = await patiently(lambda: renewed(store, placed), "looking at what jobs share")
            events = await survey(self.session, self.submission, self.stock)
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
        if hold.lost is not None:
            raise hold.lost
        self._refuse_more(inputs)
        if gone and (inputs is not None or self._is_open):
            raise NotFound(
                f"the {gone[0].partition('/')[0]} of {self.group_id} is not in the store any more: "
                "it was collected by its age; submit what is left in a new batch"
            )
        total = self.stock.total
        terms = Terms.from_json(self.manifest["terms"])
        feed: Feed | None = feed_of(inputs if inputs is not None else (), terms)
        if inputs is None and not (seal and total is None):
            feed = None
            end = total if total is not None else self.stock.count
            events.append(fanout.Ended(end, sealed=total is not None))
        self.hold(hold, placed, feed, terms, events)

    @property
    def _is_open(self) -> bool:
        return any(not self._is_final(index) for index in range(self.stock.count))

    def _refuse_more(self, inputs: object) -> None:
        if inputs is not None and self.stock.total is not None:
            raise ConfigurationError(
                f"{self.group_id} has all its {self.stock.total} inputs: resume() without more, "
                "and submit these in a batch of their own"
            )

    async def retry_failed(self, indices: Iterable[int] | None = None) -> int:
        """Have the items that failed or were cancelled tried again, from any process.

        Returns how many will run again.

        Raises:
            NotFound: The batch has no such item, or was cleaned up.
        """
        if not await self._is_there():
            raise self.submission.identity.gone
        await self.refresh()
        wanted = {*range(self.known)} if indices is None else {*indices}
        if strange := [index for index in wanted if not 0 <= index < self.known]:
            raise NotFound(f"batch {self.group_id} has no item {strange[0]}; it has {self.known}")
        count = await self._request_retry(wanted)
        if (holder := self.holder) is not None and self.holding:
            await holder.heeded()
            if await holder.is_replaced():
                await holder.over.wait()
        reopened = self.submission.requests.reopened  # also by who died before it came to start
        is_open = any(not self._is_final(index) for index in reopened)
        if is_open and not self.holding and await self._is_free():
            try:
                await self.take_over()
            except Conflict:
                logging.info("%s: somebody else has taken it, and serves this", self.group_id)
        if self.holder is not None and not self.holding and self.submission.ended < self.known:
            self._observe_again()  # what was reopened runs elsewhere
        return count

    async def _is_there(self) -> bool:
        """Whether nobody has cleaned it up: what is written into it then would stay for ever."""
        entry = self.submission.identity.entry
        if self.holding or await self.session.platform.store.look(entry) is not None:
            return True
        self.session.forget(self.submission)
        return False

    async def _request_retry(self, wanted: Iterable[int]) -> int:
        submission, budgets = self.submission, self.submission.identity.budgets
        while True:
            await self.look()
            slot = len(submission.requests.entries)
            ended = [i for i in wanted if self._is_final(i)]
            failed = [i for i in ended if submission.status(i) is not JobStatus.SUCCEEDED]
            bases: dict[int, int] = {}
            for index, attempts in (await submission.all_attempts(failed)).items():
                base = wire.retry_base(submission.requests.standing(index), attempts, budgets)
                if base is not None:
                    bases[index] = base
            if not bases:
                return 0
            self._asked = request = wire.Request(kind="retry", bases=bases, cause="retry_failed")
            if await submission.requests.append_at(slot, request):
                await submission.look_at_all(bases)  # whoever waits from now on waits for these
                return len(bases)

    async def _is_free(self) -> bool:
        """Whether nobody who lives has the lease; waits until that is clear."""
        identity, platform = self.submission.identity, self.session.platform
        there = await _lease.read(platform.store, identity.scope)
        return there is None or not there[0].held or not await self._is_served(there[0])

    async def _is_served(self, lease: _lease.Lease) -> bool:
        """Whether the holder of *lease* renews it."""
        identity, platform = self.submission.identity, self.session.platform
        since = platform.clock()
        while platform.clock() - since < _lease.EXPIRY_S and not lease.owner.dead:
            await lease.owner.ended(_lease.LOOK_S)
            there = await _lease.read(platform.store, identity.scope)
            if there is None or there[0] != lease:
                return there is not None and there[0].held
        return False

    async def part(self, why: str) -> None:
        """Stop submitting at once, for this process is about to leave it."""
        if self.holder is not None and self.holding:
            holder = self.holder
            what = f"leaving {self.group_id}"
            await release(holder.part(), what=what, grace=PARTING_S)
            left = holder.waiting
            if left or not (holder.complete or holder.all_asked_for):
                logging.warning(
                    "%s: %s is not submitted any more; %d of its items were not started. What "
                    "runs goes on; kinetic.attach_batch(%r).resume() submits the rest",
                    why,
                    self.group_id,
                    len(left),
                    self.group_id,
                )

    async def seal(self) -> None:
        """Pull no more inputs: those that were pulled are stored, and are all."""
        if self.holder is not None and self.holding:
            await self.holder.finish_inputs(seal=True)

    # --- ending ---

    async def cancel(self) -> None:
        """Stop everything and wait until it has ended.

        Raises:
            BackendError: The stop cannot be stored, or what it has ended not be read.
        """
        holder = self.holder
        if holder is not None and self.holding and not holder.complete:
            await holder.stop("cancel", keep_running=False)
            await holder.over.wait()
            if holder.unheeded is not None:
                raise holder.unheeded
            if holder.hold.lost is None:
                return  # else another process has it now, and ends it
        await self.look()
        if self.total is not None and self.submission.ended >= self.total:
            return  # nothing is left to stop, and the logs stay
        if not await self._is_there():
            return
        its_round = await self.submission.append(wire.Request(kind="stop", cause="cancel"))
        await delete_all(self.session.platform.cluster, self.submission, its_round)
        await self.look()
        for index in range(self.known):
            if not self._is_final(index) and self.submission.lasting_trouble(index) is None:
                await self._until_closed(index)

    async def _until_closed(self, index: int) -> None:
        """Wait for its end, of which the platform says nothing where a submitter closes it."""
        closing = asyncio.ensure_future(self.submission.closed(index))
        try:
            while not (await asyncio.wait({closing}, timeout=LONGEST_LOOK_S))[0]:
                await patiently(self.look, f"looking at {self.group_id}")
            closing.result()
        finally:
            closing.cancel()

    async def delete_jobs(self) -> None:
        """Take all its jobs off the platform, when none of them is wanted any more."""
        submission = self.submission
        if all(map(submission.is_final, submission.requests.reopened)):
            cluster = self.session.platform.cluster
            await delete_all(cluster, submission, submission.requests.round)
            submission.note_cleaned()

    async def remove(self, *, jobs: bool, objects: bool) -> None:
        """Stop it, and take away its jobs and its objects."""
        if self.submission.removed:
            return
        if self.holder is not None and self.holding:
            await self.cancel()
            await self.holder.over.wait()  # its lease is looked at next, and then only rarely
        await _removal.remove_batch(
            self.session, self.submission.identity, jobs=jobs, objects=objects
        )
        if objects:
            self.session.forget(self.submission)

    # --- observing ---

    def observe(self) -> None:
        """Hear when nobody submits it any more."""
        if self._mourning is None or self._mourning.done():
            self._mourning = self.session.spawn(self.mourn(), name=f"lease of {self.group_id}")

    def _observe_again(self) -> None:
        self.holder = None
        self.submission.closes = False
        self.submission.reclaim()
        self.session.watch(self.submission)
        self.observe()

    async def look_again(self) -> None:
        """When somebody submits it again that nobody did, observe it again."""
        if self.holding or self.submission.abandoned is None:
            return
        identity, platform = self.submission.identity, self.session.platform
        there = await _lease.read(platform.store, identity.scope)
        if there is not None and there[0].held:
            self._observe_again()

    async def _see_through(self) -> list[int]:
        """Learn what is there, and close what has ended; the store may have to be asked again."""
        while True:
            try:
                await self.refresh()
                stuck = await self.submission.see_through(range(self.known))
                await self.submission.read_requests()
            except KineticError as exc:
                logging.warning("looking at %s failed: %s; trying again", self.group_id, exc)
                await asyncio.sleep(LONGEST_LOOK_S)
                continue
            if self.total is None and self.submission.requests.all_stopped:
                self.stock.total = self.known
            return stuck

    async def mourn(self) -> None:
        """When nobody submits it any more, see that nobody waits for what will not come."""
        identity, platform = self.submission.identity, self.session.platform
        lease = await patiently(
            lambda: _lease.until_abandoned(
                platform.store, identity.scope, identity.submitter, platform.clock
            ),
            f"reading the lease of {self.group_id}",
        )
        stuck = await self._see_through()
        if stuck or self.total is None:
            who = lease.who if lease is not None else "its submitter"
            error = SubmitterLost(
                f"batch {self.group_id}: {who} does not submit it any more, and {len(stuck)} of "
                f"its items have no outcome; kinetic.attach_batch({self.group_id!r}).resume() "
                "goes on with them, and runs nothing again that has ended",
                job_id=self.group_id,
            )
            self.submission.abandon(error, stuck)
        self.wake()


def feed_of(inputs: Iterable[Any] | AsyncIterable[Any], terms: Terms) -> Feed:
    """What is to be pulled; a list counts as it is now, whatever the caller does with it."""
    length = size_of(inputs)
    there: Sequence[Any] | None = None
    if isinstance(inputs, (list, tuple, range, set, frozenset, dict)):
        known = cast("Collection[Any]", inputs)
        inputs = there = inputs if isinstance(inputs, range) else tuple(known)
    source = Source(inputs)
    return Feed(source=source, mode=terms.input_mode, length=length, there=there)
