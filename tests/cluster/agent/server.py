"""What the API server asks a kubelet for: logs, port-forward."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from tests.cluster.agent import streams
from tests.cluster.agent.log import Wish

if TYPE_CHECKING:
    from tests.cluster.agent.container import Container
    from tests.cluster.agent.kubelet import Kubelet
    from tests.cluster.agent.pod import Pod


class Server:
    """Listens on loopback, over TLS, on the kubelet's port."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    async def start(self, certificate: Path, key: Path, port: int) -> web.AppRunner:
        """Begin to serve; the caller cleans the runner up."""
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/portForward/{namespace}/{pod}", self._port_forward)
        app.router.add_post("/complete", self._kubelet.leader_worker_sets.complete)
        runner = web.AppRunner(
            app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True
        )
        await runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        return runner

    def _pod(self, request: web.Request) -> Pod:
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        for pod in self._kubelet.pods.values():
            if (pod.namespace, pod.name) == (namespace, name):
                return pod
        raise web.HTTPNotFound(text=f'pod "{namespace}/{name}" not found')

    def _found(self, request: web.Request) -> tuple[Pod, Container]:
        pod, wanted = self._pod(request), request.match_info["container"]
        for one in pod.containers:
            if one.name == wanted:
                return pod, one
        raise web.HTTPNotFound(text=f'container "{wanted}" of pod "{pod.name}" not found')

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        self._pod(request)
        ports = [int(port) for port in request.query.getall("port", [])]
        return await streams.forward(request, ports)

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        pod, container = self._found(request)
        if not container.logs:
            waiting = container.state.get("waiting", {})
            text = (
                f'container "{container.name}" in pod "{pod.name}" is waiting to start: '
                f"{waiting.get('message') or waiting.get('reason')}"
            )
            raise web.HTTPBadRequest(text=text)
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        answer.enable_chunked_encoding()
        # Who reads it has had enough, or the pod was removed at this very moment.
        with contextlib.suppress(ConnectionResetError, FileNotFoundError):
            await answer.prepare(request)
            async for piece in container.logs[-1].read(Wish.of(dict(request.query))):
                await answer.write(piece)
            await answer.write_eof()
        return answer
