"""The handle of one job, for asyncio."""

from __future__ import annotations

import asyncio
import contextvars
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import anyio
import anyio.to_thread
from absl import logging

from kinetic._messages import handle_bundle, handle_repr
from kinetic._replacing import replacing
from kinetic._runner.protocol import wire
from kinetic._tasks import in_thread, one_loop_stream, release, require_loop
from kinetic._tracebacks import own_frames_left_out
from kinetic.accelerators import parse
from kinetic.aio import _job_log, _lazy
from kinetic.aio._log_printer import LogPrinter
from kinetic.aio._submissions import results
from kinetic.aio._submissions.meter import Meter
from kinetic.aio.ports import Observation
from kinetic.errors import (
    AuthError,
    BackendError,
    ConfigurationError,
    JobCancelled,
    JobError,
    NoLog,
    NotFound,
    ResultTimeout,
)
from kinetic.job_record import JobRecord
from kinetic.job_status import JobStatus
from kinetic.options import check
from kinetic.prices import HOUR_S, Estimate, Price

if TYPE_CHECKING:
    from kinetic.aio._debugging.attaching import DebuggerAddress
    from kinetic.aio._engine.session import JobRef
    from kinetic.aio._lazy import Follow
    from kinetic.metric import JobMetric

__all__ = ["JobHandle"]

T = TypeVar("T")
_UNSET = object()

NOT_ON_PLATFORM = (
    "the platform doesn't have the job: its submission isn't complete, or the job was deleted. One "
    "minute after its submission, it was deleted"
)

LEAVING_S = 5
"""How many seconds a job's processes may take to end after its outcome is stored."""

DRAIN_S = 1.0
"""How long the log of an ended job may stay silent while its process still runs, in seconds."""

SILENCE_S = 10.0
"""How long to wait for the next line of an ended job's log before giving up, in seconds."""


def shown_status(status: JobStatus, *, is_pruned: bool) -> str:
    """Return a status as commands show it; `JobHandle.status` has fewer names, for programs."""
    if status is JobStatus.NOT_FOUND:
        return "CANCELLED"
    return "PRUNED" if is_pruned else status.value


@dataclass(eq=False, repr=False)
class JobHandle(JobRecord, Generic[T]):
    """A submitted job: wait for it, watch it, cancel it, clean it up.

    A handle doesn't own its job: if you cancel a task that waits for it, the job keeps running.
    Handles of the same job are equal, and you can pickle them. You get one from `Client.submit`,
    `Client.attach`, or `Client.list_jobs`.

    Args:
        job_id: The ID by which `attach` finds the job from any process.
        backend: ``gke``, ``pathways`` or ``local``.
        project, cluster_name, zone, namespace, bucket_name, k8s_name: Where the job and its
            objects are.
        image_uri: The job's container image; empty for a job on this machine.
        accelerator: The hardware that it runs on, such as ``tpu-v6e-8``.
        func_name, display_name: The function's name, and the name to show.
        created_at: When it was submitted: UTC, ISO 8601.
        group_id, group_kind, group_index: The job's batch, and the job's index in it.
        debug: Whether the job waits for a debugger.
        price: The list price of its accelerator when it was submitted.

    Example::

        job = await client.submit(train, 0.1)
        print(job.job_id, await job.status())
        loss = await job
    """

    def __post_init__(self) -> None:
        self._find: Follow | None = None
        self._ref: JobRef | None = None
        self._is_followed = False
        self._value: Any = _UNSET
        self._read_lock = asyncio.Lock()
        self._cleaned = False
        self.log_unprinted = False
        """Whether the job has ended and its log isn't printed to the end; internal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.job_id == self.job_id

    def __hash__(self) -> int:
        return hash(self.job_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        return handle_repr("JobHandle", self.facts())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle()

    def bundle(self) -> dict[str, str]:
        """Return what a notebook shows: the known facts, updated when the job ends; internal.

        Sends no request. Follows the job only if called on its loop.
        """
        if self._ref is not None and self._is_followed and not self._cleaned:
            _lazy.progress.follow_job(self._ref)
        return handle_bundle("JobHandle", self.facts())

    def facts(self) -> dict[str, object]:
        """Return what is known without a request, such as the last status; for display."""
        ref = self._ref
        status = ref.submission.status(ref.index) if ref is not None else None
        if self._cleaned and not (status is not None and status.terminal):
            status = JobStatus.NOT_FOUND
        return {
            "job_id": self.job_id,
            "function": self.func_name,
            "status": status.value if status is not None else "",
            "created_at": self.created_at,
        }

    def began_at(self) -> str:
        """Return when the last known attempt began, or when the job was submitted; internal."""
        if (ref := self._ref) is not None:
            seen, item = ref.submission.observations.get(ref.index), ref.submission.item(ref.index)
            if seen is not None and seen.created_at:
                return seen.created_at
            # The platform forgets an ended job.
            if item and item.outcome and item.outcome.started is not None:
                return datetime.fromtimestamp(item.outcome.started, UTC).isoformat()
        return self.created_at

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def bound(self, at: JobRef | Follow) -> Self:
        """Bind the handle to the session of its job, or to a function that finds it; internal."""
        if callable(at):
            self._find = at
        else:
            self._ref, self._is_followed = at, True
        return self

    def _known(self) -> JobRef | None:
        """Return the reference, after a check that the caller runs on the loop of its client."""
        if self._ref is not None:
            remedy = f"to use it in this loop: `await kinetic.aio.attach({self.job_id!r})`"
            require_loop(self._ref.session.loop, f"this handle of {self.job_id}", remedy)
        return self._ref

    async def _follow(self) -> JobRef:
        """Find the job's platform and follow the job from now on.

        Raises:
            NotFound: There is no such job.
        """
        if self._known() is None or not self._is_followed:
            self._ref = await (self._find or _lazy.follow)(self, whole=True)
            self._is_followed = True
        assert self._ref is not None
        self._ref.submission.refuse_removed()
        return self._ref

    async def _locate(self) -> JobRef:
        """Find the job, to read it once: unlike `_follow`, don't read the rest of an item's batch.

        Raises:
            NotFound: There is no such job.
        """
        if self._known() is None and self.group_id is not None:
            ref = await (self._find or _lazy.follow)(self, whole=False)
            self._ref = self._ref or ref  # another task may have followed the job meanwhile
        if self._ref is None:
            return await self._follow()
        self._ref.submission.refuse_removed()
        return self._ref

    async def status(self) -> JobStatus:
        """Read the current status from the store and the platform.

        ``NOT_FOUND`` means that the job was cancelled or cleaned up.
        """
        if self._cleaned:
            return JobStatus.NOT_FOUND
        try:
            ref = await self._locate()
        except NotFound:
            return JobStatus.NOT_FOUND
        item = await ref.submission.read_item(ref.index)
        if ref.submission.cleaned if item.state.final else not await self._exists(ref):
            return JobStatus.NOT_FOUND
        if not item.state.final:
            try:
                await ref.reconcile()
            except NotFound:  # another process has just removed the job
                return JobStatus.NOT_FOUND
        return ref.submission.status(ref.index)

    async def shown_status(self) -> str:
        """Return the `status` as commands show it, with CANCELLED and PRUNED; internal."""
        status = await self.status()
        is_pruned = self._ref is not None and self._ref.submission.is_pruned(self._ref.index)
        return shown_status(status, is_pruned=is_pruned)

    async def _exists(self, ref: JobRef) -> bool:
        return bool(await ref.session.platform.store.list(ref.submission.identity.manifest_name))

    async def reason(self) -> str:
        """Explain why the job is in its state; empty if there is no explanation.

        Asks the platform why a waiting job waits. Unpickles nothing.
        """
        ref = await self._locate()
        item = await ref.submission.read_item(ref.index)
        if not item.state.final:
            with suppress(BackendError):  # if this fails, explain from what is known
                item = await ref.reconcile(explained=True)
        observation = ref.submission.observations.get(ref.index)
        if item.outcome is None:
            if item.state.final or item.state is wire.ItemState.CANCELLING:
                return ref.submission.cancellation(ref.index)
            if (error := ref.submission.error(ref.index)) is not None:
                return str(error)
            fallback = NOT_ON_PLATFORM if self.group_id is None else ""
            return observation.message if observation is not None else fallback
        is_pruned = item.outcome.reason == wire.PRUNED
        if item.outcome.kind is wire.Kind.VALUE and not is_pruned:
            return ""
        outcome, body = await ref.submission.outcome(ref.index, item.attempt)
        if is_pruned:
            return str(results.pruned_of(body))
        text = f"{item.outcome.reason}: {results.reason_text(outcome, body)}"
        cause = await self._host_cause(ref, item)
        return f"{text}; {cause}" if cause not in text else text

    @own_frames_left_out
    async def result(
        self,
        timeout: float | None = None,
        cleanup: bool | None = None,
        cleanup_timeout: float = 180,
        cleanup_poll_interval: float = 2,
        stream_logs: bool | None = None,
        on_status_change: Callable[[JobStatus], None] | None = None,
    ) -> T:
        """Wait for the job and return its value.

        Args:
            timeout: Seconds to wait; after that, the job keeps running. None: no limit.
            cleanup: Remove the job and its objects after reading the value. None: yes, unless it is
                a debug job. A failed job stays, and so does a job whose output couldn't be printed.
            cleanup_timeout: Seconds that the removal may take.
            cleanup_poll_interval: Accepted for compatibility; has no effect.
            stream_logs: Print the job's output while you wait. Default: no.
            on_status_change: A function to call with each new status. Its exceptions are logged.

        Raises:
            ConfigurationError: *timeout* isn't a number of at least 0, or None.
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            JobCancelled: The job was cancelled.
            JobLost: The job died without an outcome.
            Pruned: The job ended early; see `BatchHandle.prune`.
            JobFailed: The job failed, and its exception can't be rebuilt here, or is one that would
                end the caller: SystemExit, KeyboardInterrupt, GeneratorExit, CancelledError.
            BaseException: The exception of the function, with the remote traceback as a note.

        Cancelled: ends the wait; the job keeps running.

        Example::

            job = await client.submit(train, 0.1)
            loss = await job.result(timeout=3600, stream_logs=True)
        """
        check(timeout=timeout)
        if self._value is _UNSET:
            try:
                ref = await self._follow()
                item = await self._wait_and_report(ref, timeout, stream_logs, on_status_change)
                if item.state is not wire.ItemState.SUCCEEDED:
                    raise await self._failure(ref, item)
                cleans_up = cleanup or (cleanup is None and not self.debug)
                if cleans_up and self.log_unprinted:  # a cleanup would delete the log
                    await self._end_processes(ref)
                    cleans_up = False
                limit = cleanup_timeout if cleans_up else None
                return cast("T", await self._read_once(ref, item, limit))
            except NotFound:
                if self._value is _UNSET:
                    raise  # unless another call has read the value and removed the job
        return cast("T", self._value)

    async def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until the job ends, and return its status; the function's value stays in the store.

        Args:
            timeout: Seconds to wait; after that, the job keeps running. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            KineticError: kinetic can't find out how the job ended.

        Cancelled: ends the wait; the job keeps running.
        """
        check(timeout=timeout)
        ref = await self._follow()
        await self._wait_final(ref, timeout)
        return ref.submission.status(ref.index)

    async def noted(self) -> dict[str, bool | int | float | str | None]:
        """Return the numbers and short strings of the result by name, without unpickling it.

        kinetic keeps at most 1 KiB of them when the job ends. For a failure, ``error`` is its
        type and the beginning of its message. For a pruned job, ``step`` and ``value`` are its last
        report. Empty before the job ends.
        """
        ref = await self._follow()
        item = await ref.submission.read_item(ref.index)
        if item.outcome is None:
            return {}
        outcome, _ = await ref.submission.outcome(ref.index, item.attempt)
        return {**(outcome.note or {})}

    async def estimate(self) -> Estimate:
        """Estimate the cost of the ended attempts from list prices.

        Raises:
            NotFound: The job was cleaned up.
        """
        estimate, _, _ = await self.account()
        return estimate

    async def account(self) -> tuple[Estimate, float | None, float | None]:
        """Return the estimate, and for how many seconds the last attempt waited and ran; internal.

        Raises:
            NotFound: The job was cleaned up.
        """
        ref = await self._locate()
        attempts = await ref.submission.list_attempts(ref.index)
        if not attempts and not await self._exists(ref):
            raise ref.submission.identity.gone_error
        if not attempts:
            await ref.submission.refuse_collected()
        meter = Meter()
        meter.note(ref.index, attempts, final=True)
        estimate = Estimate(
            accelerator=str(parse(self.accelerator)),
            price=Price(**self.price) if self.price is not None else None,
            hours=meter.seconds / HOUR_S,
            expected_hours=None,
        )
        item = ref.submission.item(ref.index)
        number = item.attempt if item is not None else max(attempts, default=1)
        # An item's record, and that of a job that was retried, may be hours older than the attempt.
        submitted = self.created_at if self.group_id is None and number == 1 else ""
        attempt = attempts.get(number, wire.Attempt())
        return estimate, *ref.submission.times(ref.index, attempt, submitted)

    async def save_result(self, path: str | os.PathLike[str], timeout: float | None = None) -> int:
        """Wait for the job, write its pickled value to a file, and return the size in bytes.

        `kinetic.aio.load_result` reads the file. The job stays.

        Args:
            path: The file to write.
            timeout: Seconds to wait; after that, the job keeps running. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            JobError: The job has no value.
            Pruned: The job ended early, without a value.
            ConfigurationError: The folder of *path* doesn't exist; raised without waiting.
            OSError: The file can't be written; an older file stays.

        Cancelled: the file stays as it was.
        """
        check(timeout=timeout)
        folder = (await anyio.Path(path).absolute()).parent
        if not await folder.is_dir():
            raise ConfigurationError(
                f"can't write the value to {path}: there is no folder {folder}; create it, or name "
                "another folder"
            )
        ref = await self._follow()
        item = await self._wait_final(ref, timeout)
        if item.outcome is None:
            raise self._cancelled_error(ref)
        outcome, body = await ref.submission.outcome(ref.index, item.attempt)
        if item.state is not wire.ItemState.SUCCEEDED:
            message = f"{self.job_id} has no value: {results.reason_text(outcome, body)}"
            raise JobError(message, job_id=self.job_id, reason=outcome.reason)
        return await results.save_value(ref.session.platform.store, outcome, body, Path(path))

    async def _wait_and_report(
        self,
        ref: JobRef,
        timeout: float | None,
        stream_logs: bool | None,
        on_status_change: Callable[[JobStatus], None] | None,
    ) -> wire.Item:
        """Wait for the job's end; until then, print the log and report each status, if asked to."""
        stop_notifying = self._notify(ref, on_status_change)
        printer = LogPrinter()
        printing = (
            ref.session.spawn(self._print(printer), name="print logs") if stream_logs else None
        )
        try:
            item = await self._wait_final(ref, timeout)
            if printing is not None:
                await self._print_rest(ref, printer, printing)
            return item
        finally:
            stop_notifying()
            if printing is not None:
                printing.cancel()

    async def _print_rest(
        self, ref: JobRef, printer: LogPrinter, printing: asyncio.Task[str]
    ) -> None:
        """Wait until the log of the ended job is printed; if that fails, warn and keep the log.

        After storing its outcome, the job's process may print more; nothing waits for that output.
        """
        cause, printed = "", -1
        self.log_unprinted = True  # also if this is cancelled
        try:
            await asyncio.wait({printing}, timeout=DRAIN_S)
            is_leaving = False
            with suppress(BackendError):
                running = [] if printing.done() else await self._running(ref)
                is_leaving = any(observation.leaving for observation in running)
            line_timeout = DRAIN_S if is_leaving else SILENCE_S
            while not printing.done() and (printer.behind or printer.lines != printed):
                printed = printer.lines
                await asyncio.wait({printing}, timeout=line_timeout)
            if printing.done():
                cause = printing.result()
            elif is_leaving:
                logging.warning(
                    "%s has ended, but its process still runs; further output isn't printed",
                    self.job_id,
                )
            else:
                cause = f"no line came for {SILENCE_S:g} s"
        except asyncio.CancelledError:
            cause = "interrupted"
            raise
        finally:
            self.log_unprinted = bool(cause)
            if cause:
                logging.warning(
                    "printed only %d lines of the output of %s: %s; its log is kept: "
                    "kinetic.attach(%r).logs() reads it, cleanup() removes it",
                    printer.lines,
                    self.job_id,
                    cause,
                    self.job_id,
                )

    async def _running(self, ref: JobRef) -> list[Observation]:
        """Return what the platform says about the attempts that haven't ended."""
        found = await ref.session.platform.cluster.find(names=self._attempt_names(ref))
        return [seen for seen in found if not seen.phase.is_over]

    async def _print(self, printer: LogPrinter) -> str:
        """Print the log; return why printing stopped early, or "" if nothing more can be read."""
        try:
            await printer.run(self.logs(follow=True))
        except (NotFound, AuthError) as exc:  # a later read of the log would fail too
            logging.warning("can't show the output of %s: %s", self.job_id, exc)
        except BrokenPipeError:
            return "standard output was closed"
        except Exception as exc:  # an error of the job itself is raised by result()
            return str(exc)
        return ""

    async def _end_processes(self, ref: JobRef) -> None:
        """End processes that still run `LEAVING_S` seconds after the outcome was stored.

        By then the runner has stored the end of the log.
        """
        try:
            for _ in range(LEAVING_S):
                if not await self._running(ref):
                    return
                await asyncio.sleep(1)
            names = [observation.name for observation in await self._running(ref)]
            await ref.session.platform.cluster.delete(names=names, keep_logs=True)
        except BackendError as exc:
            logging.warning("%s may still run; its cleanup() ends it: %s", self.job_id, exc)

    async def _read_once(self, ref: JobRef, item: wire.Item, cleanup_timeout: float | None) -> Any:
        """Read the value once for all callers; then clean up, unless *cleanup_timeout* is None."""
        async with self._read_lock:
            if self._value is not _UNSET:
                return self._value
            if ref.index in ref.submission.collected_outcomes:
                value = ref.submission.collected_outcomes[ref.index].unwrap()
            else:
                outcome, body = await ref.submission.outcome(ref.index, item.attempt)
                value = await ref.submission.value(ref.index, outcome, body)
            is_single = self.group_id is None  # an item's objects belong to its batch
            if cleanup_timeout is not None and is_single:
                self._value = value
        if cleanup_timeout is not None:
            self._cleaned = is_single
            removal = self._remove(
                ref, jobs=True, objects=is_single, timeout=cleanup_timeout, ended=True
            )
            await release(removal, operation=f"cleaning {self.job_id} up", grace=cleanup_timeout)
        return value

    async def _wait_final(self, ref: JobRef, timeout: float | None) -> wire.Item:
        """Wait until the job has ended; if its submission failed, raise that error."""
        if (refusal := ref.submission.refusals.get(ref.index)) is not None:
            raise refusal
        item = ref.submission.item(ref.index)
        if item is None or ref.submission.error(ref.index) is not None:
            item = await ref.reconcile()
        if item.state.final:
            return item
        try:
            return await asyncio.wait_for(
                ref.session.until_final(ref.submission, ref.index), timeout
            )
        except TimeoutError:
            raise ResultTimeout(
                f"{self.job_id} has no result after {timeout:g} s; it continues, and its handle "
                "stays valid",
                job_id=self.job_id,
            ) from None

    def _notify(
        self, ref: JobRef, on_status_change: Callable[[JobStatus], None] | None
    ) -> Callable[[], None]:
        """Call *on_status_change* with each new status; return a function that stops the calls."""
        if on_status_change is None:
            return lambda: None
        last_status: JobStatus | None = None
        context = contextvars.copy_context()  # the task that notices the end has another one

        def notify(index: int, item: wire.Item | None) -> None:
            nonlocal last_status
            if index != ref.index:
                return  # most calls end here: each handle of a batch listens
            status = ref.submission.status(index)
            if status is last_status:
                return
            last_status = status
            try:
                context.run(on_status_change, status)
            except Exception:
                logging.exception("on_status_change of %s raised", self.job_id)

        if ref.submission.item(ref.index) is not None or ref.submission.observations.get(ref.index):
            notify(ref.index, None)
        return ref.submission.listen(notify)

    async def _failure(self, ref: JobRef, item: wire.Item) -> BaseException:
        if item.outcome is None:
            return self._cancelled_error(ref)
        outcome, body = await ref.submission.outcome(ref.index, item.attempt)
        cause = await self._host_cause(ref, item)
        return await anyio.to_thread.run_sync(results.failure_of, outcome, body, self.job_id, cause)

    def _cancelled_error(self, ref: JobRef) -> JobCancelled:
        cancellation = ref.submission.cancellation(ref.index)
        return JobCancelled(f"{self.job_id} was {cancellation}", job_id=self.job_id)

    async def _host_cause(self, ref: JobRef, item: wire.Item) -> str:
        """Return how a host other than the first ended the job; empty if no such host is known."""
        if not parse(self.accelerator).multi_host:
            return ""
        with suppress(BackendError):
            end = await ref.host_end(item.attempt)
            return end.message if end is not None else ""
        return ""

    def _attempt_names(self, ref: JobRef) -> list[str]:
        """Return the names of all attempts that the platform may have, from the first one on."""
        submission, item = ref.submission, ref.submission.item(ref.index)
        last = item.attempt if item is not None else 1
        if submission.relaunches:  # this process may not know the newest attempt
            last = max(last, 1 + submission.identity.budgets.infrastructure)
        name_of = submission.identity.attempt_name
        # The last one isn't enough: that of a cancelled item was never launched.
        return [name_of(ref.index, attempt) for attempt in range(1, last + 1)]

    @one_loop_stream
    async def metrics(self, *, timeout: float | None = None) -> AsyncGenerator[JobMetric, None]:
        """Yield what the job reports by `kinetic.report`, from its first report to its end.

        Any process can read the metrics, also later, until the job is cleaned up. Each attempt
        begins a new curve. On a cluster, a report arrives one or two seconds after its call; the
        first may take six.

        Args:
            timeout: Seconds for the whole loop; after that, the job continues. None: no limit.

        Raises:
            ConfigurationError: *timeout* isn't a number of at least 0, or None.
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            NotFound: There is no such job.

        Closed or cancelled: the job continues.

        Example::

            async for attempt, step, loss in job.metrics():
                print(attempt, step, loss)
        """
        check(timeout=timeout)
        ref = await self._follow()
        async with aclosing(_lazy.metrics.of_job(ref, timeout)) as metrics:
            async for metric in metrics:
                yield metric

    @one_loop_stream
    async def logs(
        self, follow: bool = False, *, attempt: int | None = None
    ) -> AsyncGenerator[str]:
        """Yield the lines of the job's output so far.

        If the platform lost the log with the pod, yields the last MiB, which the runner keeps in
        the store until `cleanup`.

        Args:
            follow: Wait for more lines until the job ends, also from later attempts.
            attempt: Only the output of this attempt, counted from 1. None: of the last attempt;
                with *follow*, also of later attempts.

        Raises:
            ConfigurationError: *attempt* isn't an int of at least 1, or None.
            NoLog: The job has not started, has no such attempt, or its log was removed (a
                ``RuntimeError``).

        Example::

            async for line in job.logs(follow=True):
                print(line)
        """
        check(attempt=attempt)
        try:
            ref = await self._follow()
            async with aclosing(_job_log.lines(ref, follow=follow, attempt=attempt)) as lines:
                async for line in lines:
                    yield line
        except NotFound as exc:
            raise await self._no_log_error(exc, attempt) from exc

    async def _no_log_error(self, error: NotFound, attempt: int | None = None) -> NoLog:
        """Return an error that says why there is no log, and what to do."""
        if isinstance(error, NoLog):
            return error
        ref = self._ref
        if ref is None or ref.submission.removed:
            return NoLog(str(error))
        item = ref.submission.item(ref.index) or await ref.submission.read_item(ref.index)
        if attempt is not None:
            return NoLog(
                f"attempt {attempt} of {self.job_id} has no log: it never started, or the platform "
                f"no longer keeps it; logs() returns the log of attempt "
                f"{_job_log.last_attempt(item)}"
            )
        if item.state is wire.ItemState.CANCELLED:
            cause = "its process ended before it could store one"
            if item.attempt == 1:  # no process has claimed the first attempt
                cause = "it was cancelled before it began"
            return NoLog(f"{self.job_id} has no log: {cause}")
        if item.outcome is not None and item.outcome.phase == "submission":
            return NoLog(f"{self.job_id} has no log: it was never sent; reason() says why")
        if item.state.final:
            cause = "results() or result() removed it with the job"
            if ref.submission.collected is None:  # otherwise, that is certain
                cause += ", or the job's process wrote nothing"
            return NoLog(
                f"{self.job_id} no longer has a log: {cause}; results(cleanup=False) and "
                "result(cleanup=False) keep it"
            )
        return NoLog(
            f"{self.job_id} has no log: it has not started yet, or its job was removed; see "
            "status() and reason()"
        )

    async def tail(self, n: int = 100) -> str:
        """Return the last lines of the job's output so far, at most 1 MiB.

        Args:
            n: How many lines.

        Raises:
            ConfigurationError: *n* isn't an int of at least 0.
            NoLog: The job has not started, or its log was removed (a ``RuntimeError``).
        """
        check(n=n)
        try:
            return "\n".join(await _job_log.last(await self._follow(), n))
        except NotFound as exc:
            raise await self._no_log_error(exc) from exc

    async def cancel(self, cleanup_timeout: float = 180, cleanup_poll_interval: float = 2) -> None:
        """Stop the job and all its processes; its status becomes ``NOT_FOUND``.

        Returns when the job has ended. A job that has ended before keeps its status and outcome.

        Args:
            cleanup_timeout: Seconds to wait for the job's end.
            cleanup_poll_interval: Accepted for compatibility; has no effect.

        Raises:
            ResultTimeout: The job did not end within *cleanup_timeout*.

        Cancelled: the request stays, and the job ends.
        """
        if self._cleaned:
            return
        try:
            ref = await self._follow()
        except NotFound:
            return
        item = await ref.submission.read_item(ref.index)
        if item.state.final:
            return
        with suppress(NotFound):  # another process has just removed the job
            await self._stop(ref, cleanup_timeout)
        # If a cleanup ended before the stop request was stored, nothing reads the request.
        if self.group_id is None and not await self._exists(ref):
            store, scope = ref.session.platform.store, ref.submission.identity.scope
            await store.delete([info.name for info in await store.list(f"{scope}control/")])

    async def _stop(self, ref: JobRef, timeout: float) -> None:
        """Ask the job to end, and wait until it has."""
        # Name the attempts before the stop request: a later retry may add attempts.
        names = self._attempt_names(ref)
        await ref.submission.requests.stop_item(ref.index)
        await ref.session.platform.cluster.delete(names=names, keep_logs=True)
        await ref.submission.read_item(ref.index)
        try:
            await asyncio.wait_for(ref.session.until_final(ref.submission, ref.index), timeout)
        except TimeoutError:
            raise ResultTimeout(
                f"{self.job_id} was asked to stop and has not ended within "
                f"{timeout:g} s; it will be killed",
                job_id=self.job_id,
            ) from None
        await _lazy.removal.until_gone(ref.session, names, timeout, keep_logs=True)

    async def cleanup(
        self,
        k8s: bool = True,
        gcs: bool = True,
        cleanup_timeout: float = 180,
        cleanup_poll_interval: float = 2,
    ) -> None:
        """Stop the job if it runs, and remove it; its output directory stays.

        Args:
            k8s: Remove the job from the platform.
            gcs: Remove its objects from the store. An item's objects stay with its batch.
            cleanup_timeout: Seconds to wait for the job's end.
            cleanup_poll_interval: Accepted for compatibility; has no effect.

        Cancelled: a part may be removed; call `cleanup` again to remove the rest.
        """
        try:
            ref = await self._follow()
        except NotFound:
            self._cleaned = True
            return
        if self.group_id is not None:
            if k8s:  # the worker continues with other items
                await self.cancel(cleanup_timeout)
            return
        await self._remove(ref, jobs=k8s, objects=gcs, timeout=cleanup_timeout)
        self._cleaned = gcs

    async def _remove(
        self, ref: JobRef, *, jobs: bool, objects: bool, timeout: float, ended: bool = False
    ) -> None:
        await _lazy.removal.remove(
            ref.session,
            ref.submission.identity,
            names=self._attempt_names(ref),
            jobs=jobs,
            objects=objects,
            timeout=timeout,
            ended=ended,
        )
        if objects:
            ref.session.forget(ref.submission)

    async def debug_attach(
        self, local_port: int = 5678, working_dir: str | None = None, worker: int = 0
    ) -> subprocess.Popen[bytes]:
        """Wait for the job's debugger and forward it to a port of this machine.

        Prints the configuration for VS Code. The returned process forwards the port until the job
        or this process ends; `kinetic.debug.cleanup_port_forward` ends it earlier.

        Args:
            local_port: The port on this machine's loopback; 0 for any free one.
            working_dir: The folder where your editor finds the project's files. None: the folder
                that the job was submitted from.
            worker: Which host, from 0, of a job on several hosts.

        Raises:
            ConfigurationError: The job has no debugger (``debug=True``), the port is taken, or
                there is no such worker.
            ResultTimeout: The job isn't ready after KINETIC_DEBUG_WAIT_S seconds; it keeps running.
            JobError: The job has ended.
            AuthError: You lack a permission.

        Cancelled: nothing is forwarded; the job keeps running.
        """
        process, debugger, port = await self.forward_debugger(local_port, worker)
        instructions = _lazy.attaching.instructions(debugger, port, working_dir)
        try:
            await anyio.to_thread.run_sync(_print, instructions)
        except BaseException:  # the caller gets no process to end
            await release(in_thread(_lazy.attaching.end, process), operation="ending the forwarder")
            raise
        return process

    async def forward_debugger(
        self, local_port: int, worker: int = 0
    ) -> tuple[subprocess.Popen[bytes], DebuggerAddress, int]:
        """Do what `debug_attach` does, and print nothing; internal.

        Return the process that forwards, the debugger's address, and the port of this machine.
        """
        self._require_debugger()
        _lazy.attaching.require_port(local_port)
        debugger, target = await self.debugger(worker), (await self._follow()).session.target
        process, port = await _lazy.attaching.forward(target, debugger, local_port)
        return process, debugger, port

    def _require_debugger(self) -> None:
        if not self.debug:
            raise ConfigurationError(
                f"{self.job_id} has no debugger: it was not submitted with debug=True; submit it "
                "again with .options(debug=True)"
            )

    async def debugger(self, worker: int = 0, timeout: float | None = None) -> DebuggerAddress:
        """Wait until the job's debugger listens; internal.

        Raises:
            ConfigurationError, ResultTimeout, JobError: As `debug_attach`.
        """
        self._require_debugger()
        _lazy.attaching.require_worker(worker, self.accelerator, self.job_id)
        ref = await self._follow()

        async def ended_error(item: wire.Item) -> Exception:
            message = f"{self.job_id} has ended, and its debugger with it"
            if item.state is not wire.ItemState.SUCCEEDED:
                message += f": {await self._failure(ref, item)}"
            return JobError(message, job_id=self.job_id)

        return await _lazy.attaching.until_ready(ref, self.job_id, worker, ended_error, timeout)

    async def worker(self) -> str | None:
        """Return the name of the worker that has the item's last attempt, as `Worker.name`.

        None if no worker has taken the item, or if the job is a plain single one.

        Raises:
            NotFound: The job was cleaned up, or `results` has removed what is known of it.
        """
        ref = await self._locate()
        attempts = await ref.submission.list_attempts(ref.index)
        if not attempts:
            await ref.submission.refuse_collected()
        claimants = [it.worker for _, it in sorted(attempts.items()) if it.worker]
        return _lazy.workers.name_of(claimants[-1]) if claimants else None

    @property
    def output_dir(self) -> str:
        """The job's value of ``KINETIC_OUTPUT_DIR``; empty before the handle's first request."""
        return self._ref.output_dir if self._ref is not None else ""

    async def outputs(self) -> list[str]:
        """List the files in the output directory, relative to it and sorted.

        Raises:
            ConfigurationError: The directory is neither in this platform's store nor on a disk.
        """
        ref = self._known() or await self._follow()  # the files outlive the job
        folder, store = ref.output_dir, ref.session.platform.store.plain()
        if folder.startswith(f"{store.url}/"):
            prefix = folder.removeprefix(f"{store.url}/") + "/"
            names = [info.name for info in await store.list(prefix)]
            return [name.removeprefix(prefix) for name in names if not name.endswith("/")]
        if "://" in folder:
            raise ConfigurationError(
                f"can't list {folder} from the {self.backend} platform; use the tools of its "
                "storage"
            )

        def list_files() -> list[str]:
            paths = Path(folder).rglob("*")
            return sorted(str(path.relative_to(folder)) for path in paths if path.is_file())

        return await anyio.to_thread.run_sync(list_files)

    async def fetch_outputs(self, folder: str | os.PathLike[str]) -> int:
        """Copy the files of the output directory here, and return how many there are.

        Args:
            folder: Where to copy them. kinetic makes this folder and overwrites files in it.

        Raises:
            ConfigurationError: As `outputs`.
            OSError: The files can't be written.

        Cancelled: some files may already be written, each of them whole.
        """
        ref = self._known() or await self._follow()
        store, names = ref.session.platform.store.plain(), await self.outputs()
        prefix = f"{ref.output_dir.removeprefix(f'{store.url}/')}/"
        for name in names:
            path = await anyio.to_thread.run_sync(_prepare_path, Path(folder), name)
            with replacing(path) as partial:  # *folder* may be the output directory itself
                if ref.output_dir.startswith(f"{store.url}/"):
                    await store.fetch(f"{prefix}{name}", partial)
                else:
                    source = Path(ref.output_dir, name)
                    await anyio.to_thread.run_sync(shutil.copyfile, source, partial)
        return len(names)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _prepare_path(folder: Path, name: str) -> Path:
    """Return the path of *name* under *folder*, and create its folder.

    Raises:
        ConfigurationError: The name points outside *folder*, because a job can write any name.
    """
    path = Path(os.path.realpath(folder / name))
    if not path.is_relative_to(os.path.realpath(folder)):
        raise ConfigurationError(f"the output {name!r} points outside {folder}; it isn't copied")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
