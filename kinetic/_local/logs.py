"""Reading a job's log by bytes: from the end, in pieces, in lines that may be endless."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["LONGEST_LINE", "Lines", "tail_offset"]

LONGEST_LINE = 1 << 20
"""A line of more bytes is told in pieces of at most this size."""

BLOCK = 1 << 16


class Lines:
    """Cuts bytes into lines, as they come; what is no UTF-8 is replaced."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that *data* completes, without their newlines."""
        searched = len(self._rest)
        self._rest += data
        start = 0
        while (end := self._rest.find(b"\n", max(start, searched))) >= 0:
            yield from _pieces(bytes(self._rest[start:end]))
            start = end + 1
        del self._rest[:start]
        while len(self._rest) > LONGEST_LINE:  # the byte after a piece tells whether it is whole
            cut = _boundary(self._rest, LONGEST_LINE)
            yield self._rest[:cut].decode(errors="replace")
            del self._rest[:cut]

    def rest(self) -> Iterator[str]:
        """The last line, if nothing ended it."""
        if self._rest:
            yield self._rest.decode(errors="replace")
            self._rest.clear()


def _pieces(line: bytes) -> Iterator[str]:
    while len(line) > LONGEST_LINE:
        cut = _boundary(line, LONGEST_LINE)
        yield line[:cut].decode(errors="replace")
        line = line[cut:]
    yield line.decode(errors="replace")


def _boundary(data: bytes | bytearray, cut: int) -> int:
    """The last place at or before *cut* that is not within a character."""
    for back in range(4):
        if data[cut - back] & 0xC0 != 0x80:
            return cut - back
    return cut


def tail_offset(fd: int, count: int) -> int:
    """Where the last *count* lines of a file begin."""
    end = position = os.fstat(fd).st_size
    if count <= 0:
        return end
    newlines = -1 if end and os.pread(fd, 1, end - 1) == b"\n" else 0
    while position > 0:
        start = max(0, position - BLOCK)
        block = os.pread(fd, position - start, start)
        found = block.count(b"\n")
        if newlines + found >= count:
            at = len(block)
            while newlines < count:
                at = block.rfind(b"\n", 0, at)
                newlines += 1
            return start + at + 1
        newlines, position = newlines + found, start
    return 0
