"""Messages over a stream socket: a JSON header, and bytes that are passed on unread.

``length of header | length of body | header (JSON object) | body``

A job's order is made once by the client and read once by the job's process;
whoever stands between forwards the body as it is.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

__all__ = ["Channel", "ChannelError", "Decoder", "Message", "encode"]

HEAD = struct.Struct("<II")
LARGEST = 256 * 1024 * 1024
RECEIVE_BYTES = 256 * 1024

Message = tuple[dict[str, Any], bytes]

_dumps = json.JSONEncoder(separators=(",", ":")).encode
_loads = json.JSONDecoder().decode


class ChannelError(ValueError):
    """The other side does not speak this format."""


def encode(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """One message as bytes."""
    head = _dumps(header).encode()
    return HEAD.pack(len(head), len(body)) + head + body


class Decoder:
    """Cuts a stream into messages, wherever the stream was cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that *data* completes.

        Raises:
            ChannelError: This is not our format.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= HEAD.size:
            head, body = HEAD.unpack_from(buffer, start)
            if head + body > LARGEST:
                raise ChannelError(f"a message of {head + body} bytes is too large, or garbled")
            middle = start + HEAD.size + head
            if len(buffer) < middle + body:
                break
            try:
                header = _header(str(buffer[start + HEAD.size : middle], "utf-8"))
            except (ValueError, RecursionError) as exc:
                raise ChannelError(f"a garbled message: {exc}") from exc
            start = middle + body
            messages.append((header, bytes(buffer[middle:start])))
        del buffer[:start]
        return messages


def _header(text: str) -> dict[str, Any]:
    header: dict[str, Any] = _loads(text)
    if type(header) is not dict:
        raise ValueError("its header is no object")
    return header


class Channel:
    """One end of a connection whose owner waits for readiness itself."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = Decoder()
        self._out = bytearray()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """How many bytes wait for the other side to read."""
        return len(self._out)

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Keep a message for the next `flush`."""
        self._out += encode(header, body)

    def flush(self) -> None:
        """Send what the other side takes now.

        Raises:
            OSError: The other side is gone.
        """
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def receive(self) -> list[Message] | None:
        """What has arrived; None when nothing more will come.

        Raises:
            ChannelError: The other side does not speak this format.
        """
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        return self._decoder.feed(data) if data else None

    def close(self) -> None:
        """Let go; what is unsent is lost."""
        self._sock.close()
