"""port-forward reaches a pod through the API server."""

from __future__ import annotations

import asyncio

import aiohttp
from yarl import URL

from tests.cluster.fixtures import Namespace
from tests.cluster.orders import follow_until, pod

DEADLINE_S = 40.0
V4 = ("v4.channel.k8s.io",)
ECHO = """
import socket
server = socket.create_server(('127.0.0.1', 0))
print(server.getsockname()[1])
while True:
    connection, _ = server.accept()
    connection.sendall(connection.recv(100).upper())
    connection.close()
"""


async def spoken(namespace: Namespace, below: str, sent: bytes) -> dict[int, bytes]:
    """Open a stream, say *sent*, and collect what comes on each channel until its end."""
    heard: dict[int, bytes] = {}
    admin = namespace.admin
    connector = aiohttp.TCPConnector(ssl=admin.tls())
    headers = {"Authorization": f"Bearer {admin.token}"}
    async with (
        aiohttp.ClientSession(admin.server, connector=connector, headers=headers) as session,
        session.ws_connect(URL(namespace.path(below), encoded=True), protocols=V4) as socket,
        asyncio.timeout(DEADLINE_S),
    ):
        connection = socket.get_extra_info("socket")
        await socket.send_bytes(b"\0" + sent)
        async for message in socket:
            channel = message.data[0]
            heard[channel] = heard.get(channel, b"") + message.data[1:]
    async with asyncio.timeout(DEADLINE_S):
        while connection.fileno() != -1:  # aiohttp does not wait for the end of TLS
            await asyncio.sleep(0.01)
    return heard


async def test_a_port_of_a_pod_is_reached(namespace: Namespace) -> None:
    namespace.call("POST", "pods", pod("p", ECHO))
    port = int(follow_until(namespace, "p", b"\n"))
    heard = await spoken(namespace, f"pods/p/portforward?ports={port}", b"hello")
    known = port.to_bytes(2, "little")
    assert heard == {0: known + b"HELLO", 1: known}
