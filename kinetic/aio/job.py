"""The handle of one job, for asyncio."""

from __future__ import annotations

import asyncio
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

import anyio.to_thread
from absl import logging

from kinetic._messages import handle_bundle, handle_repr
from kinetic._runner.protocol import wire
from kinetic._tasks import in_thread, release
from kinetic._tracebacks import own_frames_left_out
from kinetic.accelerators import parse
from kinetic.aio import _engine as engine
from kinetic.aio import _job_log
from kinetic.aio._engine import implicit_client, job_spec, results
from kinetic.aio._engine.meter import Meter
from kinetic.aio._job_log import LogPrinter
from kinetic.aio.ports import Phase
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
    from kinetic.aio._engine.debugging import Place
    from kinetic.aio._engine.implicit_client import Follow
    from kinetic.aio._engine.session import JobRef

__all__ = ["JobHandle"]

T = TypeVar("T")
_UNSET = object()

NOWHERE = (
    "nothing of it is on the platform: it is about to be submitted, or was deleted, which is "
    "certain a minute after its submission"
)

LEAVING_S = 5
"""Seconds that a job's processes may take to end after its outcome is stored."""

SILENCE_S = 10.0
"""How long the log of a job that has ended may bring nothing before it is given up."""


@dataclass(eq=False, repr=False)
class JobHandle(JobRecord, Generic[T]):
    """A submitted job: wait for it, watch it, cancel it, clean it up.

    A handle doesn't own its job: if you cancel a task that waits for it, the job goes on. Handles
    of the same job are equal. You get one from `Client.submit`, `Client.attach`, or
    `Client.list_jobs`.

    Args:
        job_id: Names the job; `attach` finds it by this from any process.
        backend: ``gke``, ``pathways`` or ``local``.
        project, cluster_name, zone, namespace, bucket_name, k8s_name: Where the job and its
            objects are.
        image_uri: The container image it runs in; empty on this machine.
        accelerator: The hardware that it runs on, such as ``tpu-v6e-8``.
        func_name, display_name: The function's name, and the name to show.
        created_at: When it was submitted: UTC, ISO 8601.
        group_id, group_kind, group_index: The batch it belongs to, and its item's index.
        debug: Whether it waits for a debugger.
        price: The list price of its accelerator when it was submitted.

    Example::

        job = await client.submit(train, 0.1)
        print(job.job_id, await job.status())
        loss = await job
    """

    def __post_init__(self) -> None:
        self._find: Follow | None = None
        self._following: JobRef | None = None
        self._looked: JobRef | None = None
        self._value: Any = _UNSET
        self._reading = asyncio.Lock()
        self._cleaned = False
        self.log_owed = False
        """Whether it has ended, and a log of it is kept that was to be shown; not for users."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.job_id == self.job_id

    def __hash__(self) -> int:
        return hash(self.job_id)

    def __repr__(self) -> str:
        return handle_repr("JobHandle", self.facts())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle()

    def bundle(self) -> dict[str, str]:
        """Return what a notebook shows: the facts known now, updated when the job ends.

        It sends no request, and follows the job only if it is called on its loop; not for users.
        """
        if self._following is not None and not self._cleaned:
            engine.notebook.follow_job(self._following)
        return handle_bundle("JobHandle", self.facts())

    def facts(self) -> dict[str, object]:
        """Return what is known without a request, such as the last status; for display."""
        at = self._found
        seen = at.submission.status(at.index) if at is not None else None
        if self._cleaned and not (seen is not None and seen.terminal):
            seen = JobStatus.NOT_FOUND
        return {
            "job_id": self.job_id,
            "function": self.func_name,
            "status": seen.value if seen is not None else "",
            "created_at": self.created_at,
        }

    def began_at(self) -> str:
        """Return when its last attempt began, in UTC, if this process knows; not for users.

        For an item that waits, that is when its batch was submitted.
        """
        if (at := self._found) is not None:
            if (seen := at.submission.observation(at.index)) is not None and seen.created_at:
                return seen.created_at
            item = at.submission.item(at.index)
            started = item.outcome.started if item is not None and item.outcome else None
            if started is not None:
                return datetime.fromtimestamp(started, UTC).isoformat()
        return self.created_at

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def bound(self, at: JobRef | Follow) -> Self:
        """Tie the handle to where its job is followed, or to what finds that; not for users."""
        if callable(at):
            self._find = at
        else:
            self._following = at
        return self

    async def _follow(self) -> JobRef:
        """Find the job's platform and follow it, once.

        Raises:
            NotFound: There is no such job.
        """
        if self._following is not None:
            self._following.submission.refuse_removed()
        if self._following is None:
            self._following = await (self._find or implicit_client.follow)(self, whole=True)
        return self._following

    @property
    def _found(self) -> JobRef | None:
        return self._following or self._looked

    async def _look(self) -> JobRef:
        """Find the job for one look at it, which must not cost its whole batch.

        Raises:
            NotFound: There is no such job.
        """
        if self._following is not None or self.group_id is None:
            return await self._follow()
        if self._looked is None:
            self._looked = await (self._find or implicit_client.follow)(self, whole=False)
        self._looked.submission.refuse_removed()
        return self._looked

    async def status(self) -> JobStatus:
        """Return the status, read now from the store, and from the platform while the job is open.

        ``NOT_FOUND`` is a job that was cancelled, or that this process has cleaned up.
        """
        if self._cleaned:
            return JobStatus.NOT_FOUND
        try:
            at = await self._look()
        except NotFound:
            return JobStatus.NOT_FOUND
        item = await at.submission.look(at.index)
        if at.submission.cleaned if item.state.final else not await self._exists(at):
            return JobStatus.NOT_FOUND
        if not item.state.final:
            try:
                await at.submission.reconcile(at.index)
            except NotFound:  # another process has just removed it
                return JobStatus.NOT_FOUND
        return at.submission.status(at.index)

    async def _exists(self, at: JobRef) -> bool:
        return bool(await at.session.platform.store.list(at.submission.identity.entry))

    async def reason(self) -> str:
        """Why the job is in its state, in words; empty when there is nothing to say.

        Of one that waits the platform is asked why: it says what it would say in the log.
        Nothing is unpickled for it.
        """
        at = await self._look()
        item = await at.submission.look(at.index)
        if not item.state.final:
            with suppress(BackendError):  # what was heard before is told then
                item = await at.submission.reconcile(at.index, explained=True)
        seen = at.submission.observation(at.index)
        if item.outcome is None:
            if item.state.final or item.state is wire.ItemState.CANCELLING:
                return "cancelled"
            if (why := at.submission.error(at.index)) is not None:
                return str(why)
            nowhere = NOWHERE if self.group_id is None else ""
            return seen.message if seen is not None else nowhere
        if item.outcome.kind is wire.Kind.VALUE:
            return ""
        outcome, body = await at.submission.outcome(at.index, item.attempt)
        told = f"{item.outcome.reason}: {results.words_of(outcome, body, self.job_id)}"
        cause = await self._host_cause(at, item)
        return f"{told}; {cause}" if cause not in told else told

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
            timeout: Seconds to wait; the job goes on after them.
            cleanup: Remove the job and its objects once the value has arrived;
                None means yes, unless it is a debug job. A failed job is kept, and
                so is one whose output was to be printed and could not be, whole.
            cleanup_timeout: Seconds the removal may take.
            cleanup_poll_interval: Accepted for compatibility; nothing is polled.
            stream_logs: Print the job's output while waiting, and all of it
                before returning; where that does not work, it is logged.
            on_status_change: Called with each new status, the first and the
                last included; what it raises is logged.

        Raises:
            ConfigurationError: *timeout* is no number of at least 0, or None.
            ResultTimeout: *timeout* is over (a ``TimeoutError``).
            JobCancelled: It was cancelled.
            JobLost: It died without an outcome.
            JobFailed: It failed, and its exception cannot be rebuilt here.
            Exception: Whatever the function raised, with the remote traceback
                as a note.

        Cancelled: only the waiting ends.
        """
        check(timeout=timeout)
        if self._value is _UNSET:
            try:
                at = await self._follow()
                item = await self._ended(at, timeout, stream_logs, on_status_change)
                if item.state is not wire.ItemState.SUCCEEDED:
                    raise await self._failure(at, item)
                cleans = cleanup or (cleanup is None and not self.debug)
                if cleans and self.log_owed:
                    await self._end_processes(at)
                    cleans = False
                return cast("T", await self._take(at, item, cleanup_timeout if cleans else None))
            except NotFound:
                if self._value is _UNSET:
                    raise  # else another call was first, and has cleaned up
        return cast("T", self._value)

    async def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until it has ended, and say how; its value stays where it is.

        Raises:
            ResultTimeout: *timeout* seconds are over; the job goes on.
            KineticError: kinetic cannot find out how it ended.

        Cancelled: only the waiting ends.
        """
        check(timeout=timeout)
        at = await self._follow()
        await self._closed(at, timeout)
        return at.submission.status(at.index)

    async def noted(self) -> dict[str, bool | int | float | str | None]:
        """The numbers and short texts of its result, by their names; nothing is unpickled.

        At most 1 KiB of them were noted when it ended; see `BatchHandle.report`. Empty for
        what has not ended, or has none; of a failure
        ``error`` is its type and the beginning of its message.
        """
        at = await self._follow()
        item = await at.submission.look(at.index)
        if item.outcome is None:
            return {}
        outcome, _ = await at.submission.outcome(at.index, item.attempt)
        return {**(outcome.note or {})}

    async def estimate(self) -> Estimate:
        """Estimate what its ended attempts cost by list prices.

        Raises:
            NotFound: The job was cleaned up.
        """
        at = await self._look()
        attempts = (await at.submission.all_attempts([at.index])).get(at.index, {})
        if not attempts and not await self._exists(at):
            raise at.submission.identity.gone
        if not attempts:
            await at.submission.refuse_collected()
        meter = Meter()
        meter.note(at.index, attempts, settled=True)
        return Estimate(
            accelerator=str(parse(self.accelerator)),
            price=Price(**self.price) if self.price is not None else None,
            hours=meter.seconds / HOUR_S,
            expected_hours=None,
        )

    async def save_result(self, path: str | os.PathLike[str], timeout: float | None = None) -> int:
        """Wait for the job and write its value to a file, pickled as it is; its size in bytes.

        Nothing is rebuilt: `kinetic.jobs.load_result` does that. The job stays.

        Args:
            path: The file to write.
            timeout: Seconds to wait; the job goes on after them. None: no limit.

        Raises:
            ResultTimeout, JobCancelled, JobLost, JobFailed: As `result`; a failure is told in
                words, and its exception not rebuilt.
            OSError: The file cannot be written; what was there is as it was.

        Cancelled: the file is as it was.
        """
        check(timeout=timeout)
        at = await self._follow()
        item = await self._closed(at, timeout)
        if item.outcome is None:
            raise JobCancelled(f"{self.job_id} was cancelled", job_id=self.job_id)
        outcome, body = await at.submission.outcome(at.index, item.attempt)
        if item.state is not wire.ItemState.SUCCEEDED:
            raise JobError(results.words_of(outcome, body, self.job_id), job_id=self.job_id)
        return await results.save_value(at.session.platform.store, outcome, body, Path(path))

    async def _ended(
        self,
        at: JobRef,
        timeout: float | None,
        stream_logs: bool | None,
        on_status_change: Callable[[JobStatus], None] | None,
    ) -> wire.Item:
        """Wait for its end, and tell meanwhile what was asked for."""
        stop_telling = self._notify(at, on_status_change)
        printing = LogPrinter()
        shown = at.session.spawn(self._print(printing), name="print logs") if stream_logs else None
        try:
            item = await self._closed(at, timeout)
            if shown is not None:
                await self._shown_whole(printing, shown)
            return item
        finally:
            stop_telling()
            if shown is not None:
                shown.cancel()

    async def _shown_whole(self, printing: LogPrinter, shown: asyncio.Task[str]) -> None:
        """Wait until the output of the job, which has ended, is printed; else keep its log."""
        why, lines = "", -1
        self.log_owed = True  # if it is cancelled here
        try:
            while not shown.done() and (printing.behind or printing.lines != lines):
                lines = printing.lines
                await asyncio.wait({shown}, timeout=SILENCE_S)
            why = shown.result() if shown.done() else f"nothing came for {SILENCE_S:g} s"
        except asyncio.CancelledError:
            why = "interrupted"
            raise
        finally:
            self.log_owed = bool(why)
            if why:
                logging.warning(
                    "not all of the output of %s is shown, but %d lines: %s; its log is kept: "
                    "kinetic.attach(%r).logs() reads it, cleanup() removes it",
                    self.job_id,
                    printing.lines,
                    why,
                    self.job_id,
                )

    async def _end_processes(self, at: JobRef) -> None:
        """End what outlives the outcome, as the pods of a set may: the end of its log is stored."""
        cluster, alive = at.session.platform.cluster, list[str]()
        try:
            for _ in range(LEAVING_S):  # with its job goes the whole log of what is about to end
                found = await cluster.find(names=self._attempt_names(at))
                alive = [one.name for one in found if one.phase in (Phase.PENDING, Phase.RUNNING)]
                if not alive:
                    return
                await asyncio.sleep(1)
            await cluster.delete(names=alive)
        except BackendError as exc:
            logging.warning("%s may still run; its cleanup() ends it: %s", self.job_id, exc)

    async def _print(self, printing: LogPrinter) -> str:
        """Why not all of the output was printed, though there may be more."""
        try:
            await printing.run(self.logs(follow=True))
        except (NotFound, AuthError) as exc:  # this process cannot read it later either
            logging.warning("the output of %s cannot be shown: %s", self.job_id, exc)
        except BrokenPipeError:
            return "nobody reads it any more"
        except Exception as exc:  # of the job itself result() tells
            return str(exc)
        return ""

    async def _take(self, at: JobRef, item: wire.Item, cleanup_timeout: float | None) -> Any:
        """Read the value, and clean up if there is a time for it; what one call took, all get."""
        async with self._reading:
            if self._value is not _UNSET:
                return self._value
            value = await self._read_value(at, item)
            if cleanup_timeout is not None and self.group_id is None:
                self._value = value  # an item's outcome stays in the store
        if cleanup_timeout is not None:
            await self._clean_up_after_value(at, cleanup_timeout)
        return value

    async def _closed(self, at: JobRef, timeout: float | None) -> wire.Item:
        if (refused := at.submission.refusal(at.index)) is not None:
            raise refused
        item = at.submission.item(at.index)
        if item is None or at.submission.error(at.index) is not None:
            item = await at.submission.reconcile(at.index)
        if item.state.final:
            return item
        try:
            return await asyncio.wait_for(at.session.closed(at.submission, at.index), timeout)
        except TimeoutError:
            raise ResultTimeout(
                f"{self.job_id} has no result after {timeout:g} s; it goes on, and its handle "
                "stays valid",
                job_id=self.job_id,
            ) from None

    def _notify(
        self, at: JobRef, on_status_change: Callable[[JobStatus], None] | None
    ) -> Callable[[], None]:
        if on_status_change is None:
            return lambda: None
        told: list[JobStatus] = []

        def tell(index: int, item: wire.Item | None) -> None:
            if index != at.index:
                return  # first of all: with every handle of a batch there is one of these
            status = at.submission.status(index)
            if told and told[-1] is status:
                return
            told.append(status)
            try:
                on_status_change(status)
            except Exception:
                logging.exception("on_status_change of %s raised", self.job_id)

        if at.submission.item(at.index) is not None or at.submission.observation(at.index):
            tell(at.index, None)
        return at.submission.listen(tell)

    async def _read_value(self, at: JobRef, item: wire.Item) -> Any:
        submission = at.submission
        if at.index in submission.values:
            return submission.values[at.index]
        return await submission.value(at.index, *await submission.outcome(at.index, item.attempt))

    async def _failure(self, at: JobRef, item: wire.Item) -> BaseException:
        if item.outcome is None:
            return JobCancelled(f"{self.job_id} was cancelled", job_id=self.job_id)
        outcome, body = await at.submission.outcome(at.index, item.attempt)
        cause = await self._host_cause(at, item)
        return await anyio.to_thread.run_sync(results.failure_of, outcome, body, self.job_id, cause)

    async def _host_cause(self, at: JobRef, item: wire.Item) -> str:
        """Which other host has ended it, and how, if it is on several and the platform knows."""
        if not parse(self.accelerator).multi_host:
            return ""
        with suppress(BackendError):
            end = await at.submission.host_end(at.index, item.attempt, asking=True)
            return end.message if end is not None else ""
        return ""

    async def _clean_up_after_value(self, at: JobRef, timeout: float) -> None:
        own = self._cleaned = self.group_id is None  # an item's objects belong to its batch
        cleaning = self._remove(at, jobs=True, objects=own, timeout=timeout, ended=True)
        await release(cleaning, what=f"cleaning {self.job_id} up", grace=timeout)

    def _attempt_names(self, at: JobRef) -> list[str]:
        """All that the platform may know: what was cancelled is at an attempt that never was."""
        submission, item = at.submission, at.submission.item(at.index)
        last = item.attempt if item is not None else 1
        if submission.relaunched:  # each is a separate job, which this process may not know
            last = max(last, 1 + submission.identity.budgets.infrastructure)
        return [submission.identity.attempt_name(at.index, one) for one in range(1, last + 1)]

    async def logs(
        self, follow: bool = False, *, attempt: int | None = None
    ) -> AsyncGenerator[str]:
        """The lines of the job's output; with *follow* also those to come, until it ends.

        *follow* goes on with the next attempt when the platform replaces the
        job's process, or when it is tried again. Without it, the lines are
        those of the last attempt. With *attempt*, counted from 1, they are those
        of that attempt only. Where the platform has lost them with the pod, they are
        the last MiB, which the runner has kept in the store, until `cleanup`.

        Raises:
            ConfigurationError: *attempt* is no int of at least 1, or None.
            NoLog: The job has not started, there was no such attempt, or it was removed with its
                log (a ``RuntimeError``).
        """
        check(attempt=attempt)
        at = await self._follow_log()
        if attempt is not None:
            told = _job_log.of_attempt(at, attempt, follow=follow)
        else:
            told = _job_log.followed(at) if follow else _job_log.latest(at)
        try:
            async with aclosing(told) as lines:
                async for line in lines:
                    yield line
        except NotFound as exc:
            raise (exc if attempt is not None else await self._without_log(at)) from exc

    async def _follow_log(self) -> JobRef:
        try:
            return await self._follow()
        except NotFound as exc:
            raise NoLog(str(exc)) from exc

    async def _without_log(self, at: JobRef) -> NoLog:
        item = at.submission.item(at.index) or await at.submission.look(at.index)
        if item.state.final:
            return NoLog(
                f"{self.job_id} has no log any more: its job was removed, as cancel(), results() "
                "and result() do (with cleanup=False the latter keep it); or its pod is gone, and "
                "kept none: it was killed, or wrote nothing"
            )
        return NoLog(
            f"{self.job_id} has no log: it has not started yet, or its job was removed; status() "
            "and reason() tell"
        )

    async def tail(self, n: int = 100) -> str:
        """Return the last *n* lines of the job's output so far, at most 1 MiB of them.

        Raises:
            ConfigurationError: *n* is no int of at least 0.
            NoLog: The job has not started, or was removed with its log (a ``RuntimeError``).
        """
        check(n=n)
        at = await self._follow_log()
        try:
            return "\n".join(await _job_log.last(at, n))
        except NotFound as exc:
            raise await self._without_log(at) from exc

    async def cancel(self, cleanup_timeout: float = 180, cleanup_poll_interval: float = 2) -> None:
        """Stop the job and all its processes; its status becomes ``NOT_FOUND``.

        A value that the job committed before stays. Returns when the job has ended, or
        another process has removed it.

        Args:
            cleanup_timeout: Seconds to wait for the job's end.
            cleanup_poll_interval: Accepted for compatibility; has no effect.

        Raises:
            ResultTimeout: It has not ended within *cleanup_timeout* seconds.

        Cancelled: the request stays; the job ends all the same.
        """
        if self._cleaned:
            return
        try:
            at = await self._follow()
        except NotFound:
            return
        item = await at.submission.look(at.index)
        if item.state.final:
            return
        with suppress(NotFound):  # as of a job that is removed in this moment
            await self._stop(at, cleanup_timeout)
        if self.group_id is None and not await self._exists(at):
            # It was removed before the stop was stored, and nothing reads the stop now.
            store, scope = at.session.platform.store, at.submission.identity.scope
            await store.delete([one.name for one in await store.list(f"{scope}control/")])

    async def _stop(self, at: JobRef, timeout: float) -> None:
        """Ask the job to end, and wait until it has."""
        names = self._attempt_names(at)  # those that the stop is for: it may be tried again since
        await at.submission.requests.stop_items((at.index,), "cancel")
        await at.session.platform.cluster.delete(names=names)
        await at.submission.look(at.index)
        try:
            await asyncio.wait_for(at.session.closed(at.submission, at.index), timeout)
        except TimeoutError:
            raise ResultTimeout(
                f"{self.job_id} was asked to stop and has not ended within "
                f"{timeout:g} s; it will be killed",
                job_id=self.job_id,
            ) from None
        await job_spec.until_gone(at.session, names, timeout)

    async def cleanup(
        self,
        k8s: bool = True,
        gcs: bool = True,
        cleanup_timeout: float = 180,
        cleanup_poll_interval: float = 2,
    ) -> None:
        """Stop the job if it runs, and remove it; ``KINETIC_OUTPUT_DIR`` stays.

        Args:
            k8s: Remove the job from the platform.
            gcs: Remove its objects from the store. An item's objects stay with its batch.
            cleanup_timeout: Seconds to wait for the job's end.
            cleanup_poll_interval: Accepted for compatibility; has no effect.

        Cancelled: run it again; it goes on where it stopped.
        """
        try:
            at = await self._follow()
        except NotFound:
            self._cleaned = True
            return
        objects = gcs and self.group_id is None
        await self._remove(at, jobs=k8s, objects=objects, timeout=cleanup_timeout)
        self._cleaned = objects

    async def _remove(
        self, at: JobRef, *, jobs: bool, objects: bool, timeout: float, ended: bool = False
    ) -> None:
        await job_spec.remove(
            at.session,
            at.submission.identity.scope,
            names=self._attempt_names(at),
            jobs=jobs,
            objects=objects,
            timeout=timeout,
            ended=ended,
        )
        if objects:
            at.session.forget(at.submission)

    async def debug_attach(
        self, local_port: int = 5678, working_dir: str | None = None, worker: int = 0
    ) -> subprocess.Popen[bytes]:
        """Wait for the job's debugger, forward it to *local_port*, and print what VS Code needs.

        The process that forwards ends with the job, or with this process; end
        it earlier with `kinetic.debug.cleanup_port_forward`.

        Args:
            local_port: The port of this machine's loopback; 0 for any that is free.
            working_dir: The folder on this machine that the editor finds the
                project's files in; None for the one the job was submitted from.
            worker: Which host, from 0, of a job on several.

        Raises:
            ConfigurationError: The job was not submitted with ``debug=True``,
                the port is taken, or there is no such worker.
            ResultTimeout: The job is not ready in the time that KINETIC_DEBUG_WAIT_S
                says; it goes on.
            JobError: It has ended.
            AuthError: A right is missing.

        Cancelled: nothing is forwarded; the job goes on.
        """
        self._require_debugger()
        engine.debugging.require_port(local_port)
        place = await self.debugger(worker)
        process, port = await engine.debugging.forward(await self._follow(), place, local_port)
        words = engine.debugging.instructions(place, port, working_dir)
        try:
            await anyio.to_thread.run_sync(_print, words)
        except BaseException:  # no process reads it
            await release(in_thread(engine.debugging.end, process), what="ending the forwarder")
            raise
        return process

    def _require_debugger(self) -> None:
        if not self.debug:
            raise ConfigurationError(
                f"{self.job_id} has no debugger: it was not submitted with debug=True; submit it "
                "again with .options(debug=True)"
            )

    async def debugger(self, worker: int = 0, timeout: float | None = None) -> Place:
        """Wait until the job's debugger listens; not for users.

        Raises:
            ConfigurationError, ResultTimeout, JobError: As `debug_attach`.
        """
        self._require_debugger()
        engine.debugging.require_worker(worker, self.accelerator, self.job_id)
        at = await self._follow()

        async def ended(item: wire.Item) -> Exception:
            words = f"{self.job_id} has ended, and its debugger with it"
            if item.state is not wire.ItemState.SUCCEEDED:
                words += f": {await self._failure(at, item)}"
            return JobError(words, job_id=self.job_id)

        return await engine.debugging.ready(at, self.job_id, worker, ended, timeout)

    @property
    def output_dir(self) -> str:
        """What the job sees as ``KINETIC_OUTPUT_DIR``; empty until it was followed once."""
        return self._found.output_dir if self._found is not None else ""

    async def outputs(self) -> list[str]:
        """The files under `output_dir`, relative to it, sorted.

        Raises:
            ConfigurationError: The directory is neither in this platform's store nor on a disk.
        """
        at = self._following or await self._follow()  # the files outlive the job
        folder, store = at.output_dir, at.session.platform.store
        if folder.startswith(f"{store.url}/"):
            prefix = folder.removeprefix(f"{store.url}/") + "/"
            names = [one.name for one in await store.list(prefix)]
            return [name.removeprefix(prefix) for name in names if not name.endswith("/")]
        if "://" in folder:
            raise ConfigurationError(
                f"{folder} cannot be listed from the {self.backend} platform; "
                "list it with the tools of its own storage"
            )
        return await anyio.to_thread.run_sync(_files_under, folder)

    async def fetch_outputs(self, folder: str | os.PathLike[str]) -> int:
        """Copy the files under `output_dir` to *folder*, which is made; how many there are.

        What is there already is written over.

        Raises:
            ConfigurationError: As `outputs`.
            OSError: They cannot be written.

        Cancelled: some files may already be written.
        """
        at = self._following or await self._follow()
        store, names = at.session.platform.store, await self.outputs()
        prefix = f"{at.output_dir.removeprefix(f'{store.url}/')}/"
        for name in names:
            path = await anyio.to_thread.run_sync(_made_for, Path(folder), name)
            if at.output_dir.startswith(f"{store.url}/"):
                await store.fetch(f"{prefix}{name}", path)
            else:
                await anyio.to_thread.run_sync(shutil.copyfile, Path(at.output_dir, name), path)
        return len(names)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _made_for(folder: Path, name: str) -> Path:
    """Where the file *name* goes under *folder*: nothing is there, but its own folder is.

    Raises:
        ConfigurationError: The name leads out of it.
    """
    path = Path(os.path.realpath(folder / name))
    if not path.is_relative_to(os.path.realpath(folder)):
        raise ConfigurationError(f"the output {name!r} leads out of {folder}: it is not copied")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def _files_under(folder: str) -> list[str]:
    found: list[str] = []
    for parent, _, files in os.walk(folder):
        found += (os.path.relpath(os.path.join(parent, name), folder) for name in files)
    return sorted(found)
