"""The lines in a pod's log between which stands what one item has written.

A worker runs one item after another, and all write to one log. The lines are signed, so what an
item writes can't pass for the output of another.
"""

from __future__ import annotations

from typing import Literal

from . import signing

Event = Literal["begins", "has ended"]

MAC_LENGTH = 32
"""Characters of a signature in a log."""


def mark(key: bytes, scope: str, job_id: str, attempt: int, event: str) -> str:
    """Return the line which says that an attempt begins, or has ended."""
    text = f"attempt {attempt} of {job_id} {event}"
    return f"kinetic: {text} [{signing.sign(key, scope, 'log', text.encode())[:MAC_LENGTH]}]"
