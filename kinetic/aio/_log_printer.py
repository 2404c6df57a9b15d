"""Print a log's lines as they arrive, but no faster than standard output accepts them."""

from __future__ import annotations

import asyncio
import os
import select
import stat
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TextIO

import anyio.to_thread

from kinetic._messages import remove_control_sequences
from kinetic._progress.entry import is_terminal
from kinetic._tasks import all_or_none
from kinetic._tracebacks import of_the_caller

MAX_WAITING_CHARACTERS = 1 << 20
"""While more characters than this wait to be printed, `LogPrinter` reads no more lines."""

PIECE_BYTES = 4096
"""Bytes that a pipe or a terminal accepts without blocking, if `select` says that it has room."""

POLL_S = 0.2
"""How often, in seconds, a thread that waits for room in a pipe checks whether to stop."""


class LogPrinter:
    """Print lines in blocks: all lines that wait go out in one write.

    ``lines`` counts the printed lines; ``behind`` says whether lines wait or are being printed.
    A terminal gets colors and no other control sequence; files and pipes get what the job wrote,
    but with a question mark for a character that their encoding lacks.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.behind = False
        self._block: list[str] = []
        self._size = 0
        self._is_complete = False
        self._has_lines = asyncio.Event()
        self._has_room = asyncio.Event()

    async def run(self, lines: AsyncGenerator[str]) -> None:
        """Print *lines* until there are no more.

        Raises:
            BrokenPipeError: The reader of standard output has closed it.
            Exception: *lines* raised it; all lines before are printed.

        Cancelled: returns within a fraction of a second, even if standard output is blocked.
        """
        failures: list[Exception] = []
        async with aclosing(lines):
            await all_or_none(self._read(lines, failures), self._write())
        for failure in failures:
            raise failure

    async def _read(self, lines: AsyncGenerator[str], failures: list[Exception]) -> None:
        """Keep lines for `_write`, but wait while too many characters wait to be printed."""
        try:
            async for line in lines:
                self._block.append(line)
                self._size += len(line) + 1
                self._has_lines.set()
                if self._size > MAX_WAITING_CHARACTERS:
                    self._has_room.clear()
                    await self._has_room.wait()
        except Exception as exc:
            failures.append(exc)
        finally:
            self._is_complete = True
            self._has_lines.set()

    async def _write(self) -> None:
        while not (self._is_complete and not self._block):
            await self._has_lines.wait()
            self._has_lines.clear()
            block, self._block, self._size = self._block, [], 0
            self._has_room.set()
            if block:
                self.behind = True
                await self._print_in_thread(block)
                self.behind = bool(self._block)

    async def _print_in_thread(self, block: list[str]) -> None:
        """Print *block* in a thread; if cancelled, stop the thread and wait for its end."""
        stop = threading.Event()
        # A blocked standard output must not hold one of the loop's shared threads.
        limiter = anyio.CapacityLimiter(1)
        writing = asyncio.ensure_future(
            anyio.to_thread.run_sync(self._print, block, stop, limiter=limiter)
        )
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.exception()
            raise

    def _print(self, block: list[str], stop: threading.Event) -> None:
        """Write the lines of *block* in pieces, until *stop* is set; runs in a worker thread."""
        stream, text = sys.stdout, "\n".join(block) + "\n"
        if stream is None:  # standard output was closed before Python started, as in a daemon
            return
        # In the C locale, Python reads bytes that aren't ASCII, but refuses such characters.
        if getattr(stream, "errors", None) in ("strict", "surrogateescape"):
            text = text.encode(stream.encoding, "replace").decode(stream.encoding)
        if is_terminal(stream):
            text = remove_control_sequences(text)
        descriptor = _blocking_descriptor(stream)
        # A character has at most four bytes.
        step = len(text) if descriptor < 0 else PIECE_BYTES if text.isascii() else PIECE_BYTES // 4
        for start in range(0, len(text), step):
            while descriptor >= 0 and not select.select([], [descriptor], [], POLL_S)[1]:
                if stop.is_set():
                    return
            if stop.is_set():
                return
            piece = text[start : start + step]
            try:
                stream.write(piece)
                stream.flush()
            except BrokenPipeError as exc:
                _drop_buffer(stream)
                raise of_the_caller(exc) from None
            self.lines += piece.count("\n")


def _blocking_descriptor(stream: TextIO) -> int:
    """Return the descriptor of a pipe or terminal, whose writes can block; -1 for other streams."""
    try:
        descriptor = stream.fileno()
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (OSError, ValueError, AttributeError):
        return -1  # no file at all: a notebook, or a test that captures the output
    return -1 if is_file or descriptor >= 1024 else descriptor  # `select` has this limit


def _drop_buffer(stream: TextIO) -> None:
    """Drop the stream's buffer, which the interpreter would fail to flush at its exit."""
    descriptor = stream.fileno()
    saved_fd, null_fd = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null_fd, descriptor)
        stream.flush()
    finally:
        os.dup2(saved_fd, descriptor)
        os.close(saved_fd)
        os.close(null_fd)
