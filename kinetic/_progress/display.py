"""The thread that draws the progress of this process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from absl import logging

from kinetic._progress.entry import Entry, Mode, choose_mode, requested_mode
from kinetic._progress.steps import SHOW_FACTORY, Show, Step
from kinetic.progress import Progress

if TYPE_CHECKING:
    from kinetic._progress.surfaces import Surface

TICK_S = 0.1
"""Seconds between two drawings."""

BATCH_DELAY_S = 0.5
"""How many seconds a batch must run until the display shows its progress line."""

SETTLE_S = 1.0
"""How many seconds the interpreter waits at its exit until the last lines are drawn."""

_Command = tuple[Entry | None, Callable[[], object] | None]
"""(entry, None) begins the entry; (entry, function) ends it, draws, and calls the function.

(None, function) only draws and calls the function.
"""


class Display:
    """Show the progress of this process. Any thread may call the methods; only `settle` waits.

    The first entry starts the drawing thread, which sleeps while there is nothing to show. The
    thread draws an entry from the command that begins the entry until the command that ends it.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._started = False
        self._entries: list[Entry] = []
        self._surface: Surface | None = None
        self._broken = False

    def open(self, title: str, details: Callable[[], str] = str) -> Entry | None:
        """Show a batch from now on, and return its entry; the caller sets the entry's ``value``.

        The drawing thread calls *details*, which returns HTML for a notebook.

        Return None if progress is off, or if the drawing thread can't start.

        Raises:
            ConfigurationError: ``KINETIC_PROGRESS`` has an invalid value.
        """
        return self._open(title, None, BATCH_DELAY_S, details)

    def show_step(self, step: Step) -> Callable[[], None]:
        """Show *step* until the returned function is called.

        Raises:
            ConfigurationError: ``KINETIC_PROGRESS`` has an invalid value.
        """
        entry = self._open(step.title, step, 0.0)
        if entry is None:
            return lambda: None
        return lambda: self.close(entry, lambda: None)

    def close(self, entry: Entry, on_drawn: Callable[[], object]) -> None:
        """Stop showing *entry*; the drawing thread draws its last line, then calls *on_drawn*."""
        self._commands.put((entry, on_drawn))

    def settle(self) -> None:
        """Wait up to `SETTLE_S` until everything is drawn."""
        if self._started:
            drawn = threading.Event()
            self._commands.put((None, drawn.set))
            with contextlib.suppress(KeyboardInterrupt):
                drawn.wait(SETTLE_S)

    def forget(self) -> None:
        """Drop all entries in a forked child; the parent continues to show them."""
        self._abandon_surface()
        Display.__init__(self)

    def _open(
        self,
        title: str,
        value: Progress | Step | None,
        delay: float,
        details: Callable[[], str] = str,
    ) -> Entry | None:
        """Begin an entry, to draw after *delay* seconds; see `open`."""
        mode = choose_mode(os.environ, sys.stderr)
        if mode == "off" or not self._start():
            return None
        entry = Entry(title, value, begun=time.monotonic(), delay=delay, details=details)
        self._commands.put((entry, None))
        return entry

    def _start(self) -> bool:
        """Start the drawing thread if there is none; return whether it could start."""
        if not self._started:
            self._started = True
            try:
                threading.Thread(target=self._run, name="kinetic progress", daemon=True).start()
                atexit.register(self.settle)
            except RuntimeError:  # no thread can start while the interpreter exits
                self._started = False
        return self._started

    # --- the drawing thread ---

    def _run(self) -> None:
        """Draw for as long as the process lives."""
        while True:
            try:
                entry, on_drawn = self._commands.get(timeout=TICK_S if self._entries else None)
            except queue.Empty:
                entry, on_drawn = None, None
            if entry is not None and on_drawn is None:
                self._entries.append(entry)
            elif entry is not None and entry in self._entries:
                self._entries.remove(entry)
                self._draw_safely(functools.partial(_finish, entry))
            self._draw_safely(lambda surface: surface.draw(self._entries, time.monotonic()))
            if not self._entries:
                self._draw_safely(lambda surface: surface.close())
                self._surface, self._broken = None, False
            if on_drawn is not None:
                on_drawn()

    def _draw_safely(self, action: Callable[[Surface], None]) -> None:
        """Call *action*. After a failure, which is logged, draw nothing until all entries end."""
        if self._broken:
            return
        try:
            if self._surface is None:
                self._surface = _make_surface(choose_mode(os.environ, sys.stderr))
            action(self._surface)
        except Exception as exc:  # a failure of the progress must not stop the work
            self._broken = True
            self._abandon_surface()
            # Don't warn about a closed stream, or about a pipe without a reader.
            expected = isinstance(exc, (OSError, ValueError))
            log = logging.debug if expected else logging.warning
            log("can't show progress: %s: %s", type(exc).__name__, exc)

    def _abandon_surface(self) -> None:
        """Release the surface's streams, and write nothing to them."""
        if self._surface is not None:
            with contextlib.suppress(Exception):
                self._surface.close(quietly=True)


def _finish(entry: Entry, surface: Surface) -> None:
    surface.finish(entry, time.monotonic())


def _make_surface(mode: Mode) -> Surface:
    from kinetic._progress import surfaces

    match mode:
        case "live":
            return surfaces.Live(sys.stderr)
        case "notebook":
            return surfaces.Notebook()
        case _:
            return surfaces.Plain()


DISPLAY = Display()
"""The display of this process."""

os.register_at_fork(after_in_child=DISPLAY.forget)


def find_show() -> Show | None:
    """Return the function that shows a step on the display; None if progress is off.

    Raises:
        ConfigurationError: ``KINETIC_PROGRESS`` has an invalid value.
    """
    return None if requested_mode(os.environ) == "off" else DISPLAY.show_step


@contextlib.contextmanager
def showing_steps(show: bool | None) -> Generator[None]:
    """Show (True) or hide (False) the steps that begin in the block; None changes nothing."""
    token = None if show is None else SHOW_FACTORY.set(find_show if show else None)
    try:
        yield
    finally:
        if token is not None:
            SHOW_FACTORY.reset(token)
