"""The handle of a batch, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import types
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from absl import logging

from kinetic._messages import handle_bundle, handle_repr, one_line
from kinetic._no_sequence import NoSequence
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import SUBMISSION
from kinetic._tasks import AsyncOnly, one_loop_stream, release, require_loop
from kinetic._tracebacks import REMOTE_TRACEBACK, own_frames_left_out
from kinetic.aio import _lazy
from kinetic.aio._engine.batch import Batch
from kinetic.aio._engine.coordinator import BatchCoordinator
from kinetic.aio._reading.iteration import Consumer
from kinetic.aio._reading.progress import ShownProgress, counts_of, follow_batch, progress
from kinetic.aio._submissions import manifest
from kinetic.aio.job import JobHandle, shown_status
from kinetic.aio.ports import Phase
from kinetic.errors import BackendError, BatchError, KineticError, NotFound, Pruned, SubmissionError
from kinetic.job_status import JobStatus
from kinetic.metric import Metric
from kinetic.options import check, check_indices
from kinetic.outcome import Cancelled, Completion, Failed, Lost, Outcome, Succeeded, X
from kinetic.prices import Estimate
from kinetic.progress import Progress
from kinetic.worker import Worker

if TYPE_CHECKING:
    from kinetic.aio._reading.report import Snapshots

__all__ = ["BatchHandle"]

T = TypeVar("T")


class BatchHandle(NoSequence, AsyncOnly, Generic[T, X]):
    """A batch: many jobs of one function.

    An ``async with`` block stops unfinished items when you leave it; `detach` lets them continue.
    Without the block kinetic stops nothing. A handle from `Client.attach_batch` or
    `Client.list_batches` only observes and stops nothing either, until you `resume` the batch.
    A batch whose inputs are stored continues without any process of yours, except on several hosts.

    Args:
        batch, attached, progress, poll_timeout: Set by the client; don't make a handle yourself.

    Attributes:
        group_id: The ID by which `Client.attach_batch` finds the batch from any process.
        name, tags: The name and tags that you gave it.
        created_at: When it was submitted: UTC, ISO 8601.

    Example::

        async with await client.run_async_map(train, [0.1, 0.2, 0.3]) as batch:
            async for index, rate, outcome in batch.outcomes():
                print(rate, outcome.unwrap())
    """

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(types.GenericAlias)  # takes one argument as well as two

    def __init__(
        self,
        batch: Batch,
        *,
        attached: bool = False,
        progress: bool | None = None,
        poll_timeout: float | None = None,
    ) -> None:
        self.group_id: str = batch.group_id
        self.name: str | None = batch.manifest["name"]
        self.tags: dict[str, str] = batch.manifest["tags"]
        self.created_at: str = batch.manifest["created_at"]
        self._batch = batch
        self._handles: weakref.WeakValueDictionary[int, JobHandle[T]]
        self._handles = weakref.WeakValueDictionary()  # a batch can have infinitely many items
        self._refusals: dict[int, Exception] = {}
        self._failed: list[int] | None = None  # set by the last `results`
        self._detached = attached
        self._progress = progress
        # After this time, a wait fails if another process has yet to submit items.
        self._search_until = None
        if poll_timeout is not None:
            self._search_until = asyncio.get_running_loop().time() + poll_timeout
        self._report: Path | None = None  # the path of the last report

    def _here(self) -> Batch:
        """Return the batch, after a check that the caller runs on the loop of its client."""
        remedy = f"to use it in this loop: `await kinetic.aio.attach_batch({self.group_id!r})`"
        require_loop(self._batch.session.loop, f"this handle of {self.group_id}", remedy)
        return self._batch

    def _existing(self) -> Batch:
        """Return the batch as `_here` does, unless it was cleaned up."""
        batch = self._here()
        batch.submission.refuse_removed()
        return batch

    def __repr__(self) -> str:
        return handle_repr("BatchHandle", self.facts())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle()

    def bundle(self) -> dict[str, str]:
        """Return what a notebook shows: the known facts, updated as items end; internal.

        Sends no request. Follows the batch only if called on its loop.
        """
        if self._progress is not False:
            follow_batch(self._batch)
        counts = counts_of(self._batch)
        return handle_bundle("BatchHandle", self.facts(), counts, self._report)

    def show(self, details: Callable[[], str]) -> ShownProgress:
        """Show the batch's line in an ``async with`` block, in notebooks with *details*; internal.

        Args:
            details: Return HTML to show below the line; any thread may call this function.
        """
        self._batch.details = details
        return ShownProgress(self._here(), self._progress)

    def facts(self) -> dict[str, object]:
        """Return what is known without a request; for display, not for programs."""
        batch = self._batch
        ended = str(batch.submission.ended) if batch.followed else "?"
        ended += f" of {batch.total}" if batch.total is not None else ""
        ended += "" if batch.followed else ", not read yet"
        known = {"group_id": self.group_id, "name": self.name}
        return {**known, "ended": ended, "created_at": self.created_at}

    async def __aenter__(self) -> Self:
        self._here()  # refuses another loop
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        batch = self._here()
        is_over = self._detached or batch.complete or batch.submission.removed
        if batch.coordinator is None or is_over:
            return
        level, cause = logging.INFO, "its block ended"
        interrupted = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        if error is not None:
            level = logging.WARNING
            cause = "interrupted" if interrupted else f"its block raised {type(error).__name__}"
        advice = f"To run them: kinetic batches retry {self.group_id}"
        if batch.is_resumable_sweep:  # its optimizer knows nothing of a retry
            advice = "To continue the sweep: run its program again with resume=True"
        message = "batch %s: %s; unfinished items are cancelled. %s"
        logging.log(level, message, self.group_id, cause, advice)
        submission = batch.submission
        try:
            await release(
                self._end(batch.coordinator, level),
                operation=f"cancelling batch {self.group_id}",
                progress=lambda: submission.ended,
                interrupted=interrupted,
            )
        finally:
            if not batch.finished:
                unfinished = batch.coordinator.state.unfinished()
                logging.warning(
                    "%d jobs of %s may still run. To end them: kinetic batches cancel %s",
                    sum(map(submission.has_begun, unfinished)),
                    self.group_id,
                    self.group_id,
                )

    async def _end(self, coordinator: BatchCoordinator, level: int) -> None:
        """Cancel the batch, unless another process has taken it over."""
        with contextlib.suppress(BackendError):
            await coordinator.is_replaced()
        if coordinator.lease.lost is not None:
            logging.warning("the batch continues: %s", coordinator.lease.lost)
            return
        await self.cancel()
        is_sweep = self._here().goal is not None  # it proposes its inputs itself
        if coordinator.pump.is_cut_off and not is_sweep:
            logging.log(
                level,
                "batch %s has taken %d inputs from their iterator, which may have more; to run the "
                "rest, submit it as a new batch",
                self.group_id,
                self.stored,
            )

    # --- items and their states ---

    @property
    def jobs(self) -> list[JobHandle[T] | None]:
        """The handles by index; None for an item whose input isn't stored yet, or was refused."""
        known = range(self._batch.known)
        return [self._handle(i) if self._batch.submitted(i) else None for i in known]

    async def job(self, index: int) -> JobHandle[T]:
        """Return the handle of one item.

        Args:
            index: The item's place in the inputs, from 0.

        Raises:
            ConfigurationError: *index* isn't an int.
            NotFound: The batch has no such item.
        """
        check(index=index)
        batch = self._existing()
        await batch.read_inputs()
        batch.refuse_unknown(index, batch.total)
        return self._handle(index)

    def _handle(self, index: int) -> JobHandle[T]:
        handle = self._handles.get(index)
        if handle is None:
            record = manifest.job_record(self._batch.manifest, self.group_id, index)
            handle = JobHandle[T].from_dict(record).bound(self._batch.job_ref(index))
            self._handles[index] = handle
        return handle

    async def statuses(self) -> list[tuple[int, JobStatus]]:
        """Return index and status of every submitted or refused item, read from the store now.

        ``NOT_FOUND`` means cancelled. ``FAILED`` means failed, lost, or refused at submission.
        `outcomes` distinguishes these.

        Raises:
            NotFound: The batch was cleaned up.
        """
        return await self._existing().statuses()

    async def status_counts(self) -> dict[str, int]:
        """Count the submitted and refused items by status, as in ``{"SUCCEEDED": 8}``."""
        counts: dict[str, int] = {}
        for _, status in await self.statuses():
            counts[status.value] = counts.get(status.value, 0) + 1
        return counts

    async def shown_statuses(self) -> list[tuple[int, str]]:
        """Return `statuses` as commands show them, with CANCELLED and PRUNED; internal."""
        is_pruned = self._batch.submission.is_pruned
        return [
            (index, shown_status(status, is_pruned=is_pruned(index)))
            for index, status in await self.statuses()
        ]

    @property
    def is_cut(self) -> bool:
        """Whether lazy inputs were ended early, as last read; internal."""
        return self._batch.is_cut

    @property
    def finished(self) -> bool:
        """Whether every item has its outcome, as far as this process has read the store.

        This sends no request. A handle from `Client.list_batches` reads the store only when you
        call another method, such as `status_counts`.
        """
        return self._batch.finished

    @property
    def submission_failures(self) -> dict[int, Exception]:
        """The exceptions of inputs that could not be submitted, by index.

        For a batch that another process submitted, call `results` first.
        """
        return {**self._refusals, **self._batch.submission.refusals}

    @property
    def unavailable_children(self) -> dict[int, str]:
        """The job IDs of items whose objects are damaged or forged, by index.

        The outcome of such an item is an error about the damage.
        """
        submission = self._batch.submission
        return {index: submission.identity.job_id(index) for index in submission.unreadable()}

    @property
    def stored(self) -> int:
        """How many inputs are stored, as far as this process has read the store.

        Pass the inputs after them to `resume`.
        """
        return self._batch.stored

    @property
    def sealed(self) -> bool:
        """Whether the batch takes no more inputs, as far as this process has read the store.

        If it was stopped, their end may not be stored.
        """
        submission = self._batch.submission
        return self._batch.inputs.total is not None or submission.requests.all_stopped

    async def input(self, index: int) -> X:
        """Return the input of one item: your own object, or one rebuilt from the store.

        Args:
            index: The item's place in the inputs, from 0.

        Raises:
            ConfigurationError: *index* isn't an int.
            NotFound: The batch has no such input, or `results` or `cleanup` has removed it.
            SubmissionError: The input could not be pickled.
            WireError: The input in the store differs from the one submitted.
            Exception: The input's classes raise it while it is rebuilt.
        """
        check(index=index)
        value: X = await self._existing().input_of(index)
        return value

    # --- waiting ---

    async def wait(self, *, timeout: float | None = None) -> None:
        """Wait until every item has its outcome.

        Args:
            timeout: Seconds to wait; after that, the batch continues. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            SubmitterLost: No process submits the rest of the batch; `resume` does.

        Cancelled: ends the wait; the batch continues.
        """
        async with (
            self._new_consumer(timeout, windowed=False) as consumer,
            asyncio.timeout_at(consumer.deadline),
        ):
            while await consumer.wait_until_ready():
                consumer.ready.clear()

    @one_loop_stream
    async def as_completed(
        self, *, poll_interval: float = 5.0, timeout: float | None = None
    ) -> AsyncGenerator[JobHandle[T], None]:
        """Yield each job's handle once, when the job ends.

        Inputs that could not be submitted have no job: see `submission_failures`, or use
        `outcomes`.

        Args:
            poll_interval: Accepted for compatibility; has no effect.
            timeout: Seconds for the whole loop; after that, the batch continues. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            SubmitterLost: No process submits the rest of the batch; `resume` does.

        Example::

            async for job in batch.as_completed():
                print(job.group_index, await job)
        """
        async with self._new_consumer(timeout) as consumer:
            while True:
                async with asyncio.timeout_at(consumer.deadline):
                    if not await consumer.wait_until_ready():
                        return
                while (index := consumer.take()) is not None:
                    if not self._is_refused(index):
                        yield self._handle(index)
                    await consumer.note_delivered()

    @one_loop_stream
    async def outcomes(
        self, *, ordered: bool = False, timeout: float | None = None
    ) -> AsyncGenerator[Completion[T, X], None]:
        """Yield each item once, when it ends, with its input and its outcome.

        Items that fail don't end the loop. A returned value gives `Succeeded`, even if it is an
        exception. An input that could not be submitted gives `Failed`. The input is None if it
        can't be rebuilt here. kinetic reads at most 32 values ahead. If several loops run at once,
        each gets every item.

        An ordered loop waits for the next item in order. Later items that have ended count as not
        read: with a ``window``, kinetic takes at most that many inputs beyond the awaited item.

        Args:
            ordered: Yield in the order of the inputs. Default: in the order in which items end.
            timeout: Seconds for the whole loop; after that, the batch continues. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            SubmitterLost: No process submits the rest of the batch; `resume` does.
            InputsUnfinished: All stored items ended, and the process with the other inputs ended.
            BackendError: The store does not answer; to get the other items, iterate again.

        Closed or cancelled: the batch continues.

        Example::

            async for index, rate, outcome in batch.outcomes():
                print(rate, outcome.unwrap() if outcome.ok else outcome.error)
        """
        async with self._new_consumer(timeout, ordered=ordered) as consumer:
            async for index, outcome in consumer:
                yield Completion(index, await self._read_input(index), outcome)

    async def _read_input(self, index: int) -> Any:
        """Return an item's input, or None if it can't be rebuilt here."""
        try:
            return await self._here().input_of(index)
        except SubmissionError:
            return None  # the input could not be pickled, as the outcome says
        except Exception as exc:
            if isinstance(exc, BackendError) and not isinstance(exc, NotFound):
                raise
            # If this process has collected the results, it has removed the input.
            if index not in self._here().submission.collected_outcomes:
                message = "can't rebuild input %d of %s in this process; its input is None: %s"
                logging.warning(message, index, self.group_id, exc)
            return None

    def _new_consumer(
        self,
        timeout: float | None,
        *,
        ordered: bool = False,
        windowed: bool = True,
        verified: dict[int, wire.Outcome] | None = None,
    ) -> Consumer:
        check(timeout=timeout)
        batch = self._existing()
        return Consumer(
            batch,
            display=ShownProgress(batch, self._progress),
            timeout=timeout,
            ordered=ordered,
            windowed=windowed,
            search_until=self._search_until,
            verified=verified,
        )

    @one_loop_stream
    async def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield how far the batch is: now, and after each change, until it ends.

        Yields at most ten values per second; a slow reader skips intermediate values.

        Raises:
            NotFound: The batch was cleaned up.
        """
        async with contextlib.aclosing(progress(self._existing())) as values:
            async for value in values:
                yield value

    @one_loop_stream
    async def metrics(self, *, timeout: float | None = None) -> AsyncGenerator[Metric, None]:
        """Yield what the jobs report by `kinetic.report`, until the batch has ended.

        Yields earlier reports first, so any process can read the metrics, until `results` or
        `cleanup` removes them. The reports of one attempt come in their order. Each attempt of an
        item begins a new curve; if `outcomes` has yielded an item, its last attempt counts. On a
        cluster, a report arrives one or two seconds after its call, and the first of a job within
        six.

        Args:
            timeout: Seconds for the whole loop; after that, the batch continues. None: no limit.

        Raises:
            ConfigurationError: *timeout* isn't a number of at least 0, or None.
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            SubmitterLost: No process submits the rest of the batch; `resume` does.
            InputsUnfinished: All stored items ended, and the process with the other inputs ended.
            NotFound: The batch was cleaned up, or a process has collected its results.
            BackendError: The store does not answer.

        Closed or cancelled: the batch continues.

        Example::

            async for index, attempt, step, loss in batch.metrics():
                print(index, step, loss)
        """
        check(timeout=timeout)
        reported = _lazy.metrics.of_batch(self._existing(), timeout)
        async with contextlib.aclosing(reported):
            async for metric in reported:
                yield metric

    @property
    def max_concurrent(self) -> int | None:
        """The most jobs that may be unfinished at once; None means no limit.

        `scale` changes it.
        """
        limit = self._batch.submission.requests.workers
        if limit is None:
            limit = self._batch.manifest["terms"].get("max_concurrent")
        return int(limit) if limit is not None else None

    def running_times(self, count: int) -> list[tuple[int, float, float | None]]:
        """Return index, seconds of running, and seconds of waiting before; internal.

        An item runs from its claim, or from when this process first saw it run. The list begins
        with the longest time.
        """
        submission = self._batch.submission
        found: list[tuple[int, float, float | None]] = []
        for index, seen in submission.observations.items():
            item = submission.item(index)
            attempt = submission.attempt(index, item.attempt if item is not None else 1)
            waited, ran = submission.times(index, attempt)
            if seen.phase is Phase.RUNNING and ran is not None:
                found.append((index, ran, waited))
        return sorted(found, key=lambda times: -times[1])[:count]

    async def report(
        self,
        path: str | os.PathLike[str],
        *,
        direction: Literal["minimize", "maximize"] | None = None,
        metric: str | None = None,
        compare: Sequence[BatchHandle[Any, Any]] = (),
    ) -> Path:
        """Write one self-contained HTML page about the batch as it is now.

        The page ranks the items by a numeric result and shows the best so far and the importance of
        each input. It also shows the curves that jobs report, results against inputs, a timeline,
        durations, retries, and failures. It reads the notes beside inputs and results; it unpickles
        nothing.

        Args:
            path: The file to write. kinetic replaces it in one step; its folder must exist.
            direction: Whether the lowest metric (``"minimize"``) or the highest is best. None: as
                the sweep searches; the lowest if the batch isn't a sweep.
            metric: The result that ranks the items, such as ``"loss"``. None: the metric of the
                sweep, or the numeric result with the most different values. A reader of the page
                can change the metric and the direction.
            compare: Other batches, which the page compares with this one. Their times count from
                the start of each.

        Returns:
            The absolute path of the file.

        Raises:
            ConfigurationError: The file can't be written, or no ended result has that metric.
            NotFound: The batch was cleaned up.
            WireError: The inputs in the store differ from those submitted.

        Cancelled: the old file stays, or the new one is whole.

        Example::

            await batch.report("rates.html", metric="accuracy", direction="maximize")
        """
        check(path=path)
        self._report = await self.snapshots(direction, metric, compare).write(path)
        return self._report

    def snapshots(
        self,
        direction: Literal["minimize", "maximize"] | None,
        metric: str | None,
        compare: Sequence[BatchHandle[Any, Any]],
    ) -> Snapshots:
        """Return what reads and writes the page of `report`; internal."""
        check(direction=direction or "minimize", metric=metric)
        batches = [handle._existing() for handle in (self, *compare)]
        return _lazy.report.Snapshots(batches, direction=direction, metric=metric)

    async def records(self) -> list[dict[str, Any]]:
        """Return a flat dict for each item, as the batch is now, in the order of the inputs.

        The fields ``index``, ``job_id``, ``state``, ``reason``, and ``attempts`` are always there.
        So are ``began_at`` and ``ended_at``, the times of the last attempt (``datetime`` in UTC, or
        None), and its ``seconds``. Each scalar of the input is a field such as ``input.rate``, and
        each scalar of the result one such as ``result.loss``. A result that is a scalar itself is
        ``result``. The states are waiting, running, succeeded, failed, cancelled, lost, and pruned.
        A pruned item has no result; ``pruned.step`` and ``pruned.value`` are its last report.

        kinetic unpickles nothing, and reads the same notes as `report`. So this also works after
        `results`, and in another process.

        Raises:
            NotFound: The batch was cleaned up.
            WireError: The inputs in the store differ from those submitted.

        Example::

            rows = await batch.records()
            print([row["input.rate"] for row in rows if row["state"] == "failed"])
        """
        return await _lazy.records.read(self._existing())

    async def to_dataframe(self) -> Any:
        """Return `records` as a ``pandas.DataFrame``, whose index is the items' ``index``.

        Raises:
            ConfigurationError: pandas isn't installed.
            NotFound: The batch was cleaned up.
            WireError: The inputs in the store differ from those submitted.

        Example::

            frame = await batch.to_dataframe()
            print(frame.sort_values("result.loss").head())
        """
        return await _lazy.records.to_dataframe(self._existing())

    async def best(
        self, metric: str | None = None, direction: Literal["minimize", "maximize"] | None = None
    ) -> dict[str, Any]:
        """Return the record of the best item so far, as in `records`; of equal ones, the first.

        Args:
            metric: The numeric result that ranks the items, such as ``"loss"``. None: the metric of
                the sweep, or the only one.
            direction: Whether the lowest metric (``"minimize"``) or the highest is best. None: as
                the sweep searches; the lowest if the batch isn't a sweep. An item whose metric is
                not a finite number never is the best.

        Raises:
            ConfigurationError: No ended result has that metric; or *metric* is None, and the
                results have several numbers, or none.
            NotFound: The batch was cleaned up.
            WireError: The inputs in the store differ from those submitted.

        Example::

            best = await batch.best("accuracy", "maximize")
            print(best["input.rate"], best["result.accuracy"])
        """
        check(direction=direction or "minimize", metric=metric)
        return await _lazy.records.best(self._existing(), metric, direction)

    async def submitted(self) -> None:
        """Wait until this process has submitted every input, or has stopped submitting."""
        await self._here().until_all_submitted()

    # --- collecting ---

    @overload
    async def results(
        self,
        *,
        timeout: float | None = None,
        ordered: bool = True,
        cleanup: bool = True,
        return_exceptions: Literal[False] = False,
    ) -> list[T]: ...

    @overload
    async def results(
        self,
        *,
        timeout: float | None = None,
        ordered: bool = True,
        cleanup: bool = True,
        return_exceptions: bool,
    ) -> list[Any]: ...

    @own_frames_left_out
    async def results(
        self,
        *,
        timeout: float | None = None,
        ordered: bool = True,
        cleanup: bool = True,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Wait for all items and return their values.

        Args:
            timeout: Seconds to wait; after that, the batch continues. None: no limit.
            ordered: Sort the values by input. False: in the order in which items ended.
            cleanup: If every item has its value, remove the jobs, inputs, outcomes, and logs. This
                handle keeps the values; other processes can't read them. A batch with failures
                keeps its objects and logs, for `retry_failed` and for you; on a cluster, it loses
                its pods, and so each log except its last MiB.
            return_exceptions: Put the exception into the list where an item has no value.
                `outcomes` distinguishes it from an exception that the function returned. A pruned
                item always has its `kinetic.Pruned` in the list.

        Raises:
            BatchError: Some items have no value, and *return_exceptions* is false.
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            SubmitterLost: No process submits the rest of the batch; `resume` does.
            InputsUnfinished: All stored items ended, and the process with the other inputs ended.
            NotFound: The batch was cleaned up, or another process has collected its results.
            Exception: The iterator of the inputs raised it; a note says how to continue.

        Cancelled: the batch continues. If its objects were already being removed, this handle still
            has the values: call `results` again.

        Example::

            losses = await batch.results()
        """
        check(ordered=ordered, cleanup=cleanup, return_exceptions=return_exceptions)
        verified: dict[int, wire.Outcome] | None = {} if cleanup else None
        async with self._new_consumer(timeout, verified=verified) as consumer:
            outcomes = {index: outcome async for index, outcome in consumer}
            total = self._here().total
            if total is not None and len(outcomes) < total:  # a short list would look like success
                raise KineticError(
                    f"batch {self.group_id} has ended, but only {len(outcomes)} of its {total} "
                    "items were read; call results() again"
                )
            without_value = {
                index: it
                for index, it in outcomes.items()
                if not isinstance(it, Succeeded | Pruned)
            }
            self._failed = [n for n, it in without_value.items() if isinstance(it, Failed | Lost)]
            if verified is not None:
                await self._remove_unneeded(outcomes, verified, consumer.deadline)
        refused = {n: it.error for n, it in without_value.items() if self._is_refused(n)}
        self._refusals.update(refused)
        if without_value and not return_exceptions:
            raise self._build_error(outcomes, without_value, refused)
        indices = sorted(outcomes) if ordered else outcomes
        return [_in_results(outcomes[index]) for index in indices]

    async def _remove_unneeded(
        self,
        outcomes: dict[int, Outcome[T]],
        verified: Mapping[int, wire.Outcome],
        deadline: float | None,
    ) -> None:
        """Remove the objects that the caller no longer needs; log a warning if some remain."""
        batch = self._here()
        ended = {n: it for n, it in outcomes.items() if isinstance(it, Succeeded | Pruned)}
        # Without the end of the inputs, a process may still add some, whose items have no value.
        is_complete = len(ended) == len(outcomes) == batch.total and batch.sealed
        try:
            async with asyncio.timeout_at(deadline):
                if not is_complete:
                    await batch.delete_jobs(keep_logs=True)
                elif not batch.items_removed:
                    await batch.collect(ended, await self._read_history(verified))
        except (BackendError, TimeoutError) as exc:
            cause = str(exc) or "the timeout has passed"
            message = "%s: some of its objects remain (%s); results() or cleanup() removes them"
            logging.warning(message, self.group_id, cause)

    async def _read_history(self, verified: Mapping[int, wire.Outcome]) -> Sequence[Any] | None:
        """Return what a report needs of each item; None if it can't be read."""
        try:
            return await _lazy.records.read_packed(self._here(), verified)
        except KineticError as exc:
            logging.warning("a report about %s will have no items: %s", self.group_id, exc)
            return None

    def _build_error(
        self,
        outcomes: dict[int, Outcome[T]],
        without_value: dict[int, Failed | Cancelled | Lost],
        refused: dict[int, Exception],
    ) -> BatchError:
        """Return the error for a batch in which the items *without_value* have no value."""
        failed = [index for index in sorted(without_value) if index not in refused]
        handles = [self._handle(index) for index in failed]
        in_order = sorted(outcomes.items())
        partial = [None if index in without_value else _in_results(it) for index, it in in_order]
        cancelled = {index for index in failed if isinstance(outcomes[index], Cancelled)}
        # Report the failure itself before the items that were cancelled because of it.
        first = min(without_value.keys() - cancelled or without_value)
        error = without_value[first].error
        message = one_line(f"item {first}: {type(error).__name__}: {error}".removesuffix(": "))
        failure = BatchError(
            self.group_id,
            handles,
            partial,
            refused,
            first_failure=message,
            cancelled=len(cancelled),
            cause=self._batch.cause,
        )
        for note in getattr(error, "__notes__", ()):
            if str(note).startswith(REMOTE_TRACEBACK):
                failure.add_note(note)
        return failure

    async def estimate(self, *, look: bool = True) -> Estimate:
        """Estimate what the batch has cost so far and will cost in total, from list prices.

        Args:
            look: Read the outcomes of unfinished items first. Default: yes.

        Raises:
            NotFound: The batch was cleaned up.
        """
        batch = self._existing()
        if look:
            await batch.read()
        return batch.estimate()

    async def reason(self) -> str:
        """Explain why the batch is in its state; empty if there is no explanation.

        The reason is why the batch was stopped, that no process submits it any more, its first
        failure, or what it waits for. kinetic unpickles nothing for this.
        """
        cause = self._here().cause
        if cause and cause != manifest.SETUP_FAILED:  # the failure itself says more
            return cause
        failed = await self.failures()
        if (error := await self._here().abandonment()) is not None:
            return str(error)
        if failed:
            return f"{failed[0].job_id}: {await failed[0].reason()}"
        if self.is_cut:
            return f"{self.stored} inputs were taken from their iterator, which may have more"
        if not cause and self._here().submission.requests.all_stopped:
            return "cancelled (cancel() was called)"
        # The news that a worker goes on may come after the end of its item.
        return "" if self.finished else self._here().submission.waiting_message()

    async def failures(self) -> list[JobHandle[T]]:
        """Return the handles of jobs that failed or were lost.

        After `results`, this also works for a batch that was cleaned up.

        Raises:
            NotFound: The batch was cleaned up before this handle collected `results`.
        """
        if self._failed is not None and self._here().submission.removed:
            return [self._handle(i) for i in sorted(self._failed) if i not in self._refusals]
        statuses = await self.statuses()
        failed = [index for index, status in statuses if status is JobStatus.FAILED]
        return [self._handle(index) for index in failed if not self._is_refused(index)]

    def _is_refused(self, index: int) -> bool:
        """Return whether the input could not be submitted, so that there is no job."""
        submission = self._batch.submission
        if index in submission.refusals:
            return True
        item = submission.item(index)
        outcome = item.outcome if item is not None else None
        return outcome is not None and outcome.reason == SUBMISSION

    # --- ending ---

    async def cancel(self) -> None:
        """Stop all unfinished items and wait until they end.

        Raises:
            BackendError: The store or the platform does not answer.

        Cancelled: the request stays, and running attempts end.
        """
        if not self._here().submission.removed:
            await self._here().cancel()

    async def prune(self, index: int, attempt: int | None = None) -> None:
        """Ask the running attempt of an item to end early, as pruned; return at once.

        In the job, the next `kinetic.report` raises `kinetic.Pruned`, and `kinetic.should_stop`
        returns True. A job looks for this while it reports: every two seconds on a cluster, and at
        once on this machine. If the function runs on after the grace period of 30 s, kinetic ends
        it. The item has then succeeded, isn't retried, and its outcome is a `kinetic.Pruned`.
        Nothing happens if the attempt has ended, or never reports.

        Args:
            index: The item's place in the inputs, from 0.
            attempt: Only this attempt, as in a `kinetic.Metric`. None: the present one.

        Raises:
            ConfigurationError: The batch wasn't submitted with ``prunable=True``, or an argument is
                wrong.
            NotFound: The batch has no such item, or was cleaned up.
            BackendError: The store does not answer.

        Cancelled: the request may be stored.

        Example::

            async for index, attempt, step, loss in batch.metrics():
                if step == 10 and loss > 1.0:
                    await batch.prune(index, attempt)
        """
        check(index=index, attempt=attempt)
        await self._existing().prune(index, attempt)

    async def detach(self, *, seal: bool = False) -> None:
        """Let the batch continue after the ``async with`` block.

        This process stores inputs as long as the client is open. After that, workers run what is
        stored. On several hosts, this process also starts the items, and `resume` continues the
        batch from any process.

        Args:
            seal: Take no more inputs; the batch has only those taken so far.

        Raises:
            NotFound: The batch was cleaned up.

        Cancelled: with *seal*, the batch takes no more inputs, but is not detached.
        """
        check(seal=seal)
        batch = self._existing()
        if seal:
            await batch.seal()
        self._detached = True

    # --- workers ---

    async def scale(self, workers: int) -> int:
        """Change how many workers the batch has, and so how many items run at once.

        Any process can do this, while the batch runs or before `retry_failed`. More workers start
        as soon as the platform has room. Of fewer ones, those that wait leave first; a worker that
        runs an item ends it, and then leaves. No item is interrupted. The number replaces
        ``max_concurrent``, also for items that are retried later.

        Args:
            workers: How many workers, at least 1. ``Client(max_concurrent=)`` limits how many
                more this client asks for; a warning then says how many the batch gets.

        Returns:
            How many of them can run at once: at most one for each item and for each place of this
            machine.

        Raises:
            ConfigurationError: *workers* isn't an int of at least 1, or the batch has no workers.
            NotFound: The batch was cleaned up.
            BackendError: The store or the platform does not answer.

        Cancelled: the number may be stored; then workers that start later follow it.

        Example::

            await batch.scale(8)
        """
        check(workers=workers)
        return await self._existing().scale(workers)

    async def workers(self) -> list[Worker]:
        """Return the workers that wait or run now, in the order of their numbers.

        Empty if the batch has ended, or if each of its attempts is a job of its own.

        Raises:
            NotFound: The batch was cleaned up.
            BackendError: The store or the platform does not answer.

        Example::

            for worker in await batch.workers():
                print(worker.number, worker.state, worker.item, worker.done)
        """
        return await self._existing().workers()

    # --- continuing ---

    async def retry_failed(self, indices: Iterable[int] | None = None) -> int:
        """Run again the items that failed, were lost, or were cancelled; any process can do this.

        Returns how many items run again. The batch's submitter starts them; without a submitter,
        this process resumes the batch. The time of a ``batch_timeout`` starts again.

        Args:
            indices: Run only the items with these indices. None: all of them.

        Raises:
            ConfigurationError: *indices* aren't ints, or this process lacks a variable that the
                batch captured.
            NotFound: The batch has no such item, or was cleaned up.
        """
        wanted = check_indices(indices)
        return await self._existing().retry_failed(wanted)

    async def resume(
        self,
        *,
        inputs: Iterable[Any] | AsyncIterable[Any] | None = None,
        seal: bool = False,
        force: bool = False,
    ) -> Self:
        """Submit the rest of a batch whose submitter has ended. Ended items don't run again.

        Except on several hosts, workers run the batch, and this starts some if there are none. If
        another process submits the batch and all its inputs are stored, this changes nothing.

        Args:
            inputs: The inputs after the `stored` ones, if the process with their iterator died.
            seal: Declare that there are no inputs after the stored ones.
            force: Take over now; don't wait up to 45 s to see whether the old submitter is alive.
                A living submitter stops submitting when it notices.

        Raises:
            Conflict: Another process submits the batch; but not if workers have all inputs.
            ConfigurationError: An argument is wrong; you gave inputs, but the batch has all, or was
                cancelled; or this process lacks a variable that the batch captured.
            NotFound: The batch was cleaned up.
            WireError: The batch has a format that this version can't read.
        """
        check(seal=seal, force=force)
        if inputs is not None:
            check(inputs=inputs)
        await self._existing().take_over(inputs=inputs, seal=seal, force=force)
        self._detached = False
        return self

    async def resume_alone(self, inputs: AsyncIterable[Any] | None = None) -> None:
        """Do as `resume`, but raise `Conflict` even if workers have all inputs; internal.

        If the batch is `sealed` then, it leaves *inputs* unread.
        """
        await self._existing().take_over(inputs=inputs, alone=True)
        self._detached = False
        if not self._here().submission.requests.all_stopped:
            logging.warning(
                "the sweep %r continues in %s: its trials run the function and the project's files "
                "of the first call. To run changed code, end this batch first, by `kinetic batches "
                "cancel`: then the rest of the trials are a new batch",
                self.name,
                self.group_id,
            )

    async def cleanup(self, *, k8s: bool = True, gcs: bool = True) -> None:
        """Stop and remove the batch; output directories stay.

        Once its objects are removed, the batch no longer exists: the handle's methods raise
        `NotFound`, except `cancel`, `submitted`, and `cleanup`, which do nothing.

        Args:
            k8s: Remove its jobs from the platform.
            gcs: Remove its objects from the store.

        Cancelled: a part may be removed; call `cleanup` again to remove the rest.
        """
        await self._here().remove(jobs=k8s, objects=gcs)

    async def let_run(self) -> int:
        """At the interpreter's exit, submit all inputs that the batch has taken; internal.

        Takes no more inputs from the iterator, and ignores the ``window``. Returns how many inputs
        are yet to be submitted.
        """
        batch = self._here()
        if not batch.submits or batch.coordinator is None:
            return 0
        batch.coordinator.window.lift()
        pump = batch.coordinator.pump
        was_sealed = pump.finished
        await batch.seal(cut=True)
        if pump.is_cut_off and not was_sealed:
            logging.warning(
                "batch %s: this process ends, so it takes no more inputs from their iterator; the "
                "batch has only the %d stored ones. To run the rest, submit it as a new batch; to "
                "take all, call wait() before the end",
                batch.group_id,
                batch.stored,
            )
        submitted_count = sum(batch.submitted(index) for index in range(batch.known))
        return batch.known - submitted_count - len(batch.submission.refusals)


def _in_results(outcome: Outcome[T]) -> T | Exception:
    return outcome.value if isinstance(outcome, Succeeded) else outcome.error
