"""A closed client has no connections left, whatever its requests were doing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from kinetic.aio._net.http import CLOSE_TIMEOUT_S
from kinetic.aio.kubernetes.access import open_context
from kinetic.aio.kubernetes.api import Api
from tests.cluster.fixtures import Namespace

MOMENTS_S = [number * 0.0002 for number in range(40)]
"""Delays that cover the time from the first packet over the TLS handshake to the answer."""


async def call(api: Api, path: str) -> None:
    await api.call("GET", path)


async def watch(api: Api, path: str) -> None:
    async with aclosing(api.lines(path, query={"watch": "1"})) as lines:
        async for _ in lines:
            pass


def connections(port: int | None) -> list[Any]:
    """Return this process's connections to *port*."""
    found = psutil.Process().net_connections("tcp")
    return [connection for connection in found if connection.raddr[1:] == (port,)]


@pytest.mark.parametrize("use", [call, watch])
async def test_a_request_that_was_cancelled_leaves_no_connection(
    namespace: Namespace, use: Any
) -> None:
    port, loop = urlsplit(namespace.admin.server).port, asyncio.get_running_loop()
    left = []
    for moment in MOMENTS_S:
        api = Api(await open_context("admin", {"KUBECONFIG": str(namespace.kubeconfig)}))
        using = asyncio.create_task(use(api, namespace.path("pods")))
        await asyncio.sleep(moment)
        using.cancel()
        await asyncio.wait([using])
        closing = loop.time()
        await api.aclose()
        if loop.time() - closing >= CLOSE_TIMEOUT_S:  # the server stalled, so closing gave up
            async with asyncio.timeout(20):
                while connections(port):
                    await asyncio.sleep(0.01)
        left += connections(port)
    assert not left
