"""Proxies between a client and a server that count, refuse, cut off, or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import urllib.parse
from collections import Counter
from dataclasses import dataclass
from typing import Self

import aiohttp
from aiohttp import web

RESET = struct.pack("ii", 1, 0)
"""A value of SO_LINGER with which closing a socket sends a reset at once."""

HOP = ("host", "connection", "content-length", "transfer-encoding")
PIECE = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request and the status of its answer; ``name`` is an object's name, or a list's prefix."""

    kind: str
    name: str
    status: int


class Front:
    """``async with Front(url) as front:`` serves the GCS server at *url* under ``front.url``."""

    def __init__(self, url: str) -> None:
        self._behind = url
        self._fails_until = 0.0
        self._wanted = ""
        self.requests: list[RecordedRequest] = []

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        self._runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def fail(self, seconds: float, kind: str) -> None:
        """Answer 503 for *seconds*, and then on until a request of *kind* has got one."""
        self._fails_until = asyncio.get_running_loop().time() + seconds
        self._wanted = kind

    def counted(self, since: int = 0) -> Counter[str]:
        """Count requests by kind and first part of the name: ``create code``, ``get jobs``, …"""
        return Counter(f"{x.kind} {x.name.partition('/')[0]}" for x in self.requests[since:])

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        fails = bool(self._wanted) or asyncio.get_running_loop().time() < self._fails_until
        if fails:
            answer = web.Response(status=503, text="Backend Error")
        else:
            answer = await self._forwarded(request, body)
        record = _record(request, body, answer.status)
        if fails and record.kind == self._wanted:
            self._wanted = ""
        self.requests.append(record)
        return answer

    async def _forwarded(self, request: web.BaseRequest, body: bytes) -> web.Response:
        sent = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        url = aiohttp.client.URL(self._behind + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, data=body, headers=sent, allow_redirects=False
        ) as found:
            kept = {name: value for name, value in found.headers.items() if name.lower() not in HOP}
            return web.Response(status=found.status, body=await found.read(), headers=kept)


def _record(request: web.BaseRequest, body: bytes, status: int) -> RecordedRequest:
    path = urllib.parse.unquote(request.path)
    _, separator, name = path.partition("/o/")
    if request.method == "GET" and not separator:
        return RecordedRequest(kind="list", name=request.query.get("prefix", ""), status=status)
    kind = {"GET": "get", "DELETE": "delete", "PATCH": "update"}.get(request.method, "create")
    if request.method == "GET" and request.query.get("alt") != "media":
        kind = "look at"
    if path.startswith("/batch/"):
        return RecordedRequest(kind="batch", name=path, status=status)
    if not separator:
        match = re.search(rb'"name": ?"([^"]+)"', body)
        name = match[1].decode() if match else request.query.get("name", path)
    return RecordedRequest(kind=kind, name=name, status=status)


class Relay:
    """``async with Relay(port) as relay:`` forwards connections from ``relay.port`` to *port*."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self._pumps: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._silent: list[asyncio.StreamWriter] = []
        self._over = False
        self.cuts = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._over = True
        self._server.close()
        pumps = [*self._pumps]
        self.cut()
        for writer in self._silent:
            writer.transport.abort()
        await asyncio.gather(*pumps, return_exceptions=True)
        await asyncio.sleep(0)  # lets the transports close their sockets

    def cut(self) -> None:
        """Reset all connections; new ones can still be made."""
        for pump, writers in self._pumps.items():
            self.cuts += 1
            pump.cancel()
            for writer in writers:
                connection: socket.socket = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()
        self._pumps.clear()

    def fall_silent(self) -> None:
        """Keep all connections open but transfer nothing; new ones can still be made."""
        for pump, writers in self._pumps.items():
            self.cuts += 1
            pump.cancel()
            self._silent += writers
        self._pumps.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, upstream = await asyncio.open_connection("127.0.0.1", self._behind)
        except OSError:
            writer.transport.abort()
            return
        if self._over:  # the relay was closed during the await
            for stream in (writer, upstream):
                stream.transport.abort()
            return
        pump = asyncio.create_task(_pump_both(reader, upstream, answers, writer))
        self._pumps[pump] = (writer, upstream)
        pump.add_done_callback(self._ended)

    def _ended(self, pump: asyncio.Task[None]) -> None:
        for writer in self._pumps.pop(pump, ()):
            writer.transport.abort()


async def _pump_both(
    reader: asyncio.StreamReader,
    upstream: asyncio.StreamWriter,
    answers: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Transfer data in both directions until both sides have closed."""
    await asyncio.gather(_pump(reader, upstream), _pump(answers, writer))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE):
            sink.write(piece)
            await sink.drain()
        sink.write_eof() if sink.can_write_eof() else sink.close()
