"""The entry of each error code, from ``explanations.toml``: what you see, why, and what to do.

``kinetic explain`` prints these entries, and a test compares docs/troubleshooting.md with them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_DOCUMENT = tomllib.loads(Path(__file__).with_name("explanations.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One error code. ``message`` is the error's message, with ``…`` for names and figures."""

    code: str
    title: str
    message: str
    cause: str
    fix: str


GROUPS: Mapping[str, str] = _DOCUMENT["groups"]
"""The titles of the groups of codes, by the prefix that all codes of a group share."""

ENTRIES = tuple(Entry(code, **fields) for code, fields in _DOCUMENT["codes"].items())

BY_CODE = {entry.code: entry for entry in ENTRIES}
"""The entries by code."""
