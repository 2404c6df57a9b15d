"""Run asyncio tasks that outlast a cancellation, that callers share, or that end together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from absl import logging

from kinetic._tracebacks import own_frames_left_out
from kinetic.errors import ClientClosed, KineticError, PortalError


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running asyncio loop.

    Raises:
        PortalError: No loop runs in this thread, or the loop belongs to another library.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise PortalError(
            "kinetic.aio runs on asyncio, and no loop of asyncio runs here; under another library "
            "call the sync API in a thread, as in `await trio.to_thread.run_sync(train, 0.1)`"
        ) from None


def require_loop(home: asyncio.AbstractEventLoop, subject: str, remedy: str) -> None:
    """Refuse to use *subject* on another event loop than *home*.

    There, a wait would never end, because only the tasks of *home* end it.

    Raises:
        PortalError: Another loop, or none, runs in this thread; the message has the *remedy*.
    """
    if running_loop() is not home:
        state = "a closed event loop" if home.is_closed() else "another event loop"
        raise PortalError(f"{subject} belongs to {state}; {remedy}")


P = ParamSpec("P")
T = TypeVar("T")


class AsyncOnly:
    """A base class whose sync ``with`` and ``for`` raise an error that names the async statement.

    Type checkers don't see them, so they report such a mistake before the program runs.
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise TypeError("kinetic.aio is for asyncio: write `async with` instead of `with`")

        def __exit__(self, *exc_info: object) -> None:  # Python calls `__enter__` only if it exists
            raise AssertionError("not entered")

        def __iter__(self) -> NoReturn:
            raise TypeError(
                "kinetic.aio is for asyncio: write `async for` instead of `for`, and "
                "`[x async for x in ...]` for a list"
            )


class _OneLoopStream(AsyncOnly, AsyncGenerator[T, None]):
    """Pass on the items of an async generator, on one event loop, until the last one.

    `asyncio.run` closes the generators of its loop, and a cancellation ends a generator. Without
    this class, an iteration that continues afterwards would end early, and raise nothing.
    """

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._loop: asyncio.AbstractEventLoop | None = None
        self._was_cancelled = False

    def _require_loop(self) -> AsyncGenerator[T, None]:
        self._loop = self._loop or running_loop()
        require_loop(self._loop, "this iterator", "begin another one in this loop")
        return self._items

    @own_frames_left_out
    async def __anext__(self) -> T:
        items = self._require_loop()
        if self._was_cancelled:
            raise KineticError(
                "this iterator was cancelled, as by a timeout or Ctrl-C, while it waited for an "
                "item; begin another one. To wait for a limited time, pass a task of `anext` to "
                "asyncio.wait(..., timeout=...), which doesn't cancel it"
            )
        try:
            return await anext(items)
        except asyncio.CancelledError:
            self._was_cancelled = True
            raise

    @own_frames_left_out
    async def asend(self, value: None) -> T:
        return await self._require_loop().asend(value)

    async def athrow(self, *error: Any) -> T:
        return await self._require_loop().athrow(*error)

    async def aclose(self) -> None:
        await self._require_loop().aclose()


def one_loop_stream(
    function: Callable[P, AsyncGenerator[T, None]],
) -> Callable[P, AsyncGenerator[T, None]]:
    """Have *function* return a generator that refuses a second event loop."""

    @functools.wraps(function)
    def start(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        return _OneLoopStream(function(*args, **kwargs))

    return start


async def in_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run *work* in a worker thread, and return its result.

    If the caller is cancelled, wait up to 60 seconds for *work* to end, because a thread can't be
    stopped (see `stop_point`). Then raise the cancellation.
    """
    call = functools.partial(work, *args, **kwargs)
    future = running_loop().create_task(anyio.to_thread.run_sync(call))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await release(_wait_until_done(future), operation="waiting for a worker thread", grace=60.0)
        raise


def stop_point() -> Callable[[], None]:
    """Return a function that raises an error once this task is cancelled; any thread may call it.

    `in_thread` then ends early if *work* calls that function now and then.
    """
    task = asyncio.current_task(running_loop())
    assert task is not None
    before = task.cancelling()  # a program may have suppressed an earlier cancellation

    def check() -> None:
        if task.cancelling() > before:
            raise concurrent.futures.CancelledError

    return check


async def _wait_until_done(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # otherwise asyncio logs that no one read the exception


async def until_set(event: asyncio.Event, timeout: float) -> bool:
    """Wait for *event* up to *timeout* seconds; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()


async def await_shared(task: asyncio.Task[T], owner: str) -> T:
    """Await *task*, which several callers share, and let it continue if this caller is cancelled.

    Raises:
        ClientClosed: *task* itself was cancelled, which its *owner* does when it closes.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if task.cancelled() and caller is not None and not caller.cancelling():
            raise ClientClosed(f"{owner} was closed meanwhile; open another") from None
        raise


class SharedCalls(Generic[T]):
    """Calls that concurrent callers with the same key share; all of them get its result."""

    def __init__(self) -> None:
        self._tasks: dict[object, asyncio.Task[T]] = {}
        self._callers: Counter[object] = Counter()

    async def run(
        self,
        key: object,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        operation: str,
        grace: float = 30.0,
    ) -> T:
        """Await the running call for *key*, or ``work()`` if none runs; logs name it *operation*.

        Cancelled: the call continues for its other callers. Without any, it is cancelled, and this
        caller waits up to *grace* seconds for its end.
        """
        if (task := self._tasks.get(key)) is None:
            task = self._tasks[key] = asyncio.create_task(work(), name=f"kinetic {operation}")
        self._callers[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._callers[key] -= 1
            if not self._callers[key]:
                del self._tasks[key], self._callers[key]
                if not task.done():
                    task.cancel()
                    end = _wait_until_done(task)
                    await release(end, operation=f"cancelling {operation}", grace=grace)


async def all_or_none(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run *work* concurrently; on a failure or a cancellation, cancel and await the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await release(_wait_until_done(*tasks), operation="ending the other requests")
        raise


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> list[Any]:
    """Cancel *tasks*, and wait until they have ended; return their results, or their errors."""
    ending = [*tasks]
    for task in ending:
        task.cancel()
    return await asyncio.gather(*ending, return_exceptions=True)


async def for_each(
    work: Callable[[T], Coroutine[Any, Any, object]], items: Iterable[T], *, limit: int
) -> None:
    """Await ``work(item)`` for all *items*, *limit* at a time; a failure cancels the others."""
    remaining = iter(items)

    async def run_items() -> None:
        for item in remaining:
            await work(item)

    await all_or_none(*(run_items() for _ in range(limit)))


async def release(
    work: Coroutine[Any, Any, object],
    *,
    operation: str,
    grace: float = 30.0,
    progress: Callable[[], object] | None = None,
    interrupted: bool = False,
) -> None:
    """Await *work*, a cleanup, even if the caller is cancelled; log messages name it *operation*.

    After *grace* seconds without a new value of *progress*, cancel *work*. Log a failure of *work*
    instead of raising it, because the caller already raises another error. Raise a cancellation of
    the caller after *work* has ended. If *interrupted* is true, because the caller was interrupted
    before, Ctrl-C cancels *work*. The signal tells a Ctrl-C, because a cancellation may come again
    and again from other causes: a cancel scope of anyio cancels each ``await``.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work, name=f"kinetic release: {operation}")
    stopped: asyncio.Future[None] = loop.create_future()
    deadline, last_progress = loop.time() + grace, progress() if progress is not None else None
    cancelled: asyncio.CancelledError | None = None

    def stop() -> None:
        loop.call_soon_threadsafe(stopped.cancel)

    with (
        _on_sigint(stop) if interrupted else contextlib.nullcontext(),
        anyio.CancelScope(shield=True),  # otherwise this loop runs without a pause
    ):
        while not (task.done() or stopped.done()):
            if (time_left := deadline - loop.time()) <= 0:
                if progress is None or progress() == last_progress:
                    break
                deadline, last_progress = loop.time() + grace, progress()
                continue
            try:
                futures: set[asyncio.Future[Any]] = {task, stopped}
                await asyncio.wait(futures, timeout=time_left, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as exc:
                cancelled = exc
    if stopped.done() or task.cancelled():  # `asyncio.run` cancels *work* if it is interrupted
        task.cancel()
        logging.warning("interrupted again: stopped %s", operation)
    elif not task.done():
        task.cancel()
        logging.warning("gave up on %s after %g s", operation, grace)
    elif (failure := task.exception()) is not None:
        logging.warning("%s failed: %s: %s", operation, type(failure).__name__, failure)
    if cancelled is not None:
        raise cancelled


_sigint_callbacks: list[Callable[[], object]] = []


class _SigintHandler:
    """Call `_sigint_callbacks`, and then the handler that the program had before."""

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for callback in tuple(_sigint_callbacks):
            callback()
        self.previous(number, frame)


@contextlib.contextmanager
def _on_sigint(callback: Callable[[], object]) -> Generator[None]:
    """Have each Ctrl-C also call *callback* during the block; blocks may overlap."""
    handler = signal.getsignal(signal.SIGINT)
    # The main thread gets all signals, and only it may set handlers.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    if not isinstance(handler, _SigintHandler):
        signal.signal(signal.SIGINT, _SigintHandler(handler))
    _sigint_callbacks.append(callback)
    try:
        yield
    finally:
        _sigint_callbacks.remove(callback)
        handler = signal.getsignal(signal.SIGINT)
        if not _sigint_callbacks and isinstance(handler, _SigintHandler):
            signal.signal(signal.SIGINT, handler.previous)
