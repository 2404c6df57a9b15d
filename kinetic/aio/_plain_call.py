"""Calls that own their job: ``f()`` and `Client.run` end the job if they are cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from absl import logging

from kinetic import configuration
from kinetic._progress.steps import SHOW_FACTORY
from kinetic._tasks import in_thread, release
from kinetic.aio import _lazy
from kinetic.errors import BackendError, JobError, NotFound, ResultTimeout

if TYPE_CHECKING:
    from kinetic.aio.job import JobHandle

_stop_callbacks: list[Callable[[], object]] = []


class _SigtermHandler:
    """Pass SIGTERM on to all plain calls; ``received`` says whether this process got one."""

    def __init__(self) -> None:
        self.received = False
        self._process = os.getpid()
        self._ready_futures: list[asyncio.Future[None]] = []

    def __call__(self, number: int, frame: object) -> None:
        self.received = True
        if os.getpid() != self._process:  # a forked child: the parent owns the jobs
            _raise_sigterm()
        for stop in tuple(_stop_callbacks):
            stop()

    async def all_ready(self) -> None:
        """After the signal, wait until every plain call of this loop has ended its job."""
        # The first call that returns could end the loop, and interrupt the others.
        if self.received and len(self._ready_futures) + 1 < len(_stop_callbacks):
            self._ready_futures.append(asyncio.get_running_loop().create_future())
            await self._ready_futures[-1]
        for future in self._ready_futures:
            if not future.done():
                future.set_result(None)


class EndingOnSigterm:
    """Have SIGTERM call *stop* during the block; after the block, the signal ends the process.

    If several blocks are open, SIGTERM calls *stop* of each; the process ends after the last block.
    Does nothing, and gives None, outside the main thread or if the program handles SIGTERM.

    This isn't a generator: `contextlib.contextmanager` sets an attribute of each exception that
    passes it, which the class of a job's exception may refuse.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        self._stop = stop
        self._handler: _SigtermHandler | None = None

    def __enter__(self) -> _SigtermHandler | None:
        if threading.current_thread() is not threading.main_thread():
            return None
        handler = signal.getsignal(signal.SIGTERM)
        if handler is signal.SIG_DFL:
            handler = _SigtermHandler()
            signal.signal(signal.SIGTERM, handler)
        if isinstance(handler, _SigtermHandler):
            self._handler = handler
            _stop_callbacks.append(self._stop)
        return self._handler

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        _stop_callbacks.remove(self._stop)
        if not _stop_callbacks and self._handler.received:
            _raise_sigterm()
        # The program may have set a handler since.
        if not _stop_callbacks and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def cancelled_on_sigterm() -> EndingOnSigterm:
    """Have SIGTERM cancel the running task, like `EndingOnSigterm`; the task ends its job."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    return EndingOnSigterm(lambda: loop.call_soon_threadsafe(task.cancel))


def _raise_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


T = TypeVar("T")

CANCEL_TIMEOUT_S = 25.0
"""How many seconds to wait for a cancelled job's end; if it takes longer, the platform ends it."""


async def run_plain_call(
    submit: Callable[[], Awaitable[JobHandle[T]]], *, debug: bool, stream_logs: bool = False
) -> T:
    """Submit a job and wait for its value; the awaiting task owns the job.

    With *debug*, first forward the job's debugger to the local port that the environment variable
    ``KINETIC_DEBUG_PORT`` names.

    Raises:
        ConfigurationError: With *debug*, there is no terminal or the port is taken; no job starts.
        Exception: What the submission, `JobHandle.debug_attach`, or `JobHandle.result` raises.

    Cancelled, or on a SIGTERM that the program doesn't handle: the job is cancelled and removed,
    because no other process knows its name. Its output directory stays. If the job had ended before
    this call printed its output, its log stays as well, so that you can read it.
    """
    with cancelled_on_sigterm() as sigterm:
        try:
            if debug:
                return await _run_debugged(submit)
            return await _wait_owned(await _submit(submit), stream_logs=stream_logs)
        finally:
            if sigterm is not None:
                await sigterm.all_ready()


async def _submit(submit: Callable[[], Awaitable[JobHandle[T]]]) -> JobHandle[T]:
    try:
        return await submit()
    except asyncio.CancelledError:  # `submit` has undone the submission
        _report("interrupted during submission: the job was cancelled and removed")
        raise


async def _wait_owned(job: JobHandle[T], *, stream_logs: bool) -> T:
    try:
        return await job.result(stream_logs=stream_logs)
    except asyncio.CancelledError:
        if not job.log_unprinted:
            await release(_cancel(job), operation=f"cancelling {job.job_id}")
        raise


async def _cancel(job: JobHandle[Any]) -> None:
    """Stop and remove the job; remove its objects even if it doesn't end in time."""
    try:
        await job.cleanup(cleanup_timeout=CANCEL_TIMEOUT_S)
    except BackendError:
        await job.cleanup(k8s=False)
        raise
    _report(f"interrupted: {job.job_id} was cancelled and removed")


def _report(message: str) -> None:
    """Log *message*: as a warning in the sync API, as information in asyncio programs."""
    logging.log(logging.WARNING if SHOW_FACTORY.get() else logging.INFO, "%s", message)


async def _run_debugged(submit: Callable[[], Awaitable[JobHandle[T]]]) -> T:
    """Submit a job, forward its debugger, and wait for its value; on failure, remove the job."""
    _lazy.attaching.require_person()
    port = configuration.number("KINETIC_DEBUG_PORT", configuration.DEBUG_PORT)
    _lazy.attaching.require_port(port)
    job = await _submit(submit)
    try:
        forwarder = await job.debug_attach(port)
    except BaseException as exc:
        if isinstance(exc, JobError | NotFound) and not isinstance(exc, ResultTimeout):
            # The job has ended, so it has no debugger.
            return await _wait_owned(job, stream_logs=False)
        await release(_cancel(job), operation=f"removing {job.job_id}")
        raise
    try:
        return await _wait_owned(job, stream_logs=False)
    finally:
        await release(in_thread(_lazy.attaching.end, forwarder), operation="ending the forwarder")
