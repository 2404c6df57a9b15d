"""A file that is written whole or not at all: beside its place first, then in it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A name beside *path*: the file that the block makes there takes its place at the end.

    Whoever reads *path* finds the old file or the new one. If the block fails, nothing is left.
    """
    beside = path.with_name(f".{path.name[:100]}.{os.urandom(4).hex()}.tmp")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
