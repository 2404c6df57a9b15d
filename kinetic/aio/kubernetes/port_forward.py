"""A connection to a port of a pod's loopback, carried by a WebSocket to the API server.

Each message begins with the number of its channel. One channel carries the port's data, the other
carries errors, such as a port that can't be reached. In a channel's first message, the port's
number follows. Both directions end together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream

from kinetic._labels import KIND, WORKER
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import age_key, get_dict, labels_of
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.manifests import Paths, by_items
from kinetic.aio.kubernetes.multihost import host_of
from kinetic.aio.kubernetes.observations import name_of
from kinetic.aio.kubernetes.reflector import list_all
from kinetic.errors import NotFound, Unavailable

if TYPE_CHECKING:
    import aiohttp

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = 0, 1
HEAD_BYTES = 2
"""Bytes of the port's number, at the beginning of each channel."""

PIECE_BYTES = 32 * 1024


async def dial_pod(api: Api, paths: Paths, name: str, port: int, host: int) -> ByteStream:
    """Connect to *port* in the pod of host number *host* of the attempt or worker called *name*.

    Raises:
        NotFound: No such pod runs.
        AuthError: A permission is missing.
        Unavailable: The API server does not answer.
    """
    running = [
        pod
        for pod in (await list_all(api, paths.pods, by_items([name]))).items
        if name_of(pod) == name
        # The index of a worker's pod is its rank, and no host's number.
        and (labels_of(pod).get(KIND) == WORKER or (host_of(pod) or 0) == host)
        if not Pod(pod).ended and get_dict(pod, "status").get("phase") == "Running"
    ]
    if not running:
        location = f"namespace {paths.namespace} of {api.cluster}"
        on_host = f" on host {host}" if host else ""
        raise NotFound(
            f"no pod of {name}{on_host} is running in {location}: the job has ended, or waits"
        )
    pod = str(get_dict(max(running, key=age_key), "metadata").get("name"))
    path = f"{paths.pods}/{pod}/portforward"
    return _Tunnel(await api.tunnel(path, PROTOCOL, query={"ports": str(port)}), pod, port)


class _Tunnel(ByteStream):
    """A connection to *port* of *pod* over the WebSocket *socket*."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, pod: str, port: int) -> None:
        self._socket = socket
        self._target = f"port {port} of pod {pod}"
        self._opened_channels: set[int] = set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return the data of the next message, even if the data has more than *max_bytes* bytes.

        Raises:
            Unavailable: The pod can't reach the port.
            EndOfStream: The connection has ended.
        """
        import aiohttp

        while True:
            message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise anyio.EndOfStream
            data: bytes = message.data
            channel, rest = data[0], data[1:]
            if channel not in self._opened_channels:
                self._opened_channels.add(channel)
                rest = rest[HEAD_BYTES:]
            if rest and channel == ERROR:
                reason = rest.decode(errors="replace").strip()
                raise Unavailable(f"{self._target} cannot be reached: {reason}")
            if rest and channel == DATA:
                return rest

    async def send(self, item: bytes) -> None:
        """Send *item*, in pieces of 32 KiB.

        Raises:
            BrokenResourceError: The connection is broken.
        """
        try:
            for start in range(0, len(item), PIECE_BYTES):
                await self._socket.send_bytes(bytes([DATA]) + item[start : start + PIECE_BYTES])
        except (ConnectionError, RuntimeError) as exc:
            raise anyio.BrokenResourceError from exc

    async def send_eof(self) -> None:
        """Do nothing: the protocol has no message that ends only one direction."""

    async def aclose(self) -> None:
        """End both directions."""
        await self._socket.close()
