"""The output of a job: of one attempt after the other, each line once; how it is printed."""

from __future__ import annotations

import asyncio
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TextIO

import anyio.to_thread

from kinetic._messages import shown
from kinetic._progress.entry import is_terminal
from kinetic._runner.protocol import wire
from kinetic._tasks import all_or_none
from kinetic.aio._engine.session import JobRef
from kinetic.aio._net.retry import growing
from kinetic.errors import NoLog, NotFound

AHEAD = 1 << 20
"""Characters that wait for whoever reads the standard output, before no more are fetched."""

PIECE = 4096
"""Bytes that a pipe or a terminal which has room at all takes at once."""

LAST_BYTES = 1 << 20
"""Limit of what `last` returns: a job can write a line of any length."""

EAR_S = 0.2
"""How long a writer that nobody reads from does not hear that it is to stop."""


class LogPrinter:
    """Writes lines as they come: all that wait at once, and no faster than they are read.

    ``lines`` is how many were written, ``behind`` whether some still wait to be.
    A terminal gets no command but for colours; files and pipes get what the job wrote.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.behind = False
        self._block: list[str] = []
        self._size = 0
        self._over = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self, lines: AsyncGenerator[str]) -> None:
        """Write *lines* until there are no more.

        Raises:
            BrokenPipeError: Nobody reads any more.
            Exception: As *lines*; what came before is written.

        Cancelled: returns within a fraction of a second, also when nobody reads.
        """
        failures: list[Exception] = []
        async with aclosing(lines):
            await all_or_none(self._read(lines, failures), self._write())
        for failure in failures:
            raise failure

    async def _read(self, lines: AsyncGenerator[str], failures: list[Exception]) -> None:
        try:
            async for line in lines:
                self._block.append(line)
                self._size += len(line) + 1
                self._news.set()
                if self._size > AHEAD:
                    self._room.clear()
                    await self._room.wait()
        except Exception as exc:
            failures.append(exc)
        finally:
            self._over = True
            self._news.set()

    async def _write(self) -> None:
        while not (self._over and not self._block):
            await self._news.wait()
            self._news.clear()
            block, self._block, self._size = self._block, [], 0
            self._room.set()
            if block:
                self.behind = True
                await self._put(block)
                self.behind = bool(self._block)

    async def _put(self, block: list[str]) -> None:
        enough = threading.Event()
        writing = asyncio.ensure_future(anyio.to_thread.run_sync(self._print, block, enough))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            enough.set()
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.exception()
            raise

    def _print(self, block: list[str], enough: threading.Event) -> None:
        """Write *block* unless it is *enough* before that."""
        stream, text = sys.stdout, "\n".join(block) + "\n"
        if is_terminal(stream):
            text = shown(text)
        descriptor = _narrow(stream)
        step = len(text) if descriptor < 0 else PIECE if text.isascii() else PIECE // 4
        for start in range(0, len(text), step):
            while descriptor >= 0 and not select.select([], [descriptor], [], EAR_S)[1]:
                if enough.is_set():
                    return
            if enough.is_set():
                return
            piece = text[start : start + step]
            try:
                stream.write(piece)
                stream.flush()
            except BrokenPipeError:
                _forget(stream)
                raise
            self.lines += piece.count("\n")


def _narrow(stream: TextIO) -> int:
    """The descriptor of a stream that may take a part only, a pipe or a terminal; else -1."""
    try:
        descriptor = stream.fileno()
        file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (OSError, ValueError, AttributeError):
        return -1  # no file at all: a notebook, or who collects what is printed
    return -1 if file or sys.platform == "win32" or descriptor >= 1024 else descriptor


def _forget(stream: TextIO) -> None:
    """Drop what the stream still holds, which the interpreter would complain of at its end."""
    descriptor = stream.fileno()
    kept, nothing = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, descriptor)
        stream.flush()
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(nothing)


FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
"""How long to wait for word of an attempt that is about to start, before looking for it."""

LOOK_S = 30.0
"""How often it is looked whether an attempt whose log is read has ended, if nobody tells."""

QUIET_S = 15.0
"""How long the log of an attempt that has ended may bring nothing, where its end does not come."""


async def followed(at: JobRef) -> AsyncGenerator[str]:
    """The lines of the attempt that is under way, and of all after it, until the item has ended.

    Attempts whose log is gone, or that never ran, are passed over.

    Raises:
        NotFound: There is no log at all: it has not started, or was removed.
    """
    with at.session.awaiting(at.submission):
        async with aclosing(_followed(at)) as lines:
            async for line in lines:
                yield line


async def _followed(at: JobRef) -> AsyncGenerator[str]:
    submission = at.submission
    item = submission.item(at.index) or await submission.look(at.index)
    number, told, closed = item.attempt, False, False
    pauses = growing(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        try:
            async with aclosing(_lines(at, number, follow=True)) as lines:
                async for line in lines:
                    told = True
                    yield line
            told = True
        except NotFound:
            item = await submission.look(at.index)
            if item.attempt == number and not told:
                raise
            if not closed and not _is_hopeless(at):  # it is about to start, or just has
                closed = item.attempt > number or item.state.final
                if not closed:
                    await _change(at, next(pauses))
                continue
        if not await _goes_on(at, number):
            return
        number, closed = number + 1, False
        pauses = growing(FIRST_PAUSE_S, LONGEST_PAUSE_S)


async def latest(at: JobRef, tail: int | None = None) -> AsyncGenerator[str]:
    """The lines so far, or the last *tail* of them, of the attempt that is under way, or was last.

    Raises:
        NotFound: There is no log: it has not started, or was removed.
    """
    item = at.submission.item(at.index)
    number = item.attempt if item else 1
    async with aclosing(_lines(at, number, follow=False, tail=tail)) as lines:
        async for line in lines:
            yield line


async def last(at: JobRef, count: int) -> list[str]:
    """Return the last *count* lines that `latest` yields, and at most `LAST_BYTES` of them.

    Raises:
        NotFound: As `latest`.
    """
    kept, size = deque[bytes](), 0
    async with aclosing(latest(at, count)) as lines:
        async for line in lines:
            kept.append(line.encode(errors="replace")[-LAST_BYTES:])
            size += len(kept[-1]) + 1
            while size > LAST_BYTES + 1:
                size -= len(kept.popleft()) + 1
    return [line.decode(errors="ignore") for line in kept]


async def of_attempt(at: JobRef, number: int, *, follow: bool) -> AsyncGenerator[str]:
    """The lines of attempt *number* only.

    Raises:
        NoLog: It has not been, or its log is gone.
    """
    item, cluster = await at.submission.look(at.index), at.session.platform.cluster
    who = at.submission.identity.job_id(at.index)
    if number > item.attempt:
        raise NoLog(f"{who} has no attempt {number}: it is at attempt {item.attempt}")
    name, told = at.submission.identity.attempt_name(at.index, number), False
    gone = NoLog(
        f"attempt {number} of {who} has no log: it never started, or the platform does not "
        f"keep it any more; logs() has that of attempt {item.attempt}"
    )
    try:
        async with aclosing(_lines(at, number, follow=follow)) as lines:
            async for line in lines:
                told = True
                yield line
    except NotFound as exc:
        raise gone from exc
    if not told and not await cluster.find(names=[name]):
        raise gone


async def _lines(
    at: JobRef, number: int, *, follow: bool, tail: int | None = None
) -> AsyncGenerator[str]:
    """The lines of an attempt: the platform's, or what was kept of them where it has none.

    Raises:
        NotFound: There are none.
    """
    item, told = at.submission.item(at.index), False
    live = follow and (item is None or not item.state.final)
    name = at.submission.identity.attempt_name(at.index, number)
    lines = at.session.platform.cluster.logs(name, follow=follow, tail=tail)
    gone: NotFound | None = None
    try:
        async with aclosing(_until_over(at, number, lines) if follow else lines) as found:
            async for line in found:
                told = True
                yield line
    except NotFound as exc:
        gone = exc
    if gone is None and (told or live):  # what was followed to its end has written nothing
        return
    kept = [] if told else await at.submission.kept_log(at.index, number)
    if not kept and gone is not None:
        raise gone
    for line in kept if tail is None else kept[len(kept) - tail :] if tail else []:
        yield line


async def _until_over(at: JobRef, number: int, lines: AsyncGenerator[str]) -> AsyncGenerator[str]:
    """*lines* that are followed, to their end, or until none comes any more of what has ended.

    A platform may never say that a process has ended: its node is gone, its pod stays, waiting
    for others, or was taken away before anybody could see.
    """
    patience = _Patience()

    async def end() -> None:
        await _over(at, number)
        patience.begin()

    ending = at.session.spawn(end(), name=f"end of attempt {number}")
    try:
        async with aclosing(lines):
            while True:
                try:
                    line = await patience.next(lines)
                except (StopAsyncIteration, TimeoutError):
                    return
                yield line
    finally:
        ending.cancel()


class _Patience:
    """How long the next line is waited for: without an end until it has begun."""

    def __init__(self) -> None:
        self._begun = False
        self._waiting: asyncio.Timeout | None = None

    def begin(self) -> None:
        """From now on for some seconds."""
        self._begun = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time() + QUIET_S)

    async def next(self, lines: AsyncGenerator[str]) -> str:
        """The next of *lines*.

        Raises:
            StopAsyncIteration: There is none.
            TimeoutError: None came in time.
        """
        try:
            async with asyncio.timeout(QUIET_S if self._begun else None) as self._waiting:
                return await anext(lines)
        finally:
            self._waiting = None


async def _over(at: JobRef, number: int) -> None:
    """Wait until attempt *number* has ended, or nothing more will be heard of it."""
    while not _is_hopeless(at):
        item = at.submission.item(at.index)
        if item is not None and (item.attempt > number or item.state.final):
            return
        if not await _change(at, LOOK_S):
            await at.submission.look(at.index)


async def _goes_on(at: JobRef, number: int) -> bool:
    """Whether there is an attempt after this one, which has ended for the platform."""
    item = at.submission.item(at.index)
    while True:
        if item is not None and (item.attempt > number or item.state.final):
            return item.attempt > number
        if _is_hopeless(at):
            return False
        await _change(at, LONGEST_PAUSE_S)
        item = await at.submission.look(at.index)


def _is_hopeless(at: JobRef) -> bool:
    """Whether nothing more will be heard of it here."""
    return bool(at.submission.error(at.index) or at.submission.abandoned)


async def _change(at: JobRef, timeout: float) -> bool:
    """Wait for word of the item, *timeout* seconds at most; whether it came."""
    changed = asyncio.Event()

    def hear(index: int, item: wire.Item | None) -> None:
        if index == at.index or item is None:
            changed.set()

    stop = at.submission.listen(hear)
    try:
        async with asyncio.timeout(timeout):
            await changed.wait()
    except TimeoutError:
        return False
    finally:
        stop()
    return True
