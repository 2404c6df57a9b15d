"""The part of a page that a program writes: a test compares it, or writes it anew if asked to."""

from __future__ import annotations

import os
from pathlib import Path

WRITES = os.environ.get("KINETIC_GOLDEN") == "write"


def check(page: Path, begin: str, end: str, text: str) -> None:
    """Check that *page* has *text* between two lines; ``KINETIC_GOLDEN=write`` puts it there."""
    before, _, rest = page.read_text().partition(begin)
    there, _, after = rest.partition(end)
    if WRITES:
        page.write_text(f"{before}{begin}\n{text}{end}{after}")
    else:
        assert there.strip() == text.strip(), "KINETIC_GOLDEN=write writes it anew"
