"""Render a batch as one HTML page that needs no server and no network.

Names, inputs, and messages are text on the page. They travel as JSON without any character that
HTML interprets, and the page's script turns them into text nodes. The page's content security
policy allows only that script.

The page stays below `limit` bytes: it omits the least important parts, and says so.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kinetic._messages import one_line, unstyled
from kinetic._progress.tally import State
from kinetic._report.digest import Digest, digest
from kinetic._report.facts import BatchReport, Item
from kinetic._runner.protocol.notes import Scalar
from kinetic._version import __version__

LISTED = 10_000
"""Maximum number of items that the page lists; its statistics cover all items."""

GROUPS = 100
"""How many groups of failures the page lists."""

NAME, VALUE, MESSAGE, QUOTE = 100, 100, 300, 4000
"""How many characters the page shows of a name, a value, a message, and a traceback."""

SHORT = 24
"""How many characters of each value the page shows if a column doesn't fit otherwise."""

EXACT = 1 << 53
"""JavaScript can't hold greater numbers exactly; the page shows them as text."""

STEP_S = 1e-3
"""The least unit of times on the page, in seconds; greater for long batches, to save digits."""


def limit(items: int) -> int:
    """Return the maximum size, in bytes, of the page for a batch of *items* items.

    300 kB up to 1,000 items, 2 MB from 10,000 on.
    """
    share = min(1.0, max(0.0, (items - 1_000) / 9_000))
    return int(300_000 + share * 1_700_000)


def render(report: BatchReport) -> str:
    """Return the page. It takes a second for 10,000 items: call it in a worker thread."""
    style, script = _part("page.css"), _part("page.js")
    title = one_line(report.name or report.function or report.group_id, NAME)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "version": html.escape(__version__),
        "title": html.escape(title),
        "style": style,
        "script": script,
    }
    page = _part("page.html")
    room = limit(len(report.items)) - len(_fill(page, {**parts, "facts": ""}).encode())
    parts["facts"] = _json(_facts(report, digest(report), _Room(room)))
    return _fill(page, parts)


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _fill(page: str, parts: dict[str, str]) -> str:
    """Fill the placeholders of *page* in one pass, which ignores placeholders in inserted text."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], page)


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


_UNSAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def _json(value: Any) -> str:
    """Return JSON in ASCII that can't end a script or begin a comment of HTML."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


class _Room:
    """The bytes of the page that are left for facts."""

    def __init__(self, size: int) -> None:
        self.left = size
        self._size = size

    def take(self, value: Any) -> bool:
        """Reserve the bytes of *value* if they fit; return whether they do."""
        size = len(_json(value)) + 1
        if size > self.left:
            return False
        self.left -= size
        return True

    def take_all(self, value: Any) -> Any:
        """Reserve the bytes of *value* even if they don't fit; return *value*."""
        self.left -= len(_json(value)) + 20
        return value

    def part(self, share: float) -> _Room:
        """Split off at most the fraction *share* of the total; `give_back` returns the rest."""
        part = _Room(int(min(self.left, self._size * share)))
        self.left -= part.left
        return part

    def give_back(self, part: _Room) -> None:
        """Take back what *part* didn't use."""
        self.left += max(0, part.left)


def _facts(report: BatchReport, found: Digest, room: _Room) -> dict[str, Any]:
    """Return the data that the page's script draws, limited to the bytes of *room*."""
    listed = _listed(report, found)
    facts: dict[str, Any] = {
        "group": report.group_id,
        "name": one_line(report.name, NAME),
        "function": one_line(report.function, NAME),
        "tags": [
            [one_line(str(name), NAME), one_line(str(value), NAME)]
            for name, value in [*report.tags.items()][:30]
        ],
        "where": one_line(report.where, NAME),
        "accelerator": one_line(report.accelerator, NAME),
        "limit": report.max_concurrent,
        "direction": report.direction,
        "metric": None if report.metric is None else one_line(report.metric, NAME),
        "created": report.created,
        "read_at": report.read_at,
        "total": report.total,
        "known": len(report.items),
        "begun": round(found.begun, 3),
        "seconds": _brief(found.seconds),
        "states": [state.name.lower() for state in State],
        "counts": [found.counts.get(state, 0) for state in State],
        "series": [[_brief(point.seconds), *point.counts] for point in found.states],
        "concurrency": [[_brief(at), count] for at, count in found.concurrency],
        "peak": found.peak,
        "mean": _brief(found.mean),
        "durations": _durations(found),
        "retries": [[one_line(one.reason), one.attempts, one.items] for one in found.retries[:30]],
        "slowest": list(found.slowest),
    }
    room.take_all(facts)
    some = room.part(0.25)
    facts["failures"], groups = _failures(report, found, some)
    facts["more_failures"] = len(found.failures) - len(facts["failures"])
    room.give_back(some)
    facts["items"] = _items(report, found, listed, groups, room)
    facts["columns"], facts["constants"], facts["left_out"] = _columns(listed, room)
    return facts


def _durations(found: Digest) -> dict[str, Any] | None:
    if found.durations is None:
        return None
    numbers = asdict(found.durations)
    bins: list[dict[str, Any]] = numbers.pop("bins")
    brief = {name: _brief(number) for name, number in numbers.items()}
    return {**brief, "bins": [[_brief(b["start"]), _brief(b["stop"]), b["count"]] for b in bins]}


def _brief(number: float, digits: int = 5) -> float | int:
    """Round to *digits* significant digits; a whole number has no point."""
    brief = float(f"{number:.{digits}g}")
    return int(brief) if brief.is_integer() and abs(brief) < EXACT else brief


# --- failures ------------------------------------------------------------------------------


def _failures(
    report: BatchReport, found: Digest, room: _Room
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return the groups of failures, and the number of each failed item's group."""
    shown: list[dict[str, Any]] = []
    of_item: dict[int, int] = {}
    for number, group in enumerate(found.failures[:GROUPS]):
        entry: dict[str, Any] = {
            "message": one_line(group.message, MESSAGE),
            "reason": one_line(group.reason),
            "count": len(group.items),
            "example": group.example,
        }
        if not room.take(entry):
            break
        full = report.examples.get(group.example)
        if full is not None:
            words = {
                "words": _quote(full.message),
                "traceback": _quote(full.traceback),
                "log": _quote(full.log),
            }
            if room.take(words):
                entry |= words
        shown.append(entry)
        of_item.update(dict.fromkeys(group.items, number))
    return shown, of_item


def _quote(text: str) -> str:
    """Return the last `QUOTE` characters, because the error is at the end."""
    text = unstyled(text[-8 * QUOTE :]).rstrip()
    return text if len(text) <= QUOTE else f"…{text[-QUOTE:]}"


# --- the items -----------------------------------------------------------------------------


def _listed(report: BatchReport, found: Digest) -> list[Item]:
    """Return the items to list: all, or, above `LISTED`, the failed, the slowest, and samples."""
    items = report.items
    if len(items) <= LISTED:
        return [*items]
    wanted = [index for group in found.failures for index in group.items][: LISTED // 2]
    chosen = {*wanted, *found.slowest}
    rest = [item.index for item in items if item.index not in chosen]
    step = len(rest) / (LISTED - len(chosen))
    chosen.update(rest[int(place * step)] for place in range(LISTED - len(chosen)))
    return [item for item in items if item.index in chosen]


def _items(
    report: BatchReport,
    found: Digest,
    listed: Sequence[Item],
    groups: dict[int, int],
    room: _Room,
) -> dict[str, Any]:
    """Return the columns that every item has. Times count from the begin of the batch."""
    whole = len(listed) == len(report.items)
    begun = [item.last.begun if item.last is not None else None for item in listed]
    taken = [item.seconds(report.read_at) for item in listed]
    step = max(STEP_S, 10.0 ** math.floor(math.log10(max(found.seconds, 1.0) / 50_000)))
    items: dict[str, Any] = {
        "index": None if whole else [item.index for item in listed],
        "state": "".join(str(int(item.state)) for item in listed),
        "step": step,
        "begun": [None if at is None else round((at - found.begun) / step) for at in begun],
        "taken": [None if seconds is None else _brief(seconds, 4) for seconds in taken],
    }
    room.take_all(items)
    some = room.part(0.2)
    items["tries"], items["unlisted"] = _tries(listed, found.begun, step, some)
    room.give_back(some)
    some = room.part(0.25)
    items["why"], items["messages"] = _whys(listed, groups, some)
    room.give_back(some)
    return items


def _tries(
    listed: Sequence[Item], begun: float, step: float, room: _Room
) -> tuple[dict[str, Any], int]:
    """Return each row's attempts before its last one, and how many rows don't fit.

    An attempt is a list of its begin, its duration, and how and why it ended.
    """
    tries: dict[str, Any] = {}
    unlisted = 0
    for row, item in enumerate(listed):
        if item.before:
            shown = [
                [
                    None if one.begun is None else round((one.begun - begun) / step),
                    None
                    if one.begun is None or one.ended is None
                    else _brief(max(0.0, one.ended - one.begun), 4),
                    one.kind,
                    one_line(one.reason, 40),
                ]
                for one in item.before[-10:]
            ]
            more = len(item.before) - len(shown)
            if room.take([str(row), more, *shown]):
                tries[str(row)] = [more, *shown]
            else:
                unlisted += 1
    return tries, unlisted


def _whys(
    listed: Sequence[Item], groups: dict[int, int], room: _Room
) -> tuple[dict[str, int], list[list[Any]]]:
    """Return where each row's message is in a list, and that list of messages and groups."""
    why: dict[str, int] = {}
    messages: list[list[Any]] = []
    known: dict[tuple[str, int], int] = {}
    for row, item in enumerate(listed):
        if not item.state.bad:
            continue
        group = groups.get(item.index, -1)
        for words in (one_line(item.message, MESSAGE), ""):  # "": as the group
            key = (words, group)
            if key in known or room.take([*key]):
                if key not in known:
                    known[key] = len(messages)
                    messages.append([*key])
                if room.take([f"{row}", known[key]]):
                    why[str(row)] = known[key]
                break
    return why, messages


# --- inputs and results --------------------------------------------------------------------

_Column = tuple[str, str]
"""A column: ``input`` or ``result``, and the name of the value that it shows."""


def _columns(
    listed: Sequence[Item], room: _Room
) -> tuple[list[dict[str, Any]], list[list[Any]], list[str]]:
    """Return the columns, the values that all items share, and the names that don't fit."""
    values: dict[_Column, dict[int, Scalar]] = {}
    for row, item in enumerate(listed):
        for of, note in (("input", item.input), ("result", item.result)):
            for name, value in note.items():
                values.setdefault((of, name), {})[row] = value
    constants: list[list[Any]] = []
    fitting: list[tuple[int, dict[str, Any]]] = []
    left_out: list[str] = []
    names = room.part(0.02)
    order: dict[_Column, int] = {}
    for of in ("result", "input"):
        order |= {one: place for place, one in enumerate(one for one in values if one[0] == of)}
    # Numeric columns get space first, because the page plots them; results and inputs alternate.
    for column in sorted(
        values, key=lambda one: (not _is_numeric(values[one].values()), order[one])
    ):
        of, name = column
        by_row, shown = values[column], one_line(name, NAME)
        different = {(type(value), value) for value in by_row.values()}
        if len(different) == 1 and len(by_row) == len(listed) > 1:
            one = [of, shown, _shown(next(iter(by_row.values())))]
            if room.take(one):
                constants.append(one)
                continue
        for characters in (VALUE, SHORT):
            made = _column(of, shown, by_row, len(listed), characters)
            if room.take(made):
                fitting.append((order[column], made))
                break
        else:
            left_out += [shown] if names.take(shown) else []
    fitting.sort(key=lambda one: (one[1]["of"], one[0]))
    return [made for _, made in fitting], constants, left_out


_NO_NUMBERS = ("nan", "inf", "-inf")


def _is_numeric(values: Iterable[Scalar]) -> bool:
    """Return whether all values are numbers, or texts for numbers, such as "nan"."""
    numbers = False
    for value in values:
        if isinstance(value, bool) or (isinstance(value, str) and value not in _NO_NUMBERS):
            return False
        if isinstance(value, int) and abs(value) > EXACT:
            return False
        numbers = numbers or isinstance(value, (int, float))
    return numbers


def _column(
    of: str, name: str, by_row: dict[int, Scalar], rows: int, characters: int
) -> dict[str, Any]:
    """Return a column: numbers as they are, each text as its place in a list of all texts."""
    if _is_numeric(by_row.values()):
        numbers = [by_row.get(row) for row in range(rows)]
        brief = [_brief(one, 6) if isinstance(one, float) else one for one in numbers]
        return {"of": of, "name": name, "kind": "number", "values": brief}
    texts: dict[str, int] = {}
    places: list[int | None] = []
    for row in range(rows):
        if row in by_row:
            shown = one_line(str(_shown(by_row[row])), characters)
            places.append(texts.setdefault(shown, len(texts)))
        else:
            places.append(None)
    return {"of": of, "name": name, "kind": "text", "values": places, "texts": [*texts]}


def _shown(value: Scalar) -> str | int | float:
    """Return *value* as the page shows it: rounded or cut, None and Booleans as text."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return _brief(value, 6)
    if isinstance(value, int):
        return value if abs(value) <= EXACT else str(value)
    return one_line(value, VALUE)
