"""What a container wrote, line by line with its time, as kubelet and containerd keep it."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

LONGEST = 16 * 1024
"""Bytes of a line that are kept in one piece."""

PIECE = 256 * 1024


def now() -> str:
    """The time with nanoseconds, always nine of them."""
    moment = datetime.datetime.now(datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}000Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What part of a log somebody asks for, and how."""

    follow: bool = False
    tail: int | None = None
    timestamps: bool = False
    since: datetime.datetime | None = None

    @classmethod
    def of(cls, query: dict[str, str]) -> Self:
        """From the query of ``/containerLogs``."""
        since = None
        if "sinceTime" in query:
            since = datetime.datetime.fromisoformat(query["sinceTime"])
        elif "sinceSeconds" in query:
            ago = datetime.timedelta(seconds=int(query["sinceSeconds"]))
            since = datetime.datetime.now(datetime.UTC) - ago
        return cls(
            follow=query.get("follow") in ("true", "1"),
            tail=int(query["tailLines"]) if "tailLines" in query else None,
            timestamps=query.get("timestamps") in ("true", "1"),
            since=since,
        )


class Log:
    """The log of one run of a container, in a file.

    Like containerd it keeps a line back until its end is there, or 16 KiB of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._rest = b""
        self._grown = asyncio.Event()
        self.closed = False

    def feed(self, data: bytes) -> None:
        """Keep what was written just now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        entries = [entry for line in lines for entry in self._cut(line, b"F")]
        while len(self._rest) > LONGEST:
            entries += self._cut(self._rest[:LONGEST], b"P")
            self._rest = self._rest[LONGEST:]
        self._write(entries)

    def close(self) -> None:
        """Nothing more comes. Twice is once."""
        if not self.closed:
            self._write(self._cut(self._rest, b"P") if self._rest else [])
            self.closed = True
            self._file.close()
            self._grown.set()

    def _cut(self, line: bytes, tag: bytes) -> list[bytes]:
        pieces = [line[at : at + LONGEST] for at in range(0, len(line), LONGEST)] or [b""]
        stamp = now().encode()
        tags = [b"P"] * (len(pieces) - 1) + [tag]
        return [
            b" ".join((stamp, b"stdout", one, piece)) + b"\n"
            for one, piece in zip(tags, pieces, strict=True)
        ]

    def _write(self, entries: list[bytes]) -> None:
        if entries:
            self._file.write(b"".join(entries))
            self._grown.set()
            self._grown = asyncio.Event()

    async def read(self, wish: Wish) -> AsyncIterator[bytes]:
        """The bytes that *wish* asks for; with ``follow``, until the log is closed."""
        whole = True  # the last entry ended its line
        async for entry in self._entries(wish):
            stamp, _, tag, text = entry.split(b" ", 3)
            if wish.since and datetime.datetime.fromisoformat(_micro(stamp)) < wish.since:
                continue
            out = (stamp + b" " if wish.timestamps and whole else b"") + text
            whole = tag == b"F"
            yield out + b"\n" if whole else out

    async def _entries(self, wish: Wish) -> AsyncIterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(0 if wish.tail is None else self._start_of_tail(wish.tail))
            rest = b""
            while True:
                closed, grown = self.closed, self._grown
                while data := file.read(PIECE):
                    *entries, rest = (rest + data).split(b"\n")
                    for entry in entries:
                        yield entry
                if closed or not wish.follow:
                    return
                await grown.wait()

    def _start_of_tail(self, count: int) -> int:
        data = self._path.read_bytes()
        at = len(data)
        for _ in range(count + 1):
            at = data.rfind(b"\n", 0, at)
            if at < 0:
                return 0
        return at + 1

    def last(self, lines: int = 80, size: int = 2048) -> str:
        """The end of it, as kubelet makes a termination message of it."""
        entries = self._path.read_bytes().splitlines()[-lines:]
        texts = (entry.split(b" ", 3) for entry in entries)
        whole = b"".join(text + (b"\n" if tag == b"F" else b"") for _, _, tag, text in texts)
        return whole[-size:].decode(errors="replace")


def _micro(stamp: bytes) -> str:
    """Python reads six digits."""
    return stamp[:26].decode() + "+00:00"
