"""Progress as plain lines, now and then: for files, pipes and logs."""

from __future__ import annotations

import sys

from absl import logging

from kinetic._display.entry import Entry

__all__ = ["Plain", "next_line", "say"]

FIRST_S, LONGEST_S = 10.0, 60.0


def next_line(said: int) -> float:
    """Seconds until the next line, when *said* lines were written: 10, 20, 40, 60, 60…"""
    return min(LONGEST_S, FIRST_S * float(1 << min(said, 10)))


class Plain:
    """Writes a line of each entry after 10 s, then ever more rarely, and a last one at its end."""

    def __init__(self) -> None:
        self._said: dict[Entry, tuple[int, float]] = {}

    def draw(self, entries: list[Entry], now: float) -> None:
        """Write the lines that are due."""
        for entry in entries:
            said, last = self._said.get(entry, (0, entry.begun))
            if now - last >= next_line(said) and entry.value is not None:
                self._said[entry] = (said + 1, now)
                entry.drawn = True
                say(entry.line())

    def finish(self, entry: Entry, now: float) -> None:
        """Write the last line, if there was a first one."""
        if self._said.pop(entry, None) is not None:
            say(entry.line())

    def close(self, *, quietly: bool = False) -> None:
        """Nothing is held."""


def say(line: str) -> None:
    """Log *line*; where nobody listens to INFO, write it where the live line would be."""
    if logging.get_absl_logger().isEnabledFor(20):
        logging.info("%s", line)
    elif sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
