"""The bridge from threads to an event loop; every call of the sync API uses it."""

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

from kinetic._progress.steps import WANTED
from kinetic._sync.loop_thread import Hook, LoopThread, Outcome, receive
from kinetic._tasks import running_loop
from kinetic._tracebacks import own_frames, own_frames_left_out
from kinetic.errors import PortalError

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

GRACE_S = 30.0
"""How long an interrupted call, or the end of the interpreter, waits for clean-ups; seconds."""


def _nothing() -> None:
    pass


class Portal:
    """An event loop on a separate thread, which starts with the first call.

    Any number of threads may call. A forked child starts another loop; the calls of the parent
    continue only in the parent.
    """

    def __init__(self, *, grace: float = GRACE_S) -> None:
        self._grace = grace
        self._lock = threading.RLock()  # a finalizer can call while its thread holds the lock
        self._home: LoopThread | None = None
        self._hooks: list[Hook] = []
        _PORTALS.add(self)

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await ``function(...)`` on the loop; wait here and return or raise its outcome.

        An interrupt (Ctrl-C, or another exception of a signal handler) cancels the coroutine, which
        gets the portal's grace to clean up. A second interrupt stops waiting at once.

        Raises:
            PortalError: This is the loop's own thread, or the loop was closed.
        """
        return self.crossing().call(function, *args, **kwargs)

    async def acall(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Await ``function(...)`` on the portal's loop from any loop, without blocking it."""
        loop = running_loop()
        if self._home is not None and loop is self._home.loop:
            return await function(*args, **kwargs)
        return await self.crossing().acall(function, *args, **kwargs)

    def iterate(
        self,
        function: Callable[[], AsyncIterator[S]],
        convert: Callable[[S], T],
        on_interrupt: Callable[[], object] = _nothing,
    ) -> Iteration[S, T]:
        """Drive the async iterator that ``function()`` returns, from threads or other loops.

        Calls *on_interrupt* when Ctrl-C ends the wait of a ``for`` loop.
        """
        return Iteration(self, function, convert, on_interrupt)

    def crossing(self, *, patient: bool = True) -> Crossing:
        """Prepare one call, for a caller that passes callbacks.

        If not *patient*, the first interrupt stops waiting; the call continues while this process
        lives.
        """
        return Crossing(self, self._grace, patient)

    def on_close(self, hook: Callable[[], Awaitable[None]], *, patient: bool = False) -> None:
        """Await ``hook()`` on each loop of this portal before it closes.

        Patient hooks come first and have no time limit; only an interrupt ends them.
        """
        self._hooks.append(Hook(hook, patient))

    @property
    def current(self) -> LoopThread | None:
        """The running loop, if any; objects of another loop are stale."""
        return self._home

    def home(self) -> LoopThread:
        """Return the running loop; start one if there is none."""
        home = self._home
        if home is not None and not home.ending:
            return home
        with self._lock:
            home = self._home
            if home is None or home.ending:
                home = LoopThread(self._hooks)
                try:
                    home.start()
                    _close_at_exit()
                    self._home = home
                except BaseException:
                    home.stop()
                    self._home = None
                    raise
            return home

    def close(self) -> None:
        """Close the loop: run the hooks, cancel other tasks, and wait up to the grace period.

        Does not wait for forsaken calls. A later call starts a new loop.

        Raises:
            PortalError: This is the loop's own thread.
        """
        with self._lock:
            home, self._home = self._home, None
        if home is None:
            return
        home.refuse_own_thread()
        home.stop()
        if any(not outcome.done for outcome in home.forsaken):
            return
        try:
            receive(home.news)
            receive(home.news, timeout=self._grace)
        except queue.Empty:
            logging.warning("kinetic's event loop did not end within %g s", self._grace)

    def admit(self) -> None:
        """Refuse a wait that would never end; warn about one that blocks an event loop."""
        if self._home is not None:
            self._home.refuse_own_thread()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        from kinetic._progress.entry import in_notebook

        if in_notebook():  # while a cell waits, a notebook's loop has no other work
            return
        warnings.warn(
            "this call blocks the event loop that runs in this thread until it returns; "
            "write `await kinetic.aio.run(f, ...)` for f(...), and `await "
            "kinetic.aio.run_async_map(f, ...)` for f.run_async_map(...); other calls have the "
            "same name in kinetic.aio",
            RuntimeWarning,
            stacklevel=own_frames(),
        )

    def forget(self) -> None:
        """Forget the loop in a forked child: the loop's thread and files belong to the parent."""
        if self._home is not None:
            _INHERITED.append(self._home)
        self._lock = threading.RLock()
        self._home = None


class Crossing:
    """One call from a thread, or from another loop, into the portal's loop."""

    def __init__(self, portal: Portal, grace: float, patient: bool = True) -> None:
        self._portal = portal
        self._grace = grace
        self._patient = patient
        self._mail: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._home: LoopThread | None = None
        self._task: asyncio.Task[None] | None = None

    def here(self, function: Callable[P, object] | None) -> Callable[P, None] | None:
        """Return a function that makes the waiting thread call *function*; None stays None.

        Logs the exceptions of *function*; the call continues.
        """
        if function is None:
            return None

        def post(*args: P.args, **kwargs: P.kwargs) -> None:
            self._mail.put(functools.partial(function, *args, **kwargs))

        return post

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as `Portal.call`."""
        from kinetic._progress.display import shower  # declaring functions needs no display

        self._portal.admit()
        outcome: Outcome[T] = Outcome(functools.partial(self._mail.put, None))
        context = contextvars.copy_context()
        context.run(WANTED.set, shower)  # a user waits
        try:
            self._enter(functools.partial(function, *args, **kwargs), outcome, context)
            self._wait()
        except BaseException:
            self._leave(outcome)
            raise
        try:
            return _result(outcome)
        finally:
            del outcome  # the traceback of its error holds this frame

    async def acall(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Await *function* on the portal's loop, and return its result in the caller's loop.

        If the caller is cancelled, cancel the coroutine and wait until it ends.
        """
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # the caller's loop was closed, so nothing waits
                loop.call_soon_threadsafe(_settle, settled)

        outcome: Outcome[T] = Outcome(tell)
        context = contextvars.copy_context()
        self._enter(functools.partial(function, *args, **kwargs), outcome, context)
        try:
            await asyncio.shield(settled)
        except asyncio.CancelledError:
            self._cancel(outcome)
            await settled  # a second cancellation ends this wait
            raise
        try:
            return _result(outcome)
        finally:
            del outcome

    def _enter(
        self,
        function: Callable[[], Awaitable[T]],
        outcome: Outcome[T],
        context: contextvars.Context,
    ) -> None:
        while True:
            home = self._home = self._portal.home()
            home.waiting.add(outcome)
            start = functools.partial(self._start, home, function, outcome, context)
            try:
                home.loop.call_soon_threadsafe(start)
            except RuntimeError:  # the loop has just closed: start another one
                home.waiting.discard(outcome)
                if not home.loop.is_closed():
                    raise
            else:
                return

    def _start(
        self,
        home: LoopThread,
        function: Callable[[], Awaitable[T]],
        outcome: Outcome[T],
        context: contextvars.Context,
    ) -> None:
        def end(task: asyncio.Task[None]) -> None:
            home.carried.discard(task)
            home.waiting.discard(outcome)
            outcome.fail(asyncio.CancelledError())  # the task was cancelled before its first step

        context.run(_leave_library)
        carrying = _carry_out(function, outcome)
        self._task = home.loop.create_task(carrying, name="kinetic call", context=context)
        home.carried.add(self._task)  # nothing else refers to a forsaken call
        self._task.add_done_callback(end)

    def _wait(self) -> None:
        """Run the callbacks that are posted to this thread until the call's outcome is set."""
        while True:
            work = receive(self._mail)
            if work is None:
                return
            try:
                work()
            except Exception:
                logging.exception("a callback failed; the call continues")

    def _leave(self, outcome: Outcome[Any]) -> None:
        """After an interrupt, cancel the call; wait for its clean-up until a second interrupt."""
        if self._home is None or outcome.done:
            return
        if not self._patient:
            self._home.forsaken.add(outcome)
            return
        try:
            self._cancel(outcome)
            deadline = time.monotonic() + self._grace
            while not outcome.done:
                receive(self._mail, timeout=deadline - time.monotonic())
        except queue.Empty:
            logging.warning("an interrupted call did not clean up within %g s", self._grace)
        except BaseException:
            self._home.forsaken.add(outcome)
            logging.warning("interrupted again: a call did not finish its clean-up")

    def _cancel(self, outcome: Outcome[Any]) -> None:
        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()
            else:  # interrupted before the loop was asked to start it
                outcome.fail(asyncio.CancelledError())

        assert self._home is not None
        try:
            self._home.loop.call_soon_threadsafe(cancel)
        except RuntimeError:  # the loop is closed, and so is everything in it
            outcome.done = True


class Iteration(Generic[S, T]):
    """The items of an async iterator on the portal's loop, for ``for`` and ``async for``.

    It closes at its end, by `close`, or when it is garbage-collected.
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
        self._home: LoopThread | None = None
        self._items: AsyncIterator[S] | None = None

    def __iter__(self) -> Self:
        return self

    @own_frames_left_out
    def __next__(self) -> T:
        try:
            return self._convert(self._portal.call(self._step))
        except StopAsyncIteration:
            raise StopIteration from None
        except KeyboardInterrupt:
            self._on_interrupt()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        with own_frames_left_out:
            return self._convert(await self._portal.acall(self._step))

    def close(self) -> None:
        """Stop iterating, and wait for the iterator's clean-up."""
        if self._home is not None and self._home is self._portal.current:
            self._portal.call(_aclose, self._items)

    async def aclose(self) -> None:
        """Do the same as `close`, for a caller in another loop."""
        if self._home is not None and self._home is self._portal.current:
            await self._portal.acall(_aclose, self._items)

    def __del__(self) -> None:
        # A finalizer must not wait: it may run in the loop's own thread.
        if self._home is not None and self._home is self._portal.current:
            self._home.begin(functools.partial(_aclose, self._items))

    async def _step(self) -> S:
        if self._items is None:
            self._home, self._items = self._portal.current, self._function()
        if self._home is not self._portal.current:
            raise PortalError("this iteration belongs to a closed loop; start a new one")
        return await self._items.__anext__()


def _leave_library() -> None:
    """Tell anyio that the call runs on asyncio, even if another library's loop waits for it.

    anyio and that library look up the running library in sniffio, if it is installed.
    """
    sniffio: Any = sys.modules.get("sniffio")
    # Another thread may be importing the module.
    library = getattr(sniffio, "current_async_library_cvar", None)
    if library is not None:
        library.set(None)


async def _carry_out(function: Callable[[], Awaitable[T]], outcome: Outcome[T]) -> None:
    """Await ``function()`` and set *outcome*; an uncaught SystemExit would end the loop."""
    try:
        outcome.succeed(await function())
    except RuntimeError as exc:
        cause = exc.__cause__  # a coroutine can't raise StopIteration itself
        outcome.fail(cause if isinstance(cause, StopIteration) else exc)
    except BaseException as exc:
        outcome.fail(exc)
    finally:
        del outcome  # the traceback of its error holds this frame


def _result(outcome: Outcome[T]) -> T:
    try:
        return outcome.result()
    except asyncio.CancelledError as exc:
        raise PortalError("the call was cancelled: kinetic's event loop was closed") from exc
    finally:
        del outcome


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _aclose(items: AsyncIterator[Any] | None) -> None:
    if (close := getattr(items, "aclose", None)) is not None:
        await close()


_PORTALS: weakref.WeakSet[Portal] = weakref.WeakSet()
_INHERITED: list[LoopThread] = []
_exit_is_hooked = False


def _close_at_exit() -> None:
    """Register `_exit` when a loop starts; it then runs before callbacks registered earlier."""
    global _exit_is_hooked
    if not _exit_is_hooked:
        atexit.register(_exit)
        _exit_is_hooked = True
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _exit, exitpriority=0)  # a child of multiprocessing skips atexit


def _exit() -> None:
    try:
        for portal in tuple(_PORTALS):
            portal.close()
    except KeyboardInterrupt:
        logging.warning("interrupted: kinetic did not finish closing")


def _after_fork() -> None:
    for portal in tuple(_PORTALS):
        portal.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

PORTAL = Portal()
"""The portal of the sync API."""
