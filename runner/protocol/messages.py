"""Messages between a supervisor, its clients, and its jobs: their frame, and the way to the socket.

A message is a header, which is JSON, and a body.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket  # slow to load, and few jobs send messages

HEAD = struct.Struct("<II")  # the sizes of a message's header and body
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_SOCKET_PATH_BYTES = 100

Message = tuple[dict[str, Any], bytes]

_dumps = json.JSONEncoder(separators=(",", ":")).encode
_loads = json.JSONDecoder().decode


class ChannelError(ValueError):
    """The peer sent data that isn't a message."""


def encode(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Return one message as bytes."""
    encoded_header = _dumps(header).encode()
    return HEAD.pack(len(encoded_header), len(body)) + encoded_header + body


class Decoder:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that *data* completes, or raise `ChannelError`; keep the rest."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= HEAD.size:
            header_size, body_size = HEAD.unpack_from(buffer, start)
            if header_size + body_size > MAX_MESSAGE_BYTES:
                raise ChannelError(
                    f"a message of {header_size + body_size} bytes is too large, or garbled"
                )
            body_start = start + HEAD.size + header_size
            if len(buffer) < body_start + body_size:
                break
            try:
                header: dict[str, Any] = _loads(
                    str(buffer[start + HEAD.size : body_start], "utf-8")
                )
                if type(header) is not dict:
                    raise ValueError("its header isn't an object")
            except (ValueError, RecursionError) as exc:
                raise ChannelError(f"a garbled message: {exc}") from exc
            start = body_start + body_size
            messages.append((header, bytes(buffer[body_start:start])))
        del buffer[:start]
        return messages


def connect(sock: socket.socket, path: str) -> None:
    """Connect *sock* to the socket *path*: the system limits a path to about 100 bytes."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        sock.connect(path)
        return
    folder, name = os.path.split(path)
    if sys.platform == "linux":
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{fd}/{name}")
        finally:
            os.close(fd)
    else:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="kinetic-") as parent:
            os.symlink(folder, f"{parent}/s")
            sock.connect(f"{parent}/s/{name}")
