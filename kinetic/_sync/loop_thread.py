"""An event loop on a separate thread, which a forked child leaves alone.

A signal may interrupt the main thread between any two steps of Python code, and
with it whatever it was doing to a lock of `threading`. What the main thread does
here is therefore single calls into C: a `queue.SimpleQueue`, a set, a `_thread`.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, Unpack

from absl import logging

from kinetic.errors import PortalError

if TYPE_CHECKING:
    from concurrent.futures import Executor

if sys.platform == "win32":
    from asyncio import ProactorEventLoop as _EventLoop
else:
    from asyncio import SelectorEventLoop as _EventLoop

POLL_S = 0.1 if sys.platform == "win32" else 0.5
"""How long a signal may go unheard by a thread that waits.

Windows tells a waiting thread nothing of Ctrl-C. Elsewhere a signal that comes between the
interpreter's last look for one and its wait for a lock, or that another thread is given, wakes
nobody; it would be lost until the wait ends.
"""

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


def receive(mail: queue.SimpleQueue[T], timeout: float = math.inf) -> T:
    """Wait for the next item of *mail*, *timeout* seconds at most, with an ear for signals.

    Raises:
        queue.Empty: There was none in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        with contextlib.suppress(queue.Empty):
            return mail.get(timeout=max(0.0, min(left, POLL_S)))
        if left <= POLL_S:
            raise queue.Empty


@dataclass(frozen=True, slots=True)
class Hook:
    """Work to await before a loop is closed; if *patient*, without a time limit."""

    function: Callable[[], Awaitable[None]]
    patient: bool


class Outcome(Generic[T]):
    """The return value or exception of a call; set once, in the thread of the loop."""

    __slots__ = ("_error", "_tell", "_value", "done")

    _value: T

    def __init__(self, tell: Callable[[], object]) -> None:
        self.done = False
        self._error: BaseException | None = None
        self._tell = tell

    def succeed(self, value: T) -> None:
        """The call returned *value*."""
        self._value = value
        self._settle()

    def fail(self, error: BaseException) -> None:
        """The call raised *error*; what was settled before stays."""
        if not self.done:
            self._error = error
            self._settle()

    def result(self) -> T:
        """Return the value or raise the error."""
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            del self  # or the error's traceback would hold the error

    def _settle(self) -> None:
        self.done = True
        self._tell()


class LoopThread:
    """One event loop with its thread, and the calls that wait for it.

    ``waiting`` are the calls under way, ``forsaken`` those nobody waits for any
    more. ``ending`` tells that another call would come too late. ``news`` gets
    one item when the patient hooks have run, and one when the loop is closed.
    """

    loop: _Loop
    ident: int

    def __init__(self, hooks: list[Hook]) -> None:
        self.waiting: set[Outcome[Any]] = set()
        self.forsaken: set[Outcome[Any]] = set()
        self.carried: set[asyncio.Task[None]] = set()
        self.ending = False
        self.news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._hooks = hooks
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._stop_asked = False
        self._stopped = asyncio.Event()

    def start(self) -> None:
        """Start the loop and wait until it runs.

        Interrupted: it ends by itself as soon as it has started.
        """
        try:
            _thread.start_new_thread(self._start, ())
            error = receive(self._ready)
        except BaseException:
            self.stop()
            raise
        if error is not None:
            raise error

    def begin(self, function: Callable[[], Awaitable[None]]) -> None:
        """Have ``function()`` awaited here and wait for nothing; too late is too late."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._spawn, function)

    def stop(self) -> None:
        """Ask the loop to end; to do so twice does not matter."""
        self._stop_asked = True
        with contextlib.suppress(AttributeError, RuntimeError):  # not there yet; closed
            self.loop.call_soon_threadsafe(self._stopped.set)

    def refuse_own_thread(self) -> None:
        """Raise `PortalError` in the loop's own thread: it would wait for itself."""
        if self.ident == threading.get_ident():
            raise PortalError(
                "the sync API was called from kinetic's own event loop, where it would wait for "
                "itself; await the same name of kinetic.aio there"
            )

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="kinetic loop", daemon=True).start()
        except BaseException as exc:
            self._ready.put(exc)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        try:
            self.loop = _Loop()
        except BaseException as exc:  # no more files may be opened
            self._ready.put(exc)
            return
        self._ready.put(None)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException:
            logging.exception("kinetic's event loop ended unasked; the next call starts another")
            self.ending = True
            self.loop.run_until_complete(self._wind_up())
        finally:
            self.loop.close()
            while self.waiting:
                self.waiting.pop().fail(asyncio.CancelledError())
            self.news.put(None)
            self.news.put(None)

    async def _serve(self) -> None:
        # One task from first to last: worker threads of anyio live as long as it does, and when
        # the interpreter ends there may be no new ones to clean up with.
        if not self._stop_asked:
            await self._stopped.wait()
        self.ending = True
        _make_do_with_threads_there_are()
        hooks = tuple(self._hooks)
        for hook in hooks:
            if hook.patient:
                await _logged(hook.function)
        self.news.put(None)
        for hook in hooks:
            if not hook.patient:
                await _logged(hook.function)
        await self._wind_up()

    async def _wind_up(self) -> None:
        """Cancel every other task, and wait until they have cleaned up."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()

    def _spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        task = self.loop.create_task(_logged(function), name="kinetic clean-up")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Loop(_EventLoop):
    """A loop that does nothing in a forked child, where its selector is still the parent's."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        super().__init__()

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[Unpack[Arguments]], T],
        *args: *Arguments,
    ) -> asyncio.Future[T]:
        # When the interpreter ends, executors are shut down before anybody may clean up.
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        import anyio.to_thread

        return self.create_task(anyio.to_thread.run_sync(func, *args), name="kinetic worker")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # What was let go of is destroyed at last: that is no news to anybody.
        if self._owner == os.getpid() and not sys.is_finalizing():
            super().call_exception_handler(context)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it may have been made half only
            if self._owner == os.getpid() and not self.is_running():
                self.close()


def _make_do_with_threads_there_are() -> None:
    """When an interpreter of 3.12 ends, no thread can be started: share one that idles."""
    try:
        _thread.start_new_thread(os.getpid, ())
    except RuntimeError:
        import anyio.to_thread

        anyio.to_thread.current_default_thread_limiter().total_tokens = 1


async def _logged(function: Callable[[], Awaitable[None]]) -> None:
    try:
        await function()
    except Exception:
        logging.exception("a clean-up failed")
