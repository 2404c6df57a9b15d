"""Draw progress: live lines on a terminal, an output in a notebook, or plain log lines."""

from __future__ import annotations

import contextlib
import functools
import html
import importlib
import itertools
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from absl import logging

from kinetic._progress.entry import Entry, is_terminal
from kinetic._progress.line import compose

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PATIENCE_S = 0.5
"""How long text of another thread may wait while kinetic draws its lines."""


class Screen:
    """Keep lines at the bottom of the terminal that all of *streams* write to.

    One thread calls `draw` and `keep`. Text that other threads write to *streams* appears above the
    lines. It waits at most *patience* seconds while the lines are drawn.
    """

    def __init__(
        self, stream: TextIO, streams: Iterable[TextIO], *, patience: float = PATIENCE_S
    ) -> None:
        self._stream = stream
        self._patience = patience
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._height = 0  # how many lines are on the terminal now
        self._unended: bool | None = None  # others' last text lacks a newline
        self._guarded: list[Any] = []
        for one in streams:
            if not any(one is other for other in self._guarded):
                self._guard(one)

    def draw(self, lines: list[str]) -> None:
        """Replace the lines with *lines*, each no wider than the terminal."""
        with self._lock:
            if lines != self._lines or (lines and not self._height):
                self._lines = lines
                if not self._unended:
                    self._put()

    def keep(self, lines: list[str]) -> None:
        """Replace the lines with *lines* and leave these on the terminal."""
        with self._lock:
            start = "\n" if self._unended else self._erasing()
            self._send(self._at_a_line() + start + "".join(f"{line}\n" for line in lines))
            self._unended = False
            self._lines = []

    def close(self, *, quietly: bool = False) -> None:
        """Erase the lines and release the streams."""
        if quietly:  # a forked child may inherit a lock that nothing releases
            self._lock = threading.RLock()
        for stream in self._guarded:
            with contextlib.suppress(AttributeError):
                del stream.write
        self._guarded.clear()
        if not quietly:
            with self._lock:
                self._send(self._erasing())

    # --- other threads write ---

    def _guard(self, stream: Any) -> None:
        def write(text: str, /) -> int:
            return self._pass(stream, original, text)

        original = stream.write
        try:
            stream.write = write
        except AttributeError:  # the stream's text may mix with our lines
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

    # --- writing to the terminal ---

    def _erasing(self) -> str:
        height, self._height = self._height, 0
        if not height:
            return ""
        return "\r\x1b[K" + "\x1b[A\x1b[K" * (height - 1)

    def _put(self) -> None:
        """Draw all lines with one write, so that nothing flickers."""
        up = f"\x1b[{self._height - 1}A" if self._height > 1 else ""
        before = f"\r{up}" if self._height else self._at_a_line()
        self._height = len(self._lines)
        self._send(before + "\n".join(f"{line}\x1b[K" for line in self._lines) + "\x1b[J")

    def _at_a_line(self) -> str:
        """Return text that moves the cursor to the start of a line if its position is unknown.

        The text is as many blanks as a line has columns: they reach the next line only if the
        cursor isn't at the start of a line.
        """
        if self._unended is not None:
            return ""
        self._unended = False
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:  # KINETIC_PROGRESS=live without a terminal
            return ""
        return " " * columns + "\r"

    def _send(self, text: str) -> None:
        if not text:
            return
        left = memoryview(text.encode(self._stream.encoding or "utf-8", "replace"))
        # Don't use the stream's buffer: the interpreter can't end if it stops this daemon thread
        # while the thread holds the buffer's lock.
        descriptor = self._stream.fileno()
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:
                select.select([], [descriptor], [], PATIENCE_S)


EVERY_S = 0.5
"""How often a notebook's output is updated."""

_NUMBERS = itertools.count(1)


class Notebook:
    """Give each entry an output with a bar and a line; only a batch's output stays."""

    def __init__(self) -> None:
        # by name, because type checkers need not have IPython
        ipython: Any = importlib.import_module("IPython.display")
        self._display = ipython.display
        self._update = ipython.update_display
        self._names: dict[Entry, tuple[str, float]] = {}

    def draw(self, entries: list[Entry], now: float) -> None:
        """Show the entries that are due, twice a second."""
        for entry in entries:
            name, last = self._names.get(entry, ("", 0.0))
            if entry.value is None or now < entry.due or now - last < EVERY_S:
                continue
            if name:
                self._tell(self._update, entry, _bundle(entry), name)
            else:
                name = f"kinetic-progress-{next(_NUMBERS)}"
                self._tell(self._display, entry, _bundle(entry), name)
            entry.drawn = True
            self._names[entry] = (name, now)

    def finish(self, entry: Entry, now: float) -> None:
        """Show the last state of a batch; remove a step."""
        name, _ = self._names.pop(entry, ("", 0.0))
        if name:
            last = _bundle(entry) if entry.kept else {"text/plain": "", "text/html": ""}
            self._tell(self._update, entry, last, name)

    def _tell(self, how: Any, entry: Entry, bundle: dict[str, str], name: str) -> None:
        entry.context.run(how, bundle, raw=True, display_id=name)

    def close(self, *, quietly: bool = False) -> None:
        """Do nothing; this holds no stream."""


def _bundle(entry: Entry) -> dict[str, str]:
    line = entry.line()
    fraction = entry.value.fraction if entry.value is not None else None
    value = "" if fraction is None else f' value="{fraction:.4f}"'
    bar = f'<progress max="1"{value} style="width: 20em"></progress>'
    return {"text/plain": line, "text/html": f"<div>{bar} {html.escape(line)}</div>"}


FIRST_S, LONGEST_S = 10.0, 60.0


def next_line(lines: int) -> float:
    """Return the seconds until the next line, after *lines* lines: 10, 20, 40, 60, 60…"""
    return min(LONGEST_S, FIRST_S * float(1 << min(lines, 10)))


class Plain:
    """Write a line for each entry after 10 s, then less and less often, and one at its end."""

    def __init__(self) -> None:
        self._written: dict[Entry, tuple[int, float]] = {}

    def draw(self, entries: list[Entry], now: float) -> None:
        """Write the lines that are due."""
        for entry in entries:
            count, last = self._written.get(entry, (0, entry.begun))
            if now - last >= next_line(count) and entry.value is not None:
                self._written[entry] = (count + 1, now)
                entry.drawn = True
                say(entry.line())

    def finish(self, entry: Entry, now: float) -> None:
        """Write the last line, if the entry had one before."""
        if self._written.pop(entry, None) is not None:
            say(entry.line())

    def close(self, *, quietly: bool = False) -> None:
        """Do nothing; this holds no stream."""


def say(line: str) -> None:
    """Log *line*; if INFO isn't logged, write it to standard error."""
    if logging.get_absl_logger().isEnabledFor(20):
        logging.info("%s", line)
    elif sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


MOST_LINES, WIDEST = 8, 120
"""Maximum number of lines to draw, and of columns in a line."""


class Live:
    """Draw on the terminal of *stream*; the package rich finds its width and its colors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._screen: Screen | None = None

    def draw(self, entries: list[Entry], now: float) -> None:
        """Show the entries that are due."""
        if not entries and self._screen is None:
            return
        screen = self._on_screen()  # always, to see what others write
        shown = [one for one in entries if one.value is not None and now >= one.due]
        if not shown:
            screen.draw([])
            return
        lines: list[str] = []
        room = max(1, min(MOST_LINES, self._size.lines - 1))
        for entry in shown:
            entry.drawn = True
            lines += self._lines(entry)
        if len(lines) > room:
            hidden = len(lines) - room + 1
            lines = [*lines[: room - 1], f"and {hidden} more lines"[: self._width]]
        screen.draw(lines)

    def finish(self, entry: Entry, now: float) -> None:
        """Leave the last line of a batch on the screen; remove the line of a step."""
        if entry.drawn and entry.kept:
            self._on_screen().keep(self._lines(entry))

    def close(self, *, quietly: bool = False) -> None:
        """Erase the lines."""
        if self._screen is not None:
            screen, self._screen = self._screen, None
            screen.close(quietly=quietly)

    @functools.cached_property
    def _console(self) -> Console:
        from rich.console import Console  # a slow import, only for something to draw

        return Console(file=self._stream, force_terminal=True, highlight=False)

    @property
    def _size(self) -> os.terminal_size:
        """The size that the variables COLUMNS and LINES name, but at most that of the terminal."""
        wanted = self._console.size
        try:
            actual = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # KINETIC_PROGRESS=live without a terminal
            return os.terminal_size(wanted)
        width, height = actual.columns or wanted.width, actual.lines or wanted.height
        return os.terminal_size((min(wanted.width, width), min(wanted.height, height)))

    @property
    def _width(self) -> int:
        return max(1, min(WIDEST, self._size.columns - 1))  # a line wraps in the last column

    def _on_screen(self) -> Screen:
        if self._screen is None:
            known = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
            streams = [one for one in known if one is not None and is_terminal(one)]
            self._screen = Screen(self._stream, [*streams, self._stream])
        return self._screen

    def _lines(self, entry: Entry) -> list[str]:
        texts = compose(entry.title, entry.value, self._width)
        return [_ansi(self._console, text) for text in texts]


def _ansi(console: Console, text: Text) -> str:
    with console.capture() as captured:
        console.print(text, end="", soft_wrap=True)
    return captured.get()
