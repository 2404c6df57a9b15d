"""Fixtures for a platform on a real control plane, and for a fake server with faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.fixtures import Namespace
from tests.kubernetes.faults import FaultServer
from tests.kubernetes.kubeconfigs import Config
from tests.kubernetes.places import Place
from tests.kubernetes.world import World


@pytest.fixture
async def place(namespace: Namespace, tmp_path: Path) -> AsyncIterator[Place]:
    """Provide the platform's clients on `namespace`; close them after the test."""
    place = Place(namespace, tmp_path)
    yield place
    await place.aclose()


@pytest.fixture
async def server() -> AsyncIterator[FaultServer]:
    """Start a server that handles each request the way the test sets."""
    async with FaultServer() as running:
        yield running


@pytest.fixture
def config(tmp_path: Path, server: FaultServer) -> Config:
    """Write a kubeconfig whose context leads to `server`."""
    return Config(tmp_path, server.url)


@pytest.fixture
def world(server: FaultServer) -> World:
    """Let `server` serve jobs, pods, and logs."""
    world = World()
    server.always = world.handle
    return world
