"""Progress as live lines on a terminal: a line an entry, and one for its first failure."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, TextIO

from kinetic._display.choice import is_terminal
from kinetic._display.entry import Entry
from kinetic._display.screen import Screen
from kinetic._steps import Step
from kinetic._words import span
from kinetic.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["Live", "compose"]

MOST_LINES = 8
WIDEST = 120
TITLE, SHORTEST_TITLE = 24, 8
BAR, SHORTEST_BAR = 24, 8


class Live:
    """Draws on the terminal behind *stream*; rich knows its width and its colours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._screen: Screen | None = None

    def draw(self, entries: list[Entry], now: float) -> None:
        """Show those that are worth a line."""
        if not entries and self._screen is None:
            return
        screen = self._on_screen()  # also while there is nothing to draw: to see what others write
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
        """Leave the last line of a batch that is over; others just go."""
        if entry.drawn and entry.finished:
            self._on_screen().keep(self._lines(entry))

    def close(self, *, quietly: bool = False) -> None:
        """Clear the lines."""
        if self._screen is not None:
            screen, self._screen = self._screen, None
            screen.close(quietly=quietly)

    @functools.cached_property
    def _console(self) -> Console:
        from rich.console import Console  # it takes a while: only when there is something to draw

        return Console(file=self._stream, force_terminal=True, highlight=False)

    @property
    def _size(self) -> os.terminal_size:
        """What is set in COLUMNS and LINES may be another terminal's: never more than there is."""
        wanted = self._console.size
        try:
            there = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # no terminal: somebody insists on live lines
            return os.terminal_size(wanted)
        width, height = there.columns or wanted.width, there.lines or wanted.height
        return os.terminal_size((min(wanted.width, width), min(wanted.height, height)))

    @property
    def _width(self) -> int:
        return max(1, min(WIDEST, self._size.columns - 1))  # in the last column, lines wrap

    def _on_screen(self) -> Screen:
        if self._screen is None:
            there = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
            streams = [one for one in there if one is not None and is_terminal(one)]
            self._screen = Screen(self._stream, [*streams, self._stream])
        return self._screen

    def _lines(self, entry: Entry) -> list[str]:
        texts = compose(entry.title, entry.value, self._width)
        return [_ansi(self._console, text) for text in texts]


def _ansi(console: Console, text: Text) -> str:
    with console.capture() as captured:
        console.print(text, end="", soft_wrap=True)
    return captured.get()


def compose(title: str, value: Progress | Step | None, width: int) -> list[Text]:
    """The lines of one entry, at most *width* cells wide: what matters least goes first."""
    from rich.text import Text

    parts = _parts_of_step(value) if isinstance(value, Step) else _parts(value or Progress())
    over = max(0, TITLE + 2 + _wide(parts) - width)  # the name gives way before a count does
    parts = [(0, _cut(title, max(SHORTEST_TITLE, TITLE - over))), *parts]
    bar = SHORTEST_BAR if value is not None and value.fraction is not None else 0
    while len(parts) > 1 and (bar + 2 if bar else 0) + _wide(parts) > width:
        if bar and max(rank for rank, _ in parts) < BAR_RANK:
            bar = 0
        else:
            parts.remove(max(parts, key=lambda part: part[0]))
    if bar and value is not None:
        parts.insert(1, (BAR_RANK, _bar(value, min(BAR, width - _wide(parts) - 2))))
    line = Text("  ").join(text for _, text in parts)
    line.truncate(width, overflow="ellipsis")
    lines = [line]
    if isinstance(value, Progress) and value.first_failure:
        why = Text(f"  {value.failure()}", "red")
        why.truncate(width, overflow="ellipsis")
        lines.append(why)
    return lines


def _wide(parts: list[tuple[int, Text]]) -> int:
    return sum(text.cell_len for _, text in parts) + 2 * (len(parts) - 1)


BAR_RANK = 7
"""Parts of a higher rank make room for the bar, those of a lower one get its room."""


def _parts(value: Progress) -> list[tuple[int, Text]]:
    """Each with its rank: the highest is left out first where there is no room."""
    from rich.text import Text

    ended = f"{value.ended:,}" + (f"/{value.total:,}" if value.total is not None else " ended")
    parts = [(1, Text(ended))]
    for rank, count, name, style in (
        (2, value.failed, "failed", "red"),
        (3, value.lost, "lost", "red"),
        (6, value.cancelled, "cancelled", "yellow"),
        (5, value.running, "running", "cyan"),
        (9, value.waiting, "waiting", ""),
        (10, value.retried, "retried", "yellow"),
    ):
        if count:
            parts.append((rank, Text(f"{count:,} {name}", style)))
    if value.finished:
        return [*parts, (4, Text(span(value.elapsed), "dim"))]
    if value.rate > 0:
        parts.append((8, Text(value.speed(), "dim")))
    if value.eta is not None:
        parts.append((4, Text(f"{span(max(1.0, value.eta))} left")))
    elif value.elapsed >= 1:
        parts.append((11, Text(span(value.elapsed), "dim")))
    return parts


def _parts_of_step(step: Step) -> list[tuple[int, Text]]:
    from rich.text import Text

    fraction = step.fraction
    return [] if fraction is None else [(1, Text(f"{fraction:.0%}"))]


def _bar(value: Progress | Step, width: int) -> Text:
    from rich.text import Text

    bad = isinstance(value, Progress) and (value.failed or value.lost)
    done = int((value.fraction or 0.0) * width)
    return Text.assemble(("━" * done, "red" if bad else "green"), ("─" * (width - done), "dim"))


def _cut(words: str, longest: int) -> Text:
    from rich.text import Text

    text = Text(words, "bold")
    text.truncate(longest, overflow="ellipsis")
    return text
