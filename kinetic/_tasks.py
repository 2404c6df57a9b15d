"""Run asyncio tasks that outlast a cancellation, that callers share, or that end together."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

import anyio.to_thread
from absl import logging

from kinetic.errors import ClientClosed, PortalError


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


P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run *work* in a worker thread, and return its result.

    If the caller is cancelled, wait up to 60 seconds for *work* to end, because a thread can't be
    stopped. Then raise the cancellation.
    """
    call = functools.partial(work, *args, **kwargs)
    future = asyncio.ensure_future(anyio.to_thread.run_sync(call))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await release(_wait_until_done(future), operation="waiting for a worker thread", grace=60.0)
        raise


async def _wait_until_done(future: asyncio.Future[Any]) -> None:
    await asyncio.wait({future})
    if not future.cancelled():
        future.exception()  # otherwise asyncio logs that no one read the exception


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


async def all_or_none(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run *work* concurrently; on a failure or a cancellation, cancel and await the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


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
    before, a cancellation also cancels *work*.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work, name=f"kinetic release: {operation}")
    deadline, last_progress = loop.time() + grace, progress() if progress is not None else None
    cancelled: asyncio.CancelledError | None = None
    while not (task.done() or (interrupted and cancelled is not None)):
        if (time_left := deadline - loop.time()) <= 0:
            if progress is None or progress() == last_progress:
                break
            deadline, last_progress = loop.time() + grace, progress()
            continue
        try:
            await asyncio.wait({task}, timeout=time_left)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if not task.done():
        task.cancel()
        if interrupted and cancelled is not None:
            logging.warning("interrupted again: stopped %s", operation)
        else:
            logging.warning("gave up on %s after %g s", operation, grace)
    elif not task.cancelled() and (failure := task.exception()) is not None:
        logging.warning("%s failed: %s: %s", operation, type(failure).__name__, failure)
    if cancelled is not None:
        raise cancelled
