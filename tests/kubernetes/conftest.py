"""A real control plane, and the platform on a namespace of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.fixtures import Namespace, control_plane, groups, kubelet, namespace, nodes
from tests.kubernetes.places import Place

__all__ = ["control_plane", "groups", "kubelet", "namespace", "nodes"]


@pytest.fixture
async def place(namespace: Namespace, tmp_path: Path) -> AsyncIterator[Place]:
    """The platform on `namespace`; closed after the test."""
    made = Place(namespace, tmp_path)
    yield made
    await made.aclose()
