"""What this process knows of one submission, beyond what the store says of its items.

A submission is a batch or a single job. A `Submission` records what other modules have read,
observed, or failed to do, and wakes the callers that wait for an item. It doesn't act: the module
`ending` decides how an attempt ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kinetic import _labels
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import SUBMISSION, UNVERIFIED
from kinetic._tasks import until_set
from kinetic.aio._net.retry import is_temporary
from kinetic.aio._submissions.ids import Identity
from kinetic.aio._submissions.item_states import ItemStates
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import KineticError, NotFound, WireError
from kinetic.job_status import JobStatus, Reason

if TYPE_CHECKING:
    from kinetic.errors import Pruned
    from kinetic.outcome import Succeeded


@dataclass(slots=True)
class Evidence:
    """A report that attempt *number* of an item has ended.

    ``observation`` is the platform's; None means that the platform has no job of that name.
    ``claimant`` is the process that was known to have claimed the attempt before the platform was
    asked. ``final`` says why no later attempt of the item comes; it's empty while one may come.
    ``refusal`` is the error with which the attempt could not be launched. ``since`` is the
    loop's time of the first failure to find out how the attempt ended.
    """

    index: int
    number: int
    observation: Observation | None
    claimant: str | None = None
    final: str = ""
    refusal: Exception | None = None
    since: float | None = None


class Submission(ItemStates):
    """The items of one submission, as far as this process has seen them."""

    def __init__(self, identity: Identity, platform: Platform) -> None:
        super().__init__(identity, platform.store)
        self.store = platform.store
        self.cluster = platform.cluster
        self.relaunches = not (identity.leased or platform.cluster.replaces)
        """Whether the submitter of a single job launches its attempts after the first."""
        self.closes = not identity.leased
        """Whether this process writes the outcomes of dead attempts. For a batch, the lease's
        holder writes them, or any process if the lease is free or the item was stopped."""
        self.fence = 1
        """The number of the lease that this process has or had; it grows with each holder."""
        self.is_own = False
        """Whether this client launched the submission, after it had begun to watch it."""
        self.last_launched = 0
        """The last attempt of a single job that this process launched, 0 if it isn't the submitter.
        If the platform lacks that attempt, it has ended."""
        self.missed_since: dict[int, float] = {}
        """Attempt that no process has launched yet → the loop's time of the first look for it."""
        self.host_ends: dict[tuple[int, int], Observation | None] = {}
        """By item and number, the observation of the host that ended an attempt.

        None: the first host ended the attempt, or the platform doesn't know. If another host ended
        it, the outcome, which the first host writes, says only that this host was asked to stop.
        """
        self.collected_outcomes: Mapping[int, Succeeded[Any] | Pruned] = {}
        """The outcomes that this process collected before it removed the objects."""
        self.waiter_count = 0
        """How many callers wait for the submission; while any does, the session reconciles it."""
        self.reconcile_batch: Callable[[], Awaitable[None]] | None = None
        """For a batch, a function that reads all open items again."""
        self.doubtful: dict[int, Evidence] = {}
        """By item, an attempt whose end can't be read or written yet, or that may never start."""
        self._doubted = asyncio.Event()
        self._cleaned_at: int | None = None  # the number of the last request to retry
        self.observations: dict[int, Observation] = {}
        """By open item, the platform's last observation of its job."""
        self.worker_observations: dict[str, Observation] = {}
        """By name, the platform's last observation of each worker that waits or runs."""
        self.worker_ends: dict[str, Observation] = {}
        """By process, how each of these workers ended: the platform may forget why."""
        self.workers_asked = -math.inf
        """The loop's time when the platform was last asked for workers."""
        self.lost_worker = False
        """Whether a worker has died since the last reading: it may have ended items in silence."""
        self.on_worker_gone: Callable[[Observation], None] | None = None
        """Called when a worker has ended, after `worker_observations` lacks it."""
        self._running_since: dict[int, float] = {}
        """By open item, when this process first saw its attempt run, in seconds since the epoch."""
        self.refusals: dict[int, Exception] = {}
        """By item, why it can't be submitted; kept even after the item has its FAILED outcome."""
        self.abandoned: KineticError | None = None
        """The error for waiters of items that no process submits any more; None if none is set."""
        self._stuck: set[int] | None = None
        """The items that ``abandoned`` concerns; None means all items."""
        self._waiters: dict[int, list[asyncio.Future[wire.Item]]] = {}
        self._errors: dict[int, Exception] = {}

    # --- what is known ---

    @property
    def listed(self) -> bool:
        """Whether only the store shows which items run and have ended."""
        return self.identity.leased and not self.cluster.shows_items

    @property
    def runs_alone(self) -> bool:
        """Whether stored items run without a client, because the platform replaces workers."""
        return self.identity.leased and self.cluster.replaces

    @property
    def known_open(self) -> int:
        """How many items are known that aren't final."""
        return len(self._items) - self.ended

    @property
    def finished_items(self) -> int:
        """How many items are final, or have an error that reading again won't change."""
        return self.ended + sum(not is_temporary(error) for error in self._errors.values())

    @property
    def removed(self) -> bool:
        """Whether the submission was cleaned up."""
        return isinstance(self.abandoned, NotFound)

    def items_with_state(self, known: int) -> list[int]:
        """Return the items below *known* that have a state or an error, in order."""
        found = {*self._items, *self.refusals, *self._errors, *(self._stuck or ())}
        return sorted(index for index in found if index < known)

    @property
    def has_started(self) -> bool:
        """Whether the platform has ever accepted an attempt, as far as this process knows."""
        executors = {it.executor for found in self._attempts.values() for it in found.values()}
        # The submitter itself claims and closes an item that can't be submitted.
        reasons = {item.outcome.reason for item in self._items.values() if item.outcome}
        return bool(self.observations or executors - {None, wire.VOID} or reasons - {SUBMISSION})

    def begun(self, indices: Iterable[int]) -> list[int]:
        """Return the items that an attempt may run, or whose attempt is in doubt."""
        return [index for index in indices if self.has_begun(index) or index in self.doubtful]

    def is_open(self, index: int, number: int) -> bool:
        """Return whether the item is open at attempt *number*, as far as this process knows."""
        item = self._items[index]
        return item.attempt == number and not item.state.final

    def error(self, index: int) -> Exception | None:
        """Return why an open item will not end, or why its end can't be read; None if neither."""
        if self.abandoned is not None and (self._stuck is None or index in self._stuck):
            return self.abandoned
        return self.refusals.get(index) or self._errors.get(index)

    def final_error(self, index: int) -> Exception | None:
        """Return why the item's objects can't be read, if reading them again won't help."""
        error = self._errors.get(index)
        return None if error is None or is_temporary(error) else error

    def unreadable(self) -> list[int]:
        """Return the items whose outcome can't be read, in order."""
        outcomes = ((index, item.outcome) for index, item in self._items.items())
        unverified = {index for index, it in outcomes if it and it.reason == UNVERIFIED}
        return sorted(unverified.union(filter(self.final_error, self._errors)))

    def is_damaged(self, index: int) -> bool:
        """Return whether the item's objects are forged or damaged, which doesn't change."""
        return isinstance(self.final_error(index), WireError)

    def status(self, index: int) -> JobStatus:
        """Return the status that a user sees, from what is known now."""
        match item.state if (item := self._items.get(index)) else wire.ItemState.OPEN:
            case wire.ItemState.SUCCEEDED:
                return JobStatus.SUCCEEDED
            case wire.ItemState.FAILED:
                return JobStatus.FAILED
            case wire.ItemState.CANCELLED | wire.ItemState.CANCELLING:
                return JobStatus.NOT_FOUND
            case wire.ItemState.OPEN:
                observation = self.observations.get(index)
                running = observation is not None and observation.phase is Phase.RUNNING
                return JobStatus.RUNNING if running else JobStatus.PENDING

    def times(
        self, index: int, attempt: wire.Attempt, submitted: str = ""
    ) -> tuple[float | None, float | None]:
        """Return the seconds for which *attempt*, the item's last, waited, and has run.

        It runs from its claim. Until this process has read the claim, it runs from when this
        process first saw it run. It waits from the creation of its job, or from *submitted* (ISO
        8601). None: not known, or not begun.
        """
        begun = None if attempt.executor == wire.VOID else attempt.claimed
        end = time.time()
        if (outcome := attempt.outcome) is not None:
            begun = outcome.started or begun
            end = outcome.ended or begun or end
        elif begun is None:
            begun = self._running_since.get(index)
        seen = self.observations.get(index)
        waited = None
        with contextlib.suppress(ValueError):  # no time is known
            created = datetime.fromisoformat(seen.created_at if seen is not None else submitted)
            waited = max(0.0, (begun or end) - created.timestamp())
        return waited, None if begun is None else max(0.0, end - begun)

    @property
    def cleaned(self) -> bool:
        """Whether this process has no use for the submission's jobs, and none was retried since."""
        return self._cleaned_at == self.requests.last_retry

    def note_cleaned(self) -> None:
        """Note that this process has deleted the submission's jobs, or left their logs."""
        self._cleaned_at = self.requests.last_retry

    def refuse_removed(self) -> None:
        """Refuse a call for a submission that doesn't exist any more."""
        if self.removed:
            raise self.identity.gone_error

    def cancellation(self, index: int, batch_cause: str = "") -> str:
        """Return "cancelled" with the cause of the request that stopped an item.

        *batch_cause* is the whole cause, if kinetic stopped the item's batch.
        """
        requests = self.requests.entries[self.requests.standing(index).retried :]
        stop = next(it for it in requests if it.kind == "stop" and wire.is_named(it, index))
        match stop.cause:
            case "cancel" if stop.items is None:
                cause = "its batch was cancelled"
            case "cancel" | wire.CLEANUP:
                cause = f"{stop.cause}() was called"
            case _:
                cause = batch_cause or f"{stop.cause} of its batch"
        return f"cancelled ({cause})"

    def waiting_message(self) -> str:
        """Return the platform's message about an item that waits, or about a full disk.

        Empty if an item runs and no worker waits for space.
        """
        seen = (*self.observations.values(), *self.worker_observations.values())
        if running := [it for it in seen if it.phase is Phase.RUNNING]:
            return next((it.message for it in running if it.reason is Reason.STORE_FULL), "")
        return next((it.message for it in seen if it.phase is Phase.PENDING and it.message), "")

    # --- reading ---

    async def read_each(self, indices: Collection[int]) -> None:
        """Read items like `read_items`, but keep a forged outcome as the error of its own item.

        Raises:
            WireError: A request is damaged, which concerns all items.
        """
        try:
            await self.read_items(indices)
        except WireError:
            await self.requests.read()
            for index in indices:
                try:
                    await self.read_item(index)
                except WireError as exc:
                    self.set_error(index, exc)

    # --- updating ---

    def _set(self, index: int, item: wire.Item) -> None:
        """Keep the item's new state; drop errors, doubts, and observations that are now old."""
        if self._stuck and item != self.item(index):
            self._stuck.discard(index)  # another process runs the item again
        super()._set(index, item)
        doubt = self.doubtful.get(index)
        if doubt is not None and (item.state.final or item.attempt > doubt.number):
            del self.doubtful[index]
        seen = self.observations.get(index)
        if item.state.final or (seen and int(seen.labels[_labels.ATTEMPT]) < item.attempt):
            self.observations.pop(index, None)
            self._running_since.pop(index, None)
        if item.state.final:
            self._errors.pop(index, None)
        else:
            self.refusals.pop(index, None)

    def _notify(self, index: int, item: wire.Item | None) -> None:
        """Call the listeners, and wake the item's waiters if it is final or has an error."""
        super()._notify(index, item)
        if index not in self._waiters:
            return
        if item is not None and item.state.final:
            for waiter in self._take_waiters(index):
                waiter.set_result(item)
        elif (error := self.error(index)) is not None:
            for waiter in self._take_waiters(index):
                waiter.set_exception(error)

    def _take_waiters(self, index: int) -> list[asyncio.Future[wire.Item]]:
        return [waiter for waiter in self._waiters.pop(index) if not waiter.done()]

    def set_error(self, index: int, error: Exception) -> None:
        """Raise *error* for the item's present and later waiters: its end can't be read."""
        item = self.item(index)
        if item is None or not item.state.final:
            self._errors[index] = error
            self._notify(index, None)

    def clear_error(self, index: int) -> None:
        """Forget the item's error, because the item can be read again."""
        self._errors.pop(index, None)

    def fail_waiters(self, error: Exception) -> None:
        """Raise *error* for all present waiters: their items can't be read."""
        for index in [*self._waiters]:
            self.set_error(index, error)

    def fail_refused(self, index: int, error: Exception) -> None:
        """Raise *error* for the waiters of an item that could not be submitted."""
        self.refusals[index] = error
        self._notify(index, None)

    def abandon(self, error: KineticError, items: Iterable[int] | None = None) -> None:
        """Raise *error* for waiters of *items* (None: all), which no process submits any more."""
        self.abandoned, self._stuck = error, None if items is None else {*items}
        for index in [*self._waiters, 0] if self._stuck is None else [*self._stuck]:
            self._notify(index, None)

    def reclaim(self) -> None:
        """Forget which items no process submits, because a process submits the batch again."""
        if self._stuck is not None:
            self.abandoned = self._stuck = None

    def attributed(self, observation: Observation) -> Observation:
        """Return what *observation* says of a single job, with the attempt that its process makes.

        If a queue has suspended a Job and resumes it, the numbers of its pods begin again. So a
        process that isn't the one of an attempt that is over makes the open attempt.
        """
        index, number = _labels.attempt_of(observation.labels)
        item, known = self._items.get(index), self.attempt(index, number).executor
        is_other = known is not None and observation.executor not in ("", known)
        if item is None or number >= item.attempt or not is_other:
            return observation
        return self.observation_of(observation, index, item.attempt)

    def note(self, index: int, number: int, observation: Observation) -> None:
        """Note the platform's observation that an attempt waits or runs."""
        known = self.observations.get(index)
        if self.concerns(index, number) and known != observation:
            if known is None or (known.name, known.phase) != (observation.name, observation.phase):
                self._running_since.pop(index, None)
                if observation.phase is Phase.RUNNING:
                    self._running_since[index] = time.time()
            self.observations[index] = observation
            self._notify(index, None)

    def note_worker(self, observation: Observation) -> None:
        """Note the platform's observation of a worker."""
        from kinetic._runner.protocol.workers import EXIT_DONE, EXIT_SURPLUS  # most jobs need none

        if not observation.phase.is_over:
            self.worker_observations[observation.name] = observation
            return
        known = self.worker_observations.pop(observation.name, None)
        if known is not None:
            self.worker_ends[known.executor] = observation
        is_lost = observation.exit_code not in (EXIT_DONE, EXIT_SURPLUS)
        self.lost_worker = self.lost_worker or is_lost
        if is_lost or self.listed:  # if only the store shows what it ran, that has ended, too
            self._doubted.set()
        if known is not None and self.on_worker_gone is not None:
            self.on_worker_gone(observation)

    def observation_of(self, worker: Observation, index: int, number: int) -> Observation:
        """Return the observation of a worker as that of the attempt that it runs."""
        labels = _labels.of_attempt(worker.labels, index, number)
        return replace(worker, name=self.identity.attempt_name(index, number), labels=labels)

    def is_over(
        self, index: int, number: int, observation: Observation | None, previous: Observation | None
    ) -> bool:
        """Return whether the platform's answer shows the attempt's end; note any other answer.

        The attempt has also ended if a process has claimed it and the platform has no job of its
        name. *previous* is the observation that was known when the platform was asked.
        """
        if observation is None:
            return self.attempt(index, number).executor is not None
        if observation.phase.is_over:
            return True
        latest = self.observations.get(index)
        facts = attrgetter("name", "phase", "executor")
        # If a watch has reported another one since the question, the answer may be older.
        if latest is previous or (latest is not None and facts(latest) == facts(observation)):
            self.note(index, number, observation)
        return False

    def doubt(self, evidence: Evidence) -> None:
        """Have the submission read again soon, to find out how the attempt in *evidence* ended."""
        item = self._items.get(evidence.index)
        if item is None or not (item.state.final or item.attempt > evidence.number):
            self.doubtful[evidence.index] = evidence
            self._doubted.set()

    def doubt_unseen(self, index: int) -> None:
        """Note that a single job's open attempt may never start, until the platform shows it."""
        item, observation = self._items[index], self.observations.get(index)
        name = self.identity.attempt_name(index, item.attempt)
        if not item.state.final and (observation is None or observation.name != name):
            self.doubt(Evidence(index, item.attempt, None))

    # --- waiting ---

    @property
    def in_doubt(self) -> bool:
        """Whether an attempt may have ended without a report."""
        return bool(self.doubtful) or self.lost_worker

    async def until_doubted(self, timeout: float) -> bool:
        """Wait up to *timeout* seconds until the submission is `in_doubt`; return whether it is."""
        if not self.in_doubt:
            self._doubted.clear()
            await until_set(self._doubted, timeout)
        return self.in_doubt

    async def until_final(self, index: int) -> wire.Item:
        """Wait until the item is final.

        Raises:
            SubmitterLost: No process will start the item.
            KineticError: The item's end can't be read.
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
