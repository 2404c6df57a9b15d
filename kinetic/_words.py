"""Times, amounts and messages as people read them on one line."""

from __future__ import annotations

import html
from collections.abc import Mapping

from kinetic._terminal import unstyled

__all__ = ["amount", "described", "handle_repr", "handle_table", "one_line", "span"]

LONGEST = 200


def span(seconds: float) -> str:
    """A length of time for people: two units at most."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def amount(size: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def described(error: BaseException) -> str:
    """An exception with its type and notes, for a log that has no traceback of it."""
    return ". ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def handle_repr(kind: str, facts: Mapping[str, object]) -> str:
    """A handle on one line: its id, which comes first, and what else is known of it."""
    identity, *rest = [(name, one_line(repr(one), 60)) for name, one in facts.items() if one]
    return f"{kind}({', '.join([identity[1], *(f'{name}={one}' for name, one in rest)])})"


def handle_table(kind: str, facts: Mapping[str, object]) -> str:
    """The same as a table of HTML, for a notebook."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(one_line(str(one)))}</td></tr>"
        for name, one in facts.items()
        if one
    )
    return f"<table><caption>{html.escape(kind)}</caption>{rows}</table>"


def one_line(text: str, longest: int = LONGEST) -> str:
    """*text* on one line that no terminal takes for a command, *longest* characters at most."""
    text = unstyled(text[: 8 * longest])
    shown = "".join(one if one.isprintable() else " " for one in text)
    words = " ".join(shown.split())
    return words if len(words) <= longest else f"{words[: longest - 1].rstrip()}…"
