"""The overlay of a project's archive: what changed since the archive was made.

It is a zlib stream. Its first line is JSON: each path with its mode and size, or null if the path
is removed. A directory's path ends with ``/`` and has no size. The contents of the files follow in
the same order. It isn't a zip file: many jobs read it, and importing `zipfile` takes longer than
the rest of a small job.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Change(NamedTuple):
    """A file or directory that is new or different; ``content`` is None for a directory."""

    mode: int
    content: bytes | None


def encode(changes: Mapping[str, Change | None]) -> bytes:
    """Return the overlay of *changes*; None represents a removed path."""
    header = {
        path: change and (change.mode, None if change.content is None else len(change.content))
        for path, change in changes.items()
    }
    contents = [change.content for change in changes.values() if change and change.content]
    return zlib.compress(b"\n".join((json.dumps(header).encode(), b"".join(contents))), 1)


def decode(overlay: bytes) -> dict[str, Change | None]:
    """Return what `encode` got, in the same order.

    Raises:
        ValueError: *overlay* is garbled.
    """
    try:
        line, _, contents = zlib.decompress(overlay).partition(b"\n")
        header: dict[str, Any] = json.loads(line)
        changes, start = dict[str, Change | None](), 0
        for path, facts in header.items():
            if facts is None:
                changes[path] = None
                continue
            mode, size = facts
            content = None if size is None else contents[start : start + size]
            changes[path] = Change(mode, content)
            start += size or 0
        return changes
    except (AttributeError, TypeError, ValueError, zlib.error) as exc:
        raise ValueError(f"the overlay of changed files is garbled: {exc!r}") from exc
