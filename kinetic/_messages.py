"""Format times, amounts, and messages for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LONGEST_NAME = 80
"""Maximum length of a word to compare: the cost grows with the square of the length."""


def nearest(word: str, known: Iterable[str], *, limit: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return at most *limit* of the *known* names, those most similar to *word* first.

    *cutoff* is the minimum similarity, from 0 to 1.
    """
    import difflib  # only an error needs this module

    if len(word) > LONGEST_NAME:
        return []
    by_case = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_case, n=limit, cutoff=cutoff)
    return [by_case[name] for name in found]


def suggest(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return ``did you mean …?``, or *otherwise* when nothing resembles *word*."""
    names = [repr(name) for name in nearest(word, known)]
    if not names:
        return otherwise
    *first, last = names
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"


_STYLE = re.compile(r"\x1b\[[0-9;:]*m")
"""Style sequences such as colors; they change only how text looks."""

_COMMAND = re.compile(
    r"""(?!\x1b\[[0-9;:]*m)(?:                   # anything but a style
        (?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]         # CSI: moves, clears, asks for an answer
        | (?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])    # OSC, DCS and the like, with all they say
          [^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?
        | \x1b[ -/]*[0-~]                        # two characters, or a few
        | [\x00-\x08\x0b-\x1f\x7f-\x9f]          # a control character, or the rest of a sequence
    )""",
    re.VERBOSE,
)

_OVERWRITTEN = re.compile(r"^[^\n]*\r(?=[^\r\n])", re.MULTILINE)


def shown(text: str) -> str:
    """Return *text* for a terminal: colors stay, all other control sequences go.

    A line that carriage returns overwrite, as progress bars do, keeps its last state. Newlines and
    tabs stay. Each piece of a text can be passed separately.
    """
    if "\r" in text:
        text = _OVERWRITTEN.sub(lambda line: "".join(_STYLE.findall(line[0])), text)
    return _COMMAND.sub("", text)


def unstyled(text: str) -> str:
    """Return *text* without control sequences and colors."""
    return _STYLE.sub("", shown(text))


LONGEST = 200


def span(seconds: float) -> str:
    """Format a duration, with two units at most."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def amount(size: float) -> str:
    """Format a number of bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def described(error: BaseException) -> str:
    """Format an exception with its type and notes, for a log without a traceback."""
    return ". ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def handle_repr(kind: str, facts: Mapping[str, object]) -> str:
    """Format a handle on one line: its ID, then the other known *facts*."""
    identity, *rest = [(name, one_line(repr(one), 60)) for name, one in facts.items() if one]
    return f"{kind}({', '.join([identity[1], *(f'{name}={one}' for name, one in rest)])})"


def handle_bundle(
    kind: str,
    facts: Mapping[str, object],
    counts: Mapping[str, int] | None = None,
    file: Path | None = None,
) -> dict[str, str]:
    """Format a handle for a notebook: as text, and as HTML with *counts* and a link to *file*.

    The link is relative for a file below the current directory, where the notebook probably is.
    """
    import html  # only a notebook needs these
    import urllib.parse

    rows = [(name, html.escape(one_line(str(one)))) for name, one in facts.items() if one]
    if file is not None:
        near = _from_here(file)
        target = urllib.parse.quote(near) if near else file.as_uri()
        words = html.escape(one_line(near or str(file)))
        rows.append(("report", f'<a href="{target}">{words}</a>'))
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{cell}</td></tr>' for name, cell in rows
    )
    table = f"<table><caption>{html.escape(kind)}</caption>{body}</table>"
    if counts:
        heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in counts)
        cells = "".join(f"<td>{count:,}</td>" for count in counts.values())
        table += f"<table><caption>Items</caption><tr>{heads}</tr><tr>{cells}</tr></table>"
    return {"text/plain": handle_repr(kind, facts), "text/html": table}


def _from_here(file: Path) -> str:
    """Return the path from the current directory; empty if it is elsewhere."""
    try:
        return file.relative_to(file.cwd()).as_posix()
    except (ValueError, OSError):  # the directory may be deleted
        return ""


def both_ends(text: str, longest: int) -> str:
    """Format as `one_line`, but cut the middle of a long text: the end often has the reason."""
    words = one_line(text, 1 << 16)
    head = longest // 3
    if len(words) <= longest:
        return words
    return f"{words[:head].rstrip()} … {words[head + 3 - longest :].lstrip()}"


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return *text* on one line without control sequences, *longest* characters at most."""
    text = text[: 8 * longest]
    if not text.isprintable():
        text = "".join(one if one.isprintable() else " " for one in unstyled(text))
    words = " ".join(text.split())
    return words if len(words) <= longest else f"{words[: longest - 1].rstrip()}…"
