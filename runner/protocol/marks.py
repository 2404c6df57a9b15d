"""The lines in a pod's log between which stands what one item has written.

A worker runs one item after another, and all write to one log. The lines are signed, so what an
item writes can't pass for the output of another.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from . import signing

Event: TypeAlias = Literal["begins", "has ended"]

MAC_LENGTH = 32
"""Characters of a signature in a log."""

_MARK = re.compile(r"kinetic: attempt (\d+) of (\S+)-(\d+) (begins|has ended) \[[0-9a-f]{32}\]")


def mark(key: bytes, scope: str, job_id: str, attempt: int, event: Event) -> str:
    """Return the line which says that an attempt begins, or has ended."""
    text = f"attempt {attempt} of {job_id} {event}"
    return f"kinetic: {text} [{signing.sign(key, scope, 'log', text.encode())[:MAC_LENGTH]}]"


class Mark(NamedTuple):
    """What a mark says; only a comparison with `mark` shows that it isn't forged."""

    group_id: str
    item: int
    attempt: int
    has_ended: bool


def parse_mark(line: str) -> Mark | None:
    """Parse *line*; return None if it isn't a mark."""
    if not line.startswith("kinetic: attempt ") or (match := _MARK.fullmatch(line)) is None:
        return None
    attempt, group_id, index, event = match.groups()
    return Mark(group_id, int(index), int(attempt), event == "has ended")
