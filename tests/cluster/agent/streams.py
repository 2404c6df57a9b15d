"""exec and port-forward over WebSockets: messages whose first byte names the stream.

The protocol is ``v4.channel.k8s.io``, which the API server hands on as it is. Its newer ones it
would translate to SPDY, which is not spoken here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from aiohttp import WSMsgType, web

from tests.cluster.agent.container import Container

PROTOCOLS = ("v4.channel.k8s.io",)
STDIN, STDOUT, STDERR, STATUS = range(4)
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


async def run(
    request: web.Request, container: Container, command: Sequence[str]
) -> web.WebSocketResponse:
    """A command in a container; it ends with the connection, or the container."""
    socket = await opened(request)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=container.work,
            env=container.env,
            start_new_session=True,
        )
    except OSError as error:
        await _status(socket, 126, f"{command[0]}: {error.strerror}")
        return socket
    container.guests.add(process.pid)
    assert process.stdin and process.stdout and process.stderr
    heard = asyncio.create_task(_hear(socket, process.stdin), name="input of exec")
    outputs = [
        asyncio.create_task(pump(process.stdout, socket, STDOUT), name="output of exec"),
        asyncio.create_task(pump(process.stderr, socket, STDERR), name="errors of exec"),
    ]
    try:
        told = asyncio.gather(*outputs)
        await asyncio.wait({heard, told}, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            code = await process.wait()
            await _status(socket, 128 - code if code < 0 else code, f"exit code {code}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        container.guests.discard(process.pid)
        for task in (heard, *outputs):
            task.cancel()
        await asyncio.wait({heard, *outputs})
        await process.wait()
    return socket


async def _hear(socket: web.WebSocketResponse, stdin: asyncio.StreamWriter) -> None:
    async for message in socket:
        if message.type is WSMsgType.BINARY and message.data[:1] == bytes([STDIN]):
            with contextlib.suppress(ConnectionError):
                stdin.write(message.data[1:])
                await stdin.drain()


async def _status(socket: web.WebSocketResponse, code: int, message: str) -> None:
    told: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code:
        cause = {"reason": "ExitCode", "message": str(code)}
        told = {
            "metadata": {},
            "status": "Failure",
            "reason": "NonZeroExitCode",
            "message": f"command terminated with non-zero exit code: {message}",
            "details": {"causes": [cause]},
        }
    with contextlib.suppress(ConnectionError):
        await socket.send_bytes(bytes([STATUS]) + json.dumps(told).encode())
        await socket.close()


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
                said = f"failed to connect to localhost:{port} inside the pod: {error.strerror}"
                await socket.send_bytes(bytes([2 * number + 1]) + said.encode())
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
