"""A server with faults, and stores on it that retry quickly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.gcs.http import EMULATOR, Limits
from kinetic.aio.gcs.store import GcsStore
from tests.gcs.server import GcsServer

QUICK = Limits(
    idle_s=30.0,
    connect_s=10.0,
    retry=RetryPolicy(total_s=30.0, first_pause_s=0.005, longest_pause_s=0.02),
    piece_bytes=64 * 1024,
)
"""Long limits: server and store share a process, so when it stalls, the store sees silence."""

SILENCE_S = 0.5


@pytest.fixture
async def server() -> AsyncIterator[GcsServer]:
    async with GcsServer() as running:
        yield running


@pytest.fixture
async def store(server: GcsServer) -> AsyncIterator[GcsStore]:
    store = GcsStore("gs://kn-test", {EMULATOR: server.url}, limits=QUICK)
    yield store
    await store.aclose()


@pytest.fixture
async def wary(server: GcsServer) -> AsyncIterator[GcsStore]:
    """Open a store that soon notices that the server is silent."""
    store = GcsStore(
        "gs://kn-test", {EMULATOR: server.url}, limits=replace(QUICK, idle_s=SILENCE_S)
    )
    yield store
    await store.aclose()


@pytest.fixture
async def hasty(server: GcsServer) -> AsyncIterator[GcsStore]:
    """Open a store that soon gives up."""
    limits = replace(QUICK, retry=replace(QUICK.retry, total_s=1.0))
    store = GcsStore("gs://kn-test", {EMULATOR: server.url}, limits=limits)
    yield store
    await store.aclose()
