"""The journal: a file of job events, from which the next supervisor restores the table of jobs.

Each line is a JSON object, appended by a single write, so a killed supervisor leaves no partial
line. The file is never synced: a power cut may lose the last lines, but it also ends all jobs.
The journal never contains a job's environment or key.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
SPARE_LINES = 20_000
"""Rewrite the journal above this many lines, if most of them are about forgotten jobs."""

_dumps = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """The file of the journal, open for appending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[bytes] = []
        self._fd = -1
        self._lines = 0

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Replace the content with *lines*; after an error, the old file stays.

        Raises:
            OSError: The file can't be written.
        """
        content = [_dumps(line).encode() + b"\n" for line in lines]
        draft = self._path.with_suffix(".new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _write_whole(fd, b"".join(content))
            os.replace(draft, self._path)
        except OSError:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._lines = fd, len(content)
        self._kept.clear()

    def append(self, line: Line) -> None:
        """Write the kept lines and *line* to the file now.

        Raises:
            OSError: The write failed; the file is unchanged.
        """
        before = len(self._kept)
        self._kept.append(_dumps(line).encode() + b"\n")
        try:
            self.write_kept()
        except OSError:
            del self._kept[before:]
            raise

    def note(self, line: Line) -> None:
        """Keep *line* in memory; the next `append` or `write_kept` writes it."""
        self._kept.append(_dumps(line).encode() + b"\n")

    def write_kept(self) -> None:
        """Write the lines that `note` has kept.

        Raises:
            OSError: The write failed; the lines are kept.
        """
        if self._kept:
            self._append(b"".join(self._kept), len(self._kept))
            self._kept.clear()

    def needs_rewrite(self, job_count: int) -> bool:
        """Return whether the file is long, and has far more lines than *job_count* jobs need."""
        return self._lines > SPARE_LINES and self._lines > 8 * job_count

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _append(self, data: bytes, lines: int) -> None:
        try:
            _write_whole(self._fd, data)
        except OSError as exc:
            exc.filename = str(self._path)
            raise
        self._lines += lines


def _write_whole(fd: int, data: bytes) -> None:
    """Write all of *data* or, after an error, none of it."""
    written = 0
    try:
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError:
        if written:
            os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise


def supervisor_line() -> Line:
    """Return the line that a supervisor writes when it takes the journal over."""
    return {"was": "supervisor", "pid": os.getpid(), "at": time.time()}


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
            continue  # a power cut left a partial line
        if isinstance(line, dict):
            lines.append(line)  # pyright: ignore[reportUnknownArgumentType]
    return lines
