"""Lines at the bottom of a terminal that stay below whatever else is written to it.

What Python code writes through the streams passes by here, also that of a
logging handler which got hold of its stream long ago: the lines are taken
away, the text is written as it is, and the lines come back below it. While
somebody's line has no end yet, they wait. What another process writes to the
same terminal does not pass by here, and begins where the lines end.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, TextIO

__all__ = ["Screen"]

PATIENCE_S = 0.5
"""Nobody's own text waits longer for us, whatever the terminal does."""

_PLAINER = str.maketrans({"━": "=", "─": "-", "·": "-", "…": "~", "“": '"', "”": '"'})


class Screen:
    """The lines of one terminal; *streams* lead there. `draw` and `keep` are of one thread.

    What others write waits for these lines for *patience* seconds at most.
    """

    def __init__(
        self, stream: TextIO, streams: Iterable[TextIO], *, patience: float = PATIENCE_S
    ) -> None:
        self._stream = stream
        self._patience = patience
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._height = 0  # how many of them are on the terminal now
        self._unended: bool | None = None  # whose text came before us, and how did it end?
        self._guarded: list[Any] = []
        for one in streams:
            if not any(one is other for other in self._guarded):
                self._guard(one)

    def draw(self, lines: list[str]) -> None:
        """Show *lines*, each no wider than the terminal, in place of those before."""
        with self._lock:
            if lines != self._lines or (lines and not self._height):
                self._lines = lines
                if not self._unended:
                    self._put()

    def keep(self, lines: list[str]) -> None:
        """Write *lines* for good, in place of those that were drawn; `draw` the others below."""
        with self._lock:
            start = "\n" if self._unended else self._erasing()
            self._send(self._at_a_line() + start + "".join(f"{line}\n" for line in lines))
            self._unended = False
            self._lines = []

    def close(self, *, quietly: bool = False) -> None:
        """Take the lines away, and the hands off the streams."""
        if quietly:  # in a forked child the lock may be held by nobody
            self._lock = threading.RLock()
        for stream in self._guarded:
            with contextlib.suppress(AttributeError):
                del stream.write
        self._guarded.clear()
        if not quietly:
            with self._lock:
                self._send(self._erasing())

    # --- somebody else writes ---

    def _guard(self, stream: Any) -> None:
        def write(text: str, /) -> int:
            return self._pass(stream, original, text)

        original = stream.write
        try:
            stream.write = write
        except AttributeError:  # it cannot be guarded: what is written to it may mix with ours
            return
        self._guarded.append(stream)

    def _pass(self, stream: TextIO, original: Callable[[str], int], text: str) -> int:
        held = self._lock.acquire(timeout=self._patience)
        try:
            if held and text:
                with contextlib.suppress(OSError, ValueError):
                    self._send(self._erasing())
            count = original(text)
            if held and text:
                self._unended = not text.endswith("\n")
                if not self._unended and self._lines:
                    stream.flush()
                    with contextlib.suppress(OSError, ValueError):
                        self._put()
            return count
        finally:
            if held:
                self._lock.release()

    # --- what the terminal is sent ---

    def _erasing(self) -> str:
        height, self._height = self._height, 0
        if not height:
            return ""
        return "\r\x1b[K" + "\x1b[A\x1b[K" * (height - 1)

    def _put(self) -> None:
        """One write for all, so that nothing flickers."""
        up = f"\x1b[{self._height - 1}A" if self._height > 1 else ""
        before = f"\r{up}" if self._height else self._at_a_line()
        self._height = len(self._lines)
        self._send(before + "\n".join(f"{line}\x1b[K" for line in self._lines) + "\x1b[J")

    def _at_a_line(self) -> str:
        """At first nobody knows whether the cursor is at the beginning of a line: make it so.

        As many blanks as the terminal is wide reach into the next line only if it is not.
        """
        if self._unended is not None:
            return ""
        self._unended = False
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:  # no terminal at all: somebody insists on live lines
            return ""
        return " " * columns + "\r"

    def _send(self, text: str) -> None:
        if not text:
            return
        if sys.platform == "win32":
            type(self._stream).write(self._stream, text)
            self._stream.flush()
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            left = memoryview(text.encode(encoding))
        except UnicodeEncodeError:
            left = memoryview(text.translate(_PLAINER).encode(encoding, "replace"))
        # Not through the stream's buffer: a thread that is stopped while it holds the lock of one
        # takes the interpreter's end down with it.
        descriptor = self._stream.fileno()
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:
                select.select([], [descriptor], [], PATIENCE_S)
