"""An event loop on a separate thread. A forked child starts a new loop on a new thread.

A signal can interrupt the main thread between any two steps of Python code, even while it holds a
lock of `threading`. A handler that needs the same lock would then wait forever. So the main thread
takes no such lock here: it uses `queue.SimpleQueue`, a set, and `_thread`, which no handler can
interrupt half-way.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, Unpack

from absl import logging

from kinetic.errors import PortalError

if TYPE_CHECKING:
    from concurrent.futures import Executor

POLL_S = 0.5
"""Seconds after which a waiting thread looks for signals again.

If a signal comes just before the wait, or to another thread, its handler runs only after the wait.
"""

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def receive(inbox: queue.SimpleQueue[T], timeout: float = math.inf) -> T:
    """Return the next item of *inbox* within *timeout* seconds; signals interrupt the wait.

    Raises:
        queue.Empty: No item came in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=max(0.0, min(remaining, POLL_S)))
        if remaining <= POLL_S:
            raise queue.Empty


class Call(Generic[T]):
    """A coroutine that the loop of *loop_thread* runs for another thread, or for another loop.

    When the coroutine has ended, the loop's thread calls *notify*.
    """

    _value: T

    def __init__(
        self,
        function: Callable[[], Awaitable[T]],
        notify: Callable[[], object],
        context: contextvars.Context,
    ) -> None:
        self.loop_thread: LoopThread | None = None
        self.done = False
        self.is_abandoned = False
        """Whether the caller has stopped waiting, although the call still runs."""
        self._function = function
        self._notify = notify
        self._context = context
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    def start(self, loop_thread: LoopThread) -> None:
        """Create the task; runs in the loop's thread."""

        def on_task_done(_: asyncio.Task[None]) -> None:
            loop_thread.calls.discard(self)
            # This has an effect only if the task was cancelled before its first step.
            self.fail(asyncio.CancelledError())

        self._context.run(_forget_callers_library)
        self._task = loop_thread.loop.create_task(
            self._run(), name="kinetic call", context=self._context
        )
        self._task.add_done_callback(on_task_done)

    def cancel(self) -> None:
        """Have the loop cancel the task; any thread may call this."""
        assert self.loop_thread is not None
        try:
            self.loop_thread.loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop is closed, so the call has ended
            self.done = True

    def fail(self, error: BaseException) -> None:
        """End the call with *error*, unless it has ended."""
        if not self.done:
            self._error = error
            self._settle()

    def take_result(self) -> T:
        """Return the value, or raise the exception; a second call doesn't raise the exception.

        The exception's traceback refers to this object, so this object drops the exception.

        Raises:
            PortalError: The coroutine was cancelled.
        """
        error, self._error = self._error, None
        try:
            if isinstance(error, asyncio.CancelledError):
                raise PortalError(
                    "the call was cancelled: kinetic's event loop was closed"
                ) from error
            if error is not None:
                raise error
            return self._value
        finally:
            del error

    async def _run(self) -> None:
        """Await the coroutine; catch SystemExit, which would end the loop."""
        try:
            self._value = await self._function()
        except RuntimeError as exc:
            # Python wraps a coroutine's StopIteration in a RuntimeError. One from a job has a note.
            wrapped = exc.__cause__ if not vars(exc) else None
            self._error = wrapped if isinstance(wrapped, StopIteration) else exc
        except BaseException as exc:
            self._error = exc
        self._settle()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # the interrupt came before the loop started the call
            self.fail(asyncio.CancelledError())

    def _settle(self) -> None:
        self.done = True
        self._notify()


def _forget_callers_library() -> None:
    """Tell anyio that the call runs on asyncio, even if another library's loop waits for it."""
    # anyio and that library look up there which library runs.
    sniffio: Any = sys.modules.get("sniffio")
    # The attribute is missing while another thread imports the module.
    library = getattr(sniffio, "current_async_library_cvar", None)
    if library is not None:
        library.set(None)


Hook = Callable[[], Awaitable[None]]
"""A function that a loop awaits before it closes."""


class LoopThread:
    """One event loop with its thread, and the calls that it carries out.

    ``calls`` are the calls in progress. ``is_ending`` means that the loop takes no more of them.
    ``milestones`` gets one item when *patient_hooks* have run; these hooks have no time limit. It
    gets a second item when the other hooks have run and the loop is closed.
    """

    loop: _Loop
    ident: int

    def __init__(self, patient_hooks: list[Hook], hooks: list[Hook]) -> None:
        self.calls: set[Call[Any]] = set()
        self.is_ending = False
        self.milestones: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._patient_hooks = patient_hooks
        self._hooks = hooks
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._stop_requested = False
        self._stopped = asyncio.Event()

    def start(self) -> None:
        """Start the loop and wait until it runs.

        If the wait is interrupted, the loop ends as soon as it has started.
        """
        try:
            _thread.start_new_thread(self._start, ())
            error = receive(self._ready)
        except BaseException:
            self.stop()
            raise
        if error is not None:
            raise error

    def start_task(self, function: Hook) -> None:
        """Have the loop await ``function()``, without waiting; do nothing on a closed loop."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._spawn, function)

    def stop(self) -> None:
        """Ask the loop to end; a second call has no effect."""
        self._stop_requested = True
        with contextlib.suppress(AttributeError, RuntimeError):  # no loop exists, or it is closed
            self.loop.call_soon_threadsafe(self._stopped.set)

    def refuse_own_thread(self) -> None:
        """Raise `PortalError` in the loop's own thread, which would wait for itself."""
        if self.ident == threading.get_ident():
            raise PortalError(
                "the sync API was called from kinetic's own event loop, where it would wait for "
                "itself; await the same name of kinetic.aio there"
            )

    def _start(self) -> None:
        """Start the loop's thread. Runs in a helper thread, because `Thread.start` takes a lock."""
        try:
            threading.Thread(target=self._run, name="kinetic loop", daemon=True).start()
        except BaseException as exc:
            self._ready.put(exc)

    def _run(self) -> None:
        """Run the loop until it is stopped; then close it, and fail the calls that still wait."""
        self.ident = threading.get_ident()
        try:
            self.loop = _Loop()
        except BaseException as exc:  # such as too many open files
            self._ready.put(exc)
            return
        self._ready.put(None)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException:
            logging.exception("kinetic's event loop failed; the next call starts another")
            self.is_ending = True
            self.loop.run_until_complete(self._cancel_tasks())
        finally:
            self.loop.close()
            while self.calls:
                self.calls.pop().fail(asyncio.CancelledError())
            self.milestones.put(None)  # the first milestone, in case `_serve` failed before it
            self.milestones.put(None)

    async def _serve(self) -> None:
        # anyio's worker threads end with this task. The hooks need those threads, so they run in
        # this task: no new thread can start while the interpreter exits.
        if not self._stop_requested:
            await self._stopped.wait()
        self.is_ending = True
        _share_one_thread_if_none_can_start()
        for hook in tuple(self._patient_hooks):
            await _run_logged(hook)
        self.milestones.put(None)
        for hook in tuple(self._hooks):
            await _run_logged(hook)
        await self._cancel_tasks()

    async def _cancel_tasks(self) -> None:
        """Cancel all tasks except the current one, and wait until they have cleaned up."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()

    def _spawn(self, function: Hook) -> None:
        task = self.loop.create_task(_run_logged(function), name="kinetic clean-up")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that a forked child doesn't close: the child shares its parent's selector."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        super().__init__()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Arguments]], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        # Use anyio's threads: asyncio's executor shuts down before kinetic's last clean-ups.
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        import anyio.to_thread

        return self.create_task(anyio.to_thread.run_sync(func, *args), name="kinetic worker")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # Don't report the unfinished tasks that the end of the interpreter, or a fork, destroys.
        if self._owner == os.getpid() and not sys.is_finalizing():
            super().call_exception_handler(context)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the object's construction may have failed
            if self._owner == os.getpid() and not self.is_running():
                self.close()


def _share_one_thread_if_none_can_start() -> None:
    """If no thread can start, let anyio run one call at a time, in a worker thread that exists."""
    try:
        _thread.start_new_thread(os.getpid, ())
    except RuntimeError:  # Python 3.12 starts no thread while it exits
        import anyio.to_thread

        anyio.to_thread.current_default_thread_limiter().total_tokens = 1


async def _run_logged(function: Hook) -> None:
    try:
        await function()
    except Exception:
        logging.exception("a clean-up failed")
