"""A real control plane, the platform on a namespace of the test's own, and a server that fails."""

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
    """The platform on `namespace`; closed after the test."""
    made = Place(namespace, tmp_path)
    yield made
    await made.aclose()


@pytest.fixture
async def server() -> AsyncIterator[FaultServer]:
    """A server that does to each request what the test sets."""
    async with FaultServer() as running:
        yield running


@pytest.fixture
def config(tmp_path: Path, server: FaultServer) -> Config:
    """A kubeconfig whose context is `server`."""
    return Config(tmp_path, server.url)


@pytest.fixture
def world(server: FaultServer) -> World:
    """Jobs and pods, as `server` reports them."""
    made = World()
    server.always = made.handle
    return made
