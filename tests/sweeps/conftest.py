"""Fixtures of the tests of sweeps: a client of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kinetic.aio import Client


@pytest.fixture
async def local(small_project) -> AsyncIterator[Client]:
    async with Client(backend="local") as client:
        yield client
