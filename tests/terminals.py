"""A terminal for tests: a real pty, and what a person would see on it."""

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
"""Where something is drawn; one read may have that, and that it is taken away again."""


class Terminal:
    """A pty of *columns* by *rows*; ``raw`` is all that was sent to it, ``history`` its screens."""

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
        """A stream that writes to it."""
        return open(os.dup(self.line), "w", encoding="utf-8")

    def read(self, seconds: float = 0.0) -> bool:
        """Take what there is, and wait up to *seconds* for something; False: there is nothing."""
        ready, _, _ = select.select([self._controller], [], [], seconds)
        if not ready:
            return False
        try:
            sent = os.read(self._controller, 65536)
        except OSError:  # nobody has it open any more
            return False
        self.raw += sent
        for part in filter(None, DRAWN.split(sent)):
            self._stream.feed(part)
            self.history.append(self.lines)
        return bool(sent)

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without what is empty at its end."""
        above = [_text(row, self.screen.columns) for row in self.screen.history.top]
        lines = above + [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def until(self, what: Callable[[], object]) -> None:
        """Read until *what* is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline, f"it never came to that; seen: {self.lines}"
            self.read(0.05)

    def shows(self, words: bytes) -> None:
        """Read until *words* were sent to it."""
        self.until(lambda: words in self.raw)

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start this interpreter on it; what is typed is for that process, Ctrl-C included."""
        command = [sys.executable, *map(str, words)]
        lines = {"stdin": self.line, "stdout": self.line, "stderr": self.line}
        process = subprocess.Popen(command, **lines, preexec_fn=_own_terminal, **options)
        os.close(self.line)
        return process

    def all(self) -> None:
        """Read all that was written so far, which a pty may take its time to pass on."""
        self._marks += 1
        title = f"mark {self._marks}"
        os.write(self.line, f"\x1b]2;{title}\x07".encode())
        self.until(lambda: self.screen.title == title)

    def rest(self) -> None:
        """Read all that is there, once nobody writes to it any more."""
        began = time.monotonic()
        while self.read(DEADLINE_S):
            pass
        assert time.monotonic() - began < DEADLINE_S, "somebody still has the terminal"

    def type(self, keys: bytes) -> None:
        """As a person would."""
        os.write(self._controller, keys)

    def close(self) -> None:
        """Hang up."""
        os.close(self._controller)


def _text(row: dict[int, pyte.screens.Char], columns: int) -> str:
    return "".join(row[column].data for column in range(columns)).rstrip()


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Makes terminals."""
    made: list[Terminal] = []

    def make(columns: int = 80, rows: int = 24) -> Terminal:
        made.append(Terminal(columns, rows))
        return made[-1]

    yield make
    for one in made:
        one.close()
