"""Iterate over a batch: a consumer of its outcomes, and its line on the display."""

from __future__ import annotations

import asyncio
import contextlib
import math
import reprlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import anyio.to_thread
from absl import logging

from kinetic._messages import one_line
from kinetic._progress import steps
from kinetic._progress.tally import State, Tally
from kinetic._runner.protocol import frames, wire
from kinetic._runner.protocol.retry_budgets import SUBMISSION
from kinetic.aio._engine import results
from kinetic.errors import (
    AuthError,
    JobCancelled,
    JobFailed,
    KineticError,
    ResultTimeout,
    SubmissionError,
    WireError,
)
from kinetic.job_status import JobStatus
from kinetic.outcome import Cancelled, Failed, Lost, Outcome, Succeeded
from kinetic.progress import Progress

if TYPE_CHECKING:
    from kinetic._progress.entry import Entry
    from kinetic.aio._engine.batches import Batch
    from kinetic.aio._engine.input_pump import Delivery
    from kinetic.aio._engine.submission import Submission

RECHECK_S = 5.0
STARTING = 1024
"""Maximum number of items examined in one turn of the loop."""


class Consumer:
    """What has ended of a batch and was not taken yet; any number may consume at once.

    ``ready`` are the indices to be taken, also of inputs that could not be
    submitted. With *ordered* an index is there only when all before it were;
    what ends before its turn is remembered by its index, and its value stays
    in the store. With *windowed*, at most ``window`` items beyond those
    `delivered` are begun. After *search_until*, a time of the loop, nobody waits for items
    that another process has yet to submit. Used as an async context manager.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        ordered: bool = False,
        windowed: bool = True,
        search_until: float | None = None,
    ) -> None:
        self.ready: deque[int] = deque()
        self._batch = batch
        self._ordered = ordered
        self._windowed = windowed
        self._search_until = search_until
        self._delivery: Delivery | None = None
        self._delivered = 0
        self._told = bytearray()  # by index: whether it was ready once
        self._turn = 0
        self._awake = asyncio.Event()
        self._rereading: contextlib.ExitStack[bool | None] = contextlib.ExitStack()
        self._stop_listening = batch.submission.listen(self._note)
        batch.watchers.append(self._awake)

    async def __aenter__(self) -> Self:
        self._join()
        try:
            self._rereading.enter_context(self._batch.session.awaiting(self._batch.submission))
            if self._batch.coordinator is None:
                await self._batch.look_again()
                await self._batch.look()
            submission = self._batch.submission
            for place, index in enumerate(submission.touched(self._batch.known), start=1):
                self._note(index, submission.item(index))
                if place % STARTING == 0:
                    await asyncio.sleep(0)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._stop_listening()
        if self._delivery is not None:
            self._delivery.end()
        self._rereading.close()
        self._batch.watchers.remove(self._awake)

    def _join(self) -> None:
        # There may be one later only: this process may take the batch over.
        coordinator = self._batch.coordinator
        if self._windowed and self._delivery is None and coordinator is not None:
            self._delivery = coordinator.window.begin(self._delivered)

    def delivered(self) -> None:
        """Note that one more item was handed to the consumer."""
        self._delivered += 1
        if self._delivery is not None:
            self._delivery.add()

    def take(self) -> int | None:
        """The next that is ready, or None.

        Items that a retry has reopened meanwhile are skipped, but for an *ordered* consumer.
        """
        while self.ready:
            index = self.ready.popleft()
            item = self._batch.submission.item(index)
            if self._ordered or item is None or item.state.final or self._is_over(index):
                return index
            self._told[index] = False  # a retry has opened it: it will end once more
        return None

    async def more(self) -> bool:
        """Wait until something is ready; False when nothing more will be.

        Raises:
            SubmitterLost: Nobody submits the rest of it any more.
            ResultTimeout: Another process has not submitted the rest of it in time.
            BaseException: What ended this process's own submitting.
        """
        batch = self._batch
        while not self.ready:
            self._join()
            if batch.finished:
                if batch.coordinator is not None and batch.coordinator.error is not None:
                    raise batch.coordinator.error
                if batch.coordinator is None or batch.coordinator.complete:
                    return False  # else the client is being closed: `abandoned` will be set soon
            if batch.submission.abandoned is not None:
                raise batch.submission.abandoned
            pause = min(RECHECK_S, self._search_left())
            self._awake.clear()
            with contextlib.suppress(TimeoutError):  # a wake that is missed costs time, no more
                async with asyncio.timeout(pause):
                    await self._awake.wait()
        return True

    def _search_left(self) -> float:
        """Seconds left to wait for items that another process has yet to submit.

        Raises:
            ResultTimeout: There are none.
        """
        batch = self._batch
        if self._search_until is None or batch.total is not None or batch.submits:
            return math.inf
        left = self._search_until - asyncio.get_running_loop().time()
        if left <= 0:
            raise ResultTimeout(
                f"batch {batch.group_id} is still being submitted: {batch.known} of its items were "
                "found within poll_timeout; it goes on: attach to it again, or wait longer",
                job_id=batch.group_id,
            )
        return left

    def _note(self, index: int, item: wire.Item | None) -> None:
        if not ((item is not None and item.state.final) or self._is_over(index)):
            return
        told = self._told
        if index >= len(told):
            told.extend(bytes(index + 1 - len(told)))
        elif told[index]:
            return
        told[index] = True
        if not self._ordered:
            self.ready.append(index)
            return
        while self._turn < len(told) and told[self._turn]:
            self.ready.append(self._turn)
            self._turn += 1

    def _is_over(self, index: int) -> bool:
        """Whether an item without an outcome will not get one."""
        submission = self._batch.submission
        if submission.refusal(index) is not None:
            return True
        if submission.final_error(index) is None:
            return False
        # A process that submits goes on asking, so another error may pass.
        return submission.is_damaged(index) or not self._batch.submits


AHEAD = 32
"""Maximum number of values read ahead and held until they are taken."""


async def outcome_of(batch: Batch, index: int) -> Outcome[Any]:
    """Wait for an item's end and return its outcome; read and rebuild its value.

    Raises:
        SubmitterLost: While this waited for its end it became known that nobody will run it; if
            that was known before, it is returned as `Failed`.
        BackendError: The store does not answer, or the batch was cleaned up.
    """
    submission = batch.submission
    if index in submission.values:
        return Succeeded(submission.values[index])
    if (refused := submission.refusal(index)) is not None:
        return Failed(refused)
    item = submission.item(index)
    if item is None or not item.state.final:
        if (error := submission.error(index)) is not None:
            return Failed(error)
        item = await batch.session.closed(submission, index)
    job_id = submission.identity.job_id(index)
    if item.outcome is None:
        why = f" ({batch.cause})" if batch.cause else ""
        return Cancelled(JobCancelled(f"{job_id} was cancelled{why}", job_id=job_id))
    try:
        outcome, body = await submission.outcome(index, item.attempt)
        if outcome.kind is wire.Kind.VALUE:
            return Succeeded(await submission.value(index, outcome, body))
    except (WireError, AuthError, JobFailed) as exc:
        # Forged or damaged, not to be read, or not to be rebuilt here.
        return Failed(exc)
    if outcome.reason == SUBMISSION:  # as the process that submitted it wrote down
        text = frames.unpack(body).fields.get("error", {})
        return Failed(SubmissionError(f"{job_id} was not submitted: {text.get('message', '')}"))
    end = submission.host_end(index, item.attempt)
    cause = end.message if end is not None else ""
    failure = await anyio.to_thread.run_sync(results.failure_of, outcome, body, job_id, cause)
    error = cast("Exception", failure)  # what is no Exception comes back as a JobFailed
    match outcome.kind:
        case wire.Kind.CANCELLED:
            return Cancelled(error)
        case wire.Kind.LOST:
            return Lost(error)
        case _:
            return Failed(error)


class Outcomes:
    """Pairs of index and outcome of *batch*, values included, as *consumer* is told of them.

    *deadline* is a time of the loop; `TimeoutError` is raised if it passes while
    no outcome is ready. What is read ahead is dropped by `aclose`.

    No async generator: at the loop's end `shutdown_asyncgens` closes all of them
    concurrently, and an inner one that is being closed already raises when the
    outer one closes it.
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


AT_ONCE = 500
"""Maximum number of items counted in one turn of the loop."""

READING_S = 1.0
"""How long the last value waits for the message of the first failure."""


def state_of(item: wire.Item | None, status: JobStatus, *, refused: bool) -> State:
    """Return the state of an item, from its objects and the platform's word."""
    match item.state if item is not None else wire.ItemState.OPEN:
        case wire.ItemState.SUCCEEDED:
            return State.SUCCEEDED
        case wire.ItemState.CANCELLED:
            return State.CANCELLED
        case wire.ItemState.FAILED:
            outcome = item.outcome if item is not None else None
            lost = outcome is not None and outcome.kind is wire.Kind.LOST
            return State.LOST if lost else State.FAILED
        case wire.ItemState.CANCELLING:
            return State.RUNNING  # until it has ended
        case wire.ItemState.OPEN:
            if refused:
                return State.FAILED
            return State.RUNNING if status is JobStatus.RUNNING else State.WAITING


def state_at(submission: Submission, index: int) -> State:
    """Return the state of an item, as far as this process has seen."""
    refused = submission.refusal(index) is not None
    return state_of(submission.item(index), submission.status(index), refused=refused)


class Watch:
    """A batch that is being counted, within ``async with``; ``changed`` is set by every change.

    With *looking*, a batch that another process submits is looked at now and
    then, as by everybody who waits for it. *clock* gives seconds; it is the
    loop's unless another is named.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        looking: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.changed = asyncio.Event()
        self._batch = batch
        self._clock = clock or asyncio.get_running_loop().time
        age = time.time() - batch.submission.identity.created
        self._tally = Tally(self._clock(), age=age)
        self._looking = looking and batch.coordinator is None
        self._message: tuple[int, str] | None = None  # of the first failure, and whose it is
        self._reading: asyncio.Task[None] | None = None
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        batch = self._batch
        async with self._open as opening:
            opening.callback(batch.submission.listen(self._note))
            batch.watchers.append(self.changed)
            opening.callback(batch.watchers.remove, self.changed)
            if self._looking:
                await opening.enter_async_context(Consumer(batch))
            for index in range(batch.known):
                self._note(index)
                if index % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
            self._tally.start(self._clock())
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._open.aclose()

    @property
    def over(self) -> bool:
        """Whether nothing more will change: it is finished, or nobody goes on with it."""
        return self._batch.finished or self._batch.submission.abandoned is not None

    def value(self) -> Progress:
        """How far it is now."""
        total = self._batch.total
        return self._tally.value(
            self._clock(),
            total=total if total is not None else self._batch.manifest["total"],
            known=self._batch.known,
            first_failure=self._first_failure(),
            stopped=self._batch.cause,
            step=steps.current() or one_line(self._batch.submission.held_up()),
        )

    async def last(self) -> Progress:
        """How far it came, with the message of the first failure if that can be had soon."""
        self._first_failure()
        if self._reading is not None and not self._reading.done():
            await asyncio.wait({self._reading}, timeout=READING_S)
        return self.value()

    def _note(self, index: int, item: wire.Item | None = None) -> None:
        submission = self._batch.submission
        item = submission.item(index)
        if item is None and index >= self._batch.known and submission.refusal(index) is None:
            return  # not an item: a word to everybody who waits
        state = state_at(submission, index)
        retries, after = (item.attempt - 1, item.after) if item is not None else (0, "")
        self._tally.put(index, state, retries, self._clock(), after)

    def _first_failure(self) -> str:
        index = self._tally.first_bad
        if index is None:
            return ""
        if self._message is not None and self._message[0] == index:
            return self._message[1]
        if self._reading is None or self._reading.done():
            reading = self._read(index)
            self._reading = asyncio.create_task(reading, name="first failure of a batch")
        return ""  # it is not known yet

    async def _read(self, index: int) -> None:
        try:
            words = f"item {index}{_given(self._batch, index)}: {await _words(self._batch, index)}"
        except Exception as exc:  # the numbers are right without the words
            words = f"item {index}: what it said cannot be read: {exc}"
        self._message = (index, one_line(words))
        self.changed.set()


def _given(batch: Batch, index: int) -> str:
    """Return the item's input, shortened, if this process still has it."""
    pump = batch.coordinator.pump if batch.coordinator is not None else None
    here = pump.input_of(index) if pump is not None else None
    return f" ({one_line(reprlib.repr(here[0]), 40)})" if here is not None else ""


async def _words(batch: Batch, index: int) -> str:
    """Return the message of the item's last attempt, without rebuilding its exception."""
    submission = batch.submission
    if (refusal := submission.refusal(index)) is not None:
        return f"{type(refusal).__name__}: {refusal}"
    item = submission.item(index)
    if item is None or item.outcome is None:
        return "failed"
    outcome, body = await submission.outcome(index, item.attempt)
    text = frames.unpack(body).fields.get("error", {})
    kind, message = str(text.get("qualname", "")), str(text.get("message", ""))
    if outcome.kind is wire.Kind.LOST:
        return f"lost ({outcome.reason}): {message}"
    return f"{kind.removeprefix('builtins.')}: {message}" if kind else message


INTERVAL_S = 0.1
BEAT_S = 1.0
"""Maximum interval between two computations of the line, whose rate changes with time."""

LAST_WORD_S = 1.0
"""How long the end of the waiting waits for the last line, on a terminal that may be stopped."""


async def progress(
    batch: Batch,
    *,
    interval: float = INTERVAL_S,
    looking: bool = True,
    clock: Callable[[], float] | None = None,
) -> AsyncGenerator[Progress, None]:
    """The numbers now, and again whenever one has changed, until the batch is over.

    Values are at least *interval* seconds apart; a slow reader misses those in
    between and gets the newest. The last value is that of the end.
    """
    loop = asyncio.get_running_loop()
    async with Watch(batch, looking=looking, clock=clock) as watch:
        while not watch.over:
            watch.changed.clear()
            value = watch.value()
            rest = loop.time() + interval
            yield value
            await watch.changed.wait()
            while not watch.over and (left := rest - loop.time()) > 0:
                watch.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await watch.changed.wait()
        yield await watch.last()


class _Showing:
    """One batch on the display; several waiters share it."""

    def __init__(self, batch: Batch, entry: Entry) -> None:
        self.waiting = 0
        self._batch = batch
        self._entry = entry
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._feed(), name=f"progress of {batch.group_id}")

    async def _feed(self) -> None:
        async with Watch(self._batch) as watch:
            while not (watch.over or self._ending.is_set()):
                watch.changed.clear()
                self._entry.value = watch.value()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._ending.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await watch.changed.wait()
            last_word = watch.over and self._entry.drawn
            self._entry.value = await watch.last() if last_word else watch.value()

    async def end(self, *, stays: bool) -> None:
        """Take it off the display, and wait until its last line is there, which *stays* or not."""
        from kinetic._progress.display import DISPLAY

        self._entry.stays = stays
        try:
            self._ending.set()
            self._batch.wake()
            await asyncio.wait({self._task}, timeout=2 * LAST_WORD_S)
        finally:
            self._task.cancel()
            drawn = asyncio.Event()
            DISPLAY.close(self._entry, _setting(drawn))
        if self._task.done() and not self._task.cancelled() and self._task.exception() is not None:
            logging.warning("progress was not counted: %s", self._task.exception())
        if self._entry.drawn:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await drawn.wait()


def _setting(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets *event* from any thread."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(event.set)

    return tell


_SHOWN: dict[Batch, _Showing] = {}


def shown(batch: Batch, wanted: bool | None = None) -> Shown:
    """Show how far *batch* is within ``async with``; *wanted* None: only if the sync face asks."""
    return Shown(batch, steps.WANTED.get() is not None if wanted is None else wanted)


def is_shown(batch: Batch) -> bool:
    """Return whether it is on the display now."""
    return batch in _SHOWN


class Shown:
    """A batch that is on the display while the block runs, if it is *wanted*.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has a value that means nothing.
    """

    def __init__(self, batch: Batch, wanted: bool) -> None:
        self._batch = batch
        self._wanted = wanted
        self._showing: _Showing | None = None

    async def __aenter__(self) -> None:
        self._showing = _put_up(self._batch) if self._wanted else None
        if self._showing is not None:
            self._showing.waiting += 1

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        showing = self._showing
        if showing is None:
            return
        showing.waiting -= 1
        if not showing.waiting:
            _SHOWN.pop(self._batch, None)
            # Whoever waits for a second at a time does not want a line for each.
            await showing.end(stays=not isinstance(error, TimeoutError))


def _put_up(batch: Batch) -> _Showing | None:
    if (there := _SHOWN.get(batch)) is not None:
        return there
    from kinetic._progress.display import DISPLAY

    entry = DISPLAY.open(title_of(batch))
    if entry is None:
        return None
    showing = _SHOWN[batch] = _Showing(batch, entry)
    return showing


def title_of(batch: Batch) -> str:
    """Return the name of the batch, or that of its function."""
    manifest = batch.manifest
    named = manifest.get("name") or manifest.get("record", {}).get("func_name")
    return str(named or batch.group_id)


class Iteration:
    """Gives a consumer, and the loop's time at which *timeout* is over, within ``async with``.

    Not made from an async generator, for the reason given at `Outcomes`.
    """

    def __init__(
        self,
        batch: Batch,
        wanted: bool | None,
        timeout: float | None,
        search_until: float | None,
        *,
        ordered: bool,
        windowed: bool,
    ) -> None:
        self._batch = batch
        self._timeout = timeout
        self._search_until = search_until
        self._ordered = ordered
        self._windowed = windowed
        self._display = shown(batch, wanted)
        self._consumer: Consumer | None = None

    async def __aenter__(self) -> tuple[Consumer, float | None]:
        now, timeout = asyncio.get_running_loop().time(), self._timeout
        await self._display.__aenter__()
        try:
            consumer = Consumer(
                self._batch,
                ordered=self._ordered,
                windowed=self._windowed,
                search_until=self._search_until,
            )
            self._consumer = await consumer.__aenter__()
        except BaseException:
            await self._display.__aexit__(None, None, None)
            raise
        return self._consumer, None if timeout is None else now + timeout

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._consumer is not None:
                await self._consumer.__aexit__(kind, error, trace)
        finally:
            await self._display.__aexit__(kind, error, trace)
        if self._timeout is None or not isinstance(error, TimeoutError):
            return
        if not isinstance(error, KineticError):
            raise ResultTimeout(
                f"batch {self._batch.group_id} has not ended after {self._timeout:g} s; it goes "
                "on, and its handle stays valid",
                job_id=self._batch.group_id,
            ) from None
