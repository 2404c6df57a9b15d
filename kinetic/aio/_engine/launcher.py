"""Start the attempts of a batch that the scheduler has decided on.

Several launch requests run at once, but only while this process holds the batch's lease. The lease
is the object in the store that names the one process that submits the batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from absl import logging

from kinetic._runner.protocol import wire
from kinetic.aio._engine import ending, job_spec, prepare, scheduler
from kinetic.aio._engine.cleanup import delete_if_stopped, withdraw_idle
from kinetic.aio._engine.inputs import InputIndex
from kinetic.aio._engine.refusals import Pause, retry_while_refused
from kinetic.aio._engine.session import Session
from kinetic.aio._engine.submission import Submission
from kinetic.aio._lease import HeldLease
from kinetic.aio._net.retry import (
    FOREVER,
    Outage,
    is_final,
    is_refusal,
    retry,
    retry_forever,
)
from kinetic.errors import BackendError, KineticError, SubmitterLost, Throttled

LAUNCHES_AT_ONCE = 32
"""Maximum number of launch requests under way at once."""

UNCLEAR_S = 540.0
"""How long to retry a launch while it's unknown whether the platform took it, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """What all attempts of a batch share, and the lease that allows their launch."""

    session: Session
    submission: Submission
    uploaded: prepare.UploadedCall
    inputs: InputIndex
    lease: HeldLease


class Launcher:
    """Launch attempts; close an item as failed if its attempt can't be launched.

    `worker_launcher.WorkerLauncher` is the counterpart for platforms that run workers.

    *post* passes an event to the scheduler. A worker calls *on_change* when no launch is pending
    any more.
    """

    def __init__(
        self,
        context: BatchContext,
        state: scheduler.State,
        post: Callable[[scheduler.Event], None],
        on_change: Callable[[], None],
    ) -> None:
        self.runs_alone = False
        """Whether stored items run without this process."""
        self.unrequested: set[int] = set()
        """Items for whose next attempt this process has yet to send the launch request."""
        self.halted = False
        self.asked = asyncio.Event()
        """See `worker_launcher.WorkerLauncher`; never set here."""
        self._context = context
        self._builder = job_spec.JobSpecBuilder(
            context.session,
            context.submission.identity,
            context.uploaded,
            prunable=state.settings.prunable,
        )
        self._state = state
        self._post = post
        self._on_change = on_change
        self._queue: asyncio.Queue[scheduler.Start] = asyncio.Queue()
        self._slots: dict[int, int] = {}  # item with a slot of the client's limit → its attempt
        self._launched = 0
        self._uncertain: set[tuple[int, int]] = set()  # launches without a clear answer
        batch = f"batch {context.submission.identity.id}"
        self._pause = Pause(batch)
        self._outage = Outage(f"launching jobs of {batch}")
        self._idle = asyncio.Event()
        self._requests_under_way = 0

    @property
    def pending(self) -> bool:
        """Whether an attempt should start that the platform hasn't confirmed yet."""
        return bool(self.unrequested or self._requests_under_way)

    def start(self, start: scheduler.Start) -> None:
        """Put an attempt into the queue."""
        self.unrequested.add(start.index)
        self._queue.put_nowait(start)

    def free(self, index: int) -> None:
        """Free the item's slot in the client's limit, if it has one: its attempt has an outcome."""
        if self._slots.pop(index, None) is not None:
            self._context.session.limit.release()

    def free_all(self) -> None:
        """Free all slots in the client's limit, because this process starts nothing more."""
        for index in tuple(self._slots):
            self.free(index)

    async def halt(self) -> None:
        """Start nothing more, and wait for the requests that are under way."""
        self.halted = True
        await self.until_idle()

    async def until_idle(self) -> None:
        """Wait until no launch request is under way.

        If a stop request came during a launch, the launch is under way until `_launch` has deleted
        the new job.
        """
        while self._requests_under_way:
            self._idle.clear()
            await self._idle.wait()

    async def withdraw_uncertain(self) -> None:
        """Delete jobs that launches without a clear answer may have made for ended items."""
        uncertain, self._uncertain = self._uncertain, set()
        await withdraw_idle(self._context.submission, uncertain)

    def helpers(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that run beside the coordinator, until they are cancelled."""
        limit = self._state.settings.max_concurrent or LAUNCHES_AT_ONCE
        return [self._run_worker() for _ in range(min(LAUNCHES_AT_ONCE, limit))]

    def relaunch(self, start: scheduler.Start) -> None:
        """Put an attempt into the queue again, because the platform lacks it."""
        self.start(start)

    async def _run_worker(self) -> None:
        """Start the attempts in the queue, one after the other, until cancelled.

        Raises:
            SubmitterLost: Another process submits the batch now, or the platform has refused
                jobs for longer than KINETIC_SUBMIT_PATIENCE.
        """
        while True:
            start = await self._queue.get()
            await self._acquire_slot(start)
            if self.halted:
                continue
            await self._start(start)
            if not self.pending:
                self._on_change()

    async def _acquire_slot(self, start: scheduler.Start) -> None:
        """Take a slot of the client's limit; the item keeps it until it has an outcome."""
        limit = self._context.session.limit
        if start.index not in self._slots:
            await limit.acquire()
            if start.index in self._slots:  # another attempt took a slot for the item meanwhile
                limit.release()
        self._slots[start.index] = max(start.attempt, self._slots.get(start.index, 0))

    async def _start(self, start: scheduler.Start) -> None:
        """Launch the attempt; retry while the platform refuses jobs for a cause that can pass."""
        index = start.index
        try:
            await retry_while_refused(
                lambda: self._launch_until_answered(start),
                self._pause,
                may_wait=self._has_started,
                progress=lambda: self._launched,
            )
        except SubmitterLost:
            raise
        except KineticError as exc:
            if exc.passing and self._has_started():
                batch = self._context.submission.identity.id
                raise SubmitterLost(
                    f"this process stopped submitting batch {batch}, because the platform took no "
                    f"job for {self._pause.patience_s:g} s (KINETIC_SUBMIT_PATIENCE). Nothing is "
                    "lost. To continue, remove the cause, then call "
                    f"kinetic.attach_batch({batch!r}).resume(). {exc}",
                    job_id=batch,
                ) from exc
            await self.report_refusal(index, exc, start.attempt)
        if not self.halted:
            self.unrequested.discard(index)

    def _has_started(self) -> bool:
        return self._launched > 0 or self._context.submission.has_started

    async def _launch_until_answered(self, start: scheduler.Start) -> None:
        """Launch the attempt; retry while it's unknown whether the platform took it.

        While a quota is used up, retry for ``start_timeout`` seconds; without it, retry forever.
        """
        clock = asyncio.get_running_loop().time
        started_at = clock()

        def is_retryable(failure: Exception) -> bool:
            limit = UNCLEAR_S
            if isinstance(failure, Throttled):
                limit = self._context.uploaded.call.options.start_timeout or math.inf
            unclear = isinstance(failure, BackendError) and not is_final(failure)
            return unclear and clock() - started_at < limit

        await retry(
            lambda: self._launch_if_wanted(start), FOREVER, self._outage, should_retry=is_retryable
        )

    async def _launch_if_wanted(self, start: scheduler.Start) -> None:
        """Launch the attempt, if it's still wanted."""
        context, index = self._context, start.index
        stored_input = await retry_forever(
            lambda: context.inputs.input(index), f"reading input {index}"
        )
        if not context.lease.may_start:
            await context.lease.until_may_start()
        if await self._is_wanted(start):
            await self._launch(start.index, start.attempt, *stored_input)

    async def _is_wanted(self, start: scheduler.Start) -> bool:
        """Return whether the attempt is still wanted; if its item was stopped, read the item."""
        submission, index = self._context.submission, start.index
        if self._state.busy.get(index) != start.attempt:
            if self._slots.get(index) == start.attempt:
                self.free(index)  # the item has ended, or another process' attempt is under way
            return False
        if self._state.is_halted(index) or submission.requests.standing(index).stopped:
            await retry_forever(lambda: submission.look(index), f"looking at item {index}")
            return False
        return not self.halted

    async def _launch(
        self, index: int, attempt: int, arguments: wire.Input, data: tuple[wire.DataRef, ...]
    ) -> None:
        """Ask the platform for the attempt's job; delete it if a stop request came meanwhile."""
        submission, fence = self._context.submission, self._context.lease.fence
        self._requests_under_way += 1
        self.unrequested.discard(index)
        try:
            try:
                await self._builder.launch(
                    index,
                    attempt,
                    arguments,
                    data,
                    fence=fence,
                    round_number=submission.requests.round,
                )
            except KineticError as exc:
                self.unrequested.add(index)
                if not is_refusal(exc):
                    self._uncertain.add((index, attempt))
                raise
            self._uncertain.discard((index, attempt))
            self._launched += 1
            standing = submission.requests.standing(index)
            if standing.stopped or attempt <= standing.base:
                await delete_if_stopped(submission, index, attempt)
        finally:
            self._requests_under_way -= 1
            if not self._requests_under_way:
                self._idle.set()

    async def report_refusal(self, index: int, error: Exception, attempt: int = 1) -> None:
        """Close an item that can't start because of *error*, unless a process has begun it."""
        if await close_refused(self._context.submission, index, error, attempt):
            self._post(scheduler.Refused(index))


async def close_refused(
    submission: Submission, index: int, error: Exception, attempt: int = 1
) -> bool:
    """Close an item that can't start because of *error*, unless a process has begun it.

    Return whether the item ends without an outcome in the store.
    """
    try:
        closed = await retry_forever(
            lambda: ending.close_refused(submission, index, attempt, error),
            f"closing item {index}",
        )
    except KineticError as exc:
        logging.warning("item %d can't start, and its outcome can't be stored: %s", index, exc)
        submission.fail_refused(index, error)
        closed = True
    # `close_refused` has read the item. If it is final, reading has posted an `ItemRead`.
    item = submission.item(index)
    return closed and not (item is not None and item.state.final)
