"""Start the workers of a batch, which run its items, and replace a round that has ended.

A worker claims the items itself, and retries them. So this process only asks the platform for as
many workers as the batch may have. The page about the protocol of workers (``docs/workers.md``)
says what a round is.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from absl import logging

from kinetic import configuration
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic._runner.protocol.workers import EXIT_DONE, EXIT_SURPLUS, Terms
from kinetic.aio._engine import decisions, ending, job_spec
from kinetic.aio._engine.in_flight import Places
from kinetic.aio._engine.session import Session
from kinetic.aio._engine.workers import (
    Roster,
    count_workers,
    end_workers,
    read_roster,
    registered_places,
    stopped_round,
)
from kinetic.aio._lease import HeldLease
from kinetic.aio._net.retry import (
    FOREVER,
    Outage,
    RetryPolicy,
    growing_pauses,
    is_final,
    retry,
    retry_forever,
)
from kinetic.aio._preparing import calls
from kinetic.aio._submissions.inputs import InputIndex
from kinetic.aio._submissions.submission import Evidence, Submission
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.errors import (
    BackendError,
    KineticError,
    LaunchError,
    NotFound,
    SubmitterLost,
    Throttled,
    Unavailable,
)
from kinetic.job_status import Reason

T = TypeVar("T")

WAIT_CHECK_S = 5.0
"""How often to check whether a worker runs, in seconds, if the wait is limited."""

EARLIER_CHECKS_S = 0.1, 2.0
"""First and longest pause between two checks whether earlier workers have ended, in seconds."""

EARLIER_WARNING_S = 60.0
"""How long earlier workers may take to end before a warning, in seconds."""

RESTARTS_S = 0.5, 60.0
"""First and longest pause before a worker is started in the place of one that died before it could
take an item, in seconds."""

MOST_UNREGISTERED = 3
"""How many workers in a row may die before they can take an item: on a cluster, of one rank, if no
worker of the round could ever take one."""

BACKOFF_S = 0.25
"""How long another worker than the last one waits before it retries an item, in seconds."""


class Pause(Outage):
    """Warn once that *subject* is paused, and why; log once that it continues."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.patience_s = configuration.number("KINETIC_SUBMIT_PATIENCE", 900.0)
        self.policy = RetryPolicy(
            first_pause_s=0.5, longest_pause_s=10.0, total_s=self.patience_s, warn_after_s=0.0
        )

    def warning_text(self, failure: Exception, failing_s: float) -> str:
        """Return the warning: the refusal and its remedy."""
        return (
            f"{self.subject} is paused: kinetic retries for at most {self.patience_s:g} s "
            f"(KINETIC_SUBMIT_PATIENCE). {failure}"
        )

    def recovery_text(self) -> str:
        """Return the message for the end of the pause."""
        return f"{self.subject} continues"


async def retry_while_refused(
    call: Callable[[], Awaitable[T]], pause: Pause, *, may_wait: Callable[[], bool]
) -> T:
    """Await ``call()``; retry while the platform refuses it for now and ``may_wait()`` is true."""

    def is_retryable(failure: Exception) -> bool:
        return isinstance(failure, KineticError) and failure.passing and may_wait()

    return await retry(call, pause.policy, pause, should_retry=is_retryable)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """A batch with its inputs and its lease, for the modules that submit it."""

    session: Session
    submission: Submission
    uploaded: calls.UploadedCall
    inputs: InputIndex
    lease: HeldLease
    places: Places


def _ends_of_rank(worker: Observation) -> int:
    """Return how many workers of a rank have ended by themselves, up to *worker*; 0 if it left."""
    has_left = worker.exit_code in (None, EXIT_DONE, EXIT_SURPLUS)
    if has_left or worker.reason in (Reason.CANCELLED, *INFRASTRUCTURE):
        return 0
    return int(worker.name.rpartition(".")[2]) + 1 - worker.disruptions


def _job_of(worker: Observation) -> str:
    """Return the beginning of the names of *worker* and of all others of its Job."""
    return worker.name.rsplit(".", 2)[0]


class Launcher:
    """Keep the workers of a batch running, while it has open items.

    This calls *changed* when it has changed the *state*, and *on_change* when a request has ended.
    """

    def __init__(
        self,
        context: BatchContext,
        state: decisions.State,
        changed: Callable[[], None],
        on_change: Callable[[], None],
        length: int | None,
    ) -> None:
        self._cluster = context.session.platform.cluster
        self.halted = False
        """Whether to start no more workers."""
        self.asked = asyncio.Event()
        """Set when the platform was asked for workers, or the client's limit has no place."""
        self._context = context
        self._submission = context.submission
        self._state = state
        self._changed = changed
        self._on_change = on_change
        settings = state.settings
        self._length = length
        self._count = count = self._find_count()
        self._terms = Terms(
            workers=count,
            budgets=context.submission.identity.budgets,
            backoff_s=BACKOFF_S,
            fail_fast=settings.fail_fast,
            cancel_running=settings.cancel_running_on_fail,
            budget_s=state.budget if math.isfinite(state.budget) else None,
            lifetime_s=settings.batch_timeout,
        )
        self._builder = job_spec.JobSpecBuilder(
            context.session,
            context.submission.identity,
            context.uploaded,
            prunable=settings.prunable,
        )
        self._running: int | None = None  # the round that has workers, as far as is known
        self._has_news = False
        self._lacks_workers = False
        self._without_input: dict[int, int] = {}  # items, and their open attempts
        self._places = context.places
        self.allowed = 0 if context.places.limit.is_bounded else count
        """How many workers this client may ask for now."""
        self._needed = asyncio.Event()
        self._may_grow = asyncio.Event()
        self._busy = asyncio.Lock()
        self._was_accepted = self._was_refused = False
        # If the platform replaces no workers: those that died since the last start; how many of
        # them in a row had not registered; a round, and how many ranks it has had.
        self._lost: list[Observation] = []
        self._unregistered = 0
        self._used = 0, 0
        self._restart_pauses = growing_pauses(*RESTARTS_S)
        self._failing: Observation | None = None  # the last worker of a rank that dies repeatedly
        self._refused_job = ""  # the last one that was deleted for that
        self._told = set[str]()  # why workers die
        batch = f"batch {context.submission.identity.id}"
        self._pause, self._outage = Pause(batch), Outage(f"starting the workers of {batch}")
        self._submission.on_worker_gone = self._on_worker_gone

    @property
    def pending(self) -> bool:
        """Whether the platform hasn't confirmed the workers yet."""
        return self.lacks_workers or self._busy.locked() or self._needed.is_set()

    @property
    def lacks_workers(self) -> bool:
        """Whether open items may have no worker that runs them."""
        return self._lacks_workers or bool(self._without_input)

    @property
    def _round(self) -> int:
        """The number of the current round, by the requests that this process has read."""
        return self._submission.requests.effect.round

    def offer(self) -> None:
        """Have workers for items that may start from now on."""
        self._may_grow.set()
        if self._running != self._round or not self._submission.runs_alone:
            self._lacks_workers = True
        else:
            self._has_news = True  # idle workers look for it seldom
        self._needed.set()

    def offer_again(self, index: int, attempt: int) -> None:
        """Have workers for an item that was reopened."""
        if index >= self._context.inputs.count:  # a stop came before its input was stored
            self._without_input[index] = attempt
            self._needed.set()
        else:
            self.offer()

    def check(self) -> None:
        """Check whether there are workers, because items are open: an end may be unreported."""
        submission = self._submission
        if not (submission.runs_alone and submission.listed and submission.worker_observations):
            self._need_workers()

    def _on_worker_gone(self, worker: Observation) -> None:
        if not self._submission.runs_alone:
            self._replace(worker)
            return
        if worker.exit_code == EXIT_SURPLUS and self._places.held:  # it isn't replaced
            self._places.keep(self._places.held - 1)
            self.allowed = min(self.allowed, self._places.held)
        if (
            self._submission.listed
            and _ends_of_rank(worker) >= MOST_UNREGISTERED
            and _job_of(worker) != self._refused_job
        ):
            self._failing = worker
            self._need_workers()
        if self._submission.worker_observations:
            return
        self._places.keep(self.allowed)
        self._running = None
        if not self._state.complete:
            self._may_grow.set()
            self._need_workers()

    def _replace(self, worker: Observation) -> None:
        """Start a worker in the place of one that has ended, or give the place back."""
        living = len(self._submission.worker_observations)
        if self._places.limit.is_bounded:
            self._places.keep(max(living, min(self._places.held, self._wanted)))
            self.allowed = min(self.allowed, self._places.held)
        if self._state.complete:
            return
        self._may_grow.set()
        if worker.exit_code not in (EXIT_DONE, EXIT_SURPLUS):  # with these, it has left
            self._lost.append(worker)
        self._need_workers()

    def _need_workers(self) -> None:
        self._lacks_workers = True
        self._needed.set()

    def _find_count(self) -> int:
        platform, resources = self._context.session.platform, self._context.uploaded.resources
        wanted = self._state.settings.max_concurrent
        return count_workers(platform, resources, wanted, self._length)

    def rescale(self) -> None:
        """Follow a change of ``max_concurrent``, also in later rounds."""
        self._count = self._find_count()
        if not self._places.limit.is_bounded:
            self.allowed = self._count
        self.allowed = min(self.allowed, self._count)
        if not self._submission.worker_observations:
            self._places.keep(self.allowed)
        self._may_grow.set()
        if not self._submission.runs_alone:
            self._need_workers()

    def free_all(self) -> None:
        """Give back the places in the client's limit, and end the wait for workers."""
        self._places.keep(0)
        self.allowed = 0
        self.asked.set()
        self._submission.on_worker_gone = None

    @property
    def _wanted(self) -> int:
        """How many workers the batch may have: no more than items that have not ended."""
        total = self._state.total
        if total is None and not self._submission.runs_alone:
            total = len(self._state.marks)  # such a worker takes one item, and can't wait for it
        return self._count if total is None else min(self._count, total - self._state.ended)

    async def until_idle(self) -> None:
        """Wait until no request is under way."""
        async with self._busy:
            pass

    async def withdraw(self) -> None:
        """Delete the workers of an ended batch if they wait or were refused: they have no work.

        They would get machines later, and wait there for the batch's Secret, which is gone.
        """
        submission = self._submission
        if not (submission.listed and (self._was_refused or self._all_wait())):
            return
        self._running, self._was_refused = None, False
        try:
            await self._cluster.delete(labels=submission.identity.round_labels(self._round))
        except KineticError as exc:
            logging.warning("can't delete the workers of %s: %s", submission.identity.id, exc)

    def helpers(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that run beside the coordinator, until they are cancelled.

        Raises (in a coroutine):
            SubmitterLost: The platform has refused workers for KINETIC_SUBMIT_PATIENCE.
        """
        return [self._run(), self._grow(), self._limit_wait()]

    async def _grow(self) -> None:
        """Ask for one more worker whenever the client's limit has a place."""
        places = self._places
        while places.limit.is_bounded:
            if self.allowed >= self._wanted:
                self._may_grow.clear()
                await self._may_grow.wait()
                continue
            if places.limit.is_full:  # a submission waits for `asked`, and this may last for long
                self.asked.set()
            await places.acquire()
            if self.allowed >= self._wanted:  # the batch was scaled, or items have ended
                places.keep(places.held - 1)
                continue
            self.allowed += 1
            if self._running is not None:
                self._lacks_workers = True
            self._needed.set()

    async def _limit_wait(self) -> None:
        """End the open items if no worker has run for ``start_timeout``, while some wait."""
        limit = self._context.uploaded.call.options.start_timeout
        submission, clock = self._submission, asyncio.get_running_loop().time
        waiting_since: float | None = None
        while limit is not None:
            await asyncio.sleep(min(limit / 4, WAIT_CHECK_S))
            if not self._all_wait():
                waiting_since = None
                continue
            waiting_since = clock() if waiting_since is None else waiting_since
            if clock() - waiting_since < limit:
                continue
            try:
                await ending.ask_for_workers(submission)  # the watch may have missed a beginning
            except KineticError as exc:
                self._outage.warn(exc, clock() - waiting_since)
                continue
            if not self._all_wait():
                continue
            waiting_since = None
            message = f"no worker could start for {limit:g} s (start_timeout)"
            if waiting := submission.waiting_message():
                message += f": {waiting}"
            for index in self._state.unfinished():
                await self._end_late(index, message)

    def _all_wait(self) -> bool:
        """Whether there are workers, and none of them runs."""
        seen = self._submission.worker_observations.values()
        return {it.phase for it in seen} == {Phase.PENDING}

    async def _end_late(self, index: int, message: str) -> None:
        """Close the attempt of an item that found no worker, and those by which it would retry."""
        submission, number = self._submission, 0
        while self._all_wait():  # a worker may begin while earlier attempts are closed
            item = submission.item(index) or wire.Item(wire.ItemState.OPEN, 1)
            if item.state.final or item.attempt == number:
                return
            number = item.attempt
            name, reason = submission.identity.attempt_name(index, number), Reason.UNSCHEDULABLE
            ended = Observation(name=name, phase=Phase.ENDED, reason=reason, message=message)
            await ending.settle(submission, Evidence(index, number, ended))

    async def _run(self) -> None:
        while True:
            await self._needed.wait()
            async with self._busy:
                self._needed.clear()
                while self._without_input:
                    index, attempt = self._without_input.popitem()
                    try:
                        await self._context.inputs.input(index)
                    except NotFound as exc:  # no worker can run the item
                        await self.report_refusal(index, exc, attempt)
                if self._lacks_workers and self.allowed and not self.halted:
                    self._lacks_workers = False
                    await self._start_workers()
                    self.asked.set()
                if self._has_news:
                    self._has_news = False
                    # Workers also look by themselves, so a lost message only costs time.
                    with contextlib.suppress(BackendError):
                        await self._cluster.tell(self._submission.identity.labels)
            self._on_change()

    async def _start_workers(self) -> None:
        """Have the workers of the current round; if it is over and items are open, open another."""
        try:
            submission = self._submission
            while not submission.requests.removing:
                number = self._round
                if submission.requests.effect.all_stopped:
                    return  # what is open needs no worker
                if self._was_accepted and self._running is None:
                    # A supervisor that has died is replaced by one that begins the round again.
                    await self._close_dead()
                found = await self._scale(number)
                if found is None:
                    return
                if found:
                    self._running, self._was_accepted = number, True
                    if submission.listed:  # a stop may have come before the workers were there
                        with contextlib.suppress(KineticError):  # they also leave by themselves
                            await end_workers(submission)
                    return
                if not await self._open_round(number):
                    return
        except SubmitterLost:
            raise  # another process has the batch, and the items are its own
        except KineticError as exc:
            batch = self._submission.identity.id
            if exc.passing and self._has_started():
                self._lacks_workers = True
                raise SubmitterLost(
                    f"this process stopped submitting batch {batch}, because the platform took no "
                    f"worker for {self._pause.patience_s:g} s (KINETIC_SUBMIT_PATIENCE). Nothing "
                    "is lost. To continue, remove the cause, then call "
                    f"kinetic.attach_batch({batch!r}).resume(). {exc}",
                    job_id=batch,
                ) from exc
            self._was_refused = True
            for index in self._state.unfinished():
                item = self._submission.item(index)
                await self.report_refusal(index, exc, item.attempt if item is not None else 1)

    def _has_started(self) -> bool:
        """Return whether the platform has ever taken workers of the batch, for any process."""
        return self._was_accepted or self._submission.has_started

    async def _scale(self, number: int) -> int | None:
        """Ask for the workers of a round; return how many it has, or None if none are wanted."""
        job = self._builder.worker(number, self._context.lease.fence, self._terms)

        async def scale() -> int | None:
            submission, pauses = self._submission, growing_pauses(*EARLIER_CHECKS_S)
            # A process that slept may have lost the batch, which may be collected meanwhile.
            await self._context.lease.until_may_start()
            if stopped_round(submission) is not None:
                return None  # the refusals may have lasted for long
            if self.halted:
                self._lacks_workers = True
                return None
            requests = copy.copy(submission.requests.effect)
            if requests.round != number:
                return 0  # another process has opened a round
            began = clock()
            while (roster := await read_roster(submission, requests)).earlier:
                # Deleted workers still end their items, and one that waits for a machine stays.
                for earlier in roster.earlier:
                    await self._cluster.delete(labels=submission.identity.round_labels(earlier))
                if (waited := clock() - began) >= EARLIER_WARNING_S:
                    message = "workers that were stopped haven't ended: a node keeps a pod while it"
                    self._outage.warn(Unavailable(f"{message} doesn't answer"), waited)
                await asyncio.sleep(next(pauses))
            if not self._submission.runs_alone:
                return await self._start_more(job, number, roster)
            if self._failing is not None:
                await self._refuse_failing(self._failing, number)
                self._failing = None
            ranks = range(roster.size_for(self.allowed))
            return await self._cluster.scale(job, number=number, ranks=ranks)

        clock = asyncio.get_running_loop().time
        patience_s = self._context.uploaded.call.options.start_timeout or math.inf
        gives_up_at = clock() + patience_s

        def is_unclear(failure: Exception) -> bool:
            if isinstance(failure, Throttled):  # a quota is used up, which may last for days
                self.asked.set()
                if clock() >= gives_up_at:
                    return False
            return isinstance(failure, BackendError) and not is_final(failure)

        return await retry_while_refused(
            lambda: retry(scale, FOREVER, self._outage, should_retry=is_unclear),
            self._pause,
            may_wait=self._has_started,
        )

    async def _refuse_failing(self, worker: Observation, number: int) -> None:
        """End a round whose workers die before they can take an item, or log why one dies.

        The platform would replace them without an end, as when pods may not read the bucket.

        Raises:
            LaunchError: No worker of the round has registered.
        """
        message, identity = worker.message or "no reason is known", self._submission.identity
        if not _job_of(worker).startswith(f"{identity.round_name(number)}."):
            return
        if await registered_places(self._submission, number):
            if message not in self._told:
                self._told.add(message)
                logging.warning("a worker of %s dies repeatedly: %s", identity.id, message)
            return
        await self._cluster.delete(labels=identity.round_labels(number))
        self._running = self._failing = None
        self._refused_job = _job_of(worker)  # the ends of its other workers arrive later
        raise LaunchError(
            f"{MOST_UNREGISTERED} workers in a row have ended before they could take an item. The "
            f"last one: {message}",
            reason=str(worker.reason or ""),
        )

    async def _start_more(self, job: JobSpec, number: int, roster: Roster) -> int | None:
        """Start workers until as many live as the batch may have; the platform replaces none.

        Raises:
            LaunchError: Several workers in a row have died before they could take an item.
        """
        registered = await registered_places(self._submission, number)
        lost, self._lost, is_early = self._lost, [], False
        for worker in lost:
            if worker.name.rpartition(".")[0] in registered:
                self._unregistered, self._restart_pauses = 0, growing_pauses(*RESTARTS_S)
                continue
            is_early = True
            # A preemption says nothing about why a worker can't begin.
            self._unregistered += worker.reason not in INFRASTRUCTURE
            if self._unregistered >= MOST_UNREGISTERED:
                raise LaunchError(
                    f"{self._unregistered} workers in a row have ended before they could take an "
                    f"item. The last one: {worker.message or 'no reason is known'}",
                    reason=str(worker.reason or ""),
                )
        if is_early:
            asyncio.get_running_loop().call_later(next(self._restart_pauses), self._need_workers)
            return None
        # Each rank runs once: start with the first that no worker is known to have had.
        first = max(roster.size, max(registered.values(), default=-1) + 1)
        if number == self._used[0]:  # a worker that hasn't registered may have left no trace
            first = max(first, self._used[1])
        lacking = max(0, min(self.allowed, self._wanted) - len(roster.active))
        ranks = range(first, first + lacking)
        self._used = number, ranks.stop
        await self._cluster.scale(job, number=number, ranks=ranks)
        return max(1, ranks.stop)

    async def _open_round(self, number: int) -> bool:
        """Open a round after round *number*; return False if no item is open."""
        submission, requests = self._submission, self._submission.requests
        open_items = await self._close_dead()
        if not open_items:
            return False
        await retry_forever(requests.read, "reading requests")
        if self._round == number:
            slot, request = len(requests.entries), wire.Request(kind="round")
            await retry_forever(lambda: requests.append_at(slot, request), "opening a round")
            await retry_forever(requests.read, "reading requests")
            logging.info("%s: %d items continue", submission.identity.id, len(open_items))
        return True

    async def _close_dead(self) -> list[int]:
        """Close the claims of workers that have died; return the items that are still open.

        Workers that start from now on can't judge claims of another round, or of an earlier start.
        """
        submission, state = self._submission, self._state
        return await retry_forever(
            lambda: ending.reconcile_items(submission, state.unfinished()),
            "reading the items before a new round",
        )

    async def report_refusal(self, index: int, error: Exception, attempt: int = 1) -> None:
        """Close an item that can't start because of *error*, unless a worker has begun it."""
        submission = self._submission
        try:
            closed = await retry_forever(
                lambda: ending.close_refused(submission, index, attempt, error),
                f"closing item {index}",
            )
        except KineticError as exc:
            logging.warning("item %d can't start, and its outcome can't be stored: %s", index, exc)
            submission.fail_refused(index, error)
            closed = True
        if closed:  # `close_refused` has read the item, so a final one is noted already
            self._state.refuse(index)
            self._changed()
