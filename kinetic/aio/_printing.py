"""The output of a job on this process's standard output: in blocks, to the last line."""

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

from kinetic._display.choice import is_terminal
from kinetic._terminal import shown
from kinetic.aio._release import all_or_none

__all__ = ["Printing"]

AHEAD = 1 << 20
"""Characters that wait for whoever reads the standard output, before no more are fetched."""

PIECE = 4096
"""Bytes that a pipe or a terminal which has room at all takes at once."""

EAR_S = 0.2
"""How long a writer that nobody reads from does not hear that it is to stop."""


class Printing:
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
