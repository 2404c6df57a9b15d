"""port-forward over WebSockets: messages whose first byte names the stream.

The protocol is ``v4.channel.k8s.io``, which the API server hands on as it is. Its newer ones it
would translate to SPDY, which is not spoken here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from aiohttp import WSMsgType, web

PROTOCOLS = ("v4.channel.k8s.io",)
PIECE = 64 * 1024


async def opened(request: web.Request) -> web.WebSocketResponse:
    """The connection, once it is agreed how to speak."""
    socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=2**24)
    if not socket.can_prepare(request).ok:
        raise web.HTTPBadRequest(text=f"only WebSockets with {PROTOCOLS[0]} are served here")
    await socket.prepare(request)
    return socket


async def pump(reader: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    """Send what *reader* has, until its end or the connection's."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE):
            await socket.send_bytes(bytes([channel]) + data)


async def forward(request: web.Request, ports: Sequence[int]) -> web.WebSocketResponse:
    """Connections to ports of the pod's loopback: two channels a port, of data and of errors."""
    socket = await opened(request)
    for number, port in enumerate(ports):
        for channel in (2 * number, 2 * number + 1):
            await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
    writers: dict[int, asyncio.StreamWriter] = {}
    pumps: list[asyncio.Task[None]] = []
    try:
        for number, port in enumerate(ports):
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError as error:
                message = f"failed to connect to localhost:{port} inside the pod: {error.strerror}"
                await socket.send_bytes(bytes([2 * number + 1]) + message.encode())
                continue
            writers[2 * number] = writer
            pumps.append(asyncio.create_task(_through(reader, socket, 2 * number), name="port"))
        async for message in socket:
            if message.type is WSMsgType.BINARY and (writer := writers.get(message.data[0])):
                writer.write(message.data[1:])
                await writer.drain()
    except ConnectionError:
        pass  # one of the two sides has ended
    finally:
        for writer in writers.values():
            writer.close()
        for task in pumps:
            task.cancel()
        if pumps:
            await asyncio.wait(pumps)
    return socket


async def _through(
    reader: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int
) -> None:
    await pump(reader, socket, channel)
    with contextlib.suppress(ConnectionError):
        await socket.close()
