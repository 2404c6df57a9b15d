"""The container for pickles: a few byte frames with a JSON footer.

``frame 0 | frame 1 | … | footer (JSON) | length of the footer (4 bytes) | magic``

The footer comes last, when the sizes are known. So a large pickle can be streamed to a file, and
memory never holds two copies of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

MAGIC = b"KNF1"
TAIL = struct.Struct("<I4s")
"""The last bytes of a container: the length of the footer, and `MAGIC`."""

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that may occur while reading JSON from an untrusted writer, and using its values."""


class FramesError(ValueError):
    """The bytes are not a whole container."""


class Sink(Protocol):
    """Where bytes go: a file opened for writing."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class Frames(NamedTuple):
    """A container that was read: the fields of its footer, and views of its frames."""

    fields: Mapping[str, Any]
    frames: tuple[memoryview, ...]


def write_footer(sink: Sink, sizes: Iterable[int], fields: Mapping[str, Any]) -> int:
    """End a container whose frames, of *sizes* bytes, were already written to *sink*."""
    footer = _footer(list(sizes), fields)
    return sink.write(footer + TAIL.pack(len(footer), MAGIC))


def pack(frames: Iterable[bytes | memoryview], fields: Mapping[str, Any] | None = None) -> bytes:
    """Return a container as bytes, for small content."""
    parts = [frame if type(frame) is bytes else memoryview(frame).cast("B") for frame in frames]
    footer = _footer([*map(len, parts)], fields or {})
    return b"".join([*parts, footer, TAIL.pack(len(footer), MAGIC)])


def with_fields(data: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a copy of the container *data* with more *fields*; empty *data* has no frames."""
    if not data:
        return pack([], fields)
    content = unpack(data)
    return pack(content.frames, {**content.fields, **fields})


def _footer(sizes: list[int], fields: Mapping[str, Any]) -> bytes:
    return json.dumps({**fields, "frames": sizes}, separators=(",", ":")).encode()


def footer_length(end: bytes) -> int:
    """Return the size of a container's footer and tail (see `TAIL`), from its last bytes, *end*.

    Raises:
        FramesError: *end* isn't the end of a container.
    """
    if len(end) < TAIL.size or end[-4:] != MAGIC:
        raise FramesError("the container's end is missing or damaged")
    return int(TAIL.unpack_from(end, len(end) - TAIL.size)[0]) + TAIL.size


def footer_of(data: bytes | bytearray | memoryview) -> bytes:
    """Return the raw footer of a container, which can be signed instead of the whole container.

    Raises:
        FramesError: *data* is truncated, or isn't a container.
    """
    view = memoryview(data).cast("B")
    body = _body_size(view)
    return bytes(view[body : -TAIL.size])


def _body_size(view: memoryview) -> int:
    """Return how many bytes the frames of a container have together."""
    end = view.nbytes - TAIL.size
    length, magic = TAIL.unpack_from(view, end) if end >= 0 else (0, b"")
    if magic != MAGIC or length > end:
        raise FramesError("the container's end is missing or damaged")
    return end - int(length)


def unpack(data: bytes | bytearray | memoryview) -> Frames:
    """Read a container.

    Raises:
        FramesError: *data* is truncated, or isn't a container.
    """
    view = memoryview(data).cast("B")
    body = _body_size(view)
    try:
        fields = json.loads(bytes(view[body : -TAIL.size]))
        sizes = fields.pop("frames")
        is_valid = {int}.issuperset(map(type, sizes)) and min(sizes, default=0) >= 0
    except MALFORMED as exc:
        raise FramesError("the container's footer is damaged") from exc
    if not is_valid or sum(sizes) != body:
        raise FramesError("the sizes of the container's frames are wrong")
    frames: list[memoryview] = []
    offset = 0
    for size in sizes:
        frames.append(view[offset : offset + size])
        offset += size
    return Frames(fields, tuple(frames))
