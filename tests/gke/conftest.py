"""A client's environment that leads to the cluster of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from tests.cluster.fixtures import (
    Namespace,
    bucket,
    control_plane,
    gcs_server,
    groups,
    kubelet,
    namespace,
    nodes,
)

__all__ = ["bucket", "control_plane", "gcs_server", "groups", "kubelet", "namespace", "nodes"]

IMAGE = "example.test/image:1"
"""Any name will do: the processes run in the interpreter of the tests."""


@pytest.fixture
def configured(
    namespace: Namespace,
    bucket: str,
    gcs_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Namespace:
    """The namespace, with the variables by which users name cluster and bucket."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "admin")
    monkeypatch.setenv("KINETIC_NAMESPACE", namespace.name)
    monkeypatch.setenv("KINETIC_STORE", f"gs://{bucket}")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server)
    namespace.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs_server)
    # Else each job would unpack all there is here.
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(Path(__file__).parent))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return namespace


@pytest.fixture
async def client(configured: Namespace) -> AsyncIterator[aio.Client]:
    async with aio.Client() as client:
        yield client


async def until(what: Any) -> None:
    """A process elsewhere has done something that nobody tells of."""
    while not what():
        await asyncio.sleep(0.05)
