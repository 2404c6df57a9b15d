"""Where the stored inputs of a batch lie: some 40 bytes an item, whatever the inputs are."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread

from kinetic._runner import frames, pickles, wire
from kinetic.aio._results import INLINE_BYTES, STACK_GLOBAL
from kinetic.aio.ports import ObjectInfo, Store
from kinetic.errors import NotFound, SubmissionError, WireError

__all__ = ["Stock"]

CACHED = 4
"""Chunks that are held whole, for inputs that are asked for in order."""

DIGEST_BYTES = 32


@dataclass(slots=True)
class _Stored:
    """A slot; ``offsets`` is None until its footer was needed."""

    slot: int
    name: str
    first: int
    count: int
    offsets: array[int] | None = None
    digests: bytes = b""
    data: Mapping[int, tuple[wire.DataRef, ...]] = field(
        default_factory=dict[int, "tuple[wire.DataRef, ...]"]
    )
    failed: Mapping[int, Exception] = field(default_factory=dict[int, Exception])


class Stock:
    """The slots of the inputs, in order: chunks, and the end when it was reached."""

    def __init__(self, store: Store, scope: str) -> None:
        self.total: int | None = None
        self.slots = 0
        self._store = store
        self._scope = scope
        self._chunks: list[_Stored] = []
        self._firsts: list[int] = []
        self._bodies: dict[int, frames.Frames] = {}

    @property
    def count(self) -> int:
        """How many items are stored."""
        return self._chunks[-1].first + self._chunks[-1].count if self._chunks else 0

    async def read(self) -> None:
        """Learn which slots there are by now."""
        self.learn(await self._store.list(f"{self._scope}inputs/"))

    def learn(self, listed: Iterable[ObjectInfo]) -> None:
        """Take in a listing of the slots; what is known of them already is not read again."""
        for one in listed:
            slot = int(one.name.rpartition("/")[2])
            if slot != self.slots:
                continue
            if "total" in one.metadata:
                self.total = int(one.metadata["total"])
                self.slots += 1
            else:
                first, count = int(one.metadata["first"]), int(one.metadata["count"])
                self._add(_Stored(slot, one.name, first, count))

    def add(
        self,
        first: int,
        sizes: Iterable[int],
        digests: Iterable[str],
        data: Mapping[int, tuple[wire.DataRef, ...]],
        failed: Mapping[int, Exception],
    ) -> None:
        """Take in the slot that was won just now; *data* and *failed* by place in the chunk."""
        stored = _Stored(self.slots, wire.input_key(self._scope, self.slots), first, 0)
        _describe(stored, sizes, digests, data, failed)
        self._add(stored)

    def _add(self, stored: _Stored) -> None:
        if stored.first != self.count:
            raise WireError(
                f"{stored.name} does not follow the slot before it; its batch cannot go on: "
                "submit it again"
            )
        self._chunks.append(stored)
        self._firsts.append(stored.first)
        self.slots += 1

    async def input(self, index: int) -> tuple[wire.Input, tuple[wire.DataRef, ...]]:
        """Where the runner finds an item's arguments, and the `Data` in them.

        Raises:
            SubmissionError: It could not be pickled when it was stored.
            NotFound: It is not there.
        """
        stored = self._chunk_of(index)
        if stored.offsets is None:
            await self._read_footer(stored)
        place = self.place(index)
        assert place is not None
        return place

    def place(self, index: int) -> tuple[wire.Input, tuple[wire.DataRef, ...]] | None:
        """What `input` says, if that is known without asking the store.

        Raises:
            SubmissionError: As `input`.
            NotFound: As `input`.
        """
        stored = self._chunk_of(index)
        offsets, at = stored.offsets, index - stored.first
        if offsets is None:
            return None
        if stored.failed and (failed := stored.failed.get(at)) is not None:
            raise failed
        digest = stored.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES].hex()
        start = offsets[at - 1] if at else 0
        return wire.Input(stored.name, start, offsets[at], digest), stored.data.get(at, ())

    async def value(self, index: int) -> Any:
        """The input itself, rebuilt: what the function is called with.

        Raises:
            NotFound: It is not there.
            SubmissionError: It could not be pickled when it was stored.
            Exception: What rebuilding it raises.
        """
        stored = self._chunk_of(index)
        if stored.offsets is None:
            await self._read_footer(stored)
        at = index - stored.first
        if (failed := stored.failed.get(at)) is not None:
            raise failed
        body = await self._body(stored)
        part = body.frames[at]
        if len(part) <= INLINE_BYTES and STACK_GLOBAL not in bytes(part):
            args, kwargs = pickles.load(part)  # names no class, so it imports nothing
        else:
            args, kwargs = await anyio.to_thread.run_sync(pickles.load, part)
        match body.fields["how"][at]:
            case "s":
                return args[0]
            case "a":
                return args
            case _:
                return kwargs

    def _chunk_of(self, index: int) -> _Stored:
        at = bisect.bisect_right(self._firsts, index) - 1
        if at >= 0:
            stored = self._chunks[at]
            if index < stored.first + stored.count:
                return stored
        raise NotFound(f"no input {index} is stored under {self._scope}")

    async def _read_footer(self, stored: _Stored) -> None:
        body = await self._body(stored)
        fields = body.fields
        refs = {
            int(place): tuple(wire.DataRef(**one) for one in of)
            for place, of in fields.get("data", {}).items()
        }
        failed: dict[int, Exception] = {
            int(place): SubmissionError(text) for place, text in fields.get("failed", {}).items()
        }
        sizes = (len(part) for part in body.frames)
        _describe(stored, sizes, fields["digests"], refs, failed)

    async def _body(self, stored: _Stored) -> frames.Frames:
        held = self._bodies.get(stored.slot)
        if held is None:
            content = await self._store.get(stored.name)
            held = frames.unpack(content.body)
            while len(self._bodies) >= CACHED:
                self._bodies.pop(next(iter(self._bodies)))
            self._bodies[stored.slot] = held
        return held


def _describe(
    stored: _Stored,
    sizes: Iterable[int],
    digests: Iterable[str],
    data: Mapping[int, tuple[wire.DataRef, ...]],
    failed: Mapping[int, Exception],
) -> None:
    ends, offset = array("Q"), 0
    for size in sizes:
        offset += size
        ends.append(offset)
    stored.offsets, stored.count = ends, len(ends)
    stored.digests = b"".join(bytes.fromhex(digest) for digest in digests)
    stored.data, stored.failed = data, failed
