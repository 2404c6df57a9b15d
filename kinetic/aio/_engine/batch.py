"""A batch as one process sees it; the handles of the API call this module.

One process at a time submits a batch: it holds the batch's lease, an object in the store, and runs
a coordinator. All other processes observe the batch: they read its state, and can request a stop or
a retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from kinetic._progress.standing import Goal, Standing
from kinetic._runner.protocol import metrics, signing, wire
from kinetic._tasks import release
from kinetic.aio import _lease
from kinetic.aio._engine import ending, removal, workers
from kinetic.aio._engine.coordinator import BatchCoordinator
from kinetic.aio._engine.in_flight import Places
from kinetic.aio._engine.launcher import BatchContext, Pause, retry_while_refused
from kinetic.aio._engine.recovery import load_environment, read_inputs, recover, until_abandoned
from kinetic.aio._engine.session import JobRef, Session
from kinetic.aio._preparing import calls
from kinetic.aio._preparing.input_source import Source
from kinetic.aio._submissions.inputs import InputIndex
from kinetic.aio._submissions.manifest import (
    budget_seconds,
    map_settings_of,
    price_in,
    stop_cause,
    uploaded_call_of,
)
from kinetic.aio._submissions.submission import Submission
from kinetic.errors import (
    BackendError,
    ConfigurationError,
    Conflict,
    KineticError,
    NotFound,
    Pruned,
)
from kinetic.job_status import JobStatus
from kinetic.options import MapSettings
from kinetic.outcome import Succeeded
from kinetic.prices import HOUR_S, Estimate
from kinetic.worker import Worker

LEAVING_S = 15.0
"""How long a closing client waits, in seconds, to store inputs and release the lease."""


class Batch:
    """One batch as this process sees it; the process submits it while ``coordinator`` runs."""

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
        self.coordinator: BatchCoordinator | None = None
        self.watchers: list[asyncio.Event] = []
        identity = submission.identity
        self.inputs = InputIndex(
            session.platform.store, identity.scope, identity.key, expected=manifest["total"]
        )
        self.followed = followed
        """Whether the session keeps reading this batch. The session reads a batch from a listing
        only when a method of the batch's handle needs that."""
        self.details: Callable[[], str] = str
        """Return HTML that a notebook shows below the batch's line; any thread may call it."""
        self.items_removed = False
        self._take_over_lock = asyncio.Lock()
        self._abandonment_watch: asyncio.Task[None] | None = None
        self._own_environment: Mapping[str, str] = {}
        self._own_retry: wire.Request | None = None
        self._places = Places(session.limit)
        self.goal = Goal(**fields) if (fields := manifest["sweep"]) else None
        """What the batch searches for, if it is a sweep."""
        self.is_resumable_sweep = self.goal is not None and bool(manifest["name"])
        """Whether ``resume=True`` continues the sweep of this batch."""
        self.standing = Standing(self.goal) if self.goal is not None else None
        if self.standing is not None:
            submission.listen(self._note_standing)
        submission.listen(self.wake)
        submission.reconcile_batch = self.reconcile
        submission.requests.listeners.append(self._on_request)

    @property
    def group_id(self) -> str:
        """The ID of the batch."""
        return self.submission.identity.id

    def job_ref(self, index: int) -> JobRef:
        """Return a reference to an item's job, from which a handle is made."""
        return JobRef(session=self.session, submission=self.submission, index=index)

    # --- state ---

    @property
    def submits(self) -> bool:
        """Whether this process submits the batch now."""
        return self.coordinator is not None and not self.coordinator.over.is_set()

    @property
    def total(self) -> int | None:
        """The number of items; None until it is known."""
        if self.inputs.total is None and self.coordinator is None:
            return self.inputs.expected
        return self.inputs.total

    @property
    def sealed(self) -> bool:
        """Whether no more items can come: the end of the inputs is stored, or was until removed."""
        return self.inputs.sealed or self.submission.collected is not None

    @property
    def known(self) -> int:
        """How many items there are so far."""
        return self.inputs.announced

    @property
    def stored(self) -> int:
        """How many inputs are stored, or were stored until `results()` removed them."""
        return max(self.inputs.count, self.submission.collected or 0)

    def refuse_unknown(self, index: int, count: int | None) -> None:
        """Raise `NotFound` unless *index* is that of one of *count* items (None: of any number)."""
        if index < 0 or (count is not None and index >= count):
            items = "1 item" if self.known == 1 else f"{self.known} items"
            so_far = " so far" if self.total is None else ""
            raise NotFound(
                f"batch {self.group_id} has no item {index}: it has {items}{so_far}, "
                "numbered from 0"
            )

    def submitted(self, index: int) -> bool:
        """Return whether the item's input is stored, so that a worker may take it.

        Without a coordinator here, all items count as submitted. Refused items never do.
        """
        if index in self.submission.refusals:
            return False
        return self.coordinator is None or index < self.stored

    @property
    def finished(self) -> bool:
        """Whether callers that wait for the batch have nothing left to wait for.

        True if every item has ended or can never be read, or this process has stopped submitting
        the batch.
        """
        if self.coordinator is not None:
            # A retry reopens items of a complete batch.
            all_finished = self.submission.finished_items >= (self.total or 0)
            return (self.coordinator.complete and all_finished) or self.coordinator.over.is_set()
        return self.total is not None and self.submission.finished_items >= self.total

    @property
    def complete(self) -> bool:
        """Whether every item has ended; false if this process only stopped submitting the batch."""
        return self.finished if self.coordinator is None else self.coordinator.complete

    def follow(self, *, observed: bool = True) -> None:
        """Have the session keep reading the batch; if *observed*, also watch its lease."""
        if not self.followed:
            self.followed = True
            self.session.follow(self.submission, is_own=False)
            if observed:
                self.observe()

    async def read_inputs(self) -> None:
        """Follow the batch; if another process submits it, read how many items it has."""
        self.follow()
        if not self.submits and self.inputs.total is None:
            await read_inputs(self.submission, self.inputs)

    async def read(self) -> None:
        """Read the objects of all items that are not final."""
        await self.read_inputs()
        submission = self.submission
        unfinished = submission.unfinished(range(self.known))
        await submission.read_each(unfinished)
        # `read_each` also reads new requests, which may have reopened final items.
        reopened = {*submission.requests.reopened}.difference(unfinished)
        if open_again := submission.unfinished(reopened):
            await submission.read_each(open_again)

    async def reconcile(self) -> None:
        """Read open items, and ask the platform about those that have begun."""
        if self.coordinator is not None and self.submits:
            await self.coordinator.reconcile()
        elif self.total is None or self.submission.finished_items < self.total:
            await self.read()
            submission = self.submission
            open_items = submission.unfinished(range(self.known))
            await ending.ask(submission, submission.begun(open_items))
            # The watch of the lease may have ended before a retry reopened items.
            if not (self.finished or self._take_over_lock.locked() or submission.abandoned):
                self.observe()

    async def statuses(self) -> list[tuple[int, JobStatus]]:
        """Return index and status of each submitted or refused item, read from the store now."""
        await self.read()
        refused = self.submission.refusals
        return [
            (index, self.submission.status(index))
            for index in range(self.known)
            if index in refused or self.submitted(index)
        ]

    async def input_of(self, index: int) -> Any:
        """Return the input of an item: the user's own object, or one rebuilt from the store."""
        if (own_input := await self.own_input_of(index)) is not None:
            return own_input[0]
        await self.read_inputs()
        self.refuse_unknown(index, self.known)
        return await self.inputs.value(index)

    async def own_input_of(self, index: int) -> tuple[Any] | None:
        """Return the user's own object in a tuple.

        None if this process doesn't have the object, or if it has changed since it was stored.
        """
        return await self.coordinator.pump.input_of(index) if self.coordinator is not None else None

    async def until_inputs_fixed(self) -> None:
        """Wait until later changes to the inputs have no effect.

        If the number of inputs is known, kinetic reads all of them before any of them starts.
        """
        if self.coordinator is not None and self.coordinator.pump.has_known_length:
            await self.coordinator.pump.over.wait()

    # --- waiting ---

    def wake(self, index: int = 0, item: wire.Item | None = None) -> None:
        """Wake all tasks that wait for a change of the batch."""
        for awake in self.watchers:
            awake.set()

    def _note_standing(self, index: int, item: wire.Item | None) -> None:
        outcome = item.outcome if item is not None else None
        if self.standing is None or outcome is None or outcome.note is None:
            return
        if outcome.reason == wire.PRUNED:
            self.standing.note_pruned(index, outcome.note)
        elif outcome.kind is wire.Kind.VALUE:
            self.standing.note_result(index, outcome.note)

    async def until_all_submitted(self) -> None:
        """Wait until this process has requested every item's job, or has stopped submitting."""
        while self.coordinator is not None and not (
            self.finished or self.coordinator.all_requested
        ):
            awake = asyncio.Event()
            self.watchers.append(awake)
            try:
                await awake.wait()
            finally:
                self.watchers.remove(awake)

    # --- submitting ---

    def coordinate(
        self,
        lease: _lease.HeldLease,
        uploaded: calls.UploadedCall,
        source: Source,
        settings: MapSettings,
        *,
        ends_inputs: bool = True,
    ) -> None:
        """Start a coordinator for the batch; *ends_inputs*: no inputs follow those of *source*."""
        submission = self.submission
        submission.closes, submission.fence = True, lease.fence
        self._own_environment = uploaded.environment
        self._places.keep(0)
        submission.reclaim()
        context = BatchContext(
            session=self.session,
            submission=submission,
            uploaded=uploaded,
            inputs=self.inputs,
            lease=lease,
            places=self._places,
        )
        deadline = self.manifest["deadline"]
        if deadline is not None and submission.requests.reopened:
            deadline = time.time() + (settings.batch_timeout or 0.0)  # a retry gets it all again
        self.coordinator = coordinator = BatchCoordinator(
            context,
            settings,
            source,
            source.length or self.manifest["total"],
            self.wake,
            budget=budget_seconds(self.manifest),
            deadline=deadline,
            ends_inputs=ends_inputs,
        )
        self.session.spawn(self._run_coordinator(coordinator), name=f"batch {self.group_id}")

    @property
    def cause(self) -> str:
        """Why kinetic stopped the batch; empty if a user stopped it, or nothing did."""
        return stop_cause(self.manifest, self.submission.requests.entries)

    @property
    def is_cut(self) -> bool:
        """Whether the inputs of an iterator were ended early.

        A process has done so at its end, or a stop has, and no item was retried since.
        """
        requests = self.submission.requests
        whole = (it for it in requests.entries if it.items is None)
        first = next((it for it in whole if it.kind in ("stop", "sealed")), None)
        if first is None or self.manifest["total"] is not None:
            return False
        return requests.effect.all_stopped if first.kind == "stop" else first.cause == wire.CUT

    def estimate(self) -> Estimate:
        """Estimate the cost so far and in the end, from the items that this process has read."""
        meter, total = self.submission.meter, self.total
        ended = self.submission.ended
        expected = None if total is None or not ended else meter.seconds * total / ended
        return Estimate(
            accelerator=self.manifest["placed"]["resources"]["accelerator"],
            price=price_in(self.manifest),
            hours=meter.seconds / HOUR_S,
            expected_hours=None if expected is None else expected / HOUR_S,
        )

    async def _run_coordinator(self, coordinator: BatchCoordinator) -> None:
        """Run *coordinator*; then observe the batch if another process may run its items."""
        await coordinator.run()
        requests, lease_lost = self.submission.requests, coordinator.lease.lost is not None
        if (
            self.coordinator is not coordinator
            or requests.removing
            or not (lease_lost or coordinator.complete)
        ):
            return
        if self.submission.unfinished(requests.reopened):  # another process serves the retry
            self._observe_again()
        elif lease_lost:
            self.session.watch(self.submission)  # callers may still wait for its jobs
            self.observe()

    def _on_request(self, request: wire.Request) -> None:
        """If another process requests a retry, observe the batch, unless this one submits it."""
        # A process that takes the batch over reads the requests itself.
        if request.kind != "retry" or request == self._own_retry or self._take_over_lock.locked():
            return
        if self.coordinator is not None and not self.submits:
            self._observe_again()

    async def take_over(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any] | None = None,
        *,
        seal: bool = False,
        force: bool = False,
        alone: bool = False,
    ) -> None:
        """Submit the rest of the batch; take it from another process only with *force*.

        If workers have all inputs, this returns while another process submits the batch, unless
        *alone*. With *alone*, a batch that takes no more *inputs* leaves them unread.

        Raises:
            Conflict: Another process submits the batch; or this process does, and the caller has
                passed an argument.
            ConfigurationError: *inputs* are given, but the batch has all its inputs, or was
                cancelled. Or this process lacks a variable that the batch captured.
            NotFound: The batch was cleaned up.
            WireError: This version doesn't know the batch's format.
        """
        async with self._take_over_lock:
            await self.read_inputs()
            if inputs is not None and not alone:
                await self.submission.requests.read()
                self._refuse_more_inputs(inputs)
            if (coordinator := self.coordinator) is not None and self.submits:
                if not await coordinator.is_replaced():
                    if inputs is None and not seal and not force:
                        return
                    raise Conflict(
                        f"this client submits {self.group_id} already; you need not resume it"
                    )
                await coordinator.over.wait()
            # All items that it had have values. A process that slept may have stored more inputs.
            if await self.submission.read_collected():
                self.inputs.total = self.submission.collected
                return
            environment = await load_environment(
                self.session, self.submission, self.inputs, self.manifest, self._own_environment
            )
            uploaded = uploaded_call_of(self.manifest, environment)
            identity, platform = self.submission.identity, self.session.platform
            try:
                lease = await _lease.acquire(
                    platform.store, identity.scope, identity.submitter, platform.clock, force=force
                )
            except Conflict:
                if self.submission.runs_alone and self.inputs.sealed and not alone:
                    return
                raise
            try:
                await self._coordinate_again(lease, uploaded, inputs, seal=seal, alone=alone)
            except BaseException:
                with contextlib.suppress(ConfigurationError):  # the client is closed
                    self.observe()
                await release(lease.release(), operation=f"releasing {self.group_id}")
                raise
        await self.until_inputs_fixed()

    async def _coordinate_again(
        self,
        lease: _lease.HeldLease,
        uploaded: calls.UploadedCall,
        inputs: Iterable[Any] | AsyncIterable[Any] | None,
        *,
        seal: bool,
        alone: bool,
    ) -> None:
        if self._abandonment_watch is not None:
            # The watch and the code below would close the same attempts, so only one may run.
            self._abandonment_watch.cancel()
            await asyncio.wait({self._abandonment_watch})
        self.submission.closes, self.submission.fence = True, lease.fence
        self.session.watch(self.submission)
        missing = await recover(self.session, self.submission, self.inputs, lease, uploaded)
        if alone and (self.inputs.total is not None or self.submission.requests.all_stopped):
            inputs = None  # the last holder of the lease has ended them, or a stop has
        self._refuse_more_inputs(inputs)
        if missing and (inputs is not None or self.submission.unfinished(range(self.inputs.count))):
            raise missing
        settings = map_settings_of(self.manifest)
        source = Source(() if inputs is None else inputs, settings.input_mode)
        ends_inputs = inputs is not None or (seal and self.inputs.total is None)
        self.coordinate(lease, uploaded, source, settings, ends_inputs=ends_inputs)

    def _refuse_more_inputs(self, inputs: object) -> None:
        if inputs is not None and self.submission.requests.all_stopped:
            raise ConfigurationError(
                f"{self.group_id} was cancelled{self.cause and f' ({self.cause})'}, so it takes no "
                "more inputs: submit these as a new batch. retry_failed() runs its cancelled items"
            )
        if inputs is not None and self.inputs.total is not None:
            raise ConfigurationError(
                f"{self.group_id} has all its {self.inputs.total} inputs: call resume() without "
                "inputs, and submit these inputs as a new batch"
            )

    async def retry_failed(self, indices: Iterable[int] | None = None) -> int:
        """Retry the items of *indices* (None: all) that failed or were cancelled; return how many.

        Any process may call this.
        """
        await self.refuse_gone()
        await self.read_inputs()
        wanted = {*range(self.known)} if indices is None else {*indices}
        for index in wanted:
            self.refuse_unknown(index, self.known)
        count = await self._request_retry(wanted)
        coordinator = self.coordinator if self.submits else None
        if coordinator is not None and (coordinator.closing or await coordinator.is_replaced()):
            await coordinator.over.wait()
        # `reopened` includes the items of a process that died before it started them.
        any_open = self.submission.unfinished(self.submission.requests.reopened)
        scope, platform = self.submission.identity.scope, self.session.platform
        if any_open and not self.submits and await _lease.is_free(platform.store, scope):
            try:
                await self.take_over()
            except Conflict:
                logging.info(
                    "%s: another process has taken over, and retries the items", self.group_id
                )
        if self.coordinator is not None and not self.submits and self.submission.ended < self.known:
            self._observe_again()  # another process runs the reopened items
        return count

    async def exists(self) -> bool:
        """Return whether the batch still exists; if it doesn't, stop following it."""
        entry = self.submission.identity.manifest_name
        if self.submits or await self.session.platform.store.look(entry) is not None:
            return True
        self.session.forget(self.submission)
        return False

    async def refuse_gone(self) -> None:
        """Refuse to write if the batch was cleaned up: nothing would remove a later object."""
        if not await self.exists():
            raise self.submission.identity.gone_error

    async def _request_retry(self, wanted: Iterable[int]) -> int:
        """Request a retry of the *wanted* items that ended without a value; return how many."""
        submission, requests = self.submission, self.submission.requests
        while True:
            await self.read()
            slot = len(requests.entries)
            if not (bases := await submission.retry_bases(wanted)):
                return 0
            # A stop deletes such workers, and its request may arrive after this one.
            is_deleted = submission.listed and workers.stopped_round(submission) is not None
            self._own_retry = wire.Request(
                kind="retry",
                bases=bases,
                cause="retry_failed",
                opens_round=bool(requests.effect.done) or is_deleted,
            )
            if await requests.append_at(slot, self._own_retry):
                break
        if (limit := self.manifest["terms"].get("batch_timeout")) is not None:
            # If this fails, the round may end too early, and a client that waits opens another.
            with contextlib.suppress(BackendError):
                name = submission.identity.round_name(requests.effect.round)
                await submission.cluster.extend(name, limit)
        await submission.read_items(bases)  # from now on, these items are open
        return len(bases)

    async def leave(self, reason: str) -> None:
        """Stop submitting, because the client closes; log a warning if the batch isn't done."""
        if self.coordinator is not None and self.submits:
            coordinator = self.coordinator

            async def leave() -> None:
                await coordinator.leave()
                # The last worker may have left because these items have ended.
                with contextlib.suppress(KineticError):
                    await self.submission.read_each(coordinator.waiting)

            await release(leave(), operation=f"leaving {self.group_id}", grace=LEAVING_S)
            waiting = self.submission.unfinished(coordinator.waiting)
            rest = [f"{len(waiting)} items wait"] if waiting else []
            if has_more := coordinator.state.total is None:
                rest.append(f"inputs from number {self.stored} on aren't stored")
            if self.is_resumable_sweep:
                advice = "run its program again with resume=True"
            elif has_more:
                advice = f"kinetic.attach_batch({self.group_id!r}).resume(inputs=...)"
            else:
                advice = f"kinetic batches resume {self.group_id}"
            if rest:
                logging.warning(
                    "%s: this process no longer submits %s. Running jobs continue; %s. To submit "
                    "the rest: %s",
                    *(reason, self.group_id, " and ".join(rest), advice),
                )

    async def seal(self, *, cut: bool = False) -> None:
        """Pull no more inputs, and record in the store that the inputs have ended.

        *cut* says that their iterator may have more, and that the batch counts as incomplete.
        """
        if self.coordinator is not None and self.submits:
            await self.coordinator.finish_inputs(seal=True, cut=cut)

    # --- workers ---

    async def scale(self, count: int) -> int:
        """Have *count* workers from now on; return how many of them can run at once."""
        submission, platform = self.submission, self.session.platform
        await self.refuse_gone()
        await self.read_inputs()
        await submission.requests.append(wire.Request(kind="scale", cause=str(count)))
        resources = uploaded_call_of(self.manifest, {}).resources

        def wanted() -> int:
            return workers.count_workers(
                platform, resources, submission.requests.workers, self.total
            )

        if self.coordinator is not None and self.submits:
            launcher = self.coordinator.launcher
            # A launcher that has lost the batch allows none, but the workers continue.
            lacking = await workers.fit(
                submission, lambda: launcher.allowed if self.submits else wanted()
            )
        else:
            lacking = await workers.fit_alone(submission, self._places, wanted)
        if lacking:
            logging.warning(
                "%s keeps %d workers: in a queue, a round that has begun gets no more. The next "
                "round has %d",
                *(self.group_id, wanted() - lacking, wanted()),
            )
        return wanted() - lacking

    async def workers(self) -> list[Worker]:
        """Return the workers that wait or run."""
        await self.read_inputs()
        return await workers.describe(self.submission, self.known)

    # --- ending ---

    async def prune(self, index: int, number: int | None) -> None:
        """Ask attempt *number* of an item (None: the open one) to end as pruned."""
        submission = self.submission
        if not map_settings_of(self.manifest).prunable:
            raise ConfigurationError(
                f"the jobs of {self.group_id} don't look whether they are pruned: pass "
                "prunable=True to run_async_map"
            )
        await self.read_inputs()
        self.refuse_unknown(index, self.total)
        # A platform may replace an attempt, and only the store knows it.
        item = await submission.read_item(index)
        if item.state.final or (number is not None and number != item.attempt):
            return
        await self.refuse_gone()
        name = metrics.prune_key(submission.identity.scope, index, item.attempt)
        mac = signing.sign(submission.identity.key, submission.identity.scope, name, b"")
        await submission.store.create(name, b"", {"mac": mac})

    async def cancel(self) -> None:
        """Stop the batch and wait until all its items have ended."""
        coordinator = self.coordinator
        if coordinator is not None and self.submits and not coordinator.complete:
            await coordinator.stop("cancel", keep_running=False)
            await coordinator.over.wait()
            if coordinator.request_error is not None:
                raise coordinator.request_error
            # If the lease was lost, another process submits the batch: stop it as observers do.
            if coordinator.lease.lost is None:
                return
        await self.read()
        # If every item has ended, keep the remaining jobs and their logs.
        if self.total is not None and self.submission.ended >= self.total:
            await workers.end_leftovers(self.submission)
            return
        if not await self.exists():
            return
        await self.submission.requests.append(wire.Request(kind="stop", cause="cancel"))
        await workers.end_workers(self.submission)
        await self.read()
        for index in range(self.known):
            if not self.submission.is_final(index) and self.submission.final_error(index) is None:
                await self.session.until_final(self.submission, index)
        self.submission.reclaim()  # nothing is left to submit

    async def delete_jobs(self, *, keep_logs: bool = False) -> None:
        """Delete all workers of the batch from the platform, unless reopened items need them.

        With *keep_logs*, they stay in its records, although they have left: their logs are whole.
        """
        submission, labels = self.submission, self.submission.identity.labels
        if not submission.unfinished(submission.requests.reopened):
            if not keep_logs:
                await self._retry_while_refused(lambda: submission.cluster.delete(labels=labels))
            submission.note_cleaned()

    async def collect(
        self, outcomes: Mapping[int, Succeeded[Any] | Pruned], history: Sequence[Any] | None
    ) -> None:
        """Remove all objects of the items, and keep their *outcomes* in memory; the manifest stays.

        *history* is what a report needs of each item; this method stores it first.

        Cancelled: some objects may be removed. This process keeps *outcomes*; call `collect` again.
        """
        submission = self.submission
        if self.items_removed or not await self.exists():
            return
        submission.collected_outcomes = outcomes
        if self.coordinator is not None:
            await self.coordinator.over.wait()
        await self.delete_jobs()
        await submission.write_collected(len(outcomes), history)
        await removal.remove_items(submission)
        self.items_removed = True

    async def remove(self, *, jobs: bool, objects: bool) -> None:
        """Stop the batch; remove its jobs if *jobs* is true, and its objects if *objects* is."""
        if self.submission.removed:
            return
        if self.coordinator is not None and self.submits:
            await self.cancel()
            # Wait until the lease is released; otherwise `removal` would wait until it expires.
            await self.coordinator.over.wait()
        identity = self.submission.identity
        await self._retry_while_refused(
            lambda: removal.remove(self.session, identity, jobs=jobs, objects=objects)
        )
        if objects:
            self.session.forget(self.submission)

    async def _retry_while_refused(self, remove: Callable[[], Awaitable[None]]) -> None:
        """Await *remove*; in the process that submitted the batch, retry temporary refusals."""

        await retry_while_refused(
            remove,
            Pause(f"the removal of {self.group_id}"),
            may_wait=lambda: self.coordinator is not None and self.submission.has_started,
        )

    # --- observing ---

    def observe(self) -> None:
        """Watch the lease, to find out when no process submits the batch any more."""
        if self._abandonment_watch is None or self._abandonment_watch.done():
            self._abandonment_watch = self.session.spawn(
                self.watch_abandonment(), name=f"lease of {self.group_id}"
            )

    def _observe_again(self) -> None:
        self.coordinator = None
        self.submission.closes = False
        self.submission.reclaim()
        self.session.watch(self.submission)
        self.observe()

    async def observe_if_resumed(self) -> None:
        """Observe the batch again, if it was abandoned and a process submits it now."""
        if self.submits or self.submission.abandoned is None:
            return
        identity, platform = self.submission.identity, self.session.platform
        stored = await _lease.read(platform.store, identity.scope)
        if stored is not None and stored[0].held:
            self._observe_again()

    async def abandonment(self) -> KineticError | None:
        """Read the lease once; if it shows that no process submits the batch, return the error."""
        await self.observe_if_resumed()
        identity, store = self.submission.identity, self.session.platform.store
        if (
            self.submission.abandoned is None
            and not (self.submits or self.finished)
            and await _lease.is_abandoned(store, identity.scope, identity.submitter)
        ):
            self.observe()
            assert self._abandonment_watch is not None
            await asyncio.wait({self._abandonment_watch}, timeout=_lease.LOOK_S)
        return self.submission.abandoned

    async def _go_on(self, stuck: Sequence[int]) -> None:
        """Start workers for a batch that has none; if that fails, its waiters get the error."""
        try:
            await self.take_over()
        except Conflict:
            self._observe_again()  # another process was faster
        except KineticError as exc:
            self.submission.abandon(exc, stuck)
            self.wake()

    async def watch_abandonment(self) -> None:
        """Wait until no process submits the batch, then fail waiters of items that won't end."""
        found = await until_abandoned(
            self.session, self.submission, self.inputs, is_resumable_sweep=self.is_resumable_sweep
        )
        if found.error is not None:
            self.submission.abandon(found.error, found.stuck)
        elif found.stuck:
            self.session.spawn(self._go_on(found.stuck), name=f"workers of {self.group_id}")
            return
        self.wake()
        try:
            await workers.end_leftovers(self.submission)
        except KineticError as exc:
            logging.warning("can't delete the stopped jobs of %s: %s", self.group_id, exc)
