"""Count the items of a batch by state, for `progress`, the display, and notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import reprlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, cast

from absl import logging

from kinetic._messages import one_line
from kinetic._progress import steps
from kinetic._progress.entry import in_notebook
from kinetic._progress.tally import State, Tally
from kinetic._runner.protocol import frames, wire
from kinetic._tasks import running_loop, until_set
from kinetic.aio._reading.iteration import Consumer
from kinetic.errors import KineticError
from kinetic.job_status import JobStatus
from kinetic.progress import Progress

if TYPE_CHECKING:
    from kinetic._progress.entry import Entry
    from kinetic.aio._engine.batch import Batch
    from kinetic.aio._engine.session import JobRef, Session
    from kinetic.aio._submissions.submission import Submission

ITEMS_PER_TURN = 500
"""Maximum number of items counted in one turn of the loop."""

MAX_INPUT = 50
"""Maximum number of characters of the input that the line of the first failure has."""

READING_S = 1.0
"""How long `ItemCounter.last` waits for the first failure's message, in seconds."""


def state_of(item: wire.Item | None, status: JobStatus, *, refused: bool) -> State:
    """Return an item's state, from its objects, its status, and whether its submission failed."""
    outcome = item.outcome if item is not None else None
    match item.state if item is not None else wire.ItemState.OPEN:
        case wire.ItemState.SUCCEEDED:
            pruned = outcome is not None and outcome.reason == wire.PRUNED
            return State.PRUNED if pruned else State.SUCCEEDED
        case wire.ItemState.CANCELLED:
            return State.CANCELLED
        case wire.ItemState.FAILED:
            lost = outcome is not None and outcome.kind is wire.Kind.LOST
            return State.LOST if lost else State.FAILED
        case wire.ItemState.CANCELLING:
            return State.RUNNING  # the job runs until it has ended
        case wire.ItemState.OPEN:
            if refused:
                return State.FAILED
            return State.RUNNING if status is JobStatus.RUNNING else State.WAITING


def state_at(submission: Submission, index: int) -> State:
    """Return the state of an item, as far as this process has seen."""
    refused = index in submission.refusals
    return state_of(submission.item(index), submission.status(index), refused=refused)


class ItemCounter:
    """Count the items of a batch by state, within ``async with``; every change sets ``changed``.

    With *reads_batch*, kinetic reads the batch at intervals while another process submits it.
    """

    def __init__(self, batch: Batch, *, reads_batch: bool = False) -> None:
        self.changed = asyncio.Event()
        self._batch = batch
        self._clock = asyncio.get_running_loop().time
        age = time.time() - batch.submission.identity.created
        self._tally = Tally(self._clock(), age=age)
        self._reads_batch = reads_batch and batch.coordinator is None
        self._ended_before = False  # then its age isn't how long it took
        self._message: tuple[int, str] | None = None  # the first failure: its item and its message
        self._read_task: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        batch = self._batch
        async with self._stack as stack:
            stack.callback(batch.submission.listen(self._note))
            batch.watchers.append(self.changed)
            stack.callback(batch.watchers.remove, self.changed)
            if self._reads_batch:
                await stack.enter_async_context(Consumer(batch))
            for index in range(batch.known):
                self._note(index)
                if index % ITEMS_PER_TURN == ITEMS_PER_TURN - 1:
                    await asyncio.sleep(0)
            self._ended_before = batch.finished
            self._tally.start(self._clock())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._read_task is not None:
            self._read_task.cancel()
        await self._stack.aclose()

    @property
    def over(self) -> bool:
        """Whether nothing more will change: the batch is finished or abandoned."""
        return self._batch.finished or self._batch.submission.abandoned is not None

    def value(self) -> Progress:
        """Return how far the batch is; ``step`` is a step of this process, or why an item waits."""
        total, standing = self._batch.total, self._batch.standing
        total = total if total is not None else self._batch.manifest["total"]
        counts = self._tally.value(self._clock(), total=total, known=self._batch.known)
        return dataclasses.replace(
            counts,
            elapsed=0.0 if self._ended_before else counts.elapsed,
            best=standing.best if standing is not None else None,
            rungs=standing.rungs() if standing is not None else (),
            first_failure=self._first_failure(),
            stopped=self._batch.cause,
            step=steps.current_line() or one_line(self._batch.submission.waiting_message()),
        )

    async def last(self) -> Progress:
        """Return how far the batch came, with the first failure's message if it arrives in time."""
        self._first_failure()
        if self._read_task is not None and not self._read_task.done():
            await asyncio.wait({self._read_task}, timeout=READING_S)
        return self.value()

    def _note(self, index: int, item: wire.Item | None = None) -> None:
        submission = self._batch.submission
        item = submission.item(index)
        if item is None and index >= self._batch.known and index not in submission.refusals:
            return  # no item has this index: `Submission.abandon` always reports index 0
        state = state_at(submission, index)
        retries, after = 0, ""
        if item is not None:
            # A cancelled item's number is that of the attempt after the last one that began.
            cancelled = item.state is wire.ItemState.CANCELLED
            retries, after = max(0, item.attempt - 1 - cancelled), item.after
        self._tally.put(index, state, retries, self._clock(), after)

    def _first_failure(self) -> str:
        """Return the first failure's message; "" if no item failed, or until a task has read it."""
        index = self._tally.first_bad
        if index is None:
            return ""
        if self._message is not None and self._message[0] == index:
            return self._message[1]
        if self._read_task is None or self._read_task.done():
            reading = self._read(index)
            self._read_task = asyncio.create_task(reading, name="first failure of a batch")
        return ""  # the message isn't known yet

    async def _read(self, index: int) -> None:
        try:
            held = await self._batch.own_input_of(index)
            label = f"item {index}" + (f" ({_shorten_input(held[0])})" if held is not None else "")
            message = f"{label}: {await _failure_message(self._batch, index)}"
        except Exception as exc:  # the counts don't need this message
            message = f"item {index}: its error can't be read: {exc}"
        self._message = (index, one_line(message))
        self.changed.set()


def _shorten_input(value: Any) -> str:
    """Format an input in `MAX_INPUT` characters; a dict as its first arguments, in their order."""
    if not isinstance(value, dict):
        return one_line(reprlib.repr(value), MAX_INPUT)
    arguments = cast("Mapping[Any, Any]", value)
    parts = [f"{name}={reprlib.repr(item)}" for name, item in islice(arguments.items(), 6)]
    is_cut = len(parts) < len(arguments)
    while len(", ".join(parts)) > MAX_INPUT and len(parts) > 1:
        parts.pop()
        is_cut = True
    return one_line(", ".join(parts), MAX_INPUT) + (", …" if is_cut else "")


async def _failure_message(batch: Batch, index: int) -> str:
    """Return the message of the item's last attempt, without rebuilding its exception."""
    submission = batch.submission
    if (refusal := submission.refusals.get(index)) is not None:
        return f"{type(refusal).__name__}: {refusal}"
    item = submission.item(index)
    if item is None or item.outcome is None:
        return "failed"
    outcome, body = await submission.outcome(index, item.attempt)
    error_fields = frames.unpack(body).fields.get("error", {})
    kind, message = str(error_fields.get("qualname", "")), str(error_fields.get("message", ""))
    if outcome.kind is wire.Kind.LOST:
        return f"lost ({outcome.reason}): {message}"
    return f"{kind.removeprefix('builtins.')}: {message}" if kind else message


INTERVAL_S = 0.1
"""Minimum seconds between two values of `progress`, and between two updates of the line."""

REDRAW_S = 1.0
"""Maximum seconds between two updates of the line, which shows a rate that changes with time."""

LAST_LINE_S = 1.0
"""Maximum seconds to wait until the last line is drawn; a stopped terminal never draws it."""


async def progress(batch: Batch, *, interval: float = INTERVAL_S) -> AsyncGenerator[Progress, None]:
    """Yield how far the batch is, now and after each change, until the batch is over.

    Values are at least *interval* seconds apart; a slow reader skips intermediate values. The last
    value is the final one.
    """
    loop = asyncio.get_running_loop()
    async with ItemCounter(batch, reads_batch=True) as counter:
        while not counter.over:
            counter.changed.clear()
            value = counter.value()
            next_time = loop.time() + interval
            yield value
            await counter.changed.wait()
            while not counter.over and (left := next_time - loop.time()) > 0:
                counter.changed.clear()
                await until_set(counter.changed, left)
        yield await counter.last()


_SHOWN: set[Batch] = set()


def is_shown(batch: Batch) -> bool:
    """Return whether the display shows *batch* now."""
    return batch in _SHOWN


class ShownProgress:
    """Show how far a batch is while the block runs, unless another block shows it.

    If *wanted* is None, only calls of the sync API show it.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has an unknown value.
    """

    def __init__(self, batch: Batch, wanted: bool | None = None) -> None:
        self._batch = batch
        self._wanted = steps.SHOW_FACTORY.get() is not None if wanted is None else wanted
        self._ending = asyncio.Event()
        self._entry: Entry | None = None

    async def __aenter__(self) -> None:
        if not self._wanted or is_shown(self._batch):
            return
        from kinetic._progress.display import DISPLAY

        manifest = self._batch.manifest
        title = manifest.get("name") or manifest.get("record", {}).get("func_name")
        title = str(title or self._batch.group_id)
        self._entry = entry = DISPLAY.open(title, self._batch.details)
        if entry is not None:
            _SHOWN.add(self._batch)
            name = f"progress of {self._batch.group_id}"
            self._task = asyncio.create_task(self._update_entry(entry), name=name)

    async def __aexit__(self, *exc_info: object) -> None:
        _, error, _ = exc_info
        if self._entry is not None:
            _SHOWN.discard(self._batch)
            # A caller that waits one second at a time doesn't want a line for each wait.
            await self._end(self._entry, stays=not isinstance(error, TimeoutError))

    async def _update_entry(self, entry: Entry) -> None:
        """Keep the displayed value up to date, until the batch is over or `_end` runs."""
        async with ItemCounter(self._batch) as counter:
            while not (counter.over or self._ending.is_set()):
                counter.changed.clear()
                entry.value = counter.value()
                await until_set(self._ending, INTERVAL_S)
                await until_set(counter.changed, REDRAW_S)
            needs_last = counter.over and entry.drawn
            entry.value = await counter.last() if needs_last else counter.value()

    async def _end(self, entry: Entry, *, stays: bool) -> None:
        """Close the entry, and wait until its last line is drawn; with *stays*, the line stays."""
        from kinetic._progress.display import DISPLAY

        entry.stays = stays
        try:
            self._ending.set()
            self._batch.wake()
            await asyncio.wait({self._task}, timeout=2 * LAST_LINE_S)
        finally:
            self._task.cancel()
            loop, drawn = asyncio.get_running_loop(), asyncio.Event()

            def set_drawn() -> None:  # the display calls this on its own thread
                with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
                    loop.call_soon_threadsafe(drawn.set)

            DISPLAY.close(entry, set_drawn)
        if self._task.done() and not self._task.cancelled() and self._task.exception() is not None:
            logging.warning("can't count the progress of the batch: %s", self._task.exception())
        if entry.drawn:
            await until_set(drawn, LAST_LINE_S)


# --- in a notebook ---

# A notebook calls these functions, on any thread, when a cell displays a handle. They don't wait or
# send a request: a task of the client follows the batch or the job.


def counts_of(batch: Batch) -> dict[str, int]:
    """Return how many items are in each state; empty if this process hasn't read the batch yet."""
    if not batch.followed:
        return {}
    states = Counter(state_at(batch.submission, index) for index in range(batch.known))
    return {state.name.lower(): states[state] for state in State if states[state]}


def follow_batch(batch: Batch) -> None:
    """In the output of the running cell, show how far *batch* is until the batch is over."""
    if not (batch.finished or is_shown(batch)):
        _spawn_in_notebook(batch.session, lambda: _show_batch(batch), batch.group_id)


def follow_job(job: JobRef) -> None:
    """In the output of the running cell, show the state of a job until the job has ended."""
    item = job.submission.item(job.index)
    if item is None or not item.state.final:
        name = job.submission.identity.job_id(job.index)
        _spawn_in_notebook(job.session, lambda: _show_job(job, name), name)


def _spawn_in_notebook(
    session: Session, work: Callable[[], Coroutine[Any, Any, None]], name: str
) -> None:
    """Start *work* if this is a notebook, on the loop of *session*, and *session* is open."""
    with contextlib.suppress(KineticError):  # no loop runs here, or the client is closed
        if in_notebook() and running_loop() is session.loop:
            session.spawn(work(), name=f"display of {name}")


async def _show_batch(batch: Batch) -> None:
    async with ShownProgress(batch, wanted=True):
        if is_shown(batch):  # it isn't shown if progress is switched off
            async with contextlib.aclosing(progress(batch, interval=1.0)) as values:
                async for _ in values:
                    pass


async def _show_job(job: JobRef, name: str) -> None:
    """Show the job as a batch of one item until it has ended."""
    from kinetic._progress.display import DISPLAY

    if (entry := DISPLAY.open(name)) is None:
        return
    loop, submission, index = job.session.loop, job.submission, job.index
    tally = Tally(loop.time())

    def update(changed_index: int, new_item: wire.Item | None) -> None:
        if changed_index == index:
            item, now = submission.item(index), loop.time()
            retries = item.attempt - 1 if item is not None else 0
            tally.put(0, state_at(submission, index), retries, now)
            entry.value = tally.value(now, total=1, known=1)

    stop_listening = submission.listen(update)
    try:
        update(index, None)
        with contextlib.suppress(KineticError):  # `result()` raises the error
            await job.session.until_final(submission, index)
        update(index, None)
    finally:
        stop_listening()
        DISPLAY.close(entry, lambda: None)
