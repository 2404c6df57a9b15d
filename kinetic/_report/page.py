"""Render a batch as one HTML page that needs no server and no network.

Names, inputs, and messages are text on the page. They travel as JSON without any character that
HTML interprets, and the page's script turns them into text nodes. The page's content security
policy allows only that script.

To stay below `limit` bytes, the page omits the least important parts, and says so.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kinetic._messages import one_line, unstyled
from kinetic._progress.tally import State
from kinetic._report.digest import Durations, Statistics, compute_statistics
from kinetic._report.facts import BatchReport, Curves, Item, Part
from kinetic._runner.protocol.notes import Scalar
from kinetic._version import __version__

MAX_ITEMS = 10_000
"""Maximum number of items that the page lists; its statistics cover all items."""

MAX_GROUPS = 100
"""How many groups of failures the page lists."""

MAX_NAME, MAX_VALUE, MAX_MESSAGE, MAX_QUOTE = 100, 100, 300, 4000
"""How many characters the page shows of a name, a value, a message, and a traceback."""

MAX_EXACT_INTEGER = 1 << 53
"""JavaScript can't hold greater numbers exactly; the page shows them as text."""

LIVE = '<p id="live" role="status"></p>\n<script>{}</script>'
"""What a live page has after the script of every page."""

MAX_CURVE_POINTS = 40
"""Maximum number of points of one curve within an item."""

MAX_CURVE_NAMES = 8
"""How many of the numbers that an item reports by name the page shows."""

MIN_STEP_S = 1e-3
"""The smallest unit of times on the page, in seconds; a long batch has a larger unit."""


def limit(items: int) -> int:
    """Return the maximum size, in bytes, of the page for a batch of *items* items.

    The maximum is 300 kB up to 1,000 items, 2 MB from 10,000 items on, and grows evenly between.
    """
    fraction = min(1.0, max(0.0, (items - 1_000) / 9_000))
    return int(300_000 + fraction * 1_700_000)


def render(report: BatchReport) -> str:
    """Return the page. It takes a second for 10,000 items: call it in a worker thread."""
    return _page(report, "")


def render_live(report: BatchReport) -> str:
    """Return a page that asks its server for new facts, which `render_facts` returns."""
    return _page(report, _read_part("live.js"))


def render_facts(report: BatchReport, *, ended: bool) -> str:
    """Return the facts of a live page as JSON; *ended* says that they are the last ones."""
    budget = _ByteBudget(limit(len(report.items)))
    facts = _facts(report, compute_statistics(report), budget)
    return _json({**facts, "live": True, "ended": ended})


def _page(report: BatchReport, live_script: str) -> str:
    style, script = _read_part("page.css"), _read_part("page.js")
    title = one_line(report.name or report.function or report.group_id, MAX_NAME)
    scripts = [script, live_script] if live_script else [script]
    allowed_scripts = " ".join(f"'{_hash(text)}'" for text in scripts)
    connections = "connect-src 'self'; " if live_script else ""
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src {allowed_scripts}; "
        f"{connections}base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "version": html.escape(__version__),
        "title": html.escape(title),
        "style": style,
        "script": script,
        "live": LIVE.format(live_script) if live_script else "",
    }
    page = _read_part("page.html")
    budget = limit(len(report.items)) - len(_fill(page, {**parts, "facts": ""}).encode())
    facts = _facts(report, compute_statistics(report), _ByteBudget(budget))
    parts["facts"] = _json({**facts, "live": bool(live_script), "ended": not live_script})
    return _fill(page, parts)


_INDENTATION_OR_COMMENT = re.compile(
    r"^[ ]*(?:/\*\*.*?\*/|//.*?)\n|^[ ]+", re.MULTILINE | re.DOTALL
)


def _read_part(name: str) -> str:
    """Return a part of the page without indentation and comments, to save 8 kB in each page."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return _INDENTATION_OR_COMMENT.sub("", text)


def _fill(page: str, parts: dict[str, str]) -> str:
    """Fill the placeholders of *page* in one pass, which ignores placeholders in inserted text."""
    return re.sub(r"\{\{(\w+)\}\}", lambda placeholder: parts[placeholder[1]], page)


def _hash(content: str) -> str:
    """Return the hash by which the content security policy allows *content*."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


_UNSAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def _json(value: Any) -> str:
    """Return JSON in ASCII that can't end a script or begin a comment of HTML."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


class _ByteBudget:
    """The bytes of the page that are left for facts."""

    def __init__(self, size: int) -> None:
        self.remaining = size
        self._size = size

    def reserve_if_fits(self, value: Any) -> bool:
        """Reserve the bytes of *value* if they fit; return whether they do."""
        size = len(_json(value)) + 1
        if size > self.remaining:
            return False
        self.remaining -= size
        return True

    def reserve(self, value: Any) -> None:
        """Reserve the bytes of *value* even if they don't fit."""
        self.remaining -= len(_json(value)) + 20

    @contextlib.contextmanager
    def limited_to(self, fraction: float) -> Generator[None]:
        """Let the block reserve at most *fraction* of the total."""
        kept = max(0, self.remaining - int(self._size * fraction))
        self.remaining -= kept
        yield
        self.remaining += kept


def _facts(report: BatchReport, statistics: Statistics, budget: _ByteBudget) -> dict[str, Any]:
    """Return the data that the page's script draws, limited to the bytes of *budget*."""
    listed = _choose_items(report, statistics)
    facts: dict[str, Any] = {
        "group": report.group_id,
        "name": one_line(report.name, MAX_NAME),
        "function": one_line(report.function, MAX_NAME),
        "tags": [
            [one_line(str(name), MAX_NAME), one_line(str(value), MAX_NAME)]
            for name, value in [*report.tags.items()][:30]
        ],
        "where": one_line(report.where, MAX_NAME),
        "accelerator": one_line(report.accelerator, MAX_NAME),
        "limit": report.max_concurrent,
        "direction": report.direction,
        "metric": None if report.metric is None else one_line(report.metric, MAX_NAME),
        "created": report.created,
        "read_at": report.read_at,
        "total": report.total,
        "known": len(report.items),
        "parts": [_part(part) for part in report.parts],
        "sweep": None
        if report.goal is None
        else {
            "direction": report.goal.direction,
            "metric": report.goal.metric,
            "best": statistics.best,
            "rungs": [list(rung) for rung in statistics.rungs],
        },
        "begun": round(statistics.begun, 3),
        "seconds": _round(statistics.seconds),
        "states": [state.name.lower() for state in State],
        "counts": [statistics.counts.get(state, 0) for state in State],
        "series": [[_round(seconds), *counts] for seconds, counts in statistics.states],
        "concurrency": [
            [_round(seconds), low, _round(mean, 4), high]
            for seconds, low, mean, high in statistics.concurrency
        ],
        "peak": statistics.peak,
        "mean": _round(statistics.mean),
        "durations": _durations(statistics.durations),
        "retries": [
            [one_line(reason), attempts, items]
            for reason, attempts, items in statistics.retries[:30]
        ],
        "slowest": list(statistics.slowest),
    }
    budget.reserve(facts)
    with budget.limited_to(0.25):
        facts["failures"], groups = _failures(report, statistics, budget)
    facts["more_failures"] = len(statistics.failures) - len(facts["failures"])
    facts["items"] = _items(report, statistics, listed, groups, budget)
    with budget.limited_to(0.3):
        facts["curves"] = _curves(report.curves, listed, budget)
    facts["columns"], facts["constants"], facts["left_out"] = _columns(listed, budget)
    return facts


def _part(part: Part) -> dict[str, Any]:
    """Return what a comparison shows of one of its batches."""
    statistics = compute_statistics(part.report)
    durations = statistics.durations
    return {
        "label": one_line(part.label, MAX_NAME),
        "group": part.report.group_id,
        "function": one_line(part.report.function, MAX_NAME),
        "accelerator": one_line(part.report.accelerator, MAX_NAME),
        "created": part.report.created,
        "first": part.first,
        "known": len(part.report.items),
        "counts": [statistics.counts.get(state, 0) for state in State],
        "seconds": _round(statistics.seconds),
        "peak": statistics.peak,
        "p50": None if durations is None else _round(durations.p50),
        "p95": None if durations is None else _round(durations.p95),
    }


def _durations(durations: Durations | None) -> dict[str, Any] | None:
    if durations is None:
        return None
    numbers = asdict(durations)
    bins = [[_round(start), _round(stop), count] for start, stop, count in numbers.pop("bins")]
    return {**{name: _round(number) for name, number in numbers.items()}, "bins": bins}


def _round(number: float, digits: int = 5) -> float | int:
    """Round to *digits* significant digits; a whole number has no point."""
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < MAX_EXACT_INTEGER else rounded


# --- failures ------------------------------------------------------------------------------


def _failures(
    report: BatchReport, statistics: Statistics, budget: _ByteBudget
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return the groups of failures, and the number of each failed item's group."""
    entries: list[dict[str, Any]] = []
    group_of_item: dict[int, int] = {}
    for number, group in enumerate(statistics.failures[:MAX_GROUPS]):
        entry: dict[str, Any] = {
            "message": one_line(group.message, MAX_MESSAGE),
            "reason": one_line(group.reason),
            "count": len(group.items),
            "example": group.example,
        }
        if not budget.reserve_if_fits(entry):
            break
        example = report.examples.get(group.example)
        if example is not None:
            details = {
                "words": _quote(example.message),
                "traceback": _quote(example.traceback),
                "log": _quote(example.log),
            }
            if budget.reserve_if_fits(details):
                entry |= details
        entries.append(entry)
        group_of_item.update(dict.fromkeys(group.items, number))
    return entries, group_of_item


def _quote(text: str) -> str:
    """Return the last `MAX_QUOTE` characters, because the error is at the end."""
    text = unstyled(text[-8 * MAX_QUOTE :]).rstrip()
    return text if len(text) <= MAX_QUOTE else f"…{text[-MAX_QUOTE:]}"


# --- the items -----------------------------------------------------------------------------


def _choose_items(report: BatchReport, statistics: Statistics) -> list[Item]:
    """Return all items; above `MAX_ITEMS`, failed, slowest, the best trial, and a sample."""
    items = report.items
    if len(items) <= MAX_ITEMS:
        return [*items]
    wanted = [index for group in statistics.failures for index in group.items][: MAX_ITEMS // 2]
    chosen = {*wanted, *statistics.slowest, *(statistics.best or ())[:1]}
    rest = [item.index for item in items if item.index not in chosen]
    step = len(rest) / (MAX_ITEMS - len(chosen))
    chosen.update(rest[int(index * step)] for index in range(MAX_ITEMS - len(chosen)))
    return [item for item in items if item.index in chosen]


def _items(
    report: BatchReport,
    statistics: Statistics,
    listed: Sequence[Item],
    groups: dict[int, int],
    budget: _ByteBudget,
) -> dict[str, Any]:
    """Return the columns that every item has. Times count from the start of the batch."""
    lists_all = len(listed) == len(report.items)
    starts = [item.last.begun if item.last is not None else None for item in listed]
    durations = [item.seconds(report.read_at) for item in listed]
    step = max(MIN_STEP_S, 10.0 ** math.floor(math.log10(max(statistics.seconds, 1.0) / 50_000)))
    items: dict[str, Any] = {
        "index": None if lists_all else [item.index for item in listed],
        "state": "".join(str(int(item.state)) for item in listed),
        "step": step,
        "begun": [
            None if start is None else round((start - statistics.begun) / step) for start in starts
        ],
        "taken": [None if seconds is None else _round(seconds, 4) for seconds in durations],
    }
    budget.reserve(items)
    with budget.limited_to(0.2):
        tries = _earlier_attempts(listed, statistics.begun, step, budget)
    items["tries"], items["unlisted"] = tries
    with budget.limited_to(0.25):
        items["why"], items["messages"] = _messages(listed, groups, budget)
    return items


def _earlier_attempts(
    listed: Sequence[Item], batch_start: float, step: float, budget: _ByteBudget
) -> tuple[dict[str, Any], int]:
    """Return each row's attempts before its last one, and how many rows don't fit.

    An attempt is a list of its start, its duration, its kind, and the reason for its end.
    """
    attempts: dict[str, Any] = {}
    unlisted = 0
    for row, item in enumerate(listed):
        if item.earlier_attempts:
            shown = [
                [
                    None if attempt.begun is None else round((attempt.begun - batch_start) / step),
                    None
                    if attempt.begun is None or attempt.ended is None
                    else _round(max(0.0, attempt.ended - attempt.begun), 4),
                    attempt.kind,
                    one_line(attempt.reason, 40),
                ]
                for attempt in item.earlier_attempts[-10:]
            ]
            omitted = len(item.earlier_attempts) - len(shown)
            if budget.reserve_if_fits([str(row), omitted, *shown]):
                attempts[str(row)] = [omitted, *shown]
            else:
                unlisted += 1
    return attempts, unlisted


def _messages(
    listed: Sequence[Item], groups: dict[int, int], budget: _ByteBudget
) -> tuple[dict[str, int], list[list[Any]]]:
    """Return each failed row's position in a list of (message, group), and that list."""
    message_of_row: dict[str, int] = {}
    messages: list[list[Any]] = []
    indices: dict[tuple[str, int], int] = {}
    for row, item in enumerate(listed):
        if not item.state.bad:
            continue
        group = groups.get(item.index, -1)
        for message in (one_line(item.message, MAX_MESSAGE), ""):  # "": the message of the group
            key = (message, group)
            if key in indices or budget.reserve_if_fits([*key]):
                if key not in indices:
                    indices[key] = len(messages)
                    messages.append([*key])
                if budget.reserve_if_fits([f"{row}", indices[key]]):
                    message_of_row[str(row)] = indices[key]
                break
    return message_of_row, messages


def _curves(curves: Curves, listed: Sequence[Item], budget: _ByteBudget) -> dict[str, Any]:
    """Return the curves that fit, each with its row, its steps, and the values of each name."""
    names: list[str] = []
    shown: list[list[Any]] = []
    for row, item in enumerate(listed):
        points = curves.by_item.get(item.index, ())
        if len(points) > MAX_CURVE_POINTS:
            # Keep the first and the last point.
            step = (len(points) - 1) / (MAX_CURVE_POINTS - 1)
            points = [points[round(number * step)] for number in range(MAX_CURVE_POINTS)]
        if not points:
            continue
        dicts: list[Mapping[str, float]] = [
            value if isinstance(value, Mapping) else {"": value} for _, value in points
        ]
        for name in dict.fromkeys(name for values in dicts for name in values):
            if name not in names and len(names) < MAX_CURVE_NAMES:
                names.append(name)
        columns = [
            [None if name not in values else _round(values[name]) for values in dicts]
            for name in names
        ]
        curve = [row, [at for at, _ in points], columns]
        if budget.reserve_if_fits(curve):
            shown.append(curve)
    labels = [one_line(name, MAX_NAME) for name in names]
    return {"names": labels, "shown": shown, "reported": curves.reported}


# --- inputs and results --------------------------------------------------------------------

_Column = tuple[str, str]
"""A column: ``input``, ``result``, or ``pruned``, and the name of the value that it shows."""


def _columns(
    listed: Sequence[Item], budget: _ByteBudget
) -> tuple[list[dict[str, Any]], list[list[Any]], list[str]]:
    """Return the columns, the values that all items share, and the names of omitted columns."""
    values: dict[_Column, dict[int, Scalar]] = {}
    for source in ("input", "result", "pruned"):
        for row, item in enumerate(listed):
            for name, value in getattr(item, source).items():
                values.setdefault((source, name), {})[row] = value
    constants: list[list[Any]] = []
    columns: dict[_Column, dict[str, Any]] = {}
    left_out: list[str] = []
    name_budget = _ByteBudget(budget.remaining // 50)
    budget.remaining -= name_budget.remaining
    # Numeric columns get space first, because the page plots them; results and inputs alternate.
    counts = {source: itertools.count() for source in ("input", "result", "pruned")}
    ranks = {column: next(counts[column[0]]) for column in values}
    for column in sorted(
        values, key=lambda column: (not _is_numeric(values[column].values()), ranks[column])
    ):
        source, name = column
        by_row, shown = values[column], one_line(name, MAX_NAME)
        distinct = {(type(value), value) for value in by_row.values()}
        if len(distinct) == 1 and len(by_row) == len(listed) > 1:
            constant = [source, shown, _display_value(next(iter(by_row.values())))]
            if budget.reserve_if_fits(constant):
                constants.append(constant)
                continue
        column_data = _column(source, shown, by_row, len(listed))
        if budget.reserve_if_fits(column_data):
            columns[column] = column_data
        elif name_budget.reserve_if_fits(shown):
            left_out.append(shown)
    return [columns[column] for column in values if column in columns], constants, left_out


_NON_FINITE = ("nan", "inf", "-inf")


def _is_numeric(values: Iterable[Scalar]) -> bool:
    """Return whether all values are numbers that the page can plot, None, "nan", or infinite."""
    has_number = False
    for value in values:
        if isinstance(value, bool) or (isinstance(value, str) and value not in _NON_FINITE):
            return False
        if isinstance(value, int) and abs(value) > MAX_EXACT_INTEGER:
            return False
        has_number = has_number or isinstance(value, (int, float))
    return has_number


def _column(source: str, name: str, by_row: dict[int, Scalar], rows: int) -> dict[str, Any]:
    """Return a column: floats with 6 digits, each text as its position in a list of all texts."""
    if _is_numeric(by_row.values()):
        numbers = [by_row.get(row) for row in range(rows)]
        rounded = [_round(number, 6) if isinstance(number, float) else number for number in numbers]
        return {"of": source, "name": name, "kind": "number", "values": rounded}
    texts: dict[str, int] = {}
    indices: list[int | None] = []
    for row in range(rows):
        if row in by_row:
            indices.append(texts.setdefault(str(_display_value(by_row[row])), len(texts)))
        else:
            indices.append(None)
    return {"of": source, "name": name, "kind": "text", "values": indices, "texts": [*texts]}


def _display_value(value: Scalar) -> str | int | float:
    """Return *value* as the page shows it: rounded or cut, None and Booleans as text."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return _round(value, 6)
    if isinstance(value, int):
        return value if abs(value) <= MAX_EXACT_INTEGER else str(value)
    return one_line(value, MAX_VALUE)
