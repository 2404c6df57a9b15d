"""Pull the inputs of a batch from the collection or iterator that the user passed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, cast

import anyio.to_thread

from kinetic._tracebacks import of_the_caller
from kinetic.aio._preparing.inputs import CHUNK_BYTES, EncodedInput, Encoder
from kinetic.errors import ConfigurationError

FLUSH_S = 0.001
"""How long `Source.take` waits for more inputs of a thread after the first, in seconds."""

CLOSE_S = 5.0
"""How long a cancelled async generator may take to end, in seconds."""


class Source:
    """The user's inputs, pulled only when asked for.

    The source pickles each input before it pulls the next one, because an iterator may change an
    input and yield it again. For the same reason, it pulls nothing after an input with a `Data`
    until the caller has taken that input, and stored the files.

    A sync iterator is read in a thread of its own, because it may block, and may use a connection
    that works in one thread only. Cancelling `take` doesn't interrupt an iterator that is producing
    an input. The source copies a list; the caller takes all its inputs before the user gets
    the batch's handle, so later changes to the list or its elements have no effect.

    ``mode`` is the ``input_mode``, ``length`` the number of inputs if it's known, and
    ``known_inputs`` all inputs if they exist already.
    """

    def __init__(self, inputs: Iterable[Any] | AsyncIterable[Any], mode: str) -> None:
        self.mode = mode
        self.length = _size_of(inputs)
        self.known_inputs: Sequence[Any] | None = None
        self._async_iterator: AsyncIterator[Any] | None = None
        self._sync_iterator: Iterator[Any] | None = None
        self._ready: deque[EncodedInput] = deque()
        self._arrived = asyncio.Event()
        self._pull_task: asyncio.Task[bool] | None = None
        self._thread_work: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self._stopped = False
        self._in_thread = False  # whether a thread is producing or pickling an input
        if isinstance(inputs, (list, tuple, range, set, frozenset, dict)):
            known = cast("Collection[Any]", inputs)
            self.known_inputs = inputs if isinstance(inputs, range) else tuple(known)
            self._sync_iterator = iter(self.known_inputs)
        elif isinstance(inputs, AsyncIterable):
            self._async_iterator = aiter(inputs)
        else:
            try:
                self._sync_iterator = iter(inputs)
            except TypeError:
                kind = type(inputs).__name__
                raise ConfigurationError(f"inputs must be an iterable, not {kind}") from None

    async def take(self, wanted: int, encoder: Encoder) -> list[EncodedInput]:
        """Return between 1 and *wanted* inputs; none if there are no more, or after `stop`.

        Return fewer if they have `CHUNK_BYTES`, or if the last has a `Data`.

        Cancelled: inputs already pulled from the iterator stay in this object; `drain` returns
        them.
        """
        if self.known_inputs is not None and self._sync_iterator is not None:
            return await anyio.to_thread.run_sync(self._take_known, wanted, encoder)
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as timeout:
                while len(self._ready) < wanted and not self._is_over:
                    if self._pull_task is None or self._pull_task.done():
                        if _is_full(self._ready):
                            break
                        pulling = self._pull(wanted - len(self._ready), encoder)
                        self._pull_task = asyncio.ensure_future(pulling)
                        self._pull_task.add_done_callback(lambda _: self._arrived.set())
                    self._arrived.clear()
                    if self._ready and timeout.when() is None:
                        # An async iterator has run until it waits: perhaps for these inputs' items.
                        is_async = self._async_iterator is not None
                        timeout.reschedule(clock() + (0.0 if is_async else FLUSH_S))
                    await self._arrived.wait()
        if not (self._ready or self._stopped) and self._pull_task is not None:
            if self._pull_task.cancelled():
                raise RuntimeError("the iterator of the inputs was cancelled")
            self._pull_task.result()  # raise the iterator's error, after the inputs before it
        return self._take_ready(wanted)

    @property
    def _is_over(self) -> bool:
        """Whether the iterator has ended or raised."""
        pull_task = self._pull_task
        if self._stopped or pull_task is None or not pull_task.done():
            return self._stopped
        return pull_task.cancelled() or pull_task.exception() is not None or self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether an iterator has said that it has no more inputs."""
        task = self._pull_task
        if task is None or not task.done() or task.cancelled():
            return False
        return task.exception() is None and not task.result()

    def _take_known(self, wanted: int, encoder: Encoder) -> list[EncodedInput]:
        assert self._sync_iterator is not None
        taken: list[EncodedInput] = []
        size = 0
        while len(taken) < wanted and size < CHUNK_BYTES:
            try:
                taken.append(encoder.encode(next(self._sync_iterator)))
            except StopIteration:
                break
            size += len(taken[-1].content)
        return taken

    def _take_ready(self, wanted: int) -> list[EncodedInput]:
        return [self._ready.popleft() for _ in range(min(wanted, len(self._ready)))]

    def stop(self) -> None:
        """Pull nothing more, and end a `take` that waits."""
        self._stopped = True
        self._arrived.set()

    async def drain(self, timeout: float) -> list[EncodedInput]:
        """Stop, and return the inputs that were pulled but not taken.

        Wait up to *timeout* seconds for the input that a thread is producing or pickling.
        """
        self.stop()
        if self._in_thread and self._pull_task is not None:
            await asyncio.wait({self._pull_task}, timeout=timeout)
        return self._take_ready(len(self._ready))

    async def aclose(self) -> None:
        """Stop pulling; an async generator runs its ``finally``.

        A thread that blocks in an iterator continues.
        """
        self._stopped = True
        if self._thread_work is not None:
            self._thread_work.put(None)
        if self._pull_task is not None:
            self._pull_task.cancel()
            # Limit the wait: a generator that waits for its own batch to end never ends.
            await asyncio.wait({self._pull_task}, timeout=CLOSE_S)
            if not self._pull_task.done():
                return
            if not self._pull_task.cancelled():
                self._pull_task.exception()  # mark the error as read
        aclose_iterator = getattr(self._async_iterator, "aclose", None)
        if aclose_iterator is not None:
            await aclose_iterator()

    async def _pull(self, wanted: int, encoder: Encoder) -> bool:
        """Pull *wanted* inputs, or fewer if `_is_full` or after `stop`.

        Return False at the iterator's end.
        """
        if self._async_iterator is None:
            self._in_thread = True
            try:
                return await self._call_thread(wanted, encoder)
            finally:
                self._in_thread = False
        count = size = 0
        while count < wanted and not self._stopped and size < CHUNK_BYTES:
            try:
                value = await anext(self._async_iterator)
            except StopAsyncIteration:
                return False
            except Exception as exc:
                of_the_caller(exc)
                raise
            encoded = encoder.encode_small(value)
            if encoded is None:
                self._in_thread = True
                try:
                    encoded = await anyio.to_thread.run_sync(encoder.encode, value)
                finally:
                    self._in_thread = False
            self._ready.append(encoded)
            self._arrived.set()
            if encoded.data:  # its files must be stored before the next input is pulled
                break
            count, size = count + 1, size + len(encoded.content)
        return True

    async def _call_thread(self, wanted: int, encoder: Encoder) -> bool:
        """Have the iterator's thread pull *wanted* inputs; the first call starts the thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()

        def work() -> None:
            try:
                goes_on = self._pull_in_thread(loop, wanted, encoder)
                reply = functools.partial(answer.set_result, goes_on)
            except Exception as exc:
                reply = functools.partial(answer.set_exception, exc)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: answer.done() or reply())

        if self._thread_work is None:
            thread_work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
            run = contextvars.copy_context().run
            # The end of the interpreter doesn't wait for a daemon, which may block in the iterator.
            thread = threading.Thread(
                target=run, args=(_work_off, thread_work), name="kinetic inputs", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no thread can start while the interpreter exits
                return await anyio.to_thread.run_sync(self._pull_in_thread, loop, wanted, encoder)
            self._thread_work = thread_work
        self._thread_work.put(work)
        return await answer

    def _pull_in_thread(
        self, loop: asyncio.AbstractEventLoop, wanted: int, encoder: Encoder
    ) -> bool:
        """Do as `_pull` for a sync iterator; wake `take`, on *loop*, after each input."""
        assert self._sync_iterator is not None
        count = size = 0
        while count < wanted and not self._stopped and size < CHUNK_BYTES:
            try:
                value = next(self._sync_iterator)
            except StopIteration:
                return False
            except Exception as exc:
                of_the_caller(exc)
                raise
            except BaseException as exc:  # such as SystemExit, which would end the loop
                raise RuntimeError(f"the iterator of the inputs raised {exc!r}") from exc
            encoded = encoder.encode(value)
            self._ready.append(encoded)
            if not self._arrived.is_set():
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._arrived.set)
            if encoded.data:
                break
            count, size = count + 1, size + len(encoded.content)
        return True


def _is_full(pulled: Sequence[EncodedInput]) -> bool:
    """Return whether these inputs must be stored before the next one is pulled."""
    size = sum(len(encoded.content) for encoded in pulled)
    return bool(pulled) and (bool(pulled[-1].data) or size >= CHUNK_BYTES)


def _work_off(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (function := work.get()) is not None:
        function()


def _size_of(inputs: Any) -> int | None:
    """Return the number of inputs, or None if they have no length."""
    try:
        return len(inputs)
    except TypeError:
        return None
