"""Read the log files of this machine: that of a job, or the part that an item of a worker wrote."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.aio.ports import LogPieces
from kinetic.errors import BackendError, NotFound

TAIL_BYTES = 2 << 20
"""How many bytes before the end of a log `tail_offset` looks for lines."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
"""Pauses between two reads of a log that doesn't grow."""

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LogPart:
    """The bytes of a log file from ``begin`` to ``end`` (None: its end).

    ``outcome`` is an object that exists before another item writes to the log; empty if none does.
    """

    path: Path
    begin: int = 0
    end: int | None = None
    outcome: str = ""
    objects: DirectoryObjects | None = None


async def read_lines(
    part: LogPart, tail: int | None, ended: asyncio.Task[dict[str, Any]] | None
) -> AsyncGenerator[str]:
    """Yield the lines of *part*, or its last *tail* lines.

    Args:
        part: What to read.
        tail: How many lines; None: all.
        ended: Is done when the job or item has ended, with the supervisor's answer. Follow the log
            until then. None: don't follow.

    Raises:
        NotFound: The item has just ended, so its outcome says where its output is.
        BackendError: The file can't be read.
    """
    fd, position = -1, None if tail is not None else part.begin
    pause = FIRST_PAUSE_S
    pieces = LogPieces()
    try:
        while True:
            try:
                if fd < 0:  # the job has no log before it starts
                    with contextlib.suppress(FileNotFoundError):
                        fd = os.open(part.path, os.O_RDONLY)
                end, is_last = await _find_end(part, fd, ended)
                if position is None:
                    position = tail_offset(fd, tail or 0, part.begin, end) if fd >= 0 else None
                start = part.begin if position is None else position
                data = os.pread(fd, min(READ_BYTES, end - start), start) if end > start else b""
            except NotFound:  # it is an OSError, too
                raise
            except OSError as exc:
                raise BackendError(
                    f"can't read the log of {part.path.stem} ({exc.strerror}); look at {part.path}"
                ) from exc
            if data:
                position = start + len(data)
                for piece in pieces.feed(data):
                    yield piece.text
                pause = FIRST_PAUSE_S
                await asyncio.sleep(0)
                continue
            if is_last or ended is None:
                break  # all that was written has been read
            await asyncio.wait({ended}, timeout=pause)
            pause = min(LONGEST_PAUSE_S, pause * 1.5)
        for piece in pieces.feed(last=True):
            yield piece.text
    finally:
        if fd >= 0:
            os.close(fd)


async def _find_end(
    part: LogPart, fd: int, ended: asyncio.Task[dict[str, Any]] | None
) -> tuple[int, bool]:
    """Return where the bytes of *part* end now, and whether no more come."""
    if part.end is not None:
        return part.end, True
    has_ended = ended is not None and ended.done()
    size = os.fstat(fd).st_size if fd >= 0 else 0
    # A worker stores the outcome of an item before it begins the next. Without one, all of these
    # bytes belong to this item.
    has_outcome = part.objects is not None and part.objects.exists(part.outcome)
    if not part.outcome or not (has_ended or has_outcome):
        return size, has_ended
    answer = await ended if ended is not None else {}
    if "end" not in answer:
        raise NotFound("the item has just ended; its outcome says where its output is")
    return size if answer["end"] is None else answer["end"], True


def tail_offset(fd: int, count: int, begin: int, end: int) -> int:
    """Find where the last *count* lines begin in the bytes of a file from *begin* to *end*.

    This looks for lines in the last `TAIL_BYTES` only.
    """
    if count <= 0:
        return end
    start = max(begin, end - TAIL_BYTES)
    content = os.pread(fd, max(0, end - start), start)
    newline = len(content) - content.endswith(b"\n")  # no line begins after the last newline
    for _ in range(count):
        newline = content.rfind(b"\n", 0, newline)
        if newline < 0:
            return start
    return start + newline + 1
