"""Let threads call coroutines on kinetic's event loop; every call of the sync API does so here."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, ParamSpec, Self, TypeVar

from absl import logging

from kinetic._progress.steps import SHOW_FACTORY
from kinetic._sync.loop_thread import Call, Hook, LoopThread, receive
from kinetic._tasks import running_loop
from kinetic._tracebacks import count_own_frames, own_frames_left_out
from kinetic.errors import PortalError

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

GRACE_S = 30.0
"""Seconds that an interrupted call, and the end of the interpreter, wait for clean-ups."""


class Portal:
    """An event loop on a separate thread, which starts with the first call.

    Any number of threads may make calls. A forked child starts another loop; the calls of the
    parent continue only in the parent.
    """

    def __init__(self, *, grace: float = GRACE_S) -> None:
        self.grace = grace
        # The lock is reentrant, because a finalizer may run in the thread that holds the lock.
        self._lock = threading.RLock()
        self.current: LoopThread | None = None
        """The current loop's thread; None before the first call, and after `close`."""
        self._patient_hooks: list[Hook] = []
        self._hooks: list[Hook] = []
        _PORTALS.add(self)

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await ``function(...)`` on the loop, and block until it returns or raises.

        An interrupt (Ctrl-C, or another exception of a signal handler) cancels the coroutine, which
        has the portal's grace period to clean up. A second interrupt ends the wait at once.

        Raises:
            PortalError: The caller runs in the loop's own thread, or the loop closes before the
                call has ended.
        """
        return self.new_call().call(function, *args, **kwargs)

    async def acall(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Await ``function(...)`` on the portal's loop; the caller's loop isn't blocked.

        If the caller is cancelled, cancel the coroutine and wait until it ends.
        """
        loop = running_loop()
        # Kinetic's own loop runs this call.
        if self.current is not None and loop is self.current.loop:
            return await function(*args, **kwargs)
        settled: asyncio.Future[None] = loop.create_future()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed, so no task waits
                loop.call_soon_threadsafe(_settle, settled)

        work = functools.partial(function, *args, **kwargs)
        call: Call[T] = Call(work, notify, contextvars.copy_context())
        self.submit(call)
        try:
            await asyncio.shield(settled)
        except asyncio.CancelledError:
            call.cancel()
            await settled  # a second cancellation ends this wait
            raise
        return call.take_result()

    def submit(self, call: Call[Any]) -> None:
        """Have the loop start *call*; if the loop has just closed, use a new loop."""
        while True:
            loop_thread = call.loop_thread = self.ensure_loop_thread()
            loop_thread.calls.add(call)
            try:
                loop_thread.loop.call_soon_threadsafe(call.start, loop_thread)
            except RuntimeError:
                loop_thread.calls.discard(call)
                if not loop_thread.loop.is_closed():
                    raise
            else:
                return

    def iterate(
        self,
        function: Callable[[], AsyncIterator[S]],
        convert: Callable[[S], T],
        on_interrupt: Callable[[], object] = lambda: None,
    ) -> Iteration[S, T]:
        """Return an iteration over the async iterator ``function()``, for threads and other loops.

        *convert* turns each item of that iterator into an item for the caller. If Ctrl-C ends the
        wait of a ``for`` loop, the iteration calls *on_interrupt*.
        """
        return Iteration(self, function, convert, on_interrupt)

    def new_call(self, *, patient: bool = True) -> PortalCall:
        """Return a call that hasn't started yet.

        Before it starts, build its callback arguments with `PortalCall.in_calling_thread`. If not
        *patient*, the first interrupt ends the wait without cancelling the coroutine.
        """
        return PortalCall(self, patient)

    def on_close(self, hook: Hook, *, patient: bool = False) -> None:
        """Register *hook*: each loop of this portal awaits ``hook()`` before it closes.

        *patient* hooks run before all other hooks and have no time limit. Only an interrupt ends
        the wait for them.
        """
        (self._patient_hooks if patient else self._hooks).append(hook)

    def ensure_loop_thread(self) -> LoopThread:
        """Return the thread of the running loop; if no loop runs, or if it is ending, start one."""
        loop_thread = self.current
        if loop_thread is not None and not loop_thread.is_ending:  # most calls need no lock
            return loop_thread
        with self._lock:
            loop_thread = self.current
            if loop_thread is None or loop_thread.is_ending:
                loop_thread = LoopThread(self._patient_hooks, self._hooks)
                try:
                    loop_thread.start()
                    _close_at_exit()
                    self.current = loop_thread
                except BaseException:
                    loop_thread.stop()
                    self.current = None
                    raise
            return loop_thread

    def close(self) -> None:
        """Close the loop: run the hooks, cancel other tasks, and wait until it ends.

        The wait for patient hooks has no limit; the wait after them lasts up to the grace period.
        While a call runs whose caller has stopped waiting, this method doesn't wait at all. A later
        call starts a new loop.

        Raises:
            PortalError: The caller runs in the loop's own thread.
        """
        with self._lock:
            loop_thread, self.current = self.current, None
        if loop_thread is None:
            return
        loop_thread.refuse_own_thread()
        loop_thread.stop()
        if any(call.is_abandoned and not call.done for call in tuple(loop_thread.calls)):
            return
        try:
            receive(loop_thread.milestones)
            receive(loop_thread.milestones, timeout=self.grace)
        except queue.Empty:
            logging.warning("kinetic's event loop did not end within %g s", self.grace)

    def check_caller(self) -> None:
        """Raise `PortalError` in the loop's own thread; warn if the call blocks another loop."""
        if self.current is not None:
            self.current.refuse_own_thread()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        from kinetic._progress.entry import in_notebook

        if in_notebook():  # the loop of a notebook has no other work while a cell runs
            return
        warnings.warn(
            "this call blocks the event loop that runs in this thread until it returns; "
            "write `await kinetic.aio.run(f, ...)` for f(...), and `await "
            "kinetic.aio.run_async_map(f, ...)` for f.run_async_map(...); other calls have the "
            "same name in kinetic.aio",
            RuntimeWarning,
            stacklevel=count_own_frames(),
        )

    def forget_parent_loop(self) -> None:
        """Forget the loop in a forked child: the loop's thread and files belong to the parent."""
        if self.current is not None:
            _PARENT_LOOP_THREADS.append(self.current)
        self._lock = threading.RLock()
        self.current = None


class PortalCall:
    """One call from a thread into the portal's loop."""

    def __init__(self, portal: Portal, patient: bool) -> None:
        self._portal = portal
        self._patient = patient
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def in_calling_thread(self, function: Callable[P, object] | None) -> Callable[P, None] | None:
        """Return a function that has *function* run in the thread that waits in `call`.

        Return None for None. If *function* fails, kinetic logs that, and the call continues.
        """
        if function is None:
            return None

        def post(*args: P.args, **kwargs: P.kwargs) -> None:
            self._inbox.put(functools.partial(function, *args, **kwargs))

        return post

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await ``function(...)`` on the loop and wait for it; see `Portal.call`."""
        from kinetic._progress.display import find_show  # only a call needs the display

        self._portal.check_caller()
        context = contextvars.copy_context()
        context.run(SHOW_FACTORY.set, find_show)  # a user waits, so show long steps
        work = functools.partial(function, *args, **kwargs)
        call: Call[T] = Call(work, functools.partial(self._inbox.put, None), context)
        try:
            self._portal.submit(call)
            self._wait()
        except BaseException:
            self._abandon(call)
            raise
        return call.take_result()

    def _wait(self) -> None:
        """Run the callbacks in the inbox until None comes, which means that the call has ended."""
        while True:
            callback = receive(self._inbox)
            if callback is None:
                return
            try:
                callback()
            except Exception:
                logging.exception("a callback failed; the call continues")

    def _abandon(self, call: Call[Any]) -> None:
        """Cancel a patient call, and wait for its clean-up; leave an impatient call running.

        The grace period, or another interrupt, ends the wait.
        """
        if call.loop_thread is None or call.done:
            return
        if not self._patient:
            call.is_abandoned = True
            return
        grace = self._portal.grace
        try:
            call.cancel()
            deadline = time.monotonic() + grace
            while not call.done:
                receive(self._inbox, timeout=deadline - time.monotonic())
        except queue.Empty:
            logging.warning("an interrupted call did not clean up within %g s", grace)
        except BaseException:
            call.is_abandoned = True
            logging.warning("interrupted again: a call did not finish its clean-up")


class Iteration(Generic[S, T]):
    """The items of an async iterator on the portal's loop, for ``for`` and ``async for``.

    `close`, or garbage collection, ends the async iterator before its last item.
    """

    def __init__(
        self,
        portal: Portal,
        function: Callable[[], AsyncIterator[S]],
        convert: Callable[[S], T],
        on_interrupt: Callable[[], object],
    ) -> None:
        self._portal = portal
        self._function = function
        self._convert = convert
        self._on_interrupt = on_interrupt
        self._loop_thread: LoopThread | None = None
        self._items: AsyncIterator[S] | None = None

    def __iter__(self) -> Self:
        return self

    @own_frames_left_out
    def __next__(self) -> T:
        try:
            return self._convert(self._portal.call(self._next_item))
        except StopAsyncIteration:
            raise StopIteration from None
        except KeyboardInterrupt:
            self._on_interrupt()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        with own_frames_left_out:
            return self._convert(await self._portal.acall(self._next_item))

    def close(self) -> None:
        """End the async iterator, and wait for its clean-up."""
        if self._loop_thread is not None and self._loop_thread is self._portal.current:
            self._portal.call(_close_iterator, self._items)

    async def aclose(self) -> None:
        """Do the same as `close`, without blocking the caller's loop."""
        if self._loop_thread is not None and self._loop_thread is self._portal.current:
            await self._portal.acall(_close_iterator, self._items)

    def __del__(self) -> None:
        # A finalizer must not wait: it may run in the loop's own thread.
        if self._loop_thread is not None and self._loop_thread is self._portal.current:
            self._loop_thread.start_task(functools.partial(_close_iterator, self._items))

    async def _next_item(self) -> S:
        if self._items is None:
            self._loop_thread, self._items = self._portal.current, self._function()
        if self._loop_thread is not self._portal.current:
            raise PortalError("this iteration belongs to a closed loop; start a new one")
        return await self._items.__anext__()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():  # the waiter may have been cancelled
        future.set_result(None)


async def _close_iterator(items: AsyncIterator[Any] | None) -> None:
    if (close := getattr(items, "aclose", None)) is not None:
        await close()


_PORTALS: weakref.WeakSet[Portal] = weakref.WeakSet()
_PARENT_LOOP_THREADS: list[LoopThread] = []
"""Loops of the parent process; this reference keeps a forked child from destroying them."""

_exit_is_hooked = False


def _close_at_exit() -> None:
    """Have Python call `_close_portals` at its exit, before callbacks registered earlier."""
    global _exit_is_hooked
    if not _exit_is_hooked:
        atexit.register(_close_portals)
        _exit_is_hooked = True
    process = sys.modules.get("multiprocessing.process")
    # Such a child ends without the functions of `atexit`.
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _close_portals, exitpriority=0)  # a child of multiprocessing skips atexit


def _close_portals() -> None:
    try:
        for portal in tuple(_PORTALS):
            portal.close()
    except KeyboardInterrupt:
        logging.warning("interrupted: kinetic did not finish closing")


def _after_fork() -> None:
    for portal in tuple(_PORTALS):
        portal.forget_parent_loop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

PORTAL = Portal()
"""The portal of the sync API."""
