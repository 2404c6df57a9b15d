"""The log of one container, line by line, over connections that break.

The server puts a timestamp before each line. After a break it is asked for what
came since a second before the last one, and what is known of that is left out:
lines may have the same time, and come out of order.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from kinetic.aio.clusters._api import Api
from kinetic.aio.clusters._kube_reflect import Rhythm
from kinetic.errors import BackendError, NotFound, Refused, Throttled, Unavailable

__all__ = ["Piece", "Pieces", "Source", "container_log"]

LONGEST_LINE = 1 << 20
IDLE_S = 300.0
"""A program may be silent for ever; a dead connection is noticed after so many seconds."""

TRIES = 5
"""Connections in a row that bring nothing, before a log that has ended is given up."""

_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00) ?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A line, or a part of one that is too long to be held; ``first`` and ``last`` of its line."""

    content: bytes
    first: bool
    last: bool


class Pieces:
    """Cuts a stream into lines: the same stream into the same pieces, however it comes.

    No more is held than the longest piece, and what was fed last.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._first = True

    def feed(self, content: bytes) -> Iterator[Piece]:
        """What *content* completes."""
        *lines, rest = content.split(b"\n")
        for line in lines:
            self._rest += line
            yield from self._parts()
            yield self._taken(len(self._rest), last=True)
        self._rest += rest
        yield from self._parts()

    def end(self) -> Iterator[Piece]:
        """What is left when nothing more comes: the last line needs no newline."""
        if self._rest:
            yield self._taken(len(self._rest), last=True)

    def _parts(self) -> Iterator[Piece]:
        while len(self._rest) > self._longest:
            cut = self._longest
            while cut > self._longest - 4 and self._rest[cut] & 0xC0 == 0x80:
                cut -= 1  # not within a character
            yield self._taken(cut, last=False)

    def _taken(self, count: int, *, last: bool) -> Piece:
        piece = Piece(bytes(self._rest[:count]), self._first, last)
        del self._rest[:count]
        self._first = last
        return piece


class _Memory:
    """Which lines of the last two seconds were told already.

    Of a log that was *cut* to its last lines, those before them are not told either.
    Of a line that comes in pieces it is known how many of them were told when the
    connection broke: the same will come again.
    """

    def __init__(self, *, cut: bool) -> None:
        self._told: dict[str, Counter[int]] = {}
        self._again: dict[str, Counter[int]] = {}
        self._last = ""
        self._cut = cut
        self._first: tuple[str, int] | None = None
        self._skipping = False
        self._line: tuple[str, int] | None = None  # whose pieces come
        self._place = 0  # of the next one
        self._known: float = 0  # how many of them were told before
        self._open: tuple[tuple[str, int] | None, int] = None, 0  # of the line last told from

    @property
    def since(self) -> str:
        """The time to go on from; empty if there was no line."""
        return _before(self._last) if self._last else ""

    def reconnect(self) -> None:
        """What was told will come again."""
        self._again = {second: Counter(lines) for second, lines in self._told.items()}
        self._skipping = self._first is not None and self._first[0] in self._told

    def text(self, piece: Piece) -> bytes | None:
        """What the program wrote; None when it was told before."""
        content: bytes | None = piece.content
        if piece.first:
            self._line = None
            content = self._begun(piece.content)
            line, told = self._open
            before = told if self._line == line else math.inf
            self._place, self._known = 0, 0 if content is not None else before
        self._place += 1
        if self._place <= self._known:
            return None
        self._open = (None, 0) if piece.last else (self._line, self._place)
        return content

    def _begun(self, line: bytes) -> bytes | None:
        """The same, of a whole line or the first piece of one."""
        found = _STAMP.match(line)
        if found is None:
            return line
        second, mark = found[1].decode(), hash(line)
        self._line = second, mark
        if self._skipping and (second, mark) != self._first:
            return None
        self._skipping = False
        again = self._again.get(second)
        if again is not None and again[mark] > 0:
            again[mark] -= 1
            return None
        if self._cut and not self._told:
            self._first = second, mark
        if second > self._last:
            self._last = second
            oldest = _before(second)[:19]
            self._told = {one: lines for one, lines in self._told.items() if one >= oldest}
        self._told.setdefault(second, Counter())[mark] += 1
        return line[found.end() :]


def _before(second: str) -> str:
    moment = datetime.datetime.fromisoformat(second) - datetime.timedelta(seconds=1)
    return f"{moment.isoformat()}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One container's log: where it is, and whether the container has ended by now."""

    api: Api
    path: str
    container: str
    ended: Callable[[], bool]
    rhythm: Rhythm


async def container_log(
    source: Source, *, follow: bool, tail: int | None = None
) -> AsyncGenerator[str]:
    """The lines so far; with *follow*, until the container has ended and all is read.

    What is no UTF-8 is replaced; a line of more than 1 MiB comes in pieces.
    Nothing is told twice and nothing is left out when a connection breaks.

    Raises:
        NotFound: The pod, or its log, is gone.
        Unavailable: The log cannot be read, and the container has ended.
    """
    begun, barren = asyncio.get_running_loop().time(), 0
    memory, rhythm = _Memory(cut=tail is not None), source.rhythm
    while True:
        over = source.ended()  # asked before reading: what it wrote before its end is there then
        query = _query(source, memory, begun, tail, follow=follow and not over)
        whole, told = False, False
        failure: BackendError | None = None
        memory.reconnect()
        try:
            pieces = _read(source.api.stream(source.path, query=query, idle=IDLE_S))
            async with aclosing(pieces) as stream:
                async for piece in stream:
                    if (text := memory.text(piece)) is not None:
                        told = True
                        yield text.decode(errors="replace")
            whole = True
        except (Unavailable, Throttled) as exc:
            failure = exc
        except Refused as exc:  # "is waiting to start", or the node has removed it
            if over:
                raise NotFound(f"the log is gone: {exc}") from exc
            failure = exc
        if whole and (over or not follow):
            return
        barren = 0 if told else barren + 1
        if failure is not None and barren >= TRIES and (over or not follow):
            raise failure
        pause = min(rhythm.longest_pause_s, rhythm.first_pause_s * 2 ** min(barren, 10))
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))


def _query(
    source: Source, memory: _Memory, begun: float, tail: int | None, *, follow: bool
) -> dict[str, str]:
    query = {"container": source.container, "timestamps": "true"}
    if follow:
        query["follow"] = "true"
    if since := memory.since:
        query["sinceTime"] = since
    elif tail is not None:
        waited = asyncio.get_running_loop().time() - begun
        if tail == 0 and waited > 1:  # what has come since then was not told yet
            query["sinceSeconds"] = str(int(waited) + 1)
        else:
            query["tailLines"] = str(tail)
    return query


async def _read(contents: AsyncGenerator[bytes]) -> AsyncGenerator[Piece]:
    pieces = Pieces()
    async with aclosing(contents) as stream:
        async for content in stream:
            for piece in pieces.feed(content):
                yield piece
    for piece in pieces.end():
        yield piece
