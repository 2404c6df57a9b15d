"""The sockets of a client: made so that a dead peer is noticed, and waited for when it closes."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import math
import socket
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Sockets", "cut", "retry_after"]


def retry_after(value: str | None, now: float | None = None) -> float | None:
    """Seconds to wait by a Retry-After header, which holds them or a date; None if it says none."""
    if not value:
        return None
    try:
        wish = float(value)
    except ValueError:
        try:
            until = email.utils.parsedate_to_datetime(value).timestamp()
        except ValueError:
            return None
        wish = until - (time.time() if now is None else now)
    return max(0.0, wish) if math.isfinite(wish) else None


PROBE_S = 15
"""Seconds of silence after which the system asks the other side; half a minute is the end."""

GOODBYE_S = 1.0
"""How long a closing client waits for peers that do not answer its goodbye."""

GLANCES = 500


class Sockets:
    """Makes the sockets of a client's sessions, and knows which of them are still open.

    A session forgets a connection whose request was cancelled while it was
    being made, but TLS takes leave of the peer before it closes the socket.
    A loop that ends before that leaves the socket behind, with a warning.
    And a session that is closed leaves those waiting who read an answer.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._answers: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()

    def make(self, address: tuple[Any, ...]) -> socket.socket:
        """A socket whose system asks the other side whether it is still there.

        So a stream that may be silent notices a peer that is gone, half a minute later.
        """
        made = socket.socket(family=address[0], type=address[1], proto=address[2])
        self._made.add(made)
        for level, option, value in (
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", PROBE_S),
            (socket.IPPROTO_TCP, "TCP_KEEPALIVE", PROBE_S),  # macOS has this name for it
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PROBE_S // 3),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 2000 * PROBE_S),
        ):
            if hasattr(socket, option):
                with contextlib.suppress(OSError):  # a system may know a name and not take it
                    made.setsockopt(level, getattr(socket, option), value)
        return made

    def read(self, answer: aiohttp.ClientResponse) -> None:
        """Somebody reads *answer*, and is told when the client hangs up."""
        self._answers.add(answer)

    def hang_up(self) -> None:
        """End what is being read; before the sessions are closed."""
        for answer in tuple(self._answers):
            cut(answer)

    async def closed(self) -> None:
        """Wait until all are closed, after their sessions were: at most `GOODBYE_S`."""
        await asyncio.sleep(0)
        for _ in range(GLANCES):
            if all(one.fileno() < 0 for one in self._made):
                return
            await asyncio.sleep(GOODBYE_S / GLANCES)


def cut(answer: aiohttp.ClientResponse) -> None:
    """Close *answer*; one that is not read to its end ends its connection without a goodbye."""
    connection = answer.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    answer.close()
