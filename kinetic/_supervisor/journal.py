"""The journal: a file with the states of all jobs, which the next supervisor restores.

Each line is a JSON object with the state of a job, and replaces the job's earlier lines. The file
is never synced: a power cut may lose the last lines, but it also ends all jobs. The journal never
contains a job's environment or key.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kinetic._replacing import replacing

Line = Mapping[str, Any]
MAX_NEW_LINES = 20_000
"""Rewrite the journal after this many new lines."""

_dumps = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """The file of the journal; `rewrite` opens it.

    ``is_stale`` says that `rewrite` is due: the file is long, or a line couldn't be written.
    """

    def __init__(self, path: Path) -> None:
        self.is_stale = True
        self._path = path
        self._fd = -1
        self._new_lines = 0

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Replace the content with the process ID of this supervisor, and *lines*."""
        content = b"".join(map(_encode, [{"supervisor": os.getpid()}, *lines]))
        with replacing(self._path) as draft:
            draft.touch(0o600)
            draft.write_bytes(content)
        self.close()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._new_lines, self.is_stale = 0, False

    def append(self, line: Line) -> None:
        """Append *line* by a single write, or raise `OSError`; `read` skips an incomplete line."""
        data = _encode(line)
        self._new_lines += 1
        self.is_stale = self.is_stale or self._new_lines > MAX_NEW_LINES
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.is_stale = True
            raise

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)


def _encode(line: Line) -> bytes:
    return b"\n" + _dumps(line).encode()  # the earlier line may be incomplete, so begin a new line


def read(path: Path) -> list[Line]:
    """Return the lines of a journal, in order; an empty list if there is no file."""
    lines: list[Line] = []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return lines
    for raw in content.splitlines():
        try:
            line: Any = json.loads(raw)
        except ValueError:
            continue  # an empty line, or an incomplete one
        if isinstance(line, dict):
            lines.append(line)  # pyright: ignore[reportUnknownArgumentType]
    return lines
