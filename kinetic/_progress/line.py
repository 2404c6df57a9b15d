"""Compose the progress line for a terminal; on a narrow terminal, the line lacks some parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinetic._messages import format_duration
from kinetic._progress.steps import Step
from kinetic.progress import Progress

if TYPE_CHECKING:
    from rich.text import Text

MAX_TITLE, MIN_TITLE = 24, 8
MAX_BAR, MIN_BAR = 24, 8
"""The maximum and minimum width of the title and the bar, in cells."""


def compose(title: str, value: Progress | Step | None, width: int) -> list[Text]:
    """Return the lines of one entry, at most *width* cells wide.

    To fit the width, drop the parts with the highest ranks first.
    """
    from rich.text import Text

    if isinstance(value, Step):
        fraction = value.fraction  # another thread changes it
        parts = [] if fraction is None else [(1, Text(f"{fraction:.0%}"))]
    else:
        parts = _batch_parts(value or Progress())
    # Shorten the title before a part is dropped.
    excess = max(0, MAX_TITLE + 2 + _width_of(parts) - width)
    shortened = Text(title, "bold")
    shortened.truncate(max(MIN_TITLE, MAX_TITLE - excess), overflow="ellipsis")
    parts = [(0, shortened), *parts]
    bar_width = MIN_BAR if value is not None and value.fraction is not None else 0
    while len(parts) > 1 and (bar_width + 2 if bar_width else 0) + _width_of(parts) > width:
        if bar_width and max(rank for rank, _ in parts) < BAR_RANK:
            bar_width = 0
        else:
            parts.remove(max(parts, key=lambda part: part[0]))
    if bar_width and value is not None:
        parts.insert(1, (BAR_RANK, _bar(value, min(MAX_BAR, width - _width_of(parts) - 2))))
    line = Text("  ").join(text for _, text in parts)
    line.truncate(width, overflow="ellipsis")
    lines = [line]
    if isinstance(value, Progress) and value.first_failure:
        failure = Text(f"  {value.failure()}", "red")
        failure.truncate(width, overflow="ellipsis")
        lines.append(failure)
    return lines


def _width_of(parts: list[tuple[int, Text]]) -> int:
    """Return the cells of all parts, with two blanks between them."""
    return sum(text.cell_len for _, text in parts) + 2 * (len(parts) - 1)


BAR_RANK = 7
"""The rank of the bar. Parts of higher ranks are dropped before the bar, and others after it."""


def _batch_parts(value: Progress) -> list[tuple[int, Text]]:
    """Return the parts of a batch's line with their ranks; the highest rank is dropped first."""
    from rich.text import Text

    ended = f"{value.ended:,}" + (f"/{value.total:,}" if value.total is not None else " ended")
    parts = [(1, Text(ended))]
    for rank, count, name, style in (
        (2, value.failed, "failed", "red"),
        (3, value.lost, "lost", "red"),
        (6, value.cancelled, "cancelled", "yellow"),
        (6, value.pruned, "pruned", "yellow"),
        (5, value.running, "running", "cyan"),
        (9, value.waiting, "waiting", ""),
        (10, value.retried, "retried", "yellow"),
    ):
        if count:
            parts.append((rank, Text(f"{count:,} {name}", style)))
    if value.best is not None:
        parts.append((4, Text(f"best {value.best_value()}", "green")))
    if value.finished:
        took = format_duration(value.elapsed) if value.elapsed else ""
        return [*parts, (4, Text(took, "dim"))]
    if value.rate > 0:
        parts.append((8, Text(value.speed(), "dim")))
    if value.eta is not None:
        parts.append((4, Text(f"{format_duration(max(1.0, value.eta))} left")))
    elif value.elapsed >= 1:
        parts.append((11, Text(format_duration(value.elapsed), "dim")))
    return parts


def _bar(value: Progress | Step, width: int) -> Text:
    from rich.text import Text

    has_failures = isinstance(value, Progress) and (value.failed or value.lost)
    filled = int((value.fraction or 0.0) * width)
    return Text.assemble(
        ("━" * filled, "red" if has_failures else "green"), ("─" * (width - filled), "dim")
    )
