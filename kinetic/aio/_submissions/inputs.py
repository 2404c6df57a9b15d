"""Find the stored inputs of a batch, and pack them into chunks."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio.to_thread

from kinetic._runner.protocol import frames, notes, wire
from kinetic._tasks import for_each
from kinetic.aio._preparing.inputs import EncodedInput
from kinetic.aio._submissions.results import unpickled
from kinetic.aio.ports import ObjectInfo, Store
from kinetic.errors import NotFound, SubmissionError, WireError

CACHED_CHUNKS = 4
"""Maximum number of chunks held in memory, for inputs that are read in order."""

DIGEST_BYTES = 32

FOOTER_BYTES = 128 * 1024
"""How many bytes to read first from the end of a large chunk; most footers are shorter."""

MAX_CONCURRENT_READS = 8
"""Maximum number of chunks whose notes are read at once."""


@dataclass(slots=True)
class _StoredChunk:
    """A chunk as its signed slot describes it.

    ``offsets`` has the end of each input's pickle; it's None until the footer was read.
    """

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

    def digest(self, index: int) -> str:
        """Return the digest of an input's pickle."""
        start = (index - self.first) * DIGEST_BYTES
        return self.digests[start : start + DIGEST_BYTES].hex()


class InputIndex:
    """The stored inputs of a batch, in numbered objects, the *slots*.

    Each slot has a chunk of inputs; the last slot marks their end. The submitter signs each slot,
    and an unsigned slot is an error. The signed metadata contains the digest of the chunk's footer,
    and the footer contains the digest of each input.
    """

    def __init__(
        self, store: Store, scope: str, key: bytes, *, expected: int | None = None
    ) -> None:
        self.expected = expected
        """The number of inputs by the manifest, which was their ``len``, so it may be wrong."""
        self.total: int | None = None
        self.sealed = False
        """Whether the end of the inputs is stored; after a stop, `total` may be set without it."""
        self.slots = 0
        self._store = store
        self._scope = scope
        self._key = key
        self._chunks: list[_StoredChunk] = []
        self._bodies: dict[int, frames.Frames] = {}

    @property
    def count(self) -> int:
        """The number of stored items."""
        return self._chunks[-1].first + self._chunks[-1].count if self._chunks else 0

    @property
    def known(self) -> int:
        """How many items there are, as far as this process knows; inputs of some may be missing."""
        return max(self.count, self.total or 0)

    @property
    def announced(self) -> int:
        """How many items there are, or are expected while the end of the inputs isn't known."""
        return max(self.count, self.expected or 0) if self.total is None else self.total

    async def read(self) -> None:
        """Read which slots exist now."""
        self.learn(await self._store.list(f"{self._scope}inputs/"))

    def learn(self, listed: Iterable[ObjectInfo]) -> None:
        """Read a listing of the slots; skip known slots.

        Raises:
            WireError: A slot has no signature of the batch's submitter for its number.
        """
        for info in listed:
            if info.name != wire.input_key(self._scope, self.slots):
                continue
            try:
                slot = wire.Slot.verified(info.metadata, self._key, self._scope, info.name)
            except ValueError as exc:
                raise self._forged_error(info.name) from exc
            if slot.total is not None:
                self.total, self.sealed = slot.total, True
                self.slots += 1
            else:
                self._add(self._chunk_in(slot))

    def add(
        self,
        slot: wire.Slot,
        inputs: Sequence[EncodedInput],
        data: Mapping[int, tuple[wire.DataRef, ...]],
        failed: Mapping[int, Exception],
    ) -> None:
        """Add a slot just stored; the keys of *data* and *failed* are positions in the chunk."""
        stored = self._chunk_in(slot)
        sizes = (len(encoded.content) for encoded in inputs)
        _add_footer(stored, sizes, (encoded.digest for encoded in inputs), data, failed)
        self._add(stored)

    def _chunk_in(self, slot: wire.Slot) -> _StoredChunk:
        name = wire.input_key(self._scope, self.slots)
        return _StoredChunk(self.slots, name, slot.first, slot.count, slot.footer, slot.size)

    def _add(self, stored: _StoredChunk) -> None:
        if stored.first != self.count:
            raise WireError(
                f"{stored.name} does not follow the slot before it, so the batch cannot continue; "
                "submit the batch again"
            )
        self._chunks.append(stored)
        self.slots += 1

    async def input(self, index: int) -> tuple[wire.Input, tuple[wire.DataRef, ...]]:
        """Return where the runner finds an item's arguments, and the `Data` in them."""
        stored = self._chunk_of(index)
        ends = stored.offsets or await self._read_footer(stored)
        position = index - stored.first
        if (failed := stored.failed.get(position)) is not None:
            raise failed
        start, digest = ends[position - 1] if position else 0, stored.digest(index)
        return wire.Input(stored.name, start, ends[position], digest), stored.data.get(position, ())

    def known_digest(self, index: int) -> str | None:
        """Return the digest of an input's pickle; None if it has none, or isn't read yet."""
        with contextlib.suppress(NotFound):
            stored = self._chunk_of(index)
            if index - stored.first not in stored.failed and stored.digests:
                return stored.digest(index)
        return None

    def known_data(self) -> Iterator[wire.DataRef]:
        """Return the `Data` in the inputs, as far as this process has read their chunks."""
        return (ref for it in self._chunks for refs in it.data.values() for ref in refs)

    async def value(self, index: int) -> Any:
        """Return an input as the function gets it: unpickled.

        Raises:
            NotFound: The input isn't stored.
            SubmissionError: The input could not be pickled when it was stored.
            WireError: The input's signature is wrong; nothing was unpickled.
            Exception: Unpickling the input raised this error.
        """
        arguments, _ = await self.input(index)
        stored = self._chunk_of(index)
        position = index - stored.first
        body = await self._body(stored)
        part = body.frames[position]
        if not await anyio.to_thread.run_sync(_has_digest, part, arguments.digest):
            raise self._forged_error(f"input {index} in {stored.name}")
        args, kwargs = await unpickled(part)
        match body.fields["how"][position]:
            case "s":
                return args[0]
            case "a":
                return args
            case "l":
                return body.fields["labels"][str(position)], kwargs
            case _:
                return kwargs

    async def notes(self, parameters: Sequence[str]) -> dict[int, notes.Note]:
        """Return item → the scalars of its input, by the names of the function's *parameters*.

        This takes one request for each chunk, and reads only the footer of a large chunk.

        Raises:
            WireError: A chunk is not what its submitter signed; nothing of it was used.
        """
        found: dict[int, notes.Note] = {}

        @functools.cache  # all inputs of a batch have the same few names
        def named(name: str) -> str:
            """Name the note of a positional argument: ``[0].lr`` becomes ``config.lr``."""
            head, bracket, rest = name.partition("]")
            number = head[1:]
            if bracket and number.isdecimal() and int(number) < len(parameters):
                return parameters[int(number)] + rest
            return name

        async def read(stored: _StoredChunk) -> None:
            fields = await self._footer(stored)
            for position, encoded in fields.get("notes", {}).items():
                note = notes.read(encoded)
                if fields["how"][int(position)] not in "kl":  # a call by keywords has names
                    note = {named(name): value for name, value in note.items()}
                found[stored.first + int(position)] = note
            await asyncio.sleep(0)  # a store in memory answers without a turn of the loop

        await for_each(read, self._chunks, limit=MAX_CONCURRENT_READS)
        return found

    async def _footer(self, stored: _StoredChunk) -> Mapping[str, Any]:
        """Return the verified fields of a chunk's footer; of a large chunk, read only its end."""
        if stored.slot in self._bodies or stored.size <= FOOTER_BYTES:
            return (await self._body(stored)).fields
        start = stored.size - FOOTER_BYTES
        content = await self._store.get(stored.name, start=start)
        try:
            if (length := frames.footer_length(content.body)) > len(content.body):
                content = await self._store.get(stored.name, start=stored.size - length)
            fields: dict[str, Any] = json.loads(_verified_footer(stored, content.body))
        except ValueError as exc:
            raise self._forged_error(stored.name) from exc
        return fields

    def _chunk_of(self, index: int) -> _StoredChunk:
        chunk_number = bisect.bisect_right(self._chunks, index, key=lambda chunk: chunk.first) - 1
        if chunk_number >= 0:
            stored = self._chunks[chunk_number]
            if index < stored.first + stored.count:
                return stored
        raise NotFound(f"the input of item {index} isn't stored")

    async def _read_footer(self, stored: _StoredChunk) -> array[int]:
        """Read the chunk, and keep its inputs' offsets, digests, `Data`, and errors in *stored*."""
        body = await self._body(stored)
        fields = body.fields
        refs = {
            int(position): tuple(wire.DataRef(**fields) for fields in ref_fields)
            for position, ref_fields in fields.get("data", {}).items()
        }
        failed: dict[int, Exception] = {
            int(position): SubmissionError(message)
            for position, message in fields.get("failed", {}).items()
        }
        return _add_footer(stored, map(len, body.frames), fields["digests"], refs, failed)

    async def _body(self, stored: _StoredChunk) -> frames.Frames:
        """Return the verified content of a chunk; keep the last `CACHED_CHUNKS` in memory."""
        unpacked = self._bodies.get(stored.slot)
        if unpacked is None:
            content = await self._store.get(stored.name, limit=stored.size)
            try:
                _verified_footer(stored, content.body)
                unpacked = frames.unpack(content.body)
            except ValueError as exc:
                raise self._forged_error(stored.name) from exc
            while len(self._bodies) >= CACHED_CHUNKS:
                self._bodies.pop(next(iter(self._bodies)))
            self._bodies[stored.slot] = unpacked
        return unpacked

    def _forged_error(self, subject: str) -> WireError:
        batch = self._scope.strip("/").rpartition("/")[2]
        return WireError(
            f"{subject} is not what the submitter of {batch} signed: another process wrote it, or "
            f"it is damaged; nothing of it was used. See who can write to {self._store.url}, and "
            f"submit the batch again; kinetic.cleanup({batch!r}) removes this batch"
        )


def _has_digest(part: bytes | memoryview, digest: str) -> bool:
    return hashlib.sha256(part).hexdigest() == digest


def _verified_footer(stored: _StoredChunk, content: bytes) -> bytes:
    """Return the footer at the end of *content*; raise `ValueError` if it isn't the signed one."""
    footer = frames.footer_of(content)
    if not _has_digest(footer, stored.footer):
        raise ValueError(f"the footer of {stored.name} has another digest")
    return footer


def _add_footer(
    stored: _StoredChunk,
    sizes: Iterable[int],
    digests: Iterable[str],
    data: Mapping[int, tuple[wire.DataRef, ...]],
    failed: Mapping[int, Exception],
) -> array[int]:
    """Keep in *stored* what its footer says, and return the offsets.

    *sizes* are the numbers of bytes of the inputs' pickles.
    """
    ends, offset = array("Q"), 0
    for size in sizes:
        offset += size
        ends.append(offset)
    stored.offsets, stored.count = ends, len(ends)
    stored.digests = b"".join(bytes.fromhex(digest) for digest in digests)
    stored.data, stored.failed = data, failed
    return ends


def chunk_body(
    inputs: Sequence[EncodedInput],
    first: int,
    refs: Mapping[int, tuple[wire.DataRef, ...]],
    failed: Mapping[int, Exception],
) -> bytes:
    """Return the bytes of a slot with *inputs*; *first* is the index of the first.

    *refs* has the uploaded `Data`, and *failed* the errors, by the position in the chunk.
    """
    fields: dict[str, Any] = {
        "first": first,
        "digests": [encoded.digest for encoded in inputs],
        "how": "".join(encoded.mode for encoded in inputs),
    }
    if refs:
        fields["data"] = {
            position: [asdict(ref) for ref in data_refs] for position, data_refs in refs.items()
        }
    if failed:
        fields["failed"] = {position: str(error) for position, error in failed.items()}
    input_notes = {n: encoded.note for n, encoded in enumerate(inputs) if encoded.note is not None}
    if input_notes:
        fields["notes"] = input_notes
    labels = {n: encoded.label for n, encoded in enumerate(inputs) if encoded.mode == "l"}
    if labels:
        fields["labels"] = labels
    return frames.pack([encoded.content for encoded in inputs], fields)
