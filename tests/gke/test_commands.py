"""Run commands that read from a cluster."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Kinetic, kinetic
from tests.cluster.fixtures import Namespace

__all__ = ["kinetic"]


def test_a_missing_permission_points_to_the_doctor(
    kinetic: Kinetic, configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = kinetic("jobs", "list", "--kube-context", "dev")
    assert refused.code == 4, refused.err
    assert "kinetic doctor" in refused.err


def test_the_nodes_that_take_an_accelerator_are_counted(
    kinetic: Kinetic, configured: Namespace
) -> None:
    gpu = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    configured.kubelet.add_node("l4-1", gpu=1, labels=gpu)
    configured.kubelet.add_node("l4-4", gpu=4, labels=gpu)
    rows: dict[str, int] = {}
    while rows.get("gpu-l4") != 2:  # a new node has a taint until the controllers have seen it
        listed = kinetic("accelerators", "--live", "--json").json["items"]
        rows = {row["accelerator"]: row["nodes"] for row in listed}
    assert (rows["gpu-l4"], rows["gpu-l4x4"], rows["tpu-v5p-4"]) == (2, 1, 0)
    assert rows["cpu"] >= 1
    refused = kinetic("accelerators", "--live", "--kube-context", "dev")
    assert refused.code == 4 and "nodes" in refused.err
    local = kinetic("accelerators", "--live", "--backend", "local")
    assert local.code == 2 and "the backend is local" in local.err
