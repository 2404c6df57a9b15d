"""Watch the submissions that a client follows on one platform.

A submission has items: a batch has many, a *single job* has one. Without the word *single*, a job
is what the platform runs for one attempt at an item.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from absl import logging

from kinetic import _labels
from kinetic._runner.protocol import wire
from kinetic.aio._connection import Connection
from kinetic.aio._engine import ending
from kinetic.aio._engine.in_flight import AttemptLimit
from kinetic.aio._net.retry import growing_pauses
from kinetic.aio._submissions.submission import Evidence, Submission
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.configuration import Target
from kinetic.errors import KineticError, NotFound

RECONCILE_S = 10.0, 60.0
"""First and longest pause between two readings of a submission that has waiters, in seconds."""

LISTING_S = 1.0, 30.0
"""The same pauses if only the store shows what workers run; the first after each item's end."""

BLOCKS_PER_S = 4
"""How many blocks of items such readings list in a second, at most."""

DOUBT_S = 0.2, 10.0
"""The same pauses while an attempt is in doubt: its end isn't stored, or it may never start."""

SPREAD = 0.2
"""Random share of a `RECONCILE_S` pause: submissions that began together are read separately."""

ENDS_PER_TURN = 64
"""Maximum number of ended attempts that a settler handles before other tasks get a turn."""

OWN_JOBS = ""
"""Name of the watch over the jobs that this client starts."""

PAUSES_S = 0.2, 10.0
"""First and longest pause before an interrupted watch begins again, in seconds."""


class Submitter(Protocol):
    """The method of a batch that `Session.aclose` calls."""

    async def leave(self, reason: str) -> None:
        """Stop submitting at once; *reason* is for the log."""
        ...


class Session(Connection):
    """A connection and the submissions that this client follows over it.

    One watch covers all jobs that this client starts, by their label. A submission
    of another process gets its own watch. The session keeps a batch or a submission
    only as long as a handle, a waiter, or a coordinator refers to it.
    """

    def __init__(
        self, target: Target, platform: Platform, client_id: str, limit: AttemptLimit
    ) -> None:
        super().__init__(target, platform)
        self.client_id = client_id
        self.limit = limit
        self.batches: weakref.WeakValueDictionary[str, Submitter] = weakref.WeakValueDictionary()
        self._submissions: weakref.WeakValueDictionary[str, Submission]
        self._submissions = weakref.WeakValueDictionary()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._reconciling: dict[str, asyncio.Task[None]] = {}
        self._queue: deque[tuple[Submission, Evidence]] = deque()
        self._ended: deque[tuple[Submission, Observation]] = deque()
        self._settlers = 0
        self._settler_scheduled = False
        self._stored: deque[tuple[Submission, Evidence]] = deque()
        self._reads_stored = False
        self.loop = asyncio.get_running_loop()

    async def aclose(self) -> None:
        """Stop submitting, end the watches, and close the platform; running jobs continue."""
        batches = tuple(self.batches.values())
        try:
            await asyncio.gather(*(batch.leave("the client is closed") for batch in batches))
        finally:
            for submission in tuple(self._submissions.values()):
                submission.abandon(
                    KineticError(
                        f"the client was closed before {submission.identity.id} ended; to get the "
                        "outcome, attach to it with another client"
                    )
                )
            await super().aclose()

    # --- following ---

    def follow(self, submission: Submission, *, is_own: bool) -> Submission:
        """Keep *submission* current from now on.

        *is_own* says that this client launches its jobs. If the session already follows an object
        with the same ID, return that object, otherwise *submission*.
        """
        known = self._submissions.setdefault(submission.identity.id, submission)
        if is_own:
            known.is_own = True
            self._ensure_watch(OWN_JOBS, {_labels.CLIENT: self.client_id})
        elif known is submission:
            self.watch(submission)
        return known

    def find_followed(self, submission_id: str) -> Submission | None:
        """Return the submission of this ID that the session follows; None if it follows none."""
        return self._submissions.get(submission_id)

    def forget(self, submission: Submission) -> None:
        """Stop following a submission whose objects were removed."""
        submission.abandon(submission.identity.gone_error)
        self._submissions.pop(submission.identity.id, None)
        self.batches.pop(submission.identity.id, None)
        if (watch := self._watches.pop(submission.identity.id, None)) is not None:
            watch.cancel()

    # --- waiting ---

    async def until_final(self, submission: Submission, index: int) -> wire.Item:
        """Wait until the item is final, whether or not the watch reports its end."""
        with self.awaiting(submission):
            return await submission.until_final(index)

    @contextlib.contextmanager
    def awaiting(self, submission: Submission) -> Generator[None]:
        """Reconcile the submission at intervals while the block runs.

        The watch of the platform is faster; the readings find what the watch never reports.
        """
        submission_id = submission.identity.id
        submission.waiter_count += 1
        try:
            if submission.waiter_count == 1 and not self._closed:
                work = self._keep_reconciling(submission)
                self._reconciling[submission_id] = self.spawn(
                    work, name=f"waiting for {submission_id}"
                )
            yield
        finally:
            submission.waiter_count -= 1
            if not submission.waiter_count and (task := self._reconciling.pop(submission_id, None)):
                task.cancel()

    async def _keep_reconciling(self, submission: Submission) -> None:
        """Reconcile a submission again and again, more often while an end is in doubt."""
        clock = asyncio.get_running_loop().time
        slow_pauses, quick_pauses = _slow_pauses(submission), growing_pauses(*DOUBT_S)
        failing_since: float | None = None
        ended = submission.ended
        while True:
            # Where only the store shows what runs, list again soon after an item's end.
            if submission.listed and ended != submission.ended:
                slow_pauses, ended = _slow_pauses(submission), submission.ended
            if failing_since is not None or submission.in_doubt:
                await asyncio.sleep(next(quick_pauses))
            else:
                quick_pauses = growing_pauses(*DOUBT_S)
                if await submission.until_doubted(next(slow_pauses)):
                    continue
            submission.lost_worker = False
            try:
                if submission.reconcile_batch is not None:
                    await submission.reconcile_batch()
                elif not submission.is_final(0):
                    await ending.reconcile(submission, 0)
            except Exception as exc:
                failing_since = clock() if failing_since is None else failing_since
                waiter_error = ending.error_for_waiters(
                    submission.identity.id, exc, clock() - failing_since, patient=submission.is_own
                )
                if waiter_error is not None:
                    submission.fail_waiters(waiter_error)
            else:
                failing_since = None

    # --- watching ---

    def watch(self, submission: Submission) -> None:
        """Watch all attempts of *submission*, even attempts that other clients start."""
        self._ensure_watch(submission.identity.id, submission.identity.labels)

    def _ensure_watch(self, name: str, labels: Mapping[str, str]) -> None:
        if name not in self._watches:
            for known in tuple(self._watches):
                if known != OWN_JOBS and known not in self._submissions:
                    self._watches.pop(known).cancel()  # nothing follows the submission any more
            work = self._watch(dict(labels))
            self._watches[name] = self.spawn(work, name=f"watch {name or 'own jobs'}")

    async def _watch(self, labels: Mapping[str, str]) -> None:
        """Pass what the platform reports of jobs with *labels* to `_route`, until cancelled."""
        pauses = growing_pauses(*PAUSES_S)
        while True:
            try:
                async with aclosing(self.platform.cluster.watch(labels)) as observations:
                    async for observation in observations:
                        pauses = growing_pauses(*PAUSES_S)
                        self._route(observation)
            except NotFound as exc:  # the cluster lacks this kind of job; a launch raises the error
                logging.info("can't watch jobs: %s", exc)
            except KineticError as exc:
                logging.warning("the watch over jobs was interrupted: %s; retrying", exc)
            except Exception:  # until the watch works again, waits may end a minute late
                logging.exception("the watch over jobs was interrupted; retrying")
            await asyncio.sleep(next(pauses))

    def _route(self, observation: Observation) -> None:
        """Note a followed attempt that waits or runs; queue the evidence of one that has ended."""
        submission = self._submissions.get(observation.labels.get(_labels.SUBMISSION, ""))
        if submission is None:
            return
        if observation.ended:
            self._ended.append((submission, observation))
            self._schedule_settler()
            return
        if _labels.INDEX not in observation.labels:
            submission.note_worker(observation)
            if (receipt := observation.receipt) is not None:  # of the last item that it ran
                self.settle_soon(submission, Evidence(receipt.index, receipt.attempt, observation))
            return
        if not submission.identity.leased:
            observation = submission.attributed(observation)
        index, number = _labels.attempt_of(observation.labels)
        # An observation of any attempt of a single job may say that no attempt follows.
        last = observation.last and not (submission.identity.leased or submission.is_final(index))
        if not (last or submission.concerns(index, number)):
            return
        evidence = Evidence(index, number, observation)
        if observation.leaving and submission.identity.leased:
            self._stored.append((submission, evidence))
            if not self._reads_stored and not self._closed:
                self._reads_stored = True
                self.spawn(self._read_stored(), name="reader of outcomes")
        elif observation.leaving or observation.phase.is_over:
            self.settle_soon(submission, evidence)
        else:
            submission.note(index, number, observation)

    async def _read_stored(self) -> None:
        """Read the outcomes that items have stored, until none is left.

        While one request runs, further ends gather, so that the next request reads them all.
        """
        try:
            while self._stored:
                groups: dict[Submission, list[Evidence]] = {}
                for submission, evidence in self._stored:
                    groups.setdefault(submission, []).append(evidence)
                self._stored.clear()
                for submission, ends in groups.items():
                    found: Collection[tuple[int, int]] = ()
                    with contextlib.suppress(Exception):  # `ending.settle` reads each again
                        found = await submission.read_ends([(it.index, it.number) for it in ends])
                    for evidence in ends:
                        if (evidence.index, evidence.number) not in found:
                            self.settle_soon(submission, evidence)
        finally:
            self._reads_stored = False

    # --- settling ---

    def settle_soon(self, submission: Submission, evidence: Evidence) -> None:
        """Queue evidence of an ended attempt for `ending.settle`."""
        self._queue.append((submission, evidence))
        self._schedule_settler()

    def _schedule_settler(self) -> None:
        """Start one more task for queued evidence in the loop's next turn, if any is left then."""
        if not self._settler_scheduled:
            self._settler_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_settler)

    def _start_settler(self) -> None:
        self._settler_scheduled = False
        may_start = self._settlers < ending.SETTLING_AT_ONCE and not self._closed
        if (self._ended or self._queue) and may_start:
            self._settlers += 1
            self.spawn(self._settle_some(), name="settler")

    async def _settle_some(self) -> None:
        """Settle queued evidence until none is left; one task for each attempt would cost more."""
        count = 0
        try:
            while self._ended or self._queue:
                if self._ended:
                    await self._read_ended(*self._ended.popleft())
                    continue
                submission, evidence = self._queue.popleft()
                self._schedule_settler()  # another task works while this one waits for the store
                await ending.settle(submission, evidence)
                count += 1
                if count % ENDS_PER_TURN == 0:
                    await asyncio.sleep(0)
        finally:
            self._settlers -= 1

    async def _read_ended(self, submission: Submission, worker: Observation) -> None:
        """Read the outcomes of items that *worker* has ended; queue evidence about the others."""
        attempts = [it for it in worker.ended if submission.concerns(*it)]
        for start in range(0, len(attempts), ENDS_PER_TURN):
            part = attempts[start : start + ENDS_PER_TURN]
            self._schedule_settler()  # another task works while this one waits for the store
            found: Collection[tuple[int, int]] = ()
            if submission.identity.leased:
                with contextlib.suppress(Exception):  # `ending.settle` reads each again
                    found = await submission.read_ends(part)
            for index, number in part:
                if (index, number) not in found:
                    seen = submission.observation_of(worker, index, number)
                    seen = replace(seen, phase=Phase.GONE, ended=())
                    self._queue.append((submission, Evidence(index, number, seen)))
            await asyncio.sleep(0)


def _slow_pauses(submission: Submission) -> Iterator[float]:
    """Return the pauses between two readings of a submission whose ends are all known."""
    if not submission.listed:
        return growing_pauses(*RECONCILE_S, jitter=SPREAD)
    first, longest = LISTING_S
    blocks = (submission.known_open + wire.BLOCK_SIZE - 1) // wire.BLOCK_SIZE
    first = min(longest, max(first, blocks / BLOCKS_PER_S))
    return growing_pauses(first, longest, 1.5, jitter=SPREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """One item of a submission, on an open platform."""

    session: Session
    submission: Submission
    index: int

    @property
    def output_dir(self) -> str:
        """The value of ``KINETIC_OUTPUT_DIR`` in the item's job."""
        return self.submission.identity.output_dir(self.index)

    async def reconcile(self, *, explained: bool = False) -> wire.Item:
        """Read the item, and if it's open, ask the platform; if *explained*, also why it waits."""
        item = await ending.reconcile(self.submission, self.index, explained=explained)
        if (error := self.submission.final_error(self.index)) is not None:
            raise error
        return item

    async def host_end(self, number: int) -> Observation | None:
        """Return how a host other than the first ended attempt *number*; None if none did."""
        return await ending.host_end(self.submission, self.index, number)
