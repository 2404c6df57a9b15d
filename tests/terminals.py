"""A terminal for tests: a real pty, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pyte
import pytest

DEADLINE_S = 60.0
DRAWN = re.compile(rb"(?<=\n)|(?<=\x1b\[J)")
"""The positions after a screen update; one read may have several updates."""


class Terminal:
    """A pty of *columns* by *rows*.

    ``raw`` has all bytes that the terminal received, and ``history`` the screens they drew.
    """

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.raw = b""
        self.history: list[list[str]] = []
        self._controller, self.line = os.openpty()
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.line, termios.TIOCSWINSZ, size)
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._marks = 0

    def open(self) -> TextIO:
        """Return a stream that writes to the terminal."""
        return open(os.dup(self.line), "w", encoding="utf-8")

    def read(self, seconds: float = 0.0) -> bool:
        """Read what was written, waiting up to *seconds*; return False if nothing was."""
        ready, _, _ = select.select([self._controller], [], [], seconds)
        if not ready:
            return False
        try:
            sent = os.read(self._controller, 65536)
        except OSError:  # no process has it open any more
            return False
        self.raw += sent
        for part in filter(None, DRAWN.split(sent)):
            self._stream.feed(part)
            self.history.append(self.lines)
        return bool(sent)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen and of its history, without empty ones at the end."""
        above = [_text(row, self.screen.columns) for row in self.screen.history.top]
        lines = above + [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def until(self, condition: Callable[[], object]) -> None:
        """Read until *condition* is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"the condition stays false; seen: {self.lines}"
            self.read(0.05)

    def shows(self, text: bytes) -> None:
        """Read until the terminal has received *text*."""
        self.until(lambda: text in self.raw)

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start this interpreter on the terminal; that process gets typed keys and Ctrl-C."""
        command = [sys.executable, *map(str, arguments)]
        streams = {"stdin": self.line, "stdout": self.line, "stderr": self.line}
        process = subprocess.Popen(command, **streams, preexec_fn=_take_terminal, **options)
        os.close(self.line)
        return process

    def all(self) -> None:
        """Read all that was written so far; a pty can pass it on late."""
        self._marks += 1
        title = f"mark {self._marks}"
        os.write(self.line, f"\x1b]2;{title}\x07".encode())
        self.until(lambda: self.screen.title == title)

    def rest(self) -> None:
        """Read the rest, after the last process that has the terminal open."""
        start = time.monotonic()
        while self.read(DEADLINE_S):
            pass
        assert time.monotonic() - start < DEADLINE_S, "a process still has the terminal open"

    def type(self, keys: bytes) -> None:
        """Type *keys* as a person would."""
        os.write(self._controller, keys)

    def close(self) -> None:
        """Hang up."""
        os.close(self._controller)


def _text(row: dict[int, pyte.screens.Char], columns: int) -> str:
    return "".join(row[column].data for column in range(columns)).rstrip()


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Return a function that makes terminals."""
    terminals: list[Terminal] = []

    def make(columns: int = 80, rows: int = 24) -> Terminal:
        terminals.append(Terminal(columns, rows))
        return terminals[-1]

    yield make
    for terminal in terminals:
        terminal.close()
