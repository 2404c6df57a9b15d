"""Writes a zip file front to back, from content that was compressed before.

The standard library's writer compresses by itself, in one thread, and goes
back to fill in sizes. This one only appends, so that a digest of the file can
be taken on the way. Nothing in it depends on when or where it was made.
"""

from __future__ import annotations

import stat
import struct
from typing import Protocol

__all__ = ["DEFLATED", "STORED", "Sink", "ZipWriter"]

STORED, DEFLATED = 0, 8

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR_64 = struct.Struct("<4sIQQ")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")

_VERSION, _VERSION_64 = 20, 45
_UNIX = 3 << 8  # in "version made by": the attributes are a Unix mode
_TIME, _DATE = 0, 1 << 5 | 1  # 1980-01-01 00:00, where the format's time begins
_UTF_8, _SIZES_FOLLOW = 0x800, 0x8
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
_STREAM_64 = 1 << 31  # from here on the sizes after a stream have 8 bytes each
_PERMISSIONS = 0o777  # set-id bits do not travel


class Sink(Protocol):
    """Where the bytes of the file go."""

    def write(self, data: bytes, /) -> object: ...


class ZipWriter:
    """One zip file, appended to *sink*; not valid until `close`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._offset = 0
        self._central: list[bytes] = []
        self._stream: tuple[bytes, int, int, int, int] | None = None

    def directory(self, name: str, mode: int) -> None:
        """Add a directory; *name* ends with ``/``."""
        self.file(name, mode, b"", method=STORED, crc=0, size=0)

    def file(self, name: str, mode: int, data: bytes, *, method: int, crc: int, size: int) -> None:
        """Add a file of less than 2 GiB; *data* is already compressed by *method*."""
        encoded, flags = _encoded(name)
        start = self._offset
        self._write(_local(encoded, _VERSION, flags, method, (crc, len(data), size), b""))
        self._write(data)
        self._record(encoded, mode, flags, method, (crc, len(data), size), start)

    def begin(self, name: str, mode: int, *, method: int, size: int) -> None:
        """Begin a file of at most *size* bytes whose parts are written by `block`."""
        encoded, flags = _encoded(name)
        flags |= _SIZES_FOLLOW
        self._stream = encoded, mode, flags, method, self._offset
        if size >= _STREAM_64:
            extra = struct.pack("<HHQQ", 1, 16, 0, 0)
            header = _local(encoded, _VERSION_64, flags, method, (0, _MAX_32, _MAX_32), extra)
        else:
            header = _local(encoded, _VERSION, flags, method, (0, 0, 0), b"")
        self._write(header)
        self._stream_start = self._offset
        self._descriptor = _DESCRIPTOR_64 if size >= _STREAM_64 else _DESCRIPTOR

    def block(self, data: bytes) -> None:
        """Append to the file that was begun."""
        self._write(data)

    def end(self, *, crc: int, size: int) -> None:
        """End the file that was begun; it had *size* bytes before compression."""
        if self._stream is None:
            raise RuntimeError("no file was begun")
        encoded, mode, flags, method, start = self._stream
        self._stream = None
        facts = crc, self._offset - self._stream_start, size
        self._write(self._descriptor.pack(b"PK\x07\x08", *facts))
        self._record(encoded, mode, flags, method, facts, start)

    def close(self) -> None:
        """Write the table of contents; the sink stays open."""
        start = self._offset
        for record in self._central:
            self._write(record)
        size, count = self._offset - start, len(self._central)
        if count >= _MAX_16 or size >= _MAX_32 or start >= _MAX_32:
            end = self._offset
            self._write(
                _END_64.pack(
                    b"PK\x06\x06",
                    _END_64.size - 12,
                    _VERSION_64 | _UNIX,
                    _VERSION_64,
                    0,
                    0,
                    count,
                    count,
                    size,
                    start,
                )
            )
            self._write(_LOCATOR_64.pack(b"PK\x06\x07", 0, end, 1))
        count, size, start = min(count, _MAX_16), min(size, _MAX_32), min(start, _MAX_32)
        self._write(_END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0))

    def _write(self, data: bytes) -> None:
        self._sink.write(data)
        self._offset += len(data)

    def _record(
        self,
        encoded: bytes,
        mode: int,
        flags: int,
        method: int,
        facts: tuple[int, int, int],
        start: int,
    ) -> None:
        crc, compressed, size = facts
        large = [value for value in (size, compressed, start) if value >= _MAX_32]
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        version = _VERSION_64 if large or flags & _SIZES_FOLLOW else _VERSION
        is_directory = encoded.endswith(b"/")
        kind = stat.S_IFDIR if is_directory else stat.S_IFREG
        self._central.append(
            _CENTRAL.pack(
                b"PK\x01\x02",
                version | _UNIX,
                version,
                flags,
                method,
                _TIME,
                _DATE,
                crc,
                min(compressed, _MAX_32),
                min(size, _MAX_32),
                len(encoded),
                len(extra),
                0,
                0,
                0,
                (kind | mode & _PERMISSIONS) << 16 | (0x10 if is_directory else 0),
                min(start, _MAX_32),
            )
            + encoded
            + extra
        )


def _encoded(name: str) -> tuple[bytes, int]:
    encoded = name.encode()
    return encoded, 0 if encoded.isascii() else _UTF_8


def _local(
    encoded: bytes,
    version: int,
    flags: int,
    method: int,
    facts: tuple[int, int, int],
    extra: bytes,
) -> bytes:
    header = _LOCAL.pack(
        b"PK\x03\x04", version, flags, method, _TIME, _DATE, *facts, len(encoded), len(extra)
    )
    return header + encoded + extra
