"""Submit a batch: hold its lease, and carry out what `decisions` decides.

The lease is an object in the store; only the process that holds it may submit the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NoReturn

from absl import logging

from kinetic._messages import describe_error
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.notes import ERROR
from kinetic.aio import _shared_objects
from kinetic.aio._engine import decisions, ending
from kinetic.aio._engine.input_pump import Backpressure, InputPump
from kinetic.aio._engine.launcher import BatchContext, Launcher
from kinetic.aio._engine.recovery import renew_shared
from kinetic.aio._engine.workers import end_workers
from kinetic.aio._lease import RENEW_S
from kinetic.aio._net.retry import retry_forever
from kinetic.aio._preparing.input_source import Source
from kinetic.aio._submissions.control_log import KINDS
from kinetic.errors import (
    BackendError,
    InputsUnfinished,
    KineticError,
    SubmitterLost,
    SweepError,
)
from kinetic.options import MapSettings

LEAVING_S = 10.0
"""How long to try to release a lease, in seconds; otherwise the lease expires by itself."""


class BatchCoordinator:
    """Run one batch until it ends, or until this process stops submitting it or loses its lease.

    ``over`` is set when the coordinator has ended. ``error`` is then the error that ended it early,
    or None. ``request_error`` says why a request to stop or retry could not be stored or carried
    out; callers that wait for the request get this error. ``closing`` says that the coordinator
    carries out no further request.

    *budget* limits the seconds that all attempts together take. *deadline*, seconds since the
    epoch, is when ``batch_timeout`` is over. *ends_inputs* says that no inputs follow those of
    *source*.
    """

    def __init__(
        self,
        context: BatchContext,
        settings: MapSettings,
        source: Source,
        length: int | None,
        on_change: Callable[[], None],
        *,
        budget: float,
        deadline: float | None,
        ends_inputs: bool,
    ) -> None:
        if (scaled := context.submission.requests.workers) is not None:
            settings = replace(settings, max_concurrent=scaled)
        self.state = decisions.State(settings, budget=budget)
        self.window = Backpressure(settings.window_for(length), lambda: self.pump.wake())
        self.error: BaseException | None = None
        self.request_error: BaseException | None = None
        self.over = asyncio.Event()
        self.on_change = on_change
        self.lease = context.lease
        self.inputs = context.inputs
        self._context = context
        self._length = length
        self._deadline = deadline
        self._session = context.session
        self._submission = context.submission
        self._awake = asyncio.Event()
        self._leaving = False
        self.closing = False
        self._has_sealed = False
        self._cuts_inputs = False
        self._applying: set[asyncio.Task[object]] = set()
        self._last_attempts: dict[int, int] = {}  # of the items whose retry was logged
        self.launcher = Launcher(context, self.state, self.wake, on_change, length)
        self.pump = InputPump(
            context,
            source,
            self.window,
            self.state,
            self.wake,
            self.launcher.report_refusal,
            ends_inputs=ends_inputs,
        )
        self._restore()
        self._stop_listening = self._submission.listen(self._on_item)
        self._submission.requests.listeners.append(self._on_request)

    def _restore(self) -> None:
        """Note what was stored and requested before this process had the lease."""
        submission, state, count = self._submission, self.state, self.inputs.known
        all_stopped = submission.requests.all_stopped
        state.spend(submission.meter.seconds)
        state.add(count)
        if all_stopped:
            state.stop()
        for index in range(count):
            item, standing = submission.item(index), submission.requests.standing(index)
            if submission.is_damaged(index):
                state.refuse(index)  # counts as failed, and is not run again
            elif item is not None and item.state.final:
                state.note(index, item)
            elif item is not None and all_stopped and not standing.stopped:
                state.reopen(index, item.attempt, standing)
        state.store(count)
        if not self.pump.ends_inputs:
            total = self.inputs.total
            state.end(count if total is None else total, sealed=total is not None)

    @property
    def complete(self) -> bool:
        """Whether every item has ended, and no more items will come."""
        return self.state.complete and self.state.sealed

    @property
    def all_requested(self) -> bool:
        """Whether the platform has all workers that the batch needs for its items."""
        is_pending = self.launcher.pending or self.state.is_undecided or self.waiting
        return self.state.total is not None and not is_pending

    @property
    def waiting(self) -> list[int]:
        """Items that don't run without this process, and have no attempt under way."""
        if self._submission.runs_alone:
            return self.state.unfinished() if self.launcher.lacks_workers else []
        has_begun = self._submission.has_begun
        return [index for index in self.state.unfinished() if not has_begun(index)]

    def wake(self) -> None:
        """Have the batch decided on in the next turn of the loop."""
        self._awake.set()

    def _on_item(self, index: int, item: wire.Item | None) -> None:
        if item is not None:
            if self.state.budget < math.inf:
                self.state.spend(self._submission.meter.seconds)
            self.state.note(index, item)
            self.wake()
            if item.after and item.attempt > self._last_attempts.get(index, 1):
                self._last_attempts[index] = item.attempt
                self._log_retry(index, item.attempt)
        if self._submission.is_damaged(index):
            # A forged object stays forged, so its item counts as failed.
            self.state.refuse(index)
            self.wake()

    def _on_request(self, request: wire.Request) -> None:
        """In the background, carry out a new request to stop or retry, of any process."""
        if request.kind == "scale":
            self._rescale(int(request.cause))
        if request.kind not in KINDS:
            return
        if request.kind == "stop" and request.items is None:
            self.state.stop()
            self.wake()
            work = self._apply_stop(keep_running=request.keep_running)
        else:
            work = self._apply(request)
        number = len(self._submission.requests.entries)
        self._in_background(work, f"request {number} to {self._submission.identity.id}")

    def _rescale(self, workers: int) -> None:
        """Let *workers* run, and store as many inputs ahead as they need."""
        settings = self.state.settings = replace(self.state.settings, max_concurrent=workers)
        if self.window.limit is not None:
            self.window.limit = settings.window_for(self._length)
        self.pump.wake()
        self.launcher.rescale()

    def _in_background(self, work: Coroutine[Any, Any, object], name: str) -> None:
        task = self._session.spawn(work, name=name)
        self._applying.add(task)
        task.add_done_callback(self._on_applied)

    def _on_applied(self, task: asyncio.Task[object]) -> None:
        """Remove an ended task; its error ends the coordinator, so that no caller waits forever."""
        self._applying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.error("%s was not carried out: %s", task.get_name(), describe_error(error))
            self.request_error = self.request_error or error
        self._awake.set()

    # --- from beginning to end ---

    async def run(self) -> None:
        """Submit all items and wait until they have ended; keep an error in ``error``."""
        try:
            with self._session.awaiting(self._submission):
                async with asyncio.TaskGroup() as group:
                    helpers = [
                        *self.launcher.helpers(),
                        self.lease.keep(),
                        self._read_requests(),
                        self.pump.run(),
                        self._renew_shared_daily(),
                        self._stop_at_deadline(),
                    ]
                    helper_tasks = [group.create_task(helper) for helper in helpers]
                    await self._until_complete()
                    for task in helper_tasks:
                        task.cancel()
        except BaseExceptionGroup as errors:
            if self.request_error is not None or not self.complete:
                self.error = self.request_error or errors.exceptions[0]
                why = describe_error(self.error)
                logging.error("batch %s stopped: %s", self._submission.identity.id, why)
        finally:
            await self._leave()

    async def _until_complete(self) -> None:
        """Carry out decisions until the batch is complete, or this process must leave it.

        If there is a new request to stop or retry then, take the lease again and continue.
        """
        while True:
            await self._decide()
            if self._leaving:
                return
            requests = self._submission.requests
            logging.info("batch %s is complete", self._submission.identity.id)
            await self._finish_submitting(len(requests.entries))
            # A client appends its retry, and then looks for a holder: one of both sees the other.
            await retry_forever(requests.read, "reading requests")
            self._act()
            # A request to stop or retry makes the batch busy. One of the workers, which say that
            # their round is over, does not.
            if requests.removing or self._is_idle:
                self.closing = True
                break
            logging.info("batch %s continues with a new request", self._submission.identity.id)
            await retry_forever(self.lease.retake, "taking the lease again")
            self._submission.fence = self.lease.fence
            # While no process had the lease, a request may have come that no coordinator has read.
            await retry_forever(requests.read, "reading requests")
            self.lease.catch_up()
        if not self.state.sealed:
            stored = self.inputs.count
            self.error = InputsUnfinished(
                f"batch {self._submission.identity.id}: the {stored} stored inputs have run, and "
                f"the process that had the others is gone; call resume(inputs=...) with the inputs "
                f"from number {stored} on, or resume(seal=True) if there are no more",
                stored=stored,
            )

    async def _finish_submitting(self, known_requests: int) -> None:
        submission, total = self._submission, self.state.total
        await self.launcher.until_idle()
        await self.launcher.withdraw()
        if self.state.sealed and total is not None and not submission.requests.removing:
            await self._drop_secrets(total)
        await retry_forever(lambda: self.lease.release(known_requests), "releasing the lease")

    async def _drop_secrets(self, total: int) -> None:
        """Drop the batch's secrets, but keep the environment if an item can be retried."""
        batch, cluster = self._submission.identity.id, self._session.platform.cluster
        items = (self._submission.item(index) for index in range(total))
        try:
            # `retry_failed` needs the environment, but reopens no item that has succeeded.
            if all(item and item.state is wire.ItemState.SUCCEEDED for item in items):
                await cluster.drop_secret([batch])
            else:
                await cluster.finish(batch, self.lease.fence)
        except KineticError as exc:
            logging.warning("the secrets of %s stay until a cleanup: %s", batch, exc)

    async def _leave(self) -> None:
        """Stop listening, release the lease (log a failure), and wake all waiters."""
        try:
            self._stop_listening()
            self._submission.requests.listeners.remove(self._on_request)
            self._submission.closes = self.complete
            if self.lease.lost is None:
                async with asyncio.timeout(LEAVING_S):
                    await self.lease.release(len(self._submission.requests.entries))
        except (BackendError, SubmitterLost, TimeoutError) as exc:
            why = str(exc) or f"no answer within {LEAVING_S:g} s; the lease expires by itself"
            logging.warning("can't release the lease of %s: %s", self._submission.identity.id, why)
        finally:
            try:
                if not self.complete and not self._leaving:
                    self._abandon_waiting()
            finally:  # wake the waiters after any failure, so that none of them hangs
                self.launcher.free_all()
                self.pump.over.set()
                self.over.set()
                self.on_change()

    def _abandon_waiting(self) -> None:
        """Fail the waiters of items that this process won't submit any more."""
        batch = self._submission.identity.id
        lost = self.error
        if not isinstance(lost, (SubmitterLost, InputsUnfinished)):
            why = f": {type(lost).__name__}: {lost}" if lost is not None else ""
            call = "resume()" if self.state.sealed else "resume(inputs=...) or resume(seal=True)"
            advice = f"; to continue, attach to the batch and call {call}"
            if isinstance(lost, SweepError):  # which says how to go on
                advice = ""
            lost = SubmitterLost(f"{batch} is not submitted any more{why}{advice}", job_id=batch)
        self.error = self.error or lost
        waiting = self.waiting
        if waiting:
            logging.warning("%s; %d items wait for an attempt", lost, len(waiting))
        self._submission.abandon(lost, waiting)

    async def is_replaced(self) -> bool:
        """Return whether another process has the lease; renew the lease now to find out."""
        with contextlib.suppress(SubmitterLost):
            await self.lease.renew()
        return self.lease.lost is not None

    async def finish_inputs(self, *, seal: bool, cut: bool = False) -> None:
        """Store all inputs of a collection, or the inputs pulled so far from an iterator.

        *seal* also records in the store that an iterator's inputs have ended; *cut*, that it may
        have had more.
        """
        if self.pump.finished:
            return
        self._cuts_inputs = cut
        is_lazy = not self.pump.has_known_length
        if is_lazy:
            self.pump.close(seal=seal)
        await self.pump.over.wait()
        if is_lazy and seal and not self.pump.finished and self.lease.lost is None:
            await self.pump.end()

    async def leave(self) -> None:
        """Store inputs and requests, start nothing, and release the lease; jobs continue."""
        if not self.pump.has_iterator:  # a list is stored whole
            self.window.lift()
        await self.finish_inputs(seal=False)
        self.launcher.halted = True
        await self.launcher.until_idle()
        self._act()
        while self._applying:
            await asyncio.wait(self._applying)
        self._leaving = True
        self._awake.set()
        await self.over.wait()

    # --- deciding ---

    async def _decide(self) -> None:
        """Decide again and again until the batch is idle, or `leave` is called.

        Raises `request_error`.
        """
        while not (self._leaving or self.request_error):
            self._awake.clear()
            self._act()
            self.pump.wake()
            self.on_change()
            if self._is_idle:
                return
            await self._awake.wait()
        if self.request_error is not None and not self._leaving:
            raise self.request_error

    def _act(self) -> None:
        decision = self.state.decide()
        if decision.offers:
            self.launcher.offer()
        for index, attempt in decision.reopened.items():
            self.launcher.offer_again(index, attempt)
        if cause := decision.stop:
            keep_running = cause == "budget" or not self.state.settings.cancel_running_on_fail
            self.stop_in_background(cause, keep_running=keep_running)
        if self.state.sealed and self._submission.runs_alone and not self._has_sealed:
            self._has_sealed = True
            if not self.pump.has_known_length:
                # A worker may take this process for dead, and say that the round is over. It reads
                # on if another request comes first.
                cause = wire.CUT if self._cuts_inputs and self.pump.is_cut_off else ""
                requests = self._submission.requests
                sealing = wire.Request(kind="sealed", cause=cause)
                name = f"sealing {self._submission.identity.id}"
                self._in_background(retry_forever(lambda: requests.append(sealing), name), name)

    @property
    def _is_idle(self) -> bool:
        return self.state.complete and not (self.state.is_undecided or self._applying)

    def _log_retry(self, index: int, attempt: int) -> None:
        outcome = self._submission.attempt(index, attempt - 1).outcome
        if outcome is not None:
            logging.info(
                "%s: attempt %d failed (%s); attempt %d follows",
                self._submission.identity.job_id(index),
                attempt - 1,
                (outcome.note or {}).get(ERROR) or outcome.reason,
                attempt,
            )

    # --- requests ---

    async def _stop_at_deadline(self) -> None:
        if self._deadline is not None:
            await asyncio.sleep(max(0.0, self._deadline - time.time()))
            batch = self._submission.identity.id
            logging.warning("batch %s has reached its batch_timeout: cancelling it", batch)
            self.stop_in_background("timeout", keep_running=False)

    async def stop(self, cause: str, *, keep_running: bool) -> None:
        """Store a request to stop the whole batch; `_on_request` then carries it out."""
        request = wire.Request(kind="stop", cause=cause, keep_running=keep_running)
        await retry_forever(lambda: self._submission.requests.append(request), "requesting a stop")

    def stop_in_background(self, cause: str, *, keep_running: bool) -> None:
        """Do as `stop` in the background; if that fails, the waiters of items get the error."""
        work = self.stop(cause, keep_running=keep_running)
        self._in_background(work, f"{cause} of {self._submission.identity.id}")

    async def _apply_stop(self, *, keep_running: bool) -> None:
        """Carry out a stop of the batch: end its inputs and, unless *keep_running*, its workers."""
        submission = self._submission
        if not keep_running:
            try:
                await retry_forever(lambda: end_workers(submission), "ending workers")
            except KineticError as exc:
                logging.warning(
                    "can't end the workers of %s, which leave by themselves: %s",
                    *(submission.identity.id, exc),
                )
        self.pump.close()
        await self.pump.over.wait()
        if self.pump.ends_inputs and self.state.total is None and self.lease.lost is None:
            await self.pump.end()
        unfinished = [index for index in range(self.inputs.known) if not self.state.is_final(index)]
        await retry_forever(lambda: submission.read_each(unfinished), "reading the stopped items")

    async def _apply(self, request: wire.Request) -> None:
        """Read the items that *request* names; let those that it reopens start."""
        items = [*(request.items or request.bases)]
        submission = self._submission
        await retry_forever(lambda: submission.read_each(items), "reading the requested items")
        if request.kind != "retry":
            return
        for index in request.bases:
            item, standing = submission.item(index), submission.requests.standing(index)
            if item and item.state is wire.ItemState.OPEN and item.attempt > standing.base:
                self.state.reopen(index, item.attempt, standing)
        self.wake()

    async def reconcile(self) -> None:
        """Reconcile the open items, and check that workers live."""
        if await ending.reconcile_items(self._submission, self.state.unfinished()):
            await ending.check_workers(self._submission)
            self.launcher.check()  # a repeated request for workers changes nothing

    async def _renew_shared_daily(self) -> NoReturn:
        store, batch = self._session.platform.store, self._submission.identity.id
        while True:
            await asyncio.sleep(_shared_objects.DAY_S)
            try:
                data = self.inputs.known_data()
                missing = await renew_shared(store, self._context.uploaded, data)
            except BackendError as exc:
                logging.warning(
                    "%s: shared content wasn't renewed (%s); will retry tomorrow", batch, exc
                )
                continue
            if missing:
                logging.error(
                    "%s: %s was deleted from the store, so later jobs will fail; have the bucket's "
                    "lifecycle rule wait longer than jobs take, and submit again",
                    batch,
                    missing[0],
                )

    async def _read_requests(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._submission.requests.read_new()
            except BackendError as exc:  # the next reading finds the same requests
                logging.warning("%s: can't read requests: %s", self._submission.identity.id, exc)
