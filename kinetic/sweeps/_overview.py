"""Show the trials of a sweep in a notebook: the best ones as a table, and all values as a plot."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from kinetic._messages import one_line
from kinetic.sweeps.protocol import Direction, State, Trial

ROWS = 5
"""Maximum number of trials in the table."""

POINTS = 200
"""Maximum number of points in the plot; of more trials, each point is the best of a group."""

WIDTH, HEIGHT, LEFT, MARGIN = 480, 150, 70, 12
"""The size of the plot in pixels, the width of the labels at its left, and its margin."""

LOG_RATIO = 100.0
"""The axis is logarithmic if the largest value is this many times the smallest one."""


def overview(ended: Sequence[Trial], direction: Direction) -> str:
    """Return HTML about the trials that have ended, in the order in which they did."""
    best_of: Callable[..., Any] = min if direction == "minimize" else max
    valued = [trial for trial in ended if trial.value is not None and math.isfinite(trial.value)]
    complete = [trial for trial in valued if trial.state is State.COMPLETE]
    if not complete:
        return ""
    ranked = sorted(complete, key=_value, reverse=direction == "maximize")
    return _table(ranked[:ROWS]) + _plot(valued, best_of)


def _value(trial: Trial) -> float:
    return trial.value or 0.0


def _table(trials: Sequence[Trial]) -> str:
    names = [*dict.fromkeys(name for trial in trials for name in trial.params)]
    rows = [["trial", "value", *names]] + [
        [str(trial.number), _text(_value(trial))]
        + [_text(trial.params[name]) if name in trial.params else "" for name in names]
        for trial in trials
    ]
    head, *body = (
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * len(trials)], rows, strict=True)
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<table><caption>Best trials</caption><tr>{head}</tr>{lines}</table>"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else one_line(repr(value), 30)


def _plot(trials: Sequence[Trial], best_of: Callable[..., Any]) -> str:
    size = math.ceil(len(trials) / POINTS)
    groups = [trials[start : start + size] for start in range(0, len(trials), size)]
    points = [best_of(group, key=_value) for group in groups]
    low, high = min(map(_value, points)), max(map(_value, points))
    is_log = low > 0 and high / low >= LOG_RATIO
    scale: Callable[[float], float] = math.log if is_log else float
    # Halves, because the difference of two floats can be infinite.
    span = scale(high) / 2 - scale(low) / 2

    def x(index: int) -> str:
        return f"{LEFT + MARGIN + (WIDTH - LEFT - 2 * MARGIN) * (index + 0.5) / len(points):.1f}"

    def y(value: float) -> str:
        share = (scale(value) / 2 - scale(low) / 2) / span if span else 0.5
        return f"{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share:.1f}"

    circles, path, best = "", "", None
    for index, trial in enumerate(points):
        value, fill = _value(trial), "#3b82c4" if trial.state is State.COMPLETE else "none"
        name = f"trial {trial.number}, {trial.state}: {_text(value)}"
        circles += (
            f'<circle cx="{x(index)}" cy="{y(value)}" r="3.5" fill="{fill}" stroke="#3b82c4">'
            f"<title>{name}</title></circle>"
        )
        if trial.state is State.COMPLETE:
            best = value if best is None else best_of(best, value)
            path += f"H{x(index)}V{y(best)}" if path else f"M{x(index)} {y(best)}"
    path += f"H{WIDTH - MARGIN}"
    labels = "".join(
        f'<text x="{LEFT}" y="{y(value)}" dy="4" text-anchor="end">{_text(value)}</text>'
        for value in dict.fromkeys((low, high))
    )
    axis = ", on a logarithmic axis" if is_log else ""
    title = f"Values of {len(trials)} trials in the order of their ends{axis}; line: the best"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{title}"'
        ' style="max-width: 100%; height: auto"'
        f' font-size="11" font-family="sans-serif" fill="currentColor">{labels}{circles}'
        f'<path d="{path}" fill="none" stroke="#c2410c" stroke-width="1.5"/></svg>'
        f"<div><small>{title}</small></div>"
    )
