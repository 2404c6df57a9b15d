"""The names nearest to one that nobody knows, as an error message tells them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["nearest", "suggest"]

LONGEST = 80
"""A longer word resembles no name of ours, and comparing costs its length squared."""


def nearest(word: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """Return at most *limit* of the *known* names, the one most like *word* first."""
    import difflib  # only an error needs it

    if len(word) > LONGEST:
        return []
    by_case = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_case, n=limit, cutoff=0.5)
    return [by_case[name] for name in found]


def suggest(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return ``did you mean …?``, or *otherwise* when nothing resembles *word*."""
    names = [repr(name) for name in nearest(word, known)]
    if not names:
        return otherwise
    *first, last = names
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"
