"""The handle of a batch, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import types
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from absl import logging

from kinetic._messages import handle_bundle, handle_repr, one_line
from kinetic._runner.protocol.retry_budgets import SUBMISSION
from kinetic._tasks import release
from kinetic._tracebacks import own_frames_left_out
from kinetic.aio._engine import manifest, notebook
from kinetic.aio._engine.batches import Batch
from kinetic.aio._engine.iteration import Iteration, Outcomes, progress
from kinetic.aio.job import JobHandle
from kinetic.aio.ports import Phase
from kinetic.errors import (
    BackendError,
    BatchError,
    KineticError,
    NotFound,
    SubmissionError,
)
from kinetic.job_status import JobStatus
from kinetic.options import check, check_indices
from kinetic.outcome import Cancelled, Completion, Failed, Lost, Outcome, Succeeded, X
from kinetic.prices import Estimate
from kinetic.progress import Progress

__all__ = ["BatchHandle"]

T = TypeVar("T")


class BatchHandle(Generic[T, X]):
    """A batch: many jobs of one function.

    An ``async with`` block stops unfinished items when you leave it; `detach` lets them go on.
    Without the block kinetic stops nothing. A handle from `Client.attach_batch` or
    `Client.list_batches` only observes and stops nothing either, until you `resume` the batch.

    Args:
        batch, attached, progress, poll_timeout: Set by the client; make no handle yourself.

    Attributes:
        group_id: Names the batch; `Client.attach_batch` finds it by this from any process.
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
        self._handles = weakref.WeakValueDictionary()  # an endless batch has no end of them
        self._refusals: dict[int, Exception] = {}
        self._failed: list[int] | None = None  # as the last `results` has found
        self._detached = attached
        self._progress = progress
        # Until then, a wait includes items that another process has not submitted yet.
        self._search_until = None
        if poll_timeout is not None:
            self._search_until = asyncio.get_running_loop().time() + poll_timeout
        self._report: Path | None = None  # that was written last

    def __repr__(self) -> str:
        return handle_repr("BatchHandle", self.facts())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle()

    def bundle(self) -> dict[str, str]:
        """Return what a notebook shows: the facts known now, updated as items end.

        It sends no request, and follows the batch only if it is called on its loop; not for users.
        """
        if self._progress is not False:
            notebook.follow_batch(self._batch)
        counts = notebook.counts_of(self._batch)
        return handle_bundle("BatchHandle", self.facts(), counts, self._report)

    def facts(self) -> dict[str, object]:
        """Return what is known without a request; for display, not for programs."""
        batch = self._batch
        of = f" of {batch.total}" if batch.total is not None else ""
        ended = f"{batch.submission.ended}{of}" if batch.followed else f"?{of}, not looked yet"
        return {
            "group_id": self.group_id,
            "name": self.name,
            "ended": ended,
            "created_at": self.created_at,
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        batch = self._batch
        if (
            batch.coordinator is None
            or self._detached
            or batch.complete
            or batch.submission.removed
        ):
            return
        level, left = logging.INFO, "its block was left"
        interrupted = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        if error is not None:
            by = "interrupted" if interrupted else f"{left} by {type(error).__name__}"
            level, left = logging.WARNING, by
        words = (
            "batch %s: %s; unfinished items are cancelled. To run them: kinetic batches retry %s"
        )
        logging.log(level, words, self.group_id, left, self.group_id)
        submission = batch.submission
        try:
            await release(
                self._end(),
                what=f"cancelling batch {self.group_id}",
                progress=lambda: (submission.deleting, submission.ended),
                interrupted=interrupted,
            )
        finally:
            if not batch.finished:
                logging.warning(
                    "%d jobs of %s may still run. To end them: kinetic batches cancel %s",
                    submission.deleting or len(batch.coordinator.state.busy),
                    self.group_id,
                    self.group_id,
                )

    async def _end(self) -> None:
        """Cancel it, unless another process has taken it over meanwhile."""
        if (coordinator := self._batch.coordinator) is not None:
            with contextlib.suppress(BackendError):
                await coordinator.is_replaced()
            if coordinator.lease.lost is not None:
                logging.warning("it is left alone: %s", coordinator.lease.lost)
                return
        await self.cancel()

    # --- what is there ---

    @property
    def jobs(self) -> list[JobHandle[T] | None]:
        """The handles by index; None where nothing was submitted, or not yet."""
        known = range(self._batch.known)
        return [self._handle(i) if self._batch.submitted(i) else None for i in known]

    async def job(self, index: int) -> JobHandle[T]:
        """The handle of one item.

        Raises:
            ConfigurationError: *index* is no int.
            NotFound: The batch has no such item.
        """
        check(index=index)
        self._batch.submission.refuse_removed()
        await self._batch.refresh()
        total = self._batch.total
        if index < 0 or (total is not None and index >= total):
            raise NotFound(f"batch {self.group_id} has no item {index}; it has {total}")
        return self._handle(index)

    def _handle(self, index: int) -> JobHandle[T]:
        handle = self._handles.get(index)
        if handle is None:
            record = manifest.job_record(self._batch.manifest, self.group_id, index)
            handle = JobHandle[T].from_dict(record).bound(self._batch.following(index))
            self._handles[index] = handle
        return handle

    async def statuses(self) -> list[tuple[int, JobStatus]]:
        """Index and status of every submitted job, read from the store now.

        ``NOT_FOUND`` is a job that was cancelled, ``FAILED`` one that failed,
        was lost, or could not be submitted; `outcomes` tells these apart.

        Raises:
            NotFound: The batch was cleaned up.
        """
        self._batch.submission.refuse_removed()
        return await self._batch.statuses()

    async def status_counts(self) -> dict[str, int]:
        """How many submitted jobs are in each status; see `statuses`."""
        counts: dict[str, int] = {}
        for _, status in await self.statuses():
            counts[status.value] = counts.get(status.value, 0) + 1
        return counts

    @property
    def finished(self) -> bool:
        """Whether every item has its outcome, as far as this process has seen.

        A handle from `Client.list_batches` looks only when something else is asked of it.
        """
        return self._batch.finished

    @property
    def submission_failures(self) -> dict[int, Exception]:
        """Index → exception of inputs that could not be submitted at all.

        Of a batch that another process submitted, after `results`.
        """
        return {**self._refusals, **self._batch.refused}

    @property
    def unavailable_children(self) -> dict[int, str]:
        """Index → job id of items that nothing more can be found out about.

        What the store has of them is damaged, or forged: that is the error of their
        outcome. Of all others there is a handle, and an outcome sooner or later.
        """
        submission = self._batch.submission
        return {index: submission.identity.job_id(index) for index in submission.unreadable()}

    @property
    def stored(self) -> int:
        """How many inputs are stored, as far as this process has seen.

        `resume` with *inputs* goes on after them.
        """
        return self._batch.stored

    # --- waiting ---

    async def wait(self, *, timeout: float | None = None) -> None:
        """Wait until every item has its outcome.

        Raises:
            ResultTimeout: *timeout* seconds are over (a ``TimeoutError``); the batch goes on.
            SubmitterLost: Nobody submits the rest of it any more.
        """
        async with self._consuming(timeout, windowed=False) as (consumer, deadline):
            async with asyncio.timeout_at(deadline):
                while await consumer.more():
                    consumer.ready.clear()

    async def as_completed(
        self, *, poll_interval: float = 5.0, timeout: float | None = None
    ) -> AsyncGenerator[JobHandle[T], None]:
        """Each job once, as it ends: the last attempt of its item.

        Inputs that could not be submitted have no job: see
        `submission_failures`, or use `outcomes`.

        Args:
            poll_interval: Accepted for compatibility; nothing is polled.
            timeout: Seconds for everything.

        Raises:
            ResultTimeout: *timeout* seconds are over (a ``TimeoutError``); the batch goes on.
            SubmitterLost: Nobody submits the rest of it any more.
        """
        async with self._consuming(timeout) as (consumer, deadline):
            while True:
                async with asyncio.timeout_at(deadline):
                    if not await consumer.more():
                        return
                while (index := consumer.take()) is not None:
                    if not self._is_refused(index):
                        yield self._handle(index)
                    consumer.delivered()

    async def outcomes(
        self, *, ordered: bool = False, timeout: float | None = None
    ) -> AsyncGenerator[Completion[T, X], None]:
        """Each item once with its input and what it came to: value, error, cancelled or lost.

        They come as they end, or with *ordered* in the order of the inputs.
        What was returned is `Succeeded`, also when it is an exception; an
        input that could not be submitted is `Failed`. The input is the object
        itself as long as this process has it, else one read from the store;
        None where that cannot be rebuilt here. Nothing is collected:
        some 32 values are read ahead of you, and the rest stays in the store.
        Any number of iterations may go on at once, and each gets everything.

        In order, an item waits for all before it, however long the slowest
        takes. What has ended meanwhile costs a byte each, its value stays in
        the store; but it counts as not delivered, so with a ``window`` no
        more inputs are pulled than that many beyond the one waited for.

        Args:
            ordered: In the order of the inputs, instead of as they end.
            timeout: Seconds for everything.

        Raises:
            ResultTimeout: *timeout* seconds are over (a ``TimeoutError``); the batch goes on.
            SubmitterLost: Nobody submits the rest of it any more.
            InputsUnfinished: All that is stored has ended, and more was to come.
            BackendError: The store does not answer; iterate again for the rest.

        Closed or cancelled: the batch goes on; nothing else is left behind.
        """
        async with self._consuming(timeout, ordered=ordered) as (consumer, deadline):
            found = Outcomes(consumer, self._batch, deadline)
            async with contextlib.aclosing(found):
                async for index, outcome in found:
                    yield Completion(index, await self._input(index), outcome)

    async def _input(self, index: int) -> Any:
        try:
            return await self._batch.input_of(index)
        except SubmissionError:
            return None  # it never could be pickled: its outcome says so
        except Exception as exc:
            if isinstance(exc, BackendError) and not isinstance(exc, NotFound):
                raise
            if index not in self._batch.submission.values:  # else it was removed with its outcome
                what = "input %d of %s cannot be rebuilt in this process, None stands for it: %s"
                logging.warning(what, index, self.group_id, exc)
            return None

    def _consuming(
        self, timeout: float | None, *, ordered: bool = False, windowed: bool = True
    ) -> Iteration:
        check(timeout=timeout)
        self._batch.submission.refuse_removed()
        return Iteration(
            self._batch,
            self._progress,
            timeout,
            self._search_until,
            ordered=ordered,
            windowed=windowed,
        )

    async def progress(self) -> AsyncGenerator[Progress, None]:
        """How far it is: now, and again whenever something has changed, until the end.

        A slow reader misses what came in between, and gets the newest. The
        values are those of the live line, at most ten a second.

        Raises:
            NotFound: The batch was cleaned up.

        Closed or cancelled: nothing is left behind.
        """
        self._batch.submission.refuse_removed()
        values = progress(self._batch)
        async with contextlib.aclosing(values):
            async for value in values:
                yield value

    @property
    def max_concurrent(self) -> int | None:
        """How many of its jobs may be unfinished at once; None without a limit."""
        found = self._batch.manifest["terms"].get("max_concurrent")
        return int(found) if found is not None else None

    def longest_running(self, count: int) -> list[tuple[int, float]]:
        """Index and seconds of the *count* items that have run for longest, as far as is known.

        The seconds are since the platform made the item's process.
        """
        seen = self._batch.submission.observations()
        ages = {
            index: age
            for index, one in seen.items()
            if one.phase is Phase.RUNNING and (age := _age(one.created_at)) is not None
        }
        return sorted(ages.items(), key=lambda pair: -pair[1])[:count]

    async def report(
        self,
        path: str | os.PathLike[str],
        *,
        direction: Literal["minimize", "maximize"] = "minimize",
        metric: str | None = None,
    ) -> Path:
        """Write one self-contained HTML page about the batch as it is now.

        The page ranks the items by a numeric result and shows the best so far and the importance of
        each input. It also shows results against inputs, a timeline, durations, retries, and
        failures. It reads the notes beside inputs and results; it unpickles nothing.

        Args:
            path: The file to write. kinetic replaces it in one step; its folder must exist.
            direction: Whether the lowest metric (``"minimize"``, the default) or the highest is
                best.
            metric: The result that ranks the items, such as ``"loss"``. By default the page takes
                the numeric result with the most different values. A reader can change both.

        Returns:
            The absolute path of the file.

        Raises:
            ConfigurationError: The file cannot be written there (nothing was read), or no result
                that has ended is a number of that name.
            NotFound: The batch was cleaned up.
            WireError: The inputs in the store differ from those submitted.

        Cancelled: the old file stays, or the new one is whole.

        Example::

            await batch.report("rates.html", metric="accuracy", direction="maximize")
        """
        check(path=path, direction=direction, metric=metric)
        self._batch.submission.refuse_removed()
        from kinetic.aio._engine import report  # it takes a while, and few need it

        self._report = await report.write(self._batch, path, direction=direction, metric=metric)
        return self._report

    async def submitted(self) -> None:
        """Wait until every input was handed to the platform once, or never will be."""
        await self._batch.submitted_all()

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
        """Wait for all and return their values.

        An exception that a function returned is a value like any other.

        Args:
            timeout: Seconds for everything; the batch goes on after them.
            ordered: Input order; else the order in which the jobs ended.
            cleanup: Remove the jobs. When every item has its value, remove their inputs, outcomes
                and logs from the store as well: this handle keeps the values, another process
                can't read them any more. `statuses` and `failures` say the same as before; the
                job itself is NOT_FOUND to this process. A batch in which something failed keeps
                its objects, for `retry_failed`.
            return_exceptions: Put an exception where there is no value.
                `outcomes` tells it from one that was returned.

        Raises:
            BatchError: Some have no value, and *return_exceptions* is false.
            ResultTimeout: *timeout* is over (a ``TimeoutError``).
            SubmitterLost: Nobody submits the rest of it any more.
            InputsUnfinished: All that is stored has ended, and more was to come.
            NotFound: The batch was cleaned up, or another process has collected its results.
            Exception: The iterator of the inputs raised it, which ended the
                submitting; a note says how to go on.

        Cancelled: the batch goes on. If the removal has begun, this handle keeps the values:
            call it again.
        """
        check(ordered=ordered, cleanup=cleanup, return_exceptions=return_exceptions)
        async with self._consuming(timeout) as (consumer, deadline):
            async with contextlib.aclosing(Outcomes(consumer, self._batch, deadline)) as ended:
                found = {index: outcome async for index, outcome in ended}
            total = self._batch.total
            if total is not None and len(found) < total:  # a short list would look like success
                raise KineticError(
                    f"batch {self.group_id} has ended, and only {len(found)} of its {total} items "
                    "were told; ask for its results again"
                )
            self._failed = [i for i, one in found.items() if isinstance(one, Failed | Lost)]
            if cleanup:
                await self._tidy(found, deadline)
        refused = {i: one.error for i, one in found.items() if one.error and self._is_refused(i)}
        self._refusals.update(refused)
        if not return_exceptions and not all(outcome.ok for outcome in found.values()):
            raise self._error(found, refused)
        order = sorted(found) if ordered else found
        return [one.value if isinstance(one := found[i], Succeeded) else one.error for i in order]

    async def _tidy(self, found: dict[int, Outcome[T]], deadline: float | None) -> None:
        """Remove what is unneeded once the caller has *found*; log what cannot be removed."""
        values = {i: one.value for i, one in found.items() if isinstance(one, Succeeded)}
        whole = len(values) == len(found) == self._batch.total and self._batch.sealed
        try:
            async with asyncio.timeout_at(deadline):
                if not whole:
                    await self._batch.delete_jobs()
                elif not self._batch.items_removed:
                    await self._batch.collect(values, await self._history())
        except (BackendError, TimeoutError) as exc:
            why = str(exc) or "there was no time left"
            what = "%s: some of its objects are left: %s; results() or cleanup() removes them"
            logging.warning(what, self.group_id, why)

    async def _history(self) -> list[Any] | None:
        """Return what a report needs of each item; None if it can't be read."""
        from kinetic.aio._engine import history  # only results() and report() need it

        try:
            return history.packed(await history.read(self._batch))
        except KineticError as exc:
            logging.warning("%s: a report of it will lack its items: %s", self.group_id, exc)
            return None

    def _error(self, found: dict[int, Outcome[T]], refused: dict[int, Exception]) -> BatchError:
        failed = [i for i in sorted(found) if not found[i].ok and i not in refused]
        handles = [self._handle(index) for index in failed]
        partial = [
            one.value if isinstance(one := found[i], Succeeded) else None for i in sorted(found)
        ]
        cancelled = {i for i in failed if isinstance(found[i], Cancelled)}
        # Report the failure itself before the items that were cancelled because of it.
        bad = {i for i in found if not found[i].ok}
        first = min(bad - cancelled or bad, default=0)
        error = found[first].error
        words = one_line(f"item {first}: {type(error).__name__}: {error}")
        return BatchError(
            self.group_id,
            handles,
            partial,
            refused,
            first_failure=words,
            cancelled=len(cancelled),
            cause=self._batch.cause,
        )

    async def estimate(self, *, look: bool = True) -> Estimate:
        """Estimate what the batch has cost by list prices, and what it may cost in the end.

        With *look* it looks at what has not ended, as `statuses` does, and at nothing
        else; without, it tells what this handle has seen so far.

        Raises:
            NotFound: The batch was cleaned up.
        """
        self._batch.submission.refuse_removed()
        if look:
            await self._batch.look()
        return self._batch.estimate()

    async def reason(self) -> str:
        """Why it is as it is: why it was stopped, what failed first, or what it waits for.

        Empty when there is nothing to say. Nothing is unpickled for it.
        """
        if cause := self._batch.cause:
            return cause
        failed = await self.failures()
        if failed:
            return f"{failed[0].job_id}: {await failed[0].reason()}"
        submission = self._batch.submission
        error = submission.abandoned
        return str(error) if error is not None else submission.held_up()

    async def failures(self) -> list[JobHandle[T]]:
        """Return the handles of jobs that failed for good or were lost, from their outcomes.

        After `results`, this also works when the batch was cleaned up.

        Raises:
            NotFound: The batch was cleaned up before that.
        """
        if self._failed is not None and self._batch.submission.removed:
            return [self._handle(i) for i in sorted(self._failed) if i not in self._refusals]
        statuses = await self.statuses()
        failed = [index for index, status in statuses if status is JobStatus.FAILED]
        return [self._handle(index) for index in failed if not self._is_refused(index)]

    def _is_refused(self, index: int) -> bool:
        """Whether the input could not be submitted, so that there is no job."""
        submission = self._batch.submission
        if submission.refusal(index) is not None:
            return True
        item = submission.item(index)
        outcome = item.outcome if item is not None else None
        return outcome is not None and outcome.reason == SUBMISSION

    # --- ending ---

    async def cancel(self) -> None:
        """Stop everything that is unfinished and wait until it has ended.

        Of a batch that was cleaned up nothing is left to stop: it returns at once.

        Raises:
            BackendError: The stop cannot be stored, and the batch goes on; or what was
                stopped cannot be looked at.

        Cancelled: the request stays; running attempts end all the same.
        """
        if not self._batch.submission.removed:
            await self._batch.cancel()

    async def detach(self, *, seal: bool = False) -> None:
        """Leave the batch running when the block is left.

        This process goes on submitting it for as long as the client is open;
        after that, `resume` does from anywhere.

        Args:
            seal: Pull no more inputs: those pulled so far are all.

        Raises:
            NotFound: The batch was cleaned up.
        """
        check(seal=seal)
        self._batch.submission.refuse_removed()
        if seal:
            await self._batch.seal()
        self._detached = True

    # --- going on ---

    async def retry_failed(self, indices: Iterable[int] | None = None) -> int:
        """Run again what failed, was lost or was cancelled, and only that; from any process.

        With a ``batch_timeout``, who resumes it for that gives them the whole time again.

        Args:
            indices: Only those among them.

        Returns:
            How many items will run again. The batch's submitter starts
            them; without one, this process resumes the batch.

        Raises:
            ConfigurationError: *indices* are no ints, or this process lacks a variable that the
                batch captured.
            NotFound: The batch has no such item, or was cleaned up.
        """
        wanted = check_indices(indices)
        self._batch.submission.refuse_removed()
        return await self._batch.retry_failed(wanted)

    async def resume(
        self,
        *,
        inputs: Iterable[Any] | AsyncIterable[Any] | None = None,
        seal: bool = False,
        force: bool = False,
    ) -> Self:
        """Take over a batch whose submitter has ended, and submit the rest from this process.

        Nothing that has its outcome runs again. A submitter that may be alive
        is given 45 s to show it; one that died on this machine is known to.

        Args:
            inputs: The inputs after those that are `stored`, when those
                came from an iterator that died with its process.
            seal: There are no more inputs than those stored.
            force: Wait for no sign of life. Should the other one be alive, it
                stops submitting as soon as it notices.

        Raises:
            ConfigurationError: An argument is wrong, the batch has all its inputs, or this
                process lacks a variable that the batch captured.
            Conflict: Somebody submits it, and is alive.
            NotFound: The batch was cleaned up.
            WireError: It was written in a format that this version does not know.
        """
        check(seal=seal, force=force)
        if inputs is not None:
            check(inputs=inputs)
        self._batch.submission.refuse_removed()
        await self._batch.take_over(inputs=inputs, seal=seal, force=force)
        self._detached = False
        return self

    async def cleanup(self, *, k8s: bool = True, gcs: bool = True) -> None:
        """Stop and remove all jobs (*k8s*) and the batch's objects (*gcs*); outputs stay.

        Without its objects there is no batch: whatever is asked of the handle
        then raises `NotFound`, but for `cancel`, `submitted` and this, which do nothing.

        Cancelled: run it again; it goes on where it was.
        """
        await self._batch.remove(jobs=k8s, objects=gcs)

    async def let_run(self) -> int:
        """Before the interpreter ends, the sync face wants all to be submitted; not for users.

        No more inputs are pulled, and nobody is waited for to take what has
        ended. Returns how many inputs have yet to be handed to the platform.
        """
        batch = self._batch
        if not batch.submits or batch.coordinator is None:
            return 0
        batch.coordinator.window.lift()
        pump = batch.coordinator.pump
        cut = pump is not None and not (pump.known_length or pump.finished)
        await batch.seal()
        if cut and batch.stored:
            logging.warning(
                "batch %s: this process ends before the iterator of its inputs did, and takes no "
                "more from it: the %d that are stored are all; wait() at the end takes the rest",
                batch.group_id,
                batch.stored,
            )
        asked = sum(batch.submitted(index) for index in range(batch.known))
        return batch.known - asked - len(batch.refused)


def _age(created_at: str) -> float | None:
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(created_at)).total_seconds())
    except ValueError:
        return None
