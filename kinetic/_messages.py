"""Format times, amounts, and messages for people."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_COMPARED = 80
"""Compare no longer words, because the cost grows with the square of the length."""


def nearest(word: str, known: Iterable[str], *, limit: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return at most *limit* of the *known* names, those most similar to *word* first.

    *cutoff* is the minimum similarity, from 0 to 1.
    """
    import difflib  # only an error needs this module

    if len(word) > MAX_COMPARED:
        return []
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_lower_case, n=limit, cutoff=cutoff)
    return [by_lower_case[name] for name in matches]


def suggest(word: str, known: Collection[str], *, otherwise: str = "") -> str:
    """Return ``did you mean …?`` with the *known* names that resemble *word*.

    If no name resembles *word*, return *otherwise* or, if that is empty, a list of all known names.
    """
    if names := nearest(word, known):
        return f"did you mean {join_with_or(repr(name) for name in names)}?"
    return otherwise or (f"there are {', '.join(known)}" if known else "none exists yet")


def join_with_or(names: Iterable[str]) -> str:
    """Format at least one name, as in ``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


_STYLE = re.compile(r"\x1b\[[0-9;:]*m")
"""Style sequences such as colors; they change only how text looks."""

_COMMAND = re.compile(
    r"""(?!\x1b\[[0-9;:]*m)(?:                   # anything but a style
        (?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]         # CSI: moves, clears, or queries
        | (?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])    # OSC, DCS and the like, with their content
          [^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?
        | \x1b[ -/]*[0-~]                        # a sequence of two or more characters
        | [\x00-\x08\x0b-\x1f\x7f-\x9f]          # a control character, or the rest of a sequence
    )""",
    re.VERBOSE,
)

_OVERWRITTEN = re.compile(r"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)
"""The part of a line up to its last carriage return: the text after it overwrites that part."""


def remove_control_sequences(text: str) -> str:
    """Remove all control sequences from *text* except colors, newlines, and tabs.

    If carriage returns overwrite a line, as in a progress bar, the result has only the last version
    of that line. *text* may be a piece of a longer text.
    """
    if "\r" in text:
        text = _OVERWRITTEN.sub(lambda line: "".join(_STYLE.findall(line[0])), text)
    return _COMMAND.sub("", text)


def unstyled(text: str) -> str:
    """Return *text* without control sequences and colors."""
    return _STYLE.sub("", remove_control_sequences(text))


MAX_LINE = 200
"""Default for the maximum length of the text that `one_line` returns, in characters."""


def format_duration(seconds: float) -> str:
    """Format a duration in seconds with two units at most, as in ``2 min 05 s``."""
    whole_seconds = round(max(0.0, seconds))
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    if whole_seconds < 48 * 3600:
        return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"
    return f"{whole_seconds // 86400} d {whole_seconds % 86400 // 3600} h"


def format_size(size: float) -> str:
    """Format a number of bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def describe_error(error: BaseException) -> str:
    """Format an exception with its type and notes, for a log without a traceback."""
    return ". ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def handle_repr(kind: str, facts: Mapping[str, object]) -> str:
    """Format a handle on one line: its ID (the first of *facts*) and the other nonempty facts."""
    identity, *rest = [(name, one_line(repr(value), 60)) for name, value in facts.items() if value]
    return f"{kind}({', '.join([identity[1], *(f'{name}={text}' for name, text in rest)])})"


def handle_bundle(
    kind: str,
    facts: Mapping[str, object],
    counts: Mapping[str, int] | None = None,
    file: Path | None = None,
) -> dict[str, str]:
    """Format a handle for a notebook: as text, and as HTML with *counts* and a link to *file*.

    If *file* is below the current directory, the link is relative: the notebook is probably there.
    """
    import html  # only a notebook needs these
    import urllib.parse

    rows = [(name, html.escape(one_line(str(value)))) for name, value in facts.items() if value]
    if file is not None:
        relative = _relative_path(file)
        target = urllib.parse.quote(relative) if relative else file.as_uri()
        link_text = html.escape(one_line(relative or str(file)))
        rows.append(("report", f'<a href="{target}">{link_text}</a>'))
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{cell}</td></tr>' for name, cell in rows
    )
    table = f"<table><caption>{html.escape(kind)}</caption>{body}</table>"
    if counts:
        header_cells = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in counts)
        count_cells = "".join(f"<td>{count:,}</td>" for count in counts.values())
        table += (
            f"<table><caption>Items</caption><tr>{header_cells}</tr><tr>{count_cells}</tr></table>"
        )
    return {"text/plain": handle_repr(kind, facts), "text/html": table}


def _relative_path(file: Path) -> str:
    """Return the path relative to the current directory; empty if *file* isn't below it."""
    try:
        return file.relative_to(file.cwd()).as_posix()
    except (ValueError, OSError):  # OSError: the current directory was deleted
        return ""


def shorten_middle(text: str, limit: int) -> str:
    """Do as `one_line`, but cut a long text in the middle: its end often has the reason."""
    line = one_line(text, 1 << 16)
    head = limit // 3
    if len(line) <= limit:
        return line
    return f"{line[:head].rstrip()} … {line[head + 3 - limit :].lstrip()}"


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """Return *text* on one line without control sequences, *limit* characters at most."""
    text = text[: 8 * limit]
    if not text.isprintable():
        text = "".join(
            character if character.isprintable() else " " for character in unstyled(text)
        )
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"
