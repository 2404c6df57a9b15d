"""The sync API: each function calls its namesake in `kinetic.aio`, and waits for the result."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import types
import weakref
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from absl import logging

from kinetic import aio
from kinetic._messages import handle_repr
from kinetic._no_sequence import NoSequence
from kinetic._sync.loop_thread import LoopThread
from kinetic._sync.portal import PORTAL, Iteration
from kinetic._tasks import release
from kinetic._tracebacks import own_frames_left_out
from kinetic.aio import _plain_call
from kinetic.aio._log_printer import LogPrinter
from kinetic.aio.client import close_implicit_client, implicit_client
from kinetic.collection import Collection
from kinetic.errors import BatchError, PortalError
from kinetic.job_record import JobRecord
from kinetic.job_status import JobStatus
from kinetic.options import MapOptions, MapSettings, show_in_signature
from kinetic.outcome import Completion, X
from kinetic.prices import Estimate
from kinetic.progress import Progress
from kinetic.sweeps.protocol import Optimizer, Space, Study, Trial
from kinetic.worker import Worker

if TYPE_CHECKING:
    from kinetic.metric import JobMetric, Metric

__all__ = [
    "BatchHandle",
    "JobHandle",
    "Sweep",
    "attach",
    "attach_batch",
    "cleanup",
    "collect",
    "list_batches",
    "list_jobs",
    "load_result",
    "run",
    "run_async_map",
    "submit",
    "sweep",
]

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
M = TypeVar("M", aio.JobHandle[Any], aio.BatchHandle[Any], aio.Sweep)


@own_frames_left_out.in_methods
@dataclass(eq=False, repr=False)
class JobHandle(JobRecord, Generic[T]):
    """A submitted job: wait for it, watch it, cancel it, clean it up.

    A handle doesn't own its job: Ctrl-C ends the wait, and the job keeps running. ``await handle``
    waits for the result in any event loop. Handles of the same job are equal, and you can pickle
    them. You get one from ``f.run_async(...)``, `attach`, or `list_jobs`.

    Args:
        job_id: The ID by which `attach` finds the job from any process.
        backend: ``gke``, ``pathways`` or ``local``.
        project, cluster_name, zone, namespace, bucket_name, k8s_name: Where the job and its
            objects are.
        image_uri: The container image that the job runs in; empty on this machine.
        accelerator: The hardware that the job runs on, such as ``tpu-v6e-8``.
        func_name, display_name: The function's name, and the name to show.
        created_at: When the job was submitted: UTC, ISO 8601.
        group_id, group_kind, group_index: The ID and the kind of the job's batch, and the job's
            index in it; None for a single job.
        debug: Whether the job waits for a debugger.
        price: The list price of the job's accelerator when the job was submitted.

    Example::

        job = train.run_async(0.1)
        print(job.job_id, job.status())
        loss = job.result()
    """

    def __post_init__(self) -> None:
        self._loop_thread: LoopThread | None = None
        self._async_handle: aio.JobHandle[T] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.job_id == self.job_id

    def __hash__(self) -> int:
        return hash(self.job_id)

    def __repr__(self) -> str:
        return handle_repr("JobHandle", self._display_handle.facts())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return _bundle(self._display_handle, self._loop_thread)

    @property
    def _display_handle(self) -> aio.JobHandle[T]:
        # Showing a handle sends no request, so an async handle of any loop can do it.
        return self._async_handle or aio.JobHandle[T].from_dict(self.to_dict())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self.to_dict(),)

    def __await__(self) -> Generator[Any, None, T]:
        return self._await_result().__await__()

    async def _await_result(self) -> T:
        with own_frames_left_out:
            return await PORTAL.acall(self._aio.result)

    @property
    def _aio(self) -> aio.JobHandle[T]:
        # Replace an async handle whose loop is closed, or belongs to the parent of this fork.
        loop_thread = PORTAL.ensure_loop_thread()
        if self._async_handle is None or self._loop_thread is not loop_thread:
            self._async_handle = aio.JobHandle.from_dict(self.to_dict())
            self._loop_thread = loop_thread
        return self._async_handle

    @staticmethod
    def facing(job: aio.JobHandle[S]) -> JobHandle[S]:
        """Return a sync handle for *job*, an async handle on the sync API's loop; internal."""
        handle = JobHandle[S].from_dict(job.to_dict())
        handle._loop_thread, handle._async_handle = PORTAL.current, job
        return handle

    def status(self) -> JobStatus:
        """Read the current status from the store and the platform.

        ``NOT_FOUND`` means that the job was cancelled or cleaned up.
        """
        return PORTAL.call(self._aio.status)

    def reason(self) -> str:
        """Explain why the job is in its state; empty if there is no explanation.

        Asks the platform why a waiting job waits. Unpickles nothing.
        """
        return PORTAL.call(self._aio.reason)

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until the job ends, and return its status; the function's value stays in the store.

        Args:
            timeout: Seconds to wait; after that, the job keeps running. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            KineticError: kinetic can't find out how the job ended.

        Ctrl-C: ends the wait; the job keeps running.
        """
        return PORTAL.call(self._aio.wait, timeout)

    def estimate(self) -> Estimate:
        """Estimate the cost of the ended attempts from list prices.

        Raises:
            NotFound: The job was cleaned up.
        """
        return PORTAL.call(self._aio.estimate)

    def noted(self) -> dict[str, bool | int | float | str | None]:
        """Return the numbers and short strings of the result by name, without unpickling it.

        kinetic keeps at most 1 KiB of them when the job ends. For a failure, ``error`` is its
        type and the beginning of its message. For a pruned job, ``step`` and ``value`` are its last
        report. Empty before the job ends.
        """
        return PORTAL.call(self._aio.noted)

    def save_result(self, path: str | os.PathLike[str], timeout: float | None = None) -> int:
        """Wait for the job, write its pickled value to a file, and return the size in bytes.

        `kinetic.jobs.load_result` reads the file. The job stays.

        Args:
            path: The file to write.
            timeout: Seconds to wait; after that, the job keeps running. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            JobError: The job has no value.
            Pruned: The job ended early, without a value.
            ConfigurationError: The folder of *path* doesn't exist; raised without waiting.
            OSError: The file can't be written; an older file stays.

        Ctrl-C: the file stays as it was.
        """
        return PORTAL.call(self._aio.save_result, path, timeout)

    def fetch_outputs(self, folder: str | os.PathLike[str]) -> int:
        """Copy the files of the output directory here, and return how many there are.

        Args:
            folder: Where to copy them. kinetic makes this folder and overwrites files in it.

        Raises:
            ConfigurationError: As `outputs`.
            OSError: The files can't be written.

        Ctrl-C: some files may already be written, each of them whole.
        """
        return PORTAL.call(self._aio.fetch_outputs, folder)

    def result(
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

        Ctrl-C: ends the wait; the job keeps running.

        Example::

            job = train.run_async(0.1)
            loss = job.result(timeout=3600, stream_logs=True)
        """
        portal_call = PORTAL.new_call()
        try:
            return portal_call.call(
                self._aio.result,
                timeout=timeout,
                cleanup=cleanup,
                cleanup_timeout=cleanup_timeout,
                cleanup_poll_interval=cleanup_poll_interval,
                stream_logs=stream_logs,
                on_status_change=portal_call.in_calling_thread(on_status_change),
            )
        except KeyboardInterrupt:
            if self._async_handle is None or not self._async_handle.log_unprinted:
                message = (
                    "interrupted: %s continues. To wait for it: kinetic jobs result %s. "
                    "To end it: kinetic jobs cancel %s"
                )
                logging.warning(message, self.job_id, self.job_id, self.job_id)
            raise

    def logs(self, follow: bool = False, *, attempt: int | None = None) -> str | None:
        """Return the job's output so far, or print it until the job ends.

        Args:
            follow: Print the output so far and all later output until the job ends; return None.
            attempt: Only the output of this attempt, counted from 1. None: that of the last attempt
                and, with *follow*, of later attempts.

        Raises:
            ConfigurationError: *attempt* isn't an int of at least 1, or None.
            NoLog: The job has not started, or its log was removed (a ``RuntimeError``).
        """
        return PORTAL.call(_read_log, self._aio, follow, attempt)

    def metrics(self, *, timeout: float | None = None) -> Iteration[JobMetric, JobMetric]:
        """Yield what the job reports by `kinetic.report`, from its first report to its end.

        ``async for`` also works, in any event loop.

        Any process can read the metrics, also later, until the job is cleaned up. Each attempt
        begins a new curve. On a cluster, a report arrives one or two seconds after its call; the
        first may take six.

        Args:
            timeout: Seconds for the whole loop; after that, the job continues. None: no limit.

        Raises:
            ConfigurationError: *timeout* isn't a number of at least 0, or None.
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            NotFound: There is no such job.

        After a break or Ctrl-C: the job continues.

        Example::

            for attempt, step, loss in job.metrics():
                print(attempt, step, loss)
        """
        return PORTAL.iterate(functools.partial(self._aio.metrics, timeout=timeout), _identity)

    def tail(self, n: int = 100) -> str:
        """Return the last lines of the job's output so far, at most 1 MiB.

        Args:
            n: How many lines.

        Raises:
            ConfigurationError: *n* isn't an int of at least 0.
            NoLog: The job has not started, or its log was removed (a ``RuntimeError``).
        """
        return PORTAL.call(self._aio.tail, n)

    def cancel(self, cleanup_timeout: float = 180, cleanup_poll_interval: float = 2) -> None:
        """Stop the job and all its processes; its status becomes ``NOT_FOUND``.

        Returns when the job has ended. A job that has ended before keeps its status and outcome.

        Args:
            cleanup_timeout: Seconds to wait for the job's end.
            cleanup_poll_interval: Accepted for compatibility; has no effect.

        Raises:
            ResultTimeout: The job did not end within *cleanup_timeout*.

        Ctrl-C: the request stays, and the job ends.
        """
        PORTAL.call(self._aio.cancel, cleanup_timeout, cleanup_poll_interval)

    def cleanup(
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

        Ctrl-C: a part may be removed; call `cleanup` again to remove the rest.
        """
        PORTAL.call(self._aio.cleanup, k8s, gcs, cleanup_timeout, cleanup_poll_interval)

    def debug_attach(
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

        Ctrl-C: nothing is forwarded; the job keeps running.
        """
        return PORTAL.call(self._aio.debug_attach, local_port, working_dir, worker)

    def worker(self) -> str | None:
        """Return the name of the worker that has the item's last attempt, as `Worker.name`.

        None if no worker has taken the item, or if the job is a plain single one.

        Raises:
            NotFound: The job was cleaned up, or `results` has removed what is known of it.
        """
        return PORTAL.call(self._aio.worker)

    @property
    def output_dir(self) -> str:
        """The job's value of ``KINETIC_OUTPUT_DIR``; empty before the handle's first request."""
        return self._aio.output_dir or PORTAL.call(_read_output_dir, self._aio)

    def outputs(self) -> list[str]:
        """List the files in the output directory, relative to it and sorted.

        Raises:
            ConfigurationError: The directory is neither in this platform's store nor on a disk.
        """
        return PORTAL.call(self._aio.outputs)


@own_frames_left_out.in_methods
class BatchHandle(NoSequence, Generic[T, X]):
    """A batch: many jobs of one function.

    A ``with`` block stops unfinished items when you leave it; `detach` lets them continue. Without
    the block kinetic stops nothing, also when you interrupt a wait. You get a handle from
    ``f.run_async_map(...)``, `attach_batch`, or `list_batches`.

    Args:
        batch: The batch's handle in `kinetic.aio`; don't create a handle yourself.

    Attributes:
        group_id: The ID by which `attach_batch` finds the batch from any process.
        name, tags: The name and tags that you gave it.
        created_at: When the batch was submitted: UTC, ISO 8601.

    Example::

        with train.run_async_map([0.1, 0.2, 0.3]) as batch:
            for index, rate, outcome in batch.outcomes():
                print(rate, outcome.unwrap())
    """

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(types.GenericAlias)  # accept one or two arguments

    def __init__(self, batch: aio.BatchHandle[T, X]) -> None:
        self.group_id = batch.group_id
        self.name = batch.name
        self.tags = batch.tags
        self.created_at = batch.created_at
        self._loop_thread = PORTAL.current
        self._async_handle = batch
        # The references are weak, because a batch can have infinitely many items.
        self._sync_handles: weakref.WeakValueDictionary[int, JobHandle[T]]
        self._sync_handles = weakref.WeakValueDictionary()
        self._open_blocks = 0
        """How many ``with`` blocks of this batch are open."""

    def __repr__(self) -> str:
        return handle_repr("BatchHandle", self._async_handle.facts())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return _bundle(self._async_handle, self._loop_thread)

    def __enter__(self) -> Self:
        self._open_blocks += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(self._async_handle.__aexit__, kind, error, trace)

    def _or_new(self, batch: aio.BatchHandle[T, X]) -> BatchHandle[T, X]:
        """Return the handle of *batch*: this one, or another one in the same ``with`` blocks."""
        if batch is self._async_handle:
            return self
        new = BatchHandle(batch)
        new._open_blocks = self._open_blocks
        return new

    def _leave(
        self,
        end: Callable[P, Coroutine[Any, Any, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """End a ``with`` block by ``end(...)``, unless this is a forked child."""
        self._open_blocks = max(0, self._open_blocks - 1)
        if self._loop_thread is not PORTAL.current:  # a forked child: the parent owns the batch
            return
        try:
            PORTAL.new_call(patient=False).call(end, *args, **kwargs)
        except KeyboardInterrupt:
            _INTERRUPTIONS_LOGGED.add(self.group_id)
            logging.warning(
                "interrupted again: some jobs of batch %s may still run. "
                "To end them: kinetic batches cancel %s",
                self.group_id,
                self.group_id,
            )
            raise

    def _log_interruption(self) -> None:
        """Log that the batch continues, unless a ``with`` block stops it."""
        if not self._open_blocks:
            _log_that_batch_continues(self._async_handle)

    @contextlib.contextmanager
    def _log_if_interrupted(self) -> Generator[None, None, None]:
        try:
            yield
        except KeyboardInterrupt:
            self._log_interruption()
            raise

    @property
    def _aio(self) -> aio.BatchHandle[T, X]:
        # Replace an async handle whose loop is closed, or belongs to the parent of this fork.
        if self._loop_thread is not PORTAL.ensure_loop_thread():
            self._async_handle = PORTAL.call(aio.attach_batch, self.group_id)
            self._loop_thread, self._sync_handles = PORTAL.current, weakref.WeakValueDictionary()
        return self._async_handle

    def _sync_handle(self, job: aio.JobHandle[T]) -> JobHandle[T]:
        index = job.group_index or 0
        handle = self._sync_handles.get(index)
        if handle is None:
            handle = self._sync_handles[index] = JobHandle.facing(job)
        return handle

    @property
    def jobs(self) -> list[JobHandle[T] | None]:
        """The handles by index; None for an item whose input isn't stored yet, or was refused."""
        return [None if job is None else self._sync_handle(job) for job in self._aio.jobs]

    def job(self, index: int) -> JobHandle[T]:
        """Return the handle of one item.

        Args:
            index: The item's place in the inputs, from 0.

        Raises:
            ConfigurationError: *index* isn't an int.
            NotFound: The batch has no such item.
        """
        return self._sync_handle(PORTAL.call(self._aio.job, index))

    def statuses(self) -> list[tuple[int, JobStatus]]:
        """Return index and status of every submitted or refused item, read from the store now.

        ``NOT_FOUND`` means cancelled. ``FAILED`` means failed, lost, or refused at submission.
        `outcomes` distinguishes these.

        Raises:
            NotFound: The batch was cleaned up.
        """
        return PORTAL.call(self._aio.statuses)

    def status_counts(self) -> dict[str, int]:
        """Count the submitted and refused items by status, as in ``{"SUCCEEDED": 8}``."""
        return PORTAL.call(self._aio.status_counts)

    @property
    def finished(self) -> bool:
        """Whether every item has its outcome, as far as this process has read the store.

        This sends no request. A handle from `list_batches` reads the store only when you
        call another method, such as `status_counts`.
        """
        return self._aio.finished

    @property
    def stored(self) -> int:
        """How many inputs are stored, as far as this process has read the store.

        Pass the inputs after them to `resume`.
        """
        return self._aio.stored

    @property
    def sealed(self) -> bool:
        """Whether the batch takes no more inputs, as far as this process has read the store.

        If it was stopped, their end may not be stored.
        """
        return self._aio.sealed

    def input(self, index: int) -> X:
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
        return PORTAL.call(self._aio.input, index)

    @property
    def submission_failures(self) -> dict[int, Exception]:
        """The exceptions of inputs that could not be submitted, by index.

        For a batch that another process submitted, call `results` first.
        """
        return self._aio.submission_failures

    @property
    def unavailable_children(self) -> dict[int, str]:
        """The job IDs of items whose objects are damaged or forged, by index.

        The outcome of such an item is an error about the damage.
        """
        return self._aio.unavailable_children

    def wait(self, *, timeout: float | None = None) -> None:
        """Wait until every item has its outcome.

        Args:
            timeout: Seconds to wait; after that, the batch continues. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            SubmitterLost: No process submits the rest of the batch; `resume` does.

        Ctrl-C: ends the wait; the batch continues.
        """
        with self._log_if_interrupted():
            PORTAL.call(self._aio.wait, timeout=timeout)

    def as_completed(
        self, *, poll_interval: float = 5.0, timeout: float | None = None
    ) -> Iteration[aio.JobHandle[T], JobHandle[T]]:
        """Yield each job's handle once, when the job ends.

        ``async for`` also works, in any event loop.

        Inputs that could not be submitted have no job: see `submission_failures`, or use
        `outcomes`.

        Args:
            poll_interval: Accepted for compatibility; has no effect.
            timeout: Seconds for the whole loop; after that, the batch continues. None: no limit.

        Raises:
            ResultTimeout: *timeout* has passed (a ``TimeoutError``).
            SubmitterLost: No process submits the rest of the batch; `resume` does.

        Example::

            for job in batch.as_completed():
                print(job.group_index, job.result())
        """
        iterate_jobs = functools.partial(
            self._aio.as_completed, poll_interval=poll_interval, timeout=timeout
        )
        return PORTAL.iterate(iterate_jobs, self._sync_handle, self._log_interruption)

    def outcomes(
        self, *, ordered: bool = False, timeout: float | None = None
    ) -> Iteration[Completion[T, X], Completion[T, X]]:
        """Yield each item once, when it ends, with its input and its outcome.

        ``async for`` also works, in any event loop.

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

        After a break or Ctrl-C: the batch continues.

        Example::

            for index, rate, outcome in batch.outcomes():
                print(rate, outcome.unwrap() if outcome.ok else outcome.error)
        """
        iterate_outcomes = functools.partial(self._aio.outcomes, ordered=ordered, timeout=timeout)
        return PORTAL.iterate(iterate_outcomes, _identity, self._log_interruption)

    def progress(self) -> Iteration[Progress, Progress]:
        """Yield how far the batch is: now, and after each change, until it ends.

        ``async for`` also works, in any event loop.

        Yields at most ten values per second; a slow reader skips intermediate values.

        Raises:
            NotFound: The batch was cleaned up.
        """
        return PORTAL.iterate(self._aio.progress, _identity)

    def metrics(self, *, timeout: float | None = None) -> Iteration[Metric, Metric]:
        """Yield what the jobs report by `kinetic.report`, until the batch has ended.

        ``async for`` also works, in any event loop.

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

        After a break or Ctrl-C: the batch continues.

        Example::

            for index, attempt, step, loss in batch.metrics():
                print(index, step, loss)
        """
        read = functools.partial(self._aio.metrics, timeout=timeout)
        return PORTAL.iterate(read, _identity, self._log_interruption)

    @overload
    def results(
        self,
        *,
        timeout: float | None = None,
        ordered: bool = True,
        cleanup: bool = True,
        return_exceptions: Literal[False] = False,
    ) -> list[T]: ...

    @overload
    def results(
        self,
        *,
        timeout: float | None = None,
        ordered: bool = True,
        cleanup: bool = True,
        return_exceptions: bool,
    ) -> list[Any]: ...

    def results(
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

        Ctrl-C: the batch continues. If its objects were already being removed, this handle still
            has the values: call `results` again.

        Example::

            losses = batch.results()
        """
        try:
            with self._log_if_interrupted():
                return PORTAL.call(
                    self._aio.results,
                    timeout=timeout,
                    ordered=ordered,
                    cleanup=cleanup,
                    return_exceptions=return_exceptions,
                )
        except BatchError as error:
            error.failures = [self._sync_handle(job) for job in error.failures]
            raise

    @property
    def max_concurrent(self) -> int | None:
        """The most jobs that may be unfinished at once; None means no limit.

        `scale` changes it.
        """
        return self._aio.max_concurrent

    def reason(self) -> str:
        """Explain why the batch is in its state; empty if there is no explanation.

        The reason is why the batch was stopped, that no process submits it any more, its first
        failure, or what it waits for. kinetic unpickles nothing for this.
        """
        return PORTAL.call(self._aio.reason)

    def failures(self) -> list[JobHandle[T]]:
        """Return the handles of jobs that failed or were lost.

        After `results`, this also works for a batch that was cleaned up.

        Raises:
            NotFound: The batch was cleaned up before this handle collected `results`.
        """
        return [self._sync_handle(job) for job in PORTAL.call(self._aio.failures)]

    def report(
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

        Ctrl-C: the old file stays, or the new one is whole.

        Example::

            batch.report("rates.html", metric="accuracy", direction="maximize")
        """
        others = [batch._aio for batch in compare]
        report = self._aio.report
        return PORTAL.call(report, path, direction=direction, metric=metric, compare=others)

    def records(self) -> list[dict[str, Any]]:
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

            rows = batch.records()
            print([row["input.rate"] for row in rows if row["state"] == "failed"])
        """
        return PORTAL.call(self._aio.records)

    def to_dataframe(self) -> Any:
        """Return `records` as a ``pandas.DataFrame``, whose index is the items' ``index``.

        Raises:
            ConfigurationError: pandas isn't installed.
            NotFound: The batch was cleaned up.
            WireError: The inputs in the store differ from those submitted.

        Example::

            frame = batch.to_dataframe()
            print(frame.sort_values("result.loss").head())
        """
        return PORTAL.call(self._aio.to_dataframe)

    def best(
        self,
        metric: str | None = None,
        direction: Literal["minimize", "maximize"] | None = None,
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

            best = batch.best("accuracy", "maximize")
            print(best["input.rate"], best["result.accuracy"])
        """
        return PORTAL.call(self._aio.best, metric, direction)

    def estimate(self, *, look: bool = True) -> Estimate:
        """Estimate what the batch has cost so far and will cost in total, from list prices.

        Args:
            look: Read the outcomes of unfinished items first. Default: yes.

        Raises:
            NotFound: The batch was cleaned up.
        """
        return PORTAL.call(self._aio.estimate, look=look)

    def submitted(self) -> None:
        """Wait until this process has submitted every input, or has stopped submitting."""
        with self._log_if_interrupted():
            PORTAL.call(self._aio.submitted)

    def retry_failed(self, indices: Iterable[int] | None = None) -> int:
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
        return PORTAL.call(_submit_and_keep, self._aio, self._aio.retry_failed, indices)

    def resume(
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
        resume = functools.partial(self._aio.resume, inputs=inputs, seal=seal, force=force)
        PORTAL.call(_submit_and_keep, self._aio, resume)
        return self

    def cancel(self) -> None:
        """Stop all unfinished items and wait until they end.

        Raises:
            BackendError: The store or the platform does not answer.

        Ctrl-C: the request stays, and running attempts end.
        """
        PORTAL.call(self._aio.cancel)

    def prune(self, index: int, attempt: int | None = None) -> None:
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

        Ctrl-C: the request may be stored.

        Example::

            for index, attempt, step, loss in batch.metrics():
                if step == 10 and loss > 1.0:
                    batch.prune(index, attempt)
        """
        PORTAL.call(self._aio.prune, index, attempt)

    def scale(self, workers: int) -> int:
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

        Ctrl-C: the number may be stored; then workers that start later follow it.

        Example::

            batch.scale(8)
        """
        return PORTAL.call(self._aio.scale, workers)

    def workers(self) -> list[Worker]:
        """Return the workers that wait or run now, in the order of their numbers.

        Empty if the batch has ended, or if each of its attempts is a job of its own.

        Raises:
            NotFound: The batch was cleaned up.
            BackendError: The store or the platform does not answer.

        Example::

            for worker in batch.workers():
                print(worker.number, worker.state, worker.item, worker.done)
        """
        return PORTAL.call(self._aio.workers)

    def detach(self, *, seal: bool = False) -> None:
        """Let the batch continue after the ``with`` block.

        This process stores inputs as long as the client is open. After that, workers run what is
        stored. On several hosts, this process also starts the items, and `resume` continues the
        batch from any process.

        Args:
            seal: Take no more inputs; the batch has only those taken so far.

        Raises:
            NotFound: The batch was cleaned up.

        Ctrl-C: with *seal*, the batch takes no more inputs, but is not detached.
        """
        PORTAL.call(self._aio.detach, seal=seal)
        self._open_blocks = 0

    def cleanup(self, *, k8s: bool = True, gcs: bool = True) -> None:
        """Stop and remove the batch; output directories stay.

        Once its objects are removed, the batch no longer exists: the handle's methods raise
        `NotFound`, except `cancel`, `submitted`, and `cleanup`, which do nothing.

        Args:
            k8s: Remove its jobs from the platform.
            gcs: Remove its objects from the store.

        Ctrl-C: a part may be removed; call `cleanup` again to remove the rest.
        """
        PORTAL.call(self._aio.cleanup, k8s=k8s, gcs=gcs)


@own_frames_left_out.in_methods
class Sweep:
    """A search for the arguments with the best value: the trials, and the batch that runs them.

    A ``with`` block stops unfinished trials when you leave it. Iterating yields each trial once,
    when it has ended, and first those of earlier processes; ``async for`` works in any event loop.
    The sweep also continues while you don't iterate. You get a sweep from ``f.sweep(...)``.

    Args:
        sweep: The sweep in `kinetic.aio`; don't create one yourself.

    Example::

        with train.sweep(search, trials=50) as sweep:
            for trial in sweep:
                print(trial.params, trial.value)
        print(sweep.best)
    """

    def __init__(self, sweep: aio.Sweep) -> None:
        self._aio = sweep
        self._batch: BatchHandle[Any, Any] = BatchHandle(sweep.batch)

    @property
    def batch(self) -> BatchHandle[Any, Any]:
        """The handle of the batch that runs the trials."""
        self._batch = self._batch._or_new(self._aio.batch)  # pyright: ignore[reportPrivateUsage]
        return self._batch

    def __repr__(self) -> str:
        return repr(self._aio)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return _bundle(self._aio, PORTAL.current)

    def __enter__(self) -> Self:
        self.batch.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        end = self._aio.__aexit__
        self.batch._leave(end, kind, error, trace)  # pyright: ignore[reportPrivateUsage]

    def __iter__(self) -> Iteration[Trial, Trial]:
        return PORTAL.iterate(self._aio.__aiter__, _identity, self._log_interruption)

    def __aiter__(self) -> Iteration[Trial, Trial]:
        return iter(self)

    @property
    def best(self) -> Trial:
        """The complete trial with the best value so far; of equal values, the one ended first.

        Raises:
            SweepError: No trial is complete.
        """
        return self._aio.best

    def trials(self) -> list[Trial]:
        """Return all trials so far, in the order of their numbers."""
        return self._aio.trials()

    def stop(self) -> None:
        """Propose no more trials; open trials continue, and the iteration then ends."""

        async def stop() -> None:
            self._aio.stop()

        PORTAL.call(stop)

    def wait(self) -> None:
        """Wait until every trial has ended.

        Raises:
            SubmitterLost: Another process continues the sweep.
            Exception: The optimizer, or the space, has raised it; a note names the trial.

        Ctrl-C: ends the wait; the sweep continues.
        """
        try:
            PORTAL.call(self._aio.wait)
        except KeyboardInterrupt:
            self._log_interruption()
            raise

    def _log_interruption(self) -> None:
        self.batch._log_interruption()  # pyright: ignore[reportPrivateUsage]


def _bundle(
    handle: aio.JobHandle[Any] | aio.BatchHandle[Any] | aio.Sweep, loop_thread: LoopThread | None
) -> dict[str, str]:
    """Return what a notebook shows; while *loop_thread* runs, kinetic keeps the cell up to date."""

    async def bundle() -> dict[str, str]:
        return handle.bundle()

    if loop_thread is not None and loop_thread is PORTAL.current:
        with contextlib.suppress(PortalError):  # the loop is closing
            return PORTAL.call(bundle)
    return handle.bundle()


@own_frames_left_out
def submit(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> JobHandle[Any]:
    """Start ``function(*args, **kwargs)`` and return the job's handle.

    Returns once the platform has accepted the job; it may start later.

    Args:
        function: The function to run, plain or decorated.
        args, kwargs: Its arguments; kinetic pickles them.

    Raises:
        TypeError: The function doesn't take these arguments; nothing was sent.
        ConfigurationError: A setting is wrong.
        PackError: The function or an argument can't be shipped.
        DataError: A `Data` can't be shipped.
        LaunchError: The platform refused the job.
        BackendError: The store or the platform doesn't answer.

    Ctrl-C: the job and its objects are removed, within 30 s; shared content stays.

    Example::

        job = train.run_async(0.1)
        loss = job.result()
    """
    return JobHandle.facing(_start_or_remove(aio.submit, function, *args, **kwargs))


@own_frames_left_out
def run(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Submit, print the output, and return the value; Ctrl-C cancels and removes the job."""
    with _plain_call.EndingOnSigterm(_exit_on_sigterm):
        value: T = PORTAL.call(_run_and_show, function, *args, **kwargs)
        return value


def _exit_on_sigterm() -> None:
    raise SystemExit(128 + signal.SIGTERM)


@overload
def run_async_map(
    function: Callable[..., Coroutine[Any, Any, T]],
    inputs: Iterable[X] | AsyncIterable[X],
    **options: Unpack[MapOptions],
) -> BatchHandle[T, X]: ...


@overload
def run_async_map(
    function: Callable[..., T],
    inputs: Iterable[X] | AsyncIterable[X],
    **options: Unpack[MapOptions],
) -> BatchHandle[T, X]: ...


@own_frames_left_out
@show_in_signature(MapSettings)
def run_async_map(
    function: Callable[..., Any],
    inputs: Iterable[Any] | AsyncIterable[Any],
    **options: Unpack[MapOptions],
) -> BatchHandle[Any]:
    """Run a function once for each input, and return the batch's handle.

    kinetic pickles each input, and uploads its `Data`, before it pulls the next one. If the
    length of *inputs* is known, it does so for all inputs before this method returns. So later
    changes to an input have no effect.

    Args:
        function: A plain function, or one with a kinetic decorator.
        inputs: Any iterable, lazy or infinite, sync or async. One job runs for each input.
        input_mode: How an input becomes arguments. ``single``: it is the only argument;
            ``args``: a sequence of arguments; ``kwargs``: a dict. ``auto``: a dict gives
            keyword arguments, a list or tuple positional ones, anything else is the only
            argument. ``labelled``: a
            pair of a label, which the function does not get, and a dict of keyword arguments.
        max_concurrent: How many jobs may be unfinished at once. None: no limit. On this
            machine: how many workers run the jobs, at most one for each slot.
        retries: How many times a failed item may run again.
        fail_fast: Start nothing more after the first failure.
        cancel_running_on_fail: With *fail_fast*, also stop the jobs that run.
        name, tags: `list_batches` finds the batch by these.
        project, cluster: Where the batch runs. None: as the function's options say.
        window: Limit of submitted items that your ``for`` loop has not read yet. None: no limit
            if the length of *inputs* is known, else twice *max_concurrent*.
        batch_timeout: Seconds for the whole batch; then kinetic cancels it.
        budget: US dollars, estimated by list prices. When ended attempts cost this much,
            nothing more starts; running attempts continue.
        prunable: Let `BatchHandle.prune` end attempts that call `kinetic.report`. Default: no.
        progress: Show a progress line while you wait. None: show it.

    Raises:
        ConfigurationError: An option is wrong, or *budget* is set and the machine has no known
            price, or *inputs* is an empty list, a string, or a dict. Also if an input doesn't
            fit the function's parameters. If the length of *inputs* is unknown, only the job of
            such an input fails, with a `SubmissionError`.
        SubmissionError: The function or its project can't be shipped.

    Ctrl-C: nothing of the batch is left, except content that other calls share.
    When your script ends, its process first submits the rest of the inputs; a further
    Ctrl-C ends the process at once.

    Example::

        with train.run_async_map([0.1, 0.2, 0.3]) as batch:
            print(batch.results())
    """
    batch = _start_or_remove(lambda: aio.run_async_map(function, inputs, **options))
    _keep_until_submitted(batch)
    return BatchHandle(batch)


@own_frames_left_out
def sweep(
    function: Callable[..., Any],
    optimizer: Optimizer | Study,
    space: Space | None = None,
    *,
    trials: int | None,
    on_failure: Literal["tell", "retry", "ignore"] = "tell",
    metric: str | None = None,
    resume: bool = False,
    **options: Unpack[MapOptions],
) -> Sweep:
    """Search for the arguments with the best value, and return the sweep.

    The optimizer proposes a trial whenever a job may start, and learns each value when the job
    has ended. Its methods run in a thread of their own, one after the other.

    Args:
        function: The function, plain or decorated; it returns the number to minimize or
            maximize.
        optimizer: A study of Optuna, or an optimizer of `kinetic.sweeps`, or of yours.
        space: For a study: a function of the trial that returns the keyword arguments, or a
            dict of distributions. Other optimizers have their space already: None.
        trials: How many trials to run; cancelled ones don't count. None: as many as the
            optimizer proposes.
        on_failure: What to do when a trial fails. ``tell``: tell the optimizer. ``retry``: run
            the trial again, *retries* times (default: 2), and then tell. ``ignore``: tell the
            optimizer that the trial was cancelled. kinetic runs a preempted trial again in any
            case.
        metric: The number to use if the function returns, or reports, a dict. None: the only
            number in it. It has no effect on a number that isn't in a dict.
        resume: Continue the sweep of this *name*, or begin it if there is none. Default: False.
        options: Those of `run_async_map`, except ``input_mode``.

    Raises:
        ConfigurationError: An argument is wrong, or *function* doesn't take the parameters of
            the space. Or the optimizer can't propose the trials of the sweep to continue: its
            space has changed.
        Conflict: Another process runs the sweep of this name, or that sweep hasn't ended and
            *resume* is false.
        SubmissionError: The function or its project can't be shipped.

    Ctrl-C: kinetic removes a new sweep. A sweep that was continued stays.

    Example::

        search = kinetic.sweeps.RandomSearch(space, seed=1)
        with train.sweep(search, trials=50) as sweep:
            for trial in sweep:
                print(trial.params, trial.value)
        print(sweep.best)
    """
    start = functools.partial(
        aio.sweep,
        function,
        optimizer,
        space,
        trials=trials,
        on_failure=on_failure,
        metric=metric,
        resume=resume,
        **options,
    )
    return Sweep(_start_or_remove(start))


@own_frames_left_out
def attach(job_id: str, project: str | None = None, cluster: str | None = None) -> JobHandle[Any]:
    """Return the handle of a single job or of a batch's item, whichever process submitted it.

    Args:
        job_id: The job's ID.
        project, cluster: Where it runs. None: as environment, profile, or default says.

    Raises:
        ConfigurationError: *job_id* is the ID of a batch.
        NotFound: The store has no such job.
        WireError: The signature of the job's description is wrong.

    Example::

        job = kinetic.jobs.attach("job-local-0123456789ab")
        print(job.status())
    """
    return JobHandle.facing(PORTAL.call(aio.attach, job_id, project, cluster))


@own_frames_left_out
def attach_batch(
    group_id: str,
    project: str | None = None,
    cluster: str | None = None,
    poll_interval: float = 10.0,
    poll_timeout: float | None = None,
) -> BatchHandle[Any]:
    """Return a handle of a batch, whichever process submitted it; the handle only observes.

    Args:
        group_id: The batch's ID.
        project, cluster: Where the batch runs. None: as environment, profile, or default says.
        poll_interval: Accepted for compatibility; has no effect.
        poll_timeout: If another process hasn't submitted all items after this number of
            seconds from now, a wait on this handle raises `ResultTimeout`. None: no limit. Once
            all items are known, only ``timeout=`` of the wait counts.

    Raises:
        ConfigurationError: *group_id* is the ID of a job.
        NotFound: The store has no such batch.
        WireError: The signature of the batch, or of its inputs, is wrong.
    """
    return BatchHandle(
        PORTAL.call(aio.attach_batch, group_id, project, cluster, poll_interval, poll_timeout)
    )


@own_frames_left_out
def cleanup(submission: str, project: str | None = None, cluster: str | None = None) -> None:
    """Remove a batch or a single job by its ID: jobs and objects; output directories stay.

    kinetic doesn't read the objects, so damaged ones are also removed. If the store has none,
    this logs a warning.

    Args:
        submission: The ID of a batch or of a single job.
        project, cluster: Where it runs. None: as environment, profile, or default says.

    Raises:
        ConfigurationError: *submission* is the ID of a batch's item.
        NotFound: The text isn't an ID.
        BackendError: The jobs don't end within 180 s, or a service does not answer.

    Ctrl-C: a part may be removed; call `cleanup` again to remove the rest.
    """
    PORTAL.call(aio.cleanup, submission, project, cluster)


@own_frames_left_out
def load_result(path: str | os.PathLike[str]) -> Any:
    """Read a value from a file that `JobHandle.save_result` wrote; unpickling may run code.

    Args:
        path: The file.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is damaged, or `JobHandle.save_result` didn't write it.
        Exception: The classes of the value raise it while it is rebuilt.
    """
    return PORTAL.call(aio.load_result, path)


@own_frames_left_out
def list_batches(
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
    project: str | None = None,
    cluster: str | None = None,
    limit: int | None = None,
) -> list[BatchHandle[Any]]:
    """List the batches in the store, the newest first; their handles only observe.

    Args:
        name: List only batches with this name.
        tags: List only batches that have all of these tags.
        project, cluster: Where to look. None: as environment, profile, or default says.
        limit: Maximum number of batches. None: no limit.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    batches = PORTAL.call(aio.list_batches, name, tags, project, cluster, limit)
    return [BatchHandle(batch) for batch in batches]


@own_frames_left_out
def list_jobs(
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
    limit: int | None = None,
    items: bool = True,
) -> list[JobHandle[Any]]:
    """List the jobs that the platform knows, the newest first.

    On a cluster, the list includes jobs on several hosts. On this machine, it includes single
    jobs that were neither cancelled nor cleaned up, and the items of batches that a worker has
    taken. It omits jobs whose objects are in another store.

    Args:
        project, zone, cluster, namespace: Where to look.
            None: as environment, profile, or default says.
        limit: Maximum number of jobs. None: no limit.
        items: Whether the list has the items of batches. Default: yes.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    jobs = PORTAL.call(aio.list_jobs, project, zone, cluster, namespace, limit, items)
    return [JobHandle.facing(job) for job in jobs]


@own_frames_left_out
def collect(*, everything: bool = False) -> Collection:
    """Remove unused contents from the store and from this machine's caches.

    In the store, kinetic removes code, functions, requirements, and `Data` that nothing refers
    to and nothing has used for a day. It also removes the remains of jobs and batches whose
    process died, the names of sweeps without batches, and build contexts from the bucket of
    builds. A job refers to its content until it ends, a batch until `results` or `cleanup`. To
    remove a job's or batch's own objects, call ``cleanup(gcs=True)`` on it.

    The caches in ``KINETIC_HOME/cache`` are archives of projects, unpacked projects and `Data`,
    and environments. KINETIC_CACHE_AGE_S and KINETIC_CACHE_SIZE_MB limit them, and a store in a
    directory. Every ten minutes, the local supervisor also applies these limits. An environment
    stays for a day after its last use.

    Args:
        everything: Also remove what was used within a day, if no unfinished job and no batch
            needs it. Don't use this while another process submits to a bucket: its job may
            fail because its code no longer exists. Default: False.

    Returns:
        The removed contents, by folder.

    Raises:
        ConfigurationError: A setting is wrong.
        AuthError: You may not list or delete objects of the bucket.
        BackendError: The store does not answer.

    Ctrl-C: the removal in progress ends first.
    """
    return PORTAL.call(aio.collect, everything=everything)


def _start_or_remove(start: Callable[P, Awaitable[M]], /, *args: P.args, **kwargs: P.kwargs) -> M:
    """Return the handle from ``start(...)``; if the call then fails, remove the submission."""
    handles: list[M] = []

    async def start_and_keep() -> M:
        handles.append(await start(*args, **kwargs))
        return handles[0]

    try:
        return PORTAL.call(start_and_keep)
    except BaseException:
        for handle in handles:
            PORTAL.call(_remove, handle)
        raise


async def _remove(handle: aio.JobHandle[Any] | aio.BatchHandle[Any] | aio.Sweep) -> None:
    if isinstance(handle, aio.Sweep):  # it may have the trials of earlier processes
        await handle.__aexit__(None, None, None)
        return
    await release(handle.cleanup(), operation="removing what was submitted")


async def _read_log(job: aio.JobHandle[Any], follow: bool, attempt: int | None) -> str | None:
    lines = job.logs(follow=follow, attempt=attempt)
    if follow:
        await LogPrinter().run(lines)
        return None
    return "\n".join([line async for line in lines])


async def _read_output_dir(job: aio.JobHandle[Any]) -> str:
    await job.status()  # this sets ``output_dir`` if the job exists
    return job.output_dir


async def _run_and_show(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    client = await implicit_client()
    return await client.run_owned(function, args, kwargs, stream_logs=True)


def _identity(value: T) -> T:
    return value


# --- the end of the loop ---

_UNSUBMITTED_BATCHES: set[aio.BatchHandle[Any]] = set()
"""The batches whose inputs this process may still have to submit."""


def _keep_until_submitted(batch: aio.BatchHandle[Any]) -> None:
    """Refer to *batch*, so that it submits all inputs even if the user drops the handle."""
    _UNSUBMITTED_BATCHES.difference_update(
        [unsubmitted for unsubmitted in _UNSUBMITTED_BATCHES if unsubmitted.finished]
    )
    _UNSUBMITTED_BATCHES.add(batch)


async def _submit_and_keep(
    batch: aio.BatchHandle[Any],
    start: Callable[P, Coroutine[Any, Any, S]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> S:
    """Await ``start(...)``, then keep *batch*, because this process may now submit its inputs."""
    result = await start(*args, **kwargs)
    _keep_until_submitted(batch)
    return result


async def _finish_submitting() -> None:
    """Wait, without a time limit, until this process's batches have submitted their inputs."""
    await asyncio.gather(*(_until_submitted(batch) for batch in tuple(_UNSUBMITTED_BATCHES)))


SILENT_WAIT_S = 0.5
"""How many seconds the exit waits for submissions before it logs that it waits."""


async def _until_submitted(batch: aio.BatchHandle[Any]) -> None:
    """Wait until *batch* has submitted its inputs, and log a long wait.

    If Ctrl-C ended the script, also log that the batch continues.
    """
    await batch.let_run()
    try:
        async with asyncio.timeout(SILENT_WAIT_S):
            await batch.submitted()
    except TimeoutError:
        count = await batch.let_run()
        logging.warning(
            "batch %s has %s yet; this process ends when they are. Press Ctrl-C to end it now. To "
            "submit the rest later: kinetic batches resume %s",
            batch.group_id,
            f"{count} inputs that are not submitted" if count else "workers that are not requested",
            batch.group_id,
        )
        await batch.submitted()
    ended_by = getattr(sys, "last_value", None)  # the exception that ended the script
    if isinstance(ended_by, KeyboardInterrupt) and batch.group_id not in _INTERRUPTIONS_LOGGED:
        _log_that_batch_continues(batch)


_INTERRUPTIONS_LOGGED = set[str]()
"""The IDs of batches whose interruption is logged, so that the exit doesn't log it again."""


def _log_that_batch_continues(batch: aio.BatchHandle[Any]) -> None:
    if not batch.finished:
        _INTERRUPTIONS_LOGGED.add(batch.group_id)
        logging.warning(
            "interrupted: batch %s continues. To watch it: kinetic batches watch %s. "
            "To end it: kinetic batches cancel %s",
            batch.group_id,
            batch.group_id,
            batch.group_id,
        )


os.register_at_fork(after_in_child=_UNSUBMITTED_BATCHES.clear)  # the parent submits the batches
PORTAL.on_close(_finish_submitting, patient=True)
PORTAL.on_close(close_implicit_client)
