"""What items came to, as typed values that are read ahead of whoever takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Self, cast

import anyio.to_thread

from kinetic._runner import frames, wire
from kinetic.aio import _results
from kinetic.aio._consumer import Consumer
from kinetic.errors import JobCancelled, JobFailed, SubmissionError, WireError
from kinetic.outcome import Cancelled, Failed, Lost, Outcome, Succeeded

if TYPE_CHECKING:
    from kinetic.aio._batch import Batch

__all__ = ["Outcomes", "outcome_of"]

AHEAD = 32
"""Values that are read at once, and held until they are taken."""


async def outcome_of(batch: Batch, index: int) -> Outcome[Any]:
    """How an item ended that has ended; a value is read from the store, and rebuilt.

    Raises:
        SubmitterLost: It has not ended, and nobody will run it.
        BackendError: The store does not answer, or the batch was cleaned up.
    """
    submission = batch.submission
    if (refused := submission.refusal(index)) is not None:
        return Failed(refused)
    item = submission.item(index)
    if item is None or not item.state.final:
        if (trouble := submission.trouble(index)) is not None:
            return Failed(trouble)
        item = await submission.closed(index)
    job_id = submission.identity.job_id(index)
    if item.outcome is None:
        return Cancelled(JobCancelled(f"{job_id} was cancelled", job_id=job_id))
    try:
        outcome, body = await submission.outcome(index, item.attempt)
        if outcome.kind is wire.Kind.VALUE:
            store = batch.session.platform.store
            return Succeeded(await _results.value_of(store, outcome, body, job_id))
    except (WireError, JobFailed) as exc:  # forged or damaged; not to be rebuilt here
        return Failed(exc)
    if outcome.reason == wire.SUBMISSION:  # as the process that submitted it wrote down
        text = frames.unpack(body).fields.get("error", {})
        return Failed(SubmissionError(f"{job_id} was not submitted: {text.get('message', '')}"))
    failure = await anyio.to_thread.run_sync(_results.failure_of, outcome, body, job_id)
    error = cast("Exception", failure)  # what is no Exception comes back as a JobFailed
    match outcome.kind:
        case wire.Kind.CANCELLED:
            return Cancelled(error)
        case wire.Kind.LOST:
            return Lost(error)
        case _:
            return Failed(error)


class Outcomes:
    """Index and outcome of all of *batch* that *consumer* is told of, each with its value.

    *deadline* is a time of the loop; `TimeoutError` is raised while nothing
    was there to be given. What is read ahead is dropped by `aclose`. This is no
    generator: a loop that ends closes all of those at once, and one that
    another one is about to close refuses it.
    """

    def __init__(self, consumer: Consumer, batch: Batch, deadline: float | None) -> None:
        self._consumer = consumer
        self._batch = batch
        self._deadline = deadline
        self._ahead: deque[tuple[int, asyncio.Task[Outcome[Any]]]] = deque()
        self._given = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Outcome[Any]]:
        if self._given:
            self._given = False
            self._consumer.delivered()
        found = await self._next()
        self._given = True
        return found

    async def _next(self) -> tuple[int, Outcome[Any]]:
        consumer, batch, ahead = self._consumer, self._batch, self._ahead
        while True:
            while len(ahead) < AHEAD and (index := consumer.take()) is not None:
                if not ahead and batch.submission.holds(index):
                    return index, await outcome_of(batch, index)  # reading ahead gains nothing
                reader = asyncio.create_task(outcome_of(batch, index), name=f"kinetic read {index}")
                ahead.append((index, reader))
            async with asyncio.timeout_at(self._deadline):
                if not ahead:
                    if not await consumer.more():
                        raise StopAsyncIteration
                    continue
                index, reader = ahead[0]
                outcome = await reader
            ahead.popleft()
            return index, outcome

    async def aclose(self) -> None:
        """Drop what was read ahead."""
        left = [reader for _, reader in self._ahead]
        self._ahead.clear()
        for reader in left:
            reader.cancel()
        await asyncio.gather(*left, return_exceptions=True)
