"""Connect to a pod's port through an API server that refuses, fails, or reports an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import anyio
import pytest
from aiohttp import web
from anyio.abc import ByteStream

from kinetic.aio.kubernetes.access import Access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.manifests import Paths
from kinetic.aio.kubernetes.port_forward import PROTOCOL, dial_pod
from kinetic.errors import AuthError, NotFound, Unavailable
from tests.kubernetes.faults import (
    LIMITS,
    FaultServer,
    Handler,
    Tokens,
    anonymous,
    answer,
    reset,
    status,
)

POD = {
    "metadata": {
        "name": "one-x",
        "uid": "u",
        "labels": {"kinetic.dev/job": "one"},
        "annotations": {"kinetic.dev/name": "one"},
    },
    "status": {"phase": "Running"},
}
PORT = b"\x39\x30"


@pytest.fixture
def tokens() -> Tokens:
    return Tokens()


@pytest.fixture
async def api(server: FaultServer, tokens: Tokens) -> AsyncIterator[Api]:
    server.then(answer({"items": [POD]}))
    api = Api(Access(server=server.url, name="the cluster", credentials=tokens.passes), LIMITS)
    yield api
    await api.aclose()


def echo(*messages: bytes) -> Handler:
    """Open a WebSocket that sends *messages*, echoes one message, and closes."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        for message in messages:
            await socket.send_bytes(message)
        await socket.send_bytes(await socket.receive_bytes())
        await socket.close()
        return socket

    return handle


async def dial(api: Api) -> ByteStream:
    return await dial_pod(api, Paths("team"), "one", 12345, 0)


async def test_the_port_number_that_the_server_sends_is_not_data(
    api: Api, server: FaultServer
) -> None:
    server.then(echo(b"\0" + PORT, b"\1" + PORT, b"\0", b"\0abc"))
    async with await dial(api) as stream:
        assert await stream.receive() == b"abc"
        await stream.send(b"more")
        assert await stream.receive() == b"more"
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
    assert server.paths[-1] == "GET /api/v1/namespaces/team/pods/one-x/portforward"
    assert server.seen[-1].query == {"ports": "12345"}


async def test_an_error_that_the_server_reports_is_raised(api: Api, server: FaultServer) -> None:
    server.then(echo(b"\0" + PORT, b"\1" + PORT, b"\1nobody is there\n"))
    async with await dial(api) as stream:
        with pytest.raises(Unavailable, match=r"port 12345 of pod one-x .*: nobody is there$"):
            await stream.receive()
        await stream.send(b"")


async def test_a_token_that_is_refused_is_renewed_once(
    api: Api, server: FaultServer, tokens: Tokens
) -> None:
    server.then(status(401, "Unauthorized"), echo(b"\0" + PORT))
    async with await dial(api) as stream:
        await stream.send(b"x")
        assert await stream.receive() == b"x"
    assert tokens.made == 2


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ([status(403, "Forbidden", 'User "u" cannot get it')] * 2, AuthError, '"u" cannot get it'),
        ([status(403, "Forbidden"), status(400)], AuthError, "pods/portforward"),
        ([status(404, "NotFound", "no such pod")] * 2, NotFound, "no such pod"),
        ([reset()] * 3, Unavailable, "cannot get pods/portforward"),
        ([status(401)] * 3, AuthError, "does not accept the credentials"),
    ],
)
async def test_a_refusal_quotes_the_server(
    api: Api,
    server: FaultServer,
    answers: Sequence[Handler],
    error: type[Exception],
    message: str,
) -> None:
    server.then(*answers)
    with pytest.raises(error, match=message):
        await dial(api)


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed"])
async def test_a_pod_that_does_not_run_is_not_dialled(server: FaultServer, phase: str) -> None:
    server.then(answer({"items": [{**POD, "status": {"phase": phase}}]}))
    async with aclosing(Api(anonymous(server), LIMITS)) as api:
        with pytest.raises(NotFound, match="no pod of one is running in namespace team of a test"):
            await dial(api)
