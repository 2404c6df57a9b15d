"""Where the stored inputs of a batch lie: some 40 bytes an item, whatever the inputs are."""

from __future__ import annotations

import bisect
import hashlib
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
    """A chunk by its signed slot; ``offsets`` is None until its footer was needed."""

    slot: int
    name: str
    first: int
    count: int
    footer: str
    size: int
    offsets: array[int] | None = None
    digests: bytes = b""
    data: Mapping[int, tuple[wire.DataRef, ...]] = field(
        default_factory=dict[int, "tuple[wire.DataRef, ...]"]
    )
    failed: Mapping[int, Exception] = field(default_factory=dict[int, Exception])


class Stock:
    """The slots of the inputs, in order: chunks, and the end when it was reached.

    Each is signed by who submitted it, and nothing of one that is not is used:
    its metadata tell the digest of its footer, and that the digest of each input.
    """

    def __init__(self, store: Store, scope: str, key: bytes) -> None:
        self.total: int | None = None
        self.slots = 0
        self._store = store
        self._scope = scope
        self._key = key
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
        """Take in a listing of the slots; what is known of them already is not read again.

        Raises:
            WireError: One was not signed for its place by who submits the batch.
        """
        for one in listed:
            if one.name != wire.input_key(self._scope, self.slots):
                continue
            try:
                slot = wire.Slot.verified(one.metadata, self._key, self._scope, one.name)
            except ValueError as exc:
                raise self._forged(one.name) from exc
            if slot.total is not None:
                self.total = slot.total
                self.slots += 1
            else:
                self._add(
                    _Stored(self.slots, one.name, slot.first, slot.count, slot.footer, slot.size)
                )

    def add(
        self,
        slot: wire.Slot,
        sizes: Iterable[int],
        digests: Iterable[str],
        data: Mapping[int, tuple[wire.DataRef, ...]],
        failed: Mapping[int, Exception],
    ) -> None:
        """Take in the slot that was won just now; *data* and *failed* by place in the chunk."""
        name = wire.input_key(self._scope, self.slots)
        stored = _Stored(self.slots, name, slot.first, slot.count, slot.footer, slot.size)
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
            WireError: It is not what its submitter signed.
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
            WireError: It is not what its submitter signed; nothing of it was rebuilt.
            Exception: What rebuilding it raises.
        """
        stored = self._chunk_of(index)
        if stored.offsets is None:
            await self._read_footer(stored)
        at = index - stored.first
        if (failed := stored.failed.get(at)) is not None:
            raise failed
        body = await self._body(stored)
        part, digest = body.frames[at], stored.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        if len(part) > INLINE_BYTES:
            same = await anyio.to_thread.run_sync(_has_digest, part, digest)
        else:
            same = _has_digest(part, digest)
        if not same:
            raise self._forged(f"input {index} in {stored.name}")
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
            content = await self._store.get(stored.name, limit=stored.size)
            try:
                footer = frames.footer_of(content.body)
                if not _has_digest(footer, bytes.fromhex(stored.footer)):
                    raise self._forged(stored.name)
                held = frames.unpack(content.body)
            except ValueError as exc:
                raise self._forged(stored.name) from exc
            while len(self._bodies) >= CACHED:
                self._bodies.pop(next(iter(self._bodies)))
            self._bodies[stored.slot] = held
        return held

    def _forged(self, what: str) -> WireError:
        batch = self._scope.strip("/").rpartition("/")[2]
        return WireError(
            f"{what} is not what the submitter of {batch} signed: somebody else wrote it, or it "
            f"is damaged; nothing of it was used. See who can write to {self._store.url}, and "
            f"submit the batch again; kinetic.cleanup({batch!r}) takes this one away"
        )


def _has_digest(part: bytes | memoryview, digest: bytes) -> bool:
    return hashlib.sha256(part).digest() == digest


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
