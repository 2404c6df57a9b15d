"""A control plane with the controllers of sets, and what a user says to send jobs there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fixtures import (
    Namespace,
    control_plane,
    fresh_bucket,
    gcs_server,
    groups,
    kubelet,
    namespace,
    nodes,
)

__all__ = ["control_plane", "gcs_server", "groups", "kubelet", "namespace", "nodes"]


@pytest.fixture
def configured(namespace: Namespace, gcs_server: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The variables by which a user chooses the cluster."""
    monkeypatch.setenv("KINETIC_BACKEND", "gke")
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "admin")
    monkeypatch.setenv("KINETIC_NAMESPACE", namespace.name)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(Path(__file__).parent))
    monkeypatch.setenv("KINETIC_STORE", f"gs://{fresh_bucket(gcs_server)}")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server)
    namespace.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs_server)
    return namespace
