"""Compare or rewrite the generated part of a page."""

from __future__ import annotations

import os
from pathlib import Path

WRITES = os.environ.get("KINETIC_GOLDEN") == "write"


def check(page: Path, begin: str, end: str, text: str) -> None:
    """Check that *page* has *text* between two lines; ``KINETIC_GOLDEN=write`` puts it there."""
    before, _, rest = page.read_text().partition(begin)
    current, _, after = rest.partition(end)
    if WRITES:
        page.write_text(f"{before}{begin}\n{text}{end}{after}")
    else:
        assert current.strip() == text.strip(), "run the test with KINETIC_GOLDEN=write"
