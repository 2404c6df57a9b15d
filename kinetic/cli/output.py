"""What commands print: tables that fit, JSON of a known form, and text that stays text."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import click

from kinetic._messages import one_line, shown, span, unstyled

__all__ = ["age", "confirm", "dollars", "facts", "items", "json_line", "lines", "note", "table"]

_REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that turn round what stands after them."""

LONGEST_TEXT = 400
"""Characters of one value in a table; JSON has all of it."""


def note(text: str) -> None:
    """Say something about the command itself, beside its output."""
    click.echo(f"kinetic: {_quoted(text)}", err=True)


def age(created_at: str) -> str:
    """How long ago that was, for people."""
    try:
        born = datetime.fromisoformat(created_at)
    except ValueError:
        return "—"
    return span((datetime.now(UTC) - born).total_seconds())


def dollars(amount: float | None) -> str | None:
    """An amount of US dollars; None where none is known, which shows as a dash."""
    return None if amount is None else f"${amount:,.2f}"


def items(count: int) -> str:
    """So many items."""
    return f"{count:,} item" if count == 1 else f"{count:,} items"


def json_line(schema: str, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """One JSON object; ``schema`` names its form and the version of that."""
    document = {"schema": f"kinetic.{schema}/1", **content}
    click.echo(json.dumps(document, indent=indent, ensure_ascii=False, default=str))


def table(
    schema: str,
    columns: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    *,
    as_json: bool,
    empty: str,
) -> None:
    """A list: as a table of *columns*, or as one JSON object with all that is known.

    *empty* is what is said where there are no rows.
    """
    found = [*rows]
    if as_json:
        json_line(schema, {"items": found}, indent=2)
        return
    if not found:
        note(empty)
        return
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # An id is of no use in parts; what is said last may take several lines.
        last = column == columns[-1]
        name = column.upper().replace("_", " ")
        made.add_column(name, overflow="fold" if last else "ellipsis", no_wrap=not last)
    for row in found:
        cells = (one_line(_told(row.get(column)), LONGEST_TEXT) for column in columns)
        made.add_row(*(Text(cell) for cell in cells))
    console = _console()
    with console.capture() as printed:
        console.print(made)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def facts(schema: str, content: Mapping[str, Any], *, as_json: bool) -> None:
    """One thing and what is known of it, a line each."""
    if as_json:
        json_line(schema, content, indent=2)
        return
    width = max((len(name) for name in content), default=0)
    for name, value in content.items():
        told = _quoted(_told(value)).replace("\n", "\n" + " " * (width + 2))
        click.echo(f"{name.replace('_', ' '):<{width}}  {told}")


def lines(text: Iterable[str]) -> None:
    """Text of somebody else's, such as a log."""
    for line in text:
        click.echo(shown(line))


def confirm(question: str, *, yes: bool) -> None:
    """Ask before more than one thing is removed; a script is not asked.

    Raises:
        click.Abort: The answer is no.
    """
    if not yes and sys.stdin.isatty() and sys.stdout.isatty():
        click.confirm(question, abort=True)


def _quoted(text: str) -> str:
    """Somebody else's text within ours: it changes neither the colour nor the order of that."""
    return _REORDERING.sub("", unstyled(text))


def _told(value: Any) -> str:
    if value is None or value == "":
        return "—"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return ", ".join(f"{key}={one}" for key, one in pairs) or "—"
    return str(value)


def _console() -> Any:
    """One as wide as the terminal; without a terminal nothing is cut, and nothing is coloured."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    wide = int(os.environ.get("COLUMNS") or 10_000)
    return Console(width=wide, highlight=False, markup=False, emoji=False, no_color=True)
