"""The one bridge from threads to an event loop; everything of the sync face goes over it."""

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
"""How long an interrupted call, or the end of the interpreter, waits for clean-ups."""


def _nothing() -> None:
    pass


class Portal:
    """An event loop on a separate thread, started when it is first needed.

    Any number of threads may call. A forked child gets a loop of its own: what
    the parent's loop was doing goes on in the parent, and there only.
    """

    def __init__(self, *, grace: float = GRACE_S) -> None:
        self._grace = grace
        self._lock = threading.RLock()  # a finalizer may call while its thread is in here
        self._home: LoopThread | None = None
        self._hooks: list[Hook] = []
        _PORTALS.add(self)

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await ``function(...)`` on the loop, and wait here for what it returns or raises.

        When the wait is interrupted, by Ctrl-C or anything else that a signal
        handler raises, the coroutine is cancelled and gets the portal's grace
        to clean up; a second interrupt lets go at once.

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

        *on_interrupt* is called when Ctrl-C ends the wait of a ``for`` loop.
        """
        return Iteration(self, function, convert, on_interrupt)

    def crossing(self, *, patient: bool = True) -> Crossing:
        """One call to be made, for a caller that wants to be called back meanwhile.

        One that is not *patient* is let go of when it is interrupted, as if it
        had been twice: it goes on for as long as this process does.
        """
        return Crossing(self, self._grace, patient)

    def on_close(self, hook: Callable[[], Awaitable[None]], *, patient: bool = False) -> None:
        """Await ``hook()`` on each loop of this portal before that is closed.

        The patient ones come first and may take as long as they need; only
        another interrupt ends them.
        """
        self._hooks.append(Hook(hook, patient))

    @property
    def current(self) -> LoopThread | None:
        """Where the loop runs now, if it was started; what belongs to another is stale."""
        return self._home

    def home(self) -> LoopThread:
        """Where the loop runs, started if it was not."""
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
        """Close the loop: run the hooks, cancel what still runs, wait up to the grace.

        A call that an impatient user has let go of is not waited for. A later
        call starts a new loop.

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
            logging.warning("kinetic's event loop did not end within %g s; let go", self._grace)

    def admit(self) -> None:
        """Refuse to wait where that would last for ever; warn where it holds up a loop."""
        if self._home is not None:
            self._home.refuse_own_thread()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        from kinetic._progress.entry import in_notebook

        if in_notebook():  # a cell is to wait, and its loop has nothing else to do meanwhile
            return
        warnings.warn(
            "this call blocks the event loop that runs in this thread until it returns; "
            "await its twin in kinetic.aio instead",
            RuntimeWarning,
            stacklevel=own_frames(),
        )

    def forget(self) -> None:
        """In a forked child: the loop's thread is not here, and its files are the parent's."""
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
        """A stand-in for *function* that has the waiting thread call it; None stays None.

        What it raises is logged, and the call goes on.
        """
        if function is None:
            return None

        def post(*args: P.args, **kwargs: P.kwargs) -> None:
            self._mail.put(functools.partial(function, *args, **kwargs))

        return post

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `Portal.call`."""
        from kinetic._progress.display import shower  # declaring functions needs no display

        self._portal.admit()
        outcome: Outcome[T] = Outcome(functools.partial(self._mail.put, None))
        context = contextvars.copy_context()
        context.run(WANTED.set, shower)  # somebody sits and waits
        try:
            self._enter(functools.partial(function, *args, **kwargs), outcome, context)
            self._wait()
        except BaseException:
            self._leave(outcome)
            raise
        try:
            return _result(outcome)
        finally:
            del outcome  # its error's traceback holds this frame

    async def acall(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `Portal.acall`; when it is cancelled, so is the coroutine, and is waited for."""
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # that loop was closed, so nothing waits on it
                loop.call_soon_threadsafe(_settle, settled)

        outcome: Outcome[T] = Outcome(tell)
        context = contextvars.copy_context()
        self._enter(functools.partial(function, *args, **kwargs), outcome, context)
        try:
            await asyncio.shield(settled)
        except asyncio.CancelledError:
            self._cancel(outcome)
            await settled  # a second cancellation lets go
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
            except RuntimeError:  # it was closed just now: the next one takes the call
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
            outcome.fail(asyncio.CancelledError())  # it was cancelled before its first step

        context.run(_leave_library)
        carrying = _carry_out(function, outcome)
        self._task = home.loop.create_task(carrying, name="kinetic call", context=context)
        home.carried.add(self._task)  # once it is let go of, nothing else may refer to it
        self._task.add_done_callback(end)

    def _wait(self) -> None:
        """Run the requests to this thread until the outcome is set."""
        while True:
            work = receive(self._mail)
            if work is None:
                return
            try:
                work()
            except Exception:
                logging.exception("a callback failed; the call goes on")

    def _leave(self, outcome: Outcome[Any]) -> None:
        """The wait was interrupted: cancel, wait for the clean-up, let go the second time."""
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
            logging.warning("what was interrupted cleans up for %g s now; let go", self._grace)
        except BaseException:
            self._home.forsaken.add(outcome)
            logging.warning("interrupted again: let go of a call while it cleaned up")

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
    """What a loop elsewhere yields: an iterator here and an async iterator in any loop.

    It is closed when it is exhausted, by `close`, or when it is dropped.
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
        """Stop iterating, and wait until the iterator's clean-up has run."""
        if self._home is not None and self._home is self._portal.current:
            self._portal.call(_aclose, self._items)

    async def aclose(self) -> None:
        """As `close`, for another loop."""
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
    """What waits under another library's loop is carried out under asyncio's, and anyio must know.

    sniffio is where both look that up, if it is installed.
    """
    sniffio: Any = sys.modules.get("sniffio")
    library = getattr(sniffio, "current_async_library_cvar", None)  # it may just be imported
    if library is not None:
        library.set(None)


async def _carry_out(function: Callable[[], Awaitable[T]], outcome: Outcome[T]) -> None:
    """Settle *outcome*; SystemExit is the caller's, too, and would end this loop."""
    try:
        outcome.succeed(await function())
    except RuntimeError as exc:
        cause = exc.__cause__  # a coroutine cannot raise StopIteration as it is
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
    """Registered when a loop starts, so that it runs before whatever was registered earlier."""
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
        logging.warning("interrupted: kinetic let go of what it was closing")


def _after_fork() -> None:
    for portal in tuple(_PORTALS):
        portal.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

PORTAL = Portal()
"""The portal of the sync face; there is no other outside tests."""
