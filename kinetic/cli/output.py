"""What commands print: tables that fit, JSON of a known form, and text that stays text."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import click

from kinetic._messages import one_line, shown, span, unstyled

_REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that turn round what stands after them."""

NOTHING = "—"
LEAST_OF_LAST, LEAST_OF_OTHERS = 24, 12
"""With less room than this a column of a table is no column any more; the first is never cut."""

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
        return NOTHING
    return span((datetime.now(UTC) - born).total_seconds())


def dollars(amount: float | None) -> str | None:
    """An amount of US dollars; None where none is known, which shows as a dash."""
    return None if amount is None else f"${amount:,.2f}"


def items(count: int) -> str:
    """So many items."""
    return f"{count:,} item" if count == 1 else f"{count:,} items"


def json_line(schema: str, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """One JSON object; ``schema`` names its form and the version of that."""
    import json  # `kinetic --help` prints none

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
    cells = [[one_line(_told(row.get(one)), LONGEST_TEXT) for one in columns] for row in found]
    console = _console()
    with console.capture() as printed:
        lay_out([one.replace("_", " ") for one in columns], cells, console)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def lay_out(names: Sequence[str], rows: Sequence[Sequence[str]], console: Any) -> None:
    """A table where it fits; else what is said last is below its row, or all but the first is.

    Neither of these is cut: an id is of no use in parts, nor is half of a reason.
    """
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    columns = [*zip(names, *rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    gaps = 2 * (len(widths) - 1)
    beside = sum(widths[:-1]) + gaps + min(widths[-1], LEAST_OF_LAST) <= console.width
    kept = [*range(len(widths))]
    if not beside:  # what is nowhere said gives way, then the ends of what is longest
        kept = [at for at in kept[:-1] if at == 0 or {*columns[at][1:]} != {NOTHING}]
        widths = [widths[at] for at in kept]
        while sum(widths) + 2 * (len(widths) - 1) > console.width:
            longest = max(range(1, len(widths)), key=widths.__getitem__, default=0)
            if widths[longest] <= LEAST_OF_OTHERS or not longest:
                _pile_up(names, rows, console)
                return
            widths[longest] -= 1
    made = Table(box=None, pad_edge=False, header_style="bold")
    for at, width in zip(kept, widths, strict=True):
        last = beside and at == kept[-1]
        size = None if last else width
        overflow: Any = "fold" if last else "ellipsis"
        made.add_column(names[at].upper(), overflow=overflow, no_wrap=not last, width=size)
    for row in rows:
        made.add_row(*(Text(row[at]) for at in kept))
    if beside:
        console.print(made)
        return
    with console.capture() as table:
        console.print(made)
    head, *lines = table.get().splitlines()
    console.print(Text.from_ansi(head))
    for line, row in zip(lines, rows, strict=True):
        console.print(Text.from_ansi(line))
        if row[-1] != NOTHING:
            console.print(Padding(Text(row[-1]), (0, 0, 0, 2)))


def _pile_up(names: Sequence[str], rows: Sequence[Sequence[str]], console: Any) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for first, *rest in rows:
        told = [(name, one) for name, one in zip(names[1:], rest, strict=True) if one != NOTHING]
        console.print(Text(first, "bold"))
        console.print(Padding(Text("  ".join(f"{name} {one}" for name, one in told)), (0, 0, 0, 2)))


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


def asks(*, yes: bool) -> bool:
    """Whether `confirm` would ask: a script is not asked."""
    return not yes and sys.stdin.isatty() and sys.stdout.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask before more than one thing is removed.

    Raises:
        click.exceptions.Exit: The answer is no.
    """
    if asks(yes=yes) and not click.confirm(question):
        note("nothing was done")
        raise click.exceptions.Exit(1)


def _quoted(text: str) -> str:
    """Somebody else's text within ours: it changes neither the colour nor the order of that."""
    return _REORDERING.sub("", unstyled(text))


def _told(value: Any) -> str:
    if value is None or value == "":
        return NOTHING
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return ", ".join(f"{key}={one}" for key, one in pairs) or NOTHING
    return str(value)


def _console() -> Any:
    """One as wide as the terminal; without a terminal nothing is cut, and nothing is coloured."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    said = os.environ.get("COLUMNS", "")
    wide = int(said) if said.isdecimal() and int(said) else 10_000
    return Console(width=wide, highlight=False, markup=False, emoji=False, no_color=True)
