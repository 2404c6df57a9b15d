"""Iterate over a batch: find out which items have ended, and read their values."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio.to_thread

from kinetic import errors
from kinetic._runner.protocol import frames, pickles, wire
from kinetic._runner.protocol.retry_budgets import SUBMISSION
from kinetic._tasks import end_all
from kinetic.aio._submissions import results
from kinetic.outcome import Cancelled, Failed, Lost, Outcome, Succeeded

if TYPE_CHECKING:
    from kinetic.aio._engine.batch import Batch
    from kinetic.aio._engine.input_pump import Backpressure

READ_AHEAD = 32
"""Maximum number of values read ahead and held until they are taken."""

RECHECK_S = 5.0
"""How long to wait for a change before looking again, in seconds."""

ITEMS_PER_TURN = 1024
"""Maximum number of items examined in one turn of the loop."""


class Consumer:
    """Yield index and outcome of each item of a batch, in the order in which the items end.

    Use it as an async context manager, and iterate over it once. A batch may have many consumers.

    With *ordered*, items come in the order of their indices; before its turn, the value of an item
    that has ended stays in the store. With *windowed*, the batch starts at most ``window`` items
    beyond those counted by `note_delivered`. *display* is active while the block runs. After
    *timeout* seconds, the block raises `ResultTimeout`, but not while an item is ready. Until
    *search_until*, a time of the loop, `wait_until_ready` waits for items that another process has
    yet to submit. *verified* gets the verified outcome of each value that a first attempt returned.

    ``ready`` has the indices that `take` returns next, even those of items that were refused.

    This class isn't an async generator, because at the loop's end `shutdown_asyncgens` closes all
    generators concurrently. An inner generator that is already closing would raise when the outer
    generator closes it.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        display: contextlib.AbstractAsyncContextManager[None] | None = None,
        timeout: float | None = None,
        ordered: bool = False,
        windowed: bool = True,
        search_until: float | None = None,
        verified: dict[int, wire.Outcome] | None = None,
    ) -> None:
        self.ready: deque[int] = deque()
        self.deadline: float | None = None
        self._batch = batch
        self._display = display or contextlib.nullcontext()
        self._timeout = timeout
        self._ordered = ordered
        self._windowed = windowed
        self._search_until = search_until
        self._verified = verified
        self._window: Backpressure | None = None
        self._delivered = 0
        self._reported = bytearray()  # by index: whether the item was ready once
        self._next_index = 0
        self._awake = asyncio.Event()
        self._read_ahead: deque[tuple[int, asyncio.Task[Outcome[Any]]]] = deque()
        self._was_taken = False
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        batch, submission = self._batch, self._batch.submission
        if self._timeout is not None:
            self.deadline = asyncio.get_running_loop().time() + self._timeout
        async with self._stack as stack:
            await stack.enter_async_context(self._display)
            stack.callback(submission.listen(self._on_item))
            batch.watchers.append(self._awake)
            stack.callback(batch.watchers.remove, self._awake)
            stack.enter_context(batch.session.awaiting(submission))
            stack.callback(self._leave_window)
            stack.push_async_callback(self._cancel_readers)
            self._join_window()
            if batch.coordinator is None:
                await batch.observe_if_resumed()
                await batch.read()
            for count, index in enumerate(submission.items_with_state(batch.known), start=1):
                self._on_item(index, submission.item(index))
                if count % ITEMS_PER_TURN == 0:
                    await asyncio.sleep(0)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)
        if self._timeout is None or not isinstance(error, TimeoutError):
            return
        if not isinstance(error, errors.KineticError):
            raise errors.ResultTimeout(
                f"batch {self._batch.group_id} has not ended after {self._timeout:g} s; the batch "
                "continues, and its handle stays valid",
                job_id=self._batch.group_id,
            ) from None

    def _join_window(self) -> None:
        # A coordinator may come later, if this process takes the batch over.
        coordinator = self._batch.coordinator
        if self._windowed and self._window is None and coordinator is not None:
            self._window = coordinator.window
            self._window.note(self, self._delivered)

    def _leave_window(self) -> None:
        if self._window is not None:
            self._window.leave(self)

    async def _cancel_readers(self) -> None:
        readers = [reader for _, reader in self._read_ahead]
        self._read_ahead.clear()
        await end_all(readers)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Outcome[Any]]:
        if self._was_taken:  # the caller has finished with the previous item
            self._was_taken = False
            await self.note_delivered()
        result = await self._next()
        self._was_taken = True
        return result

    async def _next(self) -> tuple[int, Outcome[Any]]:
        """Return the next item; meanwhile, tasks read up to `READ_AHEAD` values of ready items."""
        batch, ahead = self._batch, self._read_ahead
        while True:
            while len(ahead) < READ_AHEAD and (index := self.take()) is not None:
                if not ahead and (held := self._take_held(index)) is not None:
                    return index, held
                reader = asyncio.create_task(
                    outcome_of(batch, index, self._verified), name=f"kinetic read {index}"
                )
                ahead.append((index, reader))
            async with asyncio.timeout_at(self.deadline):
                if not ahead:
                    if not await self.wait_until_ready():
                        raise StopAsyncIteration
                    continue
                index, reader = ahead[0]
                outcome = await reader
            ahead.popleft()
            return index, outcome

    def _take_held(self, index: int) -> Succeeded[Any] | None:
        """Return a value as `outcome_of` does, if it is in memory and `results.is_quick`."""
        submission = self._batch.submission
        item = submission.item(index)
        if item is None or item.state is not wire.ItemState.SUCCEEDED:
            return None
        held = submission.held(index, item.attempt)
        if held is None or held[0].reason == wire.PRUNED or not results.is_quick(held[1]):
            return None
        try:
            value = pickles.load(held[1])
        except Exception:  # `outcome_of` says what is wrong
            return None
        submission.drop(index)
        if self._verified is not None and item.attempt == 1:
            self._verified[index] = held[0]
        return Succeeded(value)

    async def note_delivered(self) -> None:
        """Count one more item as delivered; at times, let the loop's other tasks run."""
        self._delivered += 1
        if self._window is not None:
            self._window.note(self, self._delivered)
        if self._delivered % ITEMS_PER_TURN == 0:
            await asyncio.sleep(0)

    def take(self) -> int | None:
        """Return the next index that is ready, or None.

        Skip items that a retry has reopened meanwhile, unless the consumer is *ordered*.
        """
        while self.ready:
            index = self.ready.popleft()
            item = self._batch.submission.item(index)
            if self._ordered or item is None or item.state.final or self._is_over(index):
                return index
            self._reported[index] = False  # a retry has reopened the item, which will end again
        return None

    async def wait_until_ready(self) -> bool:
        """Wait until an item is ready; return False if no further item will be ready.

        Raises:
            SubmitterLost: No process submits the rest of the batch any more.
            ResultTimeout: Another process has not submitted the rest in time.
            BaseException: The error with which this process stopped submitting the batch.
        """
        batch = self._batch
        while not self.ready:
            self._join_window()
            if batch.finished:
                if batch.coordinator is not None and batch.coordinator.error is not None:
                    raise batch.coordinator.error
                # A client that is closing leaves the batch incomplete, and sets `abandoned` soon.
                if batch.coordinator is None or batch.coordinator.complete:
                    return False
            if batch.submission.abandoned is not None:
                raise batch.submission.abandoned
            pause = min(RECHECK_S, self._search_left())
            self._awake.clear()
            # Look again, in case a wake-up was missed. A time limit would take three times as long.
            timer = asyncio.get_running_loop().call_later(pause, self._awake.set)
            try:
                await self._awake.wait()
            finally:
                timer.cancel()
        return True

    def _search_left(self) -> float:
        """Return how many seconds are left to wait for items that another process submits."""
        batch = self._batch
        if self._search_until is None or batch.total is not None or batch.submits:
            return math.inf
        left = self._search_until - asyncio.get_running_loop().time()
        if left <= 0:
            raise errors.ResultTimeout(
                f"batch {batch.group_id} is still being submitted: {batch.known} of its items were "
                "found within poll_timeout; the batch continues: attach to it again, or wait "
                "longer",
                job_id=batch.group_id,
            )
        return left

    def _on_item(self, index: int, item: wire.Item | None) -> None:
        """Put an ended item into ``ready``, only once; if *ordered*, after all earlier items."""
        if not ((item is not None and item.state.final) or self._is_over(index)):
            return
        reported = self._reported
        if index >= len(reported):
            reported.extend(bytes(index + 1 - len(reported)))
        elif reported[index]:
            return
        reported[index] = True
        if not self._ordered:
            self.ready.append(index)
            return
        while self._next_index < len(reported) and reported[self._next_index]:
            self.ready.append(self._next_index)
            self._next_index += 1

    def _is_over(self, index: int) -> bool:
        """Return whether an item that isn't final won't get an outcome that can be read."""
        submission = self._batch.submission
        if index in submission.refusals:
            return True
        if submission.final_error(index) is None:
            return False
        # Damage is permanent. After another error, a process that submits the batch reads again.
        return submission.is_damaged(index) or not self._batch.submits


async def outcome_of(
    batch: Batch, index: int, verified: dict[int, wire.Outcome] | None = None
) -> Outcome[Any]:
    """Wait for an item's end and return its outcome; read and rebuild its value.

    If *verified* is given, put the verified outcome of a first attempt's value into it.

    Raises:
        SubmitterLost: During the wait, kinetic has found that no process will run the item. If
            kinetic knew that before the wait, the outcome is `Failed`.
        BackendError: The store does not answer, or the batch was cleaned up.
    """
    submission = batch.submission
    if index in submission.collected_outcomes:
        return submission.collected_outcomes[index]
    if (refused := submission.refusals.get(index)) is not None:
        return Failed(refused)
    item = submission.item(index)
    if item is None or not item.state.final:
        if (error := submission.error(index)) is not None:
            return Failed(error)
        item = await batch.session.until_final(submission, index)
    if item.outcome is None:
        job_id = submission.identity.job_id(index)
        cancellation = submission.cancellation(index, batch.cause)
        return Cancelled(errors.JobCancelled(f"{job_id} was {cancellation}", job_id=job_id))
    try:
        outcome, body = await submission.outcome(index, item.attempt)
        if outcome.kind is wire.Kind.VALUE:
            if verified is not None and item.attempt == 1:
                verified[index] = outcome
            return Succeeded(await submission.value(index, outcome, body))
    except errors.Pruned as pruned:
        return pruned.with_traceback(None)
    except (errors.WireError, errors.AuthError, errors.JobFailed) as exc:
        # The outcome is forged or damaged, or this process can't read or rebuild its value.
        return Failed(exc)
    job_id = submission.identity.job_id(index)
    if outcome.reason == SUBMISSION:  # the submitting process wrote this outcome
        error_fields = frames.unpack(body).fields.get("error", {})
        return Failed(
            errors.SubmissionError(f"{job_id} was not submitted: {error_fields.get('message', '')}")
        )
    end = submission.host_ends.get((index, item.attempt))
    cause = end.message if end is not None else ""
    error = await anyio.to_thread.run_sync(results.item_failure_of, outcome, body, job_id, cause)
    match outcome.kind:
        case wire.Kind.CANCELLED:
            return Cancelled(error)
        case wire.Kind.LOST:
            return Lost(error)
        case _:
            return Failed(error)
