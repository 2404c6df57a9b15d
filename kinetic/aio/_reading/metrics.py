"""Read the metrics that jobs report while they run.

A job stores its reports in numbered slots, one after the other, and the last ones in the body of
its outcome. So a reader asks for the next slot until there is none. The end of the attempt decides:
what follows the last slot is in the outcome, or the job died and there is nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Container
from dataclasses import dataclass, field

from absl import logging

from kinetic import _labels
from kinetic._runner.protocol import frames, metrics, wire
from kinetic._runner.protocol.metrics import Reports
from kinetic._tasks import for_each, until_set
from kinetic.aio._engine.batch import Batch
from kinetic.aio._engine.session import JobRef
from kinetic.aio._reading.iteration import Consumer
from kinetic.aio._submissions.submission import Submission
from kinetic.aio.ports import Phase
from kinetic.errors import NotFound, ResultTimeout, WireError
from kinetic.metric import JobMetric, Metric

PAUSES_S = 1.0, 1.0, 5.0
QUICK_PAUSES_S = 0.02, 0.1, 0.25
"""Pauses between two reads of the reports of an attempt, in seconds: the first after a report, the
longest after one, and the longest before any."""

READS_AT_ONCE = 32


@dataclass(slots=True)
class _Curve:
    """The reports of one attempt: the slots that were read, and when to look for the next.

    ``read`` counts the reports that were read of each process of the job.
    """

    next_slot: int = 0
    read: dict[str, int] = field(default_factory=dict[str, int])
    pause: float = 0.0
    due_at: float = 0.0


class Reader:
    """Read the reports of a submission, each once."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._curves: dict[tuple[int, int], _Curve] = {}
        self._ended: dict[int, int] = {}  # item → its last attempt that was read to the end
        quick = metrics.is_quick(submission.store.url)
        self._pauses = QUICK_PAUSES_S if quick else PAUSES_S
        self._clock = asyncio.get_running_loop().time
        self._next_due_at = 0.0

    def pause(self) -> float:
        """Return how many seconds to wait until the next read, or for attempts that begin."""
        return min(max(0.0, self._next_due_at - self._clock()), self._pauses[1])

    async def read_running(self, indices: Container[int]) -> list[Metric]:
        """Return the new reports of the running attempts of items, as far as a read is due."""
        now, found = self._clock(), dict[int, list[Metric]]()
        shown = (
            (index, int(seen.labels.get(_labels.ATTEMPT, 1)))
            for index, seen in self._submission.observations.items()
            if seen.phase is Phase.RUNNING and index in indices
        )
        running = [it for it in shown if it[1] > self._ended.get(it[0], 0)]
        due = [attempt for attempt in running if self._curve(*attempt).due_at <= now]

        async def read(attempt: tuple[int, int]) -> None:
            index, number = attempt
            found[index] = [
                *(await self._read_ended(index, number - 1)),
                *(await self._read_slots(index, number)),
            ]

        await for_each(read, due, limit=min(len(due), READS_AT_ONCE))
        times = (self._curve(*attempt).due_at for attempt in running)
        self._next_due_at = min(times, default=math.inf)
        return [metric for index, _ in due for metric in found[index]]

    async def read_item(self, index: int) -> list[Metric]:
        """Return the new reports of an item that has ended."""
        item = self._submission.item(index)
        return [] if item is None else await self._read_ended(index, item.attempt)

    def _curve(self, index: int, number: int) -> _Curve:
        return self._curves.setdefault((index, number), _Curve())

    async def _read_slots(self, index: int, number: int) -> list[Metric]:
        curve = self._curve(index, number)
        found: list[Metric] = []
        while True:
            try:
                reports = await read_slot(self._submission, index, number, curve.next_slot)
            except NotFound:
                break
            curve.next_slot += 1
            found += _new(index, number, curve, reports)
        first, longest, longest_before = self._pauses
        if curve.next_slot == 0:
            longest = longest_before
        curve.pause = first if found else min(longest, (curve.pause or first) * 1.5)
        curve.due_at = self._clock() + curve.pause
        return found

    async def _read_ended(self, index: int, last: int) -> list[Metric]:
        """Return the new reports of the attempts up to *last*, which have ended."""
        begin = self._ended.get(index, 0) + 1
        if begin > last:
            return []
        submission = self._submission
        item = submission.item(index)
        outcomes = {item.attempt: item.outcome} if item is not None else {}
        if begin < last or last not in outcomes:
            listed = await submission.list_attempts(index)
            outcomes |= {number: attempt.outcome for number, attempt in listed.items()}
        found: list[Metric] = []
        for number in range(begin, last + 1):
            outcome = outcomes.get(number)
            # A job that dies reports nothing more, and another process writes its outcome.
            if outcome is None or outcome.metrics or outcome.kind is not wire.Kind.VALUE:
                found += await self._read_slots(index, number)
            if outcome is not None and outcome.metrics:
                tail = await read_tail(submission, index, number)
                found += _new(index, number, self._curve(index, number), tail)
            self._curves.pop((index, number), None)
            self._ended[index] = number
        return found


async def read_slot(submission: Submission, index: int, number: int, slot: int) -> Reports | None:
    """Return the reports in a slot of an attempt; None if they are forged or damaged.

    Raises:
        NotFound: The attempt has no such slot.
    """
    identity = submission.identity
    name = metrics.metrics_key(identity.scope, index, number, slot)
    content = await submission.store.get(name)
    try:
        return Reports.verified(content.body, content.metadata, identity.key, identity.scope, name)
    except ValueError as exc:
        logging.warning("%s; nothing of it is used", exc)
        return None


async def read_tail(submission: Submission, index: int, number: int) -> Reports | None:
    """Return the reports in the outcome of an attempt; None if there are none."""
    try:
        _, body = await submission.read_outcome(index, number)
        fields = frames.unpack(body).fields.get(metrics.METRICS)
        return Reports.of(fields) if fields is not None else None
    except NotFound:  # the results were collected
        return None
    except (WireError, ValueError) as exc:
        logging.warning("the last metrics of item %d can't be read: %s", index, exc)
        return None


def _new(index: int, number: int, curve: _Curve, reports: Reports | None) -> list[Metric]:
    """Return the reports that weren't read before, and count them as read."""
    if reports is None:
        return []
    known = curve.read.get(reports.writer, 0)
    curve.read[reports.writer] = max(reports.first + len(reports.entries), known)
    new = reports.entries[max(0, known - reports.first) :]
    return [Metric(index, number, step, value) for step, value in new]


async def of_batch(batch: Batch, timeout: float | None) -> AsyncGenerator[Metric]:
    """Yield the reports of all jobs of a batch, until it has ended; see `BatchHandle.metrics`."""
    loop, reader = asyncio.get_running_loop(), Reader(batch.submission)
    async with Consumer(batch, timeout=timeout, windowed=False) as consumer:
        await batch.submission.refuse_collected()
        is_open = True
        while is_open:
            while (index := consumer.take()) is not None:
                for metric in await reader.read_item(index):
                    yield metric
            for metric in await reader.read_running(range(batch.known)):
                yield metric
            if consumer.deadline is not None and loop.time() >= consumer.deadline:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(reader.pause()):
                    is_open = await consumer.wait_until_ready()


async def of_job(ref: JobRef, timeout: float | None) -> AsyncGenerator[JobMetric]:
    """Yield the reports of one job, until it has ended; see `JobHandle.metrics`."""
    submission, index = ref.submission, ref.index
    loop, reader = asyncio.get_running_loop(), Reader(submission)
    deadline = None if timeout is None else loop.time() + timeout
    changed = asyncio.Event()
    stop_listening = submission.listen(lambda number, _: changed.set() if number == index else None)
    try:
        with ref.session.awaiting(submission):
            await ref.reconcile()
            await submission.refuse_collected()
            while True:
                item = submission.item(index)
                has_ended = item is not None and item.state.final
                if not has_ended and (error := submission.error(index)) is not None:
                    raise error
                if has_ended:
                    found = await reader.read_item(index)
                else:
                    found = await reader.read_running((index,))
                for _, number, step, value in found:
                    yield JobMetric(number, step, value)
                if has_ended:
                    return
                if deadline is not None and loop.time() >= deadline:
                    raise ResultTimeout(
                        f"{submission.identity.job_id(index)} has not ended after {timeout:g} s; "
                        "it continues, and its handle stays valid",
                        job_id=submission.identity.job_id(index),
                    )
                changed.clear()
                await until_set(changed, reader.pause())
    finally:
        stop_listening()
