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
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from absl import logging

from kinetic._progress.entry import Entry, is_terminal
from kinetic._progress.line import compose

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MAX_WAIT_S = 0.5
"""How many seconds another thread's write may wait while kinetic draws its lines."""


class Screen:
    """Keep lines at the bottom of the terminal that all of *streams* write to.

    One thread calls `draw` and `keep`. Text that other threads write to *streams* appears above the
    lines. Such a write waits at most *max_wait* seconds while the lines are drawn.
    """

    def __init__(
        self, stream: TextIO, streams: Iterable[TextIO], *, max_wait: float = MAX_WAIT_S
    ) -> None:
        self._stream = stream
        self._max_wait = max_wait
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._height = 0  # how many lines are on the terminal now
        # Whether text of other threads lacks a final newline; None while that isn't known.
        self._is_line_open: bool | None = None
        # Each stream, its new ``write``, and the ``write`` that another library had set before.
        self._patches: list[tuple[Any, Callable[[str], int], Callable[[str], int] | None]] = []
        for candidate in streams:
            if not any(candidate is patched for patched, _, _ in self._patches):
                self._patch(candidate)

    def draw(self, lines: list[str]) -> None:
        """Replace the lines with *lines*, each no wider than the terminal."""
        with self._lock:
            if lines != self._lines or (lines and not self._height):
                self._lines = lines
                if not self._is_line_open:
                    self._redraw()

    def keep(self, lines: list[str]) -> None:
        """Replace the lines with *lines*, which stay on the terminal from now on."""
        with self._lock:
            prefix = "\n" if self._is_line_open else self._erase_sequence()
            self._send(self._line_start() + prefix + "".join(f"{line}\n" for line in lines))
            self._is_line_open = False
            self._lines = []

    def close(self, *, quietly: bool = False) -> None:
        """Release the streams; erase the lines, unless *quietly*."""
        if quietly:  # a forked child may inherit a lock that nothing releases
            self._lock = threading.RLock()
        for stream, write, previous in self._patches:
            if stream.write is not write:
                continue  # another library has patched the stream since, and calls *write*
            with contextlib.suppress(AttributeError):
                del stream.write
            if previous is not None:
                stream.write = previous
        self._patches.clear()
        self._lines = []
        if not quietly:
            with self._lock:
                self._send(self._erase_sequence())

    # --- other threads write ---

    def _patch(self, stream: Any) -> None:
        """Have ``stream.write`` call `_write_above`."""

        def write(text: str, /) -> int:
            return self._write_above(stream, original, text)

        original = stream.write
        previous = getattr(stream, "__dict__", {}).get("write")
        try:
            stream.write = write
        except AttributeError:  # ``write`` can't be set, so its text may mix with the lines
            return
        self._patches.append((stream, write, previous))

    def _write_above(self, stream: TextIO, original: Callable[[str], int], text: str) -> int:
        """Erase the lines, write *text* with *original*, and draw the lines below *text*."""
        has_lock = self._lock.acquire(timeout=self._max_wait)
        try:
            if has_lock and text:
                with contextlib.suppress(OSError, ValueError):
                    self._send(self._erase_sequence())
            count = original(text)
            if has_lock and text:
                self._is_line_open = not text.endswith("\n")
                if not self._is_line_open and self._lines:
                    stream.flush()
                    with contextlib.suppress(OSError, ValueError):
                        self._redraw()
            return count
        finally:
            if has_lock:
                self._lock.release()

    # --- writing to the terminal ---

    def _erase_sequence(self) -> str:
        """Return the control sequence that erases the lines, which the caller must send."""
        height, self._height = self._height, 0
        if not height:
            return ""
        return "\r\x1b[K" + "\x1b[A\x1b[K" * (height - 1)

    def _redraw(self) -> None:
        """Draw all lines with one write, so that nothing flickers."""
        up = f"\x1b[{self._height - 1}A" if self._height > 1 else ""
        prefix = f"\r{up}" if self._height else self._line_start()
        self._height = len(self._lines)
        self._send(prefix + "\n".join(f"{line}\x1b[K" for line in self._lines) + "\x1b[J")

    def _line_start(self) -> str:
        """Return text that moves the cursor to the start of a line if its position is unknown.

        The text has a blank for each column of a line. The blanks reach the next line only if the
        cursor isn't at the start of a line.
        """
        if self._is_line_open is not None:
            return ""
        self._is_line_open = False
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:  # KINETIC_PROGRESS=live without a terminal
            return ""
        return " " * columns + "\r"

    def _send(self, text: str) -> None:
        if not text:
            return
        unsent = memoryview(text.encode(self._stream.encoding or "utf-8", "replace"))
        # Don't use the stream's buffer: the interpreter can't end if it stops this daemon thread
        # while the thread holds the buffer's lock.
        descriptor = self._stream.fileno()
        while unsent:
            try:
                unsent = unsent[os.write(descriptor, unsent) :]
            except BlockingIOError:
                select.select([], [descriptor], [], MAX_WAIT_S)


UPDATE_INTERVAL_S = 0.5
"""Minimum seconds between two updates of a notebook's output."""

_OUTPUT_NUMBERS = itertools.count(1)


class Notebook:
    """Show each entry as an output with a bar and a line; remove a step's output at its end."""

    def __init__(self) -> None:
        # imported by name, because type checkers needn't have IPython
        ipython: Any = importlib.import_module("IPython.display")
        self._display = ipython.display
        self._update = ipython.update_display
        self._names: dict[Entry, tuple[str, float]] = {}  # an output's ID and last update

    def draw(self, entries: list[Entry], now: float) -> None:
        """Show the entries that are due, each at most twice a second."""
        for entry in entries:
            name, last = self._names.get(entry, ("", 0.0))
            if entry.value is None or now < entry.due or now - last < UPDATE_INTERVAL_S:
                continue
            if name:
                self._publish(self._update, entry, _bundle(entry), name)
            else:
                name = f"kinetic-progress-{next(_OUTPUT_NUMBERS)}"
                self._publish(self._display, entry, _bundle(entry), name)
            entry.drawn = True
            self._names[entry] = (name, now)

    def finish(self, entry: Entry, now: float) -> None:
        """Show the last state of a batch; remove a step."""
        name, _ = self._names.pop(entry, ("", 0.0))
        if name:
            last = _bundle(entry) if entry.kept else {"text/plain": "", "text/html": ""}
            self._publish(self._update, entry, last, name)

    def _publish(self, publish: Any, entry: Entry, bundle: dict[str, str], name: str) -> None:
        """Call *publish* in the entry's context, so that IPython uses the entry's cell."""
        entry.context.run(publish, bundle, raw=True, display_id=name)

    def close(self, *, quietly: bool = False) -> None:
        """Do nothing; this class patches no stream."""


def _bundle(entry: Entry) -> dict[str, str]:
    line = entry.line()
    fraction = entry.value.fraction if entry.value is not None else None
    value = "" if fraction is None else f' value="{fraction:.4f}"'
    bar = f'<progress max="1"{value} style="width: 20em"></progress>'
    return {
        "text/plain": line,
        "text/html": f"<div>{bar} {html.escape(line)}</div>{entry.details()}",
    }


FIRST_LINE_S, MAX_INTERVAL_S = 10.0, 60.0


class Plain:
    """Write a line for each entry after 10 s, then less and less often, and one at its end."""

    def __init__(self) -> None:
        self._written: dict[Entry, tuple[int, float]] = {}

    def draw(self, entries: list[Entry], now: float) -> None:
        """Write the lines that are due."""
        for entry in entries:
            count, last = self._written.get(entry, (0, entry.begun))
            # The pauses are 10, 20, 40, 60, 60… seconds.
            pause_s = min(MAX_INTERVAL_S, FIRST_LINE_S * float(1 << min(count, 10)))
            if now - last >= pause_s and entry.value is not None:
                self._written[entry] = (count + 1, now)
                entry.drawn = True
                log_line(entry.line())

    def finish(self, entry: Entry, now: float) -> None:
        """Write the entry's last line, if the entry had a line before."""
        if self._written.pop(entry, None) is not None:
            log_line(entry.line())

    def close(self, *, quietly: bool = False) -> None:
        """Do nothing; this class patches no stream."""


def log_line(line: str) -> None:
    """Log *line*; if INFO isn't logged, write it to standard error."""
    if logging.get_absl_logger().isEnabledFor(20):
        logging.info("%s", line)
    elif sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


MAX_LINES, MAX_COLUMNS = 8, 120
"""Maximum number of lines to draw, and of columns in a line."""


class Live:
    """Draw on the terminal of *stream*; the package rich finds the terminal's size and colors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._screen: Screen | None = None

    def draw(self, entries: list[Entry], now: float) -> None:
        """Show the entries that are due."""
        if not entries and self._screen is None:
            return
        screen = self._open_screen()  # even if nothing is due: it must see other threads' text
        shown = [entry for entry in entries if entry.value is not None and now >= entry.due]
        if not shown:
            screen.draw([])
            return
        lines: list[str] = []
        max_lines = max(1, min(MAX_LINES, self._size.lines - 1))
        for entry in shown:
            entry.drawn = True
            lines += self._lines(entry)
        if len(lines) > max_lines:
            hidden = len(lines) - max_lines + 1
            lines = [*lines[: max_lines - 1], f"and {hidden} more lines"[: self._width]]
        screen.draw(lines)

    def finish(self, entry: Entry, now: float) -> None:
        """Leave the last line of a batch on the screen; remove the line of a step."""
        if entry.drawn and entry.kept:
            self._open_screen().keep(self._lines(entry))

    def close(self, *, quietly: bool = False) -> None:
        """Erase the lines."""
        if self._screen is not None:
            screen, self._screen = self._screen, None
            screen.close(quietly=quietly)

    @functools.cached_property
    def _console(self) -> Console:
        from rich.console import Console  # a slow import, so only when there is a line to draw

        return Console(file=self._stream, force_terminal=True, highlight=False)

    @property
    def _size(self) -> os.terminal_size:
        """The size that the variables COLUMNS and LINES name, but at most that of the terminal."""
        configured = self._console.size
        try:
            actual = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # KINETIC_PROGRESS=live without a terminal
            return os.terminal_size(configured)
        width, height = actual.columns or configured.width, actual.lines or configured.height
        return os.terminal_size((min(configured.width, width), min(configured.height, height)))

    @property
    def _width(self) -> int:
        return max(1, min(MAX_COLUMNS, self._size.columns - 1))  # a line wraps in the last column

    def _open_screen(self) -> Screen:
        """Return the screen, which the first call opens."""
        if self._screen is None:
            candidates = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
            streams = [
                stream for stream in candidates if stream is not None and is_terminal(stream)
            ]
            self._screen = Screen(self._stream, [*streams, self._stream])
        return self._screen

    def _lines(self, entry: Entry) -> list[str]:
        texts = compose(entry.title, entry.value, self._width)
        return [_ansi(self._console, text) for text in texts]


def _ansi(console: Console, text: Text) -> str:
    with console.capture() as captured:
        console.print(text, end="", soft_wrap=True)
    return captured.get()


Surface: TypeAlias = Live | Notebook | Plain
"""Where entries are drawn; only the drawing thread calls its methods."""
