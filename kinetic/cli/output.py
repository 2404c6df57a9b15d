"""Print the output of commands: tables, JSON in a documented format, and lines of logs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TextIO, TypeVar, cast

import click

from kinetic._messages import format_duration, one_line, remove_control_sequences, unstyled

P = ParamSpec("P")
T = TypeVar("T")

_BIDI_CONTROLS = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that reverse the text after them on a terminal."""

EMPTY_CELL = "—"
"""The cell of an unknown value."""

MIN_COLUMN_WIDTH = 12
"""Minimum width of a column, in cells; a narrower column is unreadable."""

MAX_TEXT_LENGTH = 400
"""Maximum number of characters of a value in a table; JSON has the whole value."""

SETTLE_S = 0.01
"""How long the event loop runs after a prompt, in seconds, before the next request."""


def note(text: str) -> None:
    """Print a message of the command on standard error."""
    click.echo(f"kinetic: {_sanitize(text)}", err=True)


def age(created_at: str) -> str:
    """Return how long ago *created_at* (ISO 8601) was; `EMPTY_CELL` if it is invalid."""
    from datetime import UTC, datetime  # `kinetic --help` doesn't need this import

    try:
        created = datetime.fromisoformat(created_at)
    except ValueError:
        return EMPTY_CELL
    return format_duration((datetime.now(UTC) - created).total_seconds())


def dollars(amount: float | None) -> str | None:
    """Format an amount of US dollars; None stays None."""
    return None if amount is None else f"${amount:,.2f}"


def items(count: int) -> str:
    """Return *count* with the word item or items."""
    return f"{count:,} item" if count == 1 else f"{count:,} items"


def json_line(schema: str, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Print one JSON object; its ``schema`` names the form and the form's version."""
    import json  # `kinetic --help` doesn't need this import

    document = {"schema": f"kinetic.{schema}/1", **content}
    click.echo(json.dumps(document, indent=indent, default=str))


def table(
    schema: str,
    columns: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    *,
    as_json: bool,
    empty: str = "",
) -> None:
    """Print *rows* as a table of *columns*, or as one JSON object with every field.

    *empty* is the note for a list without rows.
    """
    listed = [*rows]
    if as_json:
        json_line(schema, {"items": listed}, indent=2)
        return
    if not listed:
        note(empty)
        return
    cells = [
        [one_line(_format_cell(row.get(column)), MAX_TEXT_LENGTH) for column in columns]
        for row in listed
    ]
    names = [column.replace("_", " ").upper() for column in columns]
    is_cut = sys.stdout.isatty() or os.environ.get("COLUMNS")  # in a pipe, a table isn't
    width = shutil.get_terminal_size().columns if is_cut else None
    for line in lay_out(names, cells, width):
        click.echo(line)


def lay_out(names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the lines of a table, at most *width* cells wide; None means any width.

    If the table doesn't fit, it has no empty columns, and each row has the last column below it.
    Other columns are cut, but not the first, because a part of an ID is useless.
    """
    from rich.cells import cell_len

    columns = [*zip(names, *rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        return [_format_row(line, widths) for line in (names, *rows)]
    kept = [
        index
        for index in range(len(columns) - 1)
        if index == 0 or {*columns[index][1:]} != {EMPTY_CELL}
    ]
    widths = [widths[index] for index in kept]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        index = max(range(1, len(widths)), key=widths.__getitem__, default=0)
        if index == 0 or widths[index] <= MIN_COLUMN_WIDTH:
            break  # the terminal wraps the rest
        widths[index] -= 1
    lines = [_format_row([names[index] for index in kept], widths)]
    for row in rows:
        lines.append(_format_row([row[index] for index in kept], widths))
        if row[-1] != EMPTY_CELL:
            lines += textwrap.wrap(row[-1], width, initial_indent="  ", subsequent_indent="  ")
    return lines


def _format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return one line of a table, with each cell cut or padded to its width."""
    from rich.cells import cell_len, set_cell_size

    fitted = [
        set_cell_size(cell, width)
        if cell_len(cell) <= width
        else set_cell_size(cell, width - 1) + "…"
        for cell, width in zip(cells, widths, strict=True)
    ]
    return "  ".join(fitted).rstrip()


def fields(schema: str, content: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the fields of one object: a line per field, or one JSON object."""
    if as_json:
        json_line(schema, content, indent=2)
        return
    width = max((len(name) for name in content), default=0)
    for name, value in content.items():
        text = _sanitize(_format_cell(value)).replace("\n", "\n" + " " * (width + 2))
        click.echo(f"{name.replace('_', ' '):<{width}}  {text}")


def done(schema: str, content: Mapping[str, Any], message: str, *, as_json: bool) -> None:
    """Say what the command has done: *message* as a note, or *content* as one JSON object."""
    if as_json:
        json_line(schema, content, indent=2)
    else:
        note(message)


def lines(text: Iterable[str], *, err: bool = False) -> None:
    """Print lines of a job, such as its log, without control sequences other than colors."""
    for line in text:
        click.echo(remove_control_sequences(line), err=err)


def will_ask(*, yes: bool) -> bool:
    """Return whether to ask a person: only on a terminal, and without --yes."""
    return not yes and sys.stdin is not None and sys.stdin.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask *question* on a terminal; without one, or with *yes*, return at once.

    On an event loop, call this function through `ask`.

    Raises:
        click.exceptions.Exit: The answer is no.
    """
    if will_ask(yes=yes):
        require(question, yes=False)


def require(question: str, *, yes: bool, answer: str = "") -> None:
    """Ask *question* and return only after a yes, or at once with *yes*.

    *answer* is what to type instead of yes. The answer may come from a pipe. On an event loop, call
    this function through `ask`.

    Raises:
        click.UsageError: Standard input gives no answer.
        click.exceptions.Exit: The answer is another one.
    """
    if yes:
        return
    typed = read_answer(question if answer else f"{question} [y/N]")
    if typed != answer if answer else typed.lower() not in ("y", "yes"):
        note("nothing was done")
        raise click.exceptions.Exit(1)


def read_answer(question: str) -> str:
    """Print *question*, and return the next line of standard input without surrounding spaces.

    If standard input is a terminal, the question appears there, even if the output goes to files.

    Raises:
        click.UsageError: Standard input is closed, or has ended.
    """
    sys.stdout.flush()
    line = ""
    try:
        with _screen() as screen:
            screen.write(f"{_sanitize(question)}: ")
            screen.flush()
        line = sys.stdin.readline()
    except (AttributeError, OSError, ValueError):  # AttributeError: standard input was never open
        pass
    if not line:
        click.echo(err=True)  # ends the line of the question
        raise click.UsageError(
            "the command needs an answer, and standard input gives none; pass --yes to continue "
            "without a question"
        )
    return line.strip()


def _screen() -> contextlib.AbstractContextManager[TextIO]:
    """Return the stream for questions: standard error, or else the terminal that answers."""
    if sys.stdin.isatty() and not sys.stderr.isatty():
        with contextlib.suppress(OSError):
            return open(os.ttyname(sys.stdin.fileno()), "w", encoding="utf-8")
    return contextlib.nullcontext(sys.stderr)


async def ask(prompt: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call *prompt*, which blocks the event loop; Ctrl-C ends the prompt at once.

    asyncio's handler of Ctrl-C would only cancel the task, which can't end before the prompt.
    """
    import asyncio  # `kinetic --help` doesn't need these imports
    import signal

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = prompt(*args, **kwargs)
    finally:
        signal.signal(signal.SIGINT, handler)
    # The loop drops the connections that servers have closed meanwhile. The next request would
    # otherwise use one of them, and fail.
    await asyncio.sleep(SETTLE_S)
    return answer


def _sanitize(text: str) -> str:
    """Remove characters that change the color or the direction of the text around them."""
    return _BIDI_CONTROLS.sub("", unstyled(text))


def _format_cell(value: Any) -> str:
    if value is None or value == "":
        return EMPTY_CELL
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return ", ".join(f"{key}={item}" for key, item in pairs) or EMPTY_CELL
    return str(value)
