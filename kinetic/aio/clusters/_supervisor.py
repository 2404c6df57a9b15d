"""A connection to the local supervisor, in the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinetic._local import daemon
from kinetic._local.protocol import VERSION
from kinetic._runner.channel import ChannelError, Decoder, encode
from kinetic.aio.ports import Shared
from kinetic.errors import Unavailable

__all__ = ["Connection", "Lost", "open_connection"]


PLACES = 16
"""What so many batches have in common is known to the supervisor at once."""


class Lost(ConnectionError):
    """The supervisor is gone; what was asked may or may not have happened."""


class Connection(asyncio.Protocol):
    """Requests that are answered in any order, and the messages of a watch."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._asked = 0
        self._unsent = bytearray()
        self._events: deque[dict[str, Any]] = deque()
        self._event: asyncio.Future[None] | None = None
        self._over = asyncio.Event()
        self._places: dict[Shared, int] = {}
        self.lost = False

    # --- what the loop calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Part of `asyncio.Protocol`."""
        try:
            messages = self._decoder.feed(data)
        except ChannelError:
            self.close()
            return
        for header, _ in messages:
            if (number := header.get("id")) is None:
                self._events.append(header)
            elif (answer := self._answers.pop(number, None)) is not None and not answer.done():
                answer.set_result(header)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of `asyncio.Protocol`."""
        self.lost = True
        self._over.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Lost("the local supervisor has gone"))
                answer.exception()  # whoever asked may have been cancelled
        self._answers.clear()
        self._wake()

    # --- what the client calls -----------------------------------------------------------------

    def ask(self, header: Mapping[str, Any], body: bytes = b"") -> asyncio.Future[dict[str, Any]]:
        """Send a request; the future has its answer, or raises `Lost`.

        Requests of one turn of the loop travel together.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        if self.lost:
            answer.set_exception(Lost("the local supervisor has gone"))
            return answer
        self._asked += 1
        self._answers[self._asked] = answer
        self.send({**header, "id": self._asked}, body)
        return answer

    def place(self, shared: Shared) -> tuple[int, bool]:
        """Where *shared* is on the other side, and whether it is there; else send it there."""
        place = self._places.pop(shared, None)
        known = place is not None
        if place is None:
            place = len(self._places)
            if place >= PLACES:  # that of what was not needed for the longest time
                place = self._places.pop(next(iter(self._places)))
        self._places[shared] = place
        return place, known

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message that is not answered."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += encode(header, body)

    async def event(self) -> dict[str, Any]:
        """The next message of the watch.

        Raises:
            Lost: There will be none.
        """
        while not self._events:
            if self.lost:
                raise Lost("the local supervisor has gone")
            self._event = asyncio.get_running_loop().create_future()
            await self._event
        return self._events.popleft()

    def close(self) -> None:
        """End the connection; the loop does so in its next turn."""
        self._flush()
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """End the connection."""
        self.close()
        await self._over.wait()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(bytes(self._unsent))
            self._unsent.clear()

    def _wake(self) -> None:
        if self._event is not None and not self._event.done():
            self._event.set_result(None)


async def open_connection(home: Path, environ: Mapping[str, str]) -> Connection:
    """Connect to the supervisor of *home*; one is started if there is none.

    Raises:
        Unavailable: It cannot be reached.

    Cancelled:
        A supervisor may have been started; without work it ends by itself.
    """
    loop = asyncio.get_running_loop()
    for _ in range(5):
        dialling = loop.run_in_executor(None, daemon.connect, home, environ)
        try:
            sock = await asyncio.shield(dialling)
        except asyncio.CancelledError:
            dialling.add_done_callback(_hang_up)
            raise
        except OSError as exc:
            raise Unavailable(f"the local platform cannot be used: {exc}") from exc
        _, connection = await loop.create_unix_connection(Connection, sock=sock)
        try:
            hello = await connection.ask({"op": "hello", "protocol": VERSION})
        except Lost:
            continue  # it was about to leave when we came
        except BaseException:
            connection.close()
            raise
        if "error" in hello:
            connection.close()
            raise Unavailable(f"the local supervisor is of another kind: {hello['error']}")
        return connection
    raise Unavailable(f"the local supervisor of {home} ends as soon as it is started; see its log")


def _hang_up(dialling: asyncio.Future[socket.socket]) -> None:
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result().close()
