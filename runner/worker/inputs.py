"""Read the inputs of items from the slots in which their submitter stored them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol import frames, wire

if TYPE_CHECKING:
    from ..stores.objects import Objects

CACHED_FOOTERS = 8
FOOTER_READ_BYTES = 64 * 1024
"""How many bytes to read first from the end of a slot; most footers are shorter."""


class StoredInput(NamedTuple):
    """An input, and the `Data` that only this item has."""

    part: wire.Input
    content: bytes
    data: tuple[wire.DataRef, ...]


class RefusedInput(NamedTuple):
    """Why the submitter couldn't encode an input."""

    message: str


AHEAD_BYTES = 64 * 1024
"""How many bytes of a slot to read at once, if its inputs are smaller."""


class _Ahead(NamedTuple):
    """The bytes of a slot from ``start`` on."""

    name: str
    start: int
    content: bytes

    def part(self, part: wire.Input) -> bytes | None:
        """Return the bytes of an input; None if they aren't all here."""
        begin, end = part.start - self.start, part.stop - self.start
        has_all = part.name == self.name and begin >= 0 and end <= len(self.content)
        return self.content[begin:end] if has_all else None


class _Footer(NamedTuple):
    ends: list[int]
    digests: list[str]
    data: Mapping[str, Any]
    failed: Mapping[str, str]


class Inputs:
    """The inputs of one submission.

    A slot's signed metadata has the digest of its footer, and the footer has the digest of each
    input. Footers are kept, and so are small inputs that follow the one that was read. The store is
    still asked each time whether the slot exists.
    """

    def __init__(self, objects: Objects, scope: str) -> None:
        self._objects = objects
        self._scope = scope
        self._footers: dict[int, _Footer] = {}
        self._ahead = _Ahead("", 0, b"")

    def read(self, index: int, number: int, slot: wire.Slot) -> StoredInput | RefusedInput | None:
        """Return the input of item *index* in slot *number*; None if the slot was removed.

        Raises:
            ValueError: The slot or the input isn't what the submitter stored.
            OSError: The store doesn't answer.
        """
        name, ahead = wire.input_key(self._scope, number), self._ahead
        try:
            footer = self._footers.get(number) or self._read_footer(name, number, slot)
            position = index - slot.first
            if footer.failed and (message := footer.failed.get(str(position))) is not None:
                return RefusedInput(message)
            start = footer.ends[position - 1] if position else 0
        except KeyError:
            return None
        part = wire.Input(name, start, footer.ends[position], footer.digests[position])
        # Keep a small input, and those that follow it in the slot.
        if part.stop - part.start <= AHEAD_BYTES // 2 and self._ahead.part(part) is None:
            stop = min(footer.ends[-1], part.start + AHEAD_BYTES)
            try:
                content, _ = self._objects.get(name, part.start, stop)
            except KeyError:
                return None
            self._ahead = _Ahead(name, part.start, content)
        refs = footer.data.get(str(position), ()) if footer.data else ()
        data = tuple(wire.DataRef(**ref) for ref in refs)
        return self.read_part(part, data, has_read=self._ahead is not ahead)

    def read_part(
        self, part: wire.Input, data: tuple[wire.DataRef, ...], *, has_read: bool = False
    ) -> StoredInput | None:
        """Return an input, of which *part* says where it is; None if it was removed.

        *has_read* says that the kept bytes were read just now, so that the slot exists.
        """
        try:
            if (content := self._ahead.part(part)) is None:
                content, _ = self._objects.get(part.name, part.start, part.stop)
            elif not has_read and not self._objects.exists(part.name):
                return None  # a kept copy proves nothing
        except KeyError:
            return None
        if hashlib.sha256(content).hexdigest() != part.digest:
            raise ValueError(f"{part.name} is not what was submitted: its SHA-256 differs")
        return StoredInput(part, content, data)

    def _read_footer(self, name: str, number: int, slot: wire.Slot) -> _Footer:
        start = max(0, slot.size - FOOTER_READ_BYTES)
        end, _ = self._objects.get(name, start, slot.size)
        if not start:
            self._ahead = _Ahead(name, 0, end)  # a small slot is read whole
        if (length := frames.footer_length(end)) > len(end):
            end, _ = self._objects.get(name, slot.size - length, slot.size)
        text = end[len(end) - length : -frames.TAIL.size]
        if hashlib.sha256(text).hexdigest() != slot.footer:
            raise ValueError(f"the footer of {name} has another digest")
        fields = json.loads(text)
        ends, offset = list[int](), 0
        for size in fields["frames"]:
            offset += size
            ends.append(offset)
        while len(self._footers) >= CACHED_FOOTERS:
            self._footers.pop(next(iter(self._footers)))
        footer = _Footer(ends, fields["digests"], fields.get("data", {}), fields.get("failed", {}))
        self._footers[number] = footer
        return footer
