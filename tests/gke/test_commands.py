"""Run the command line on a cluster with a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Kinetic, kinetic
from tests.cluster.fixtures import Namespace

__all__ = ["kinetic"]

FILE = Path(__file__).parent / "commands.py"


def test_a_job_and_a_batch_from_the_command_line(
    kinetic: Kinetic, configured: Namespace, tmp_path: Path
) -> None:
    job = kinetic("run", f"{FILE}:double", "-a", "x=4", "--detach", "--json").json["job_id"]
    assert kinetic("jobs", "logs", job, "-f").out == "doubling 4\n"
    assert kinetic("jobs", "result", job, "--unpickle", "--json").json["value"] == "8"
    (row,) = kinetic("jobs", "list", "--json").json["items"]
    assert (row["job_id"], row["status"], row["backend"]) == (job, "SUCCEEDED", "gke")
    assert kinetic("jobs", "status", job[:-2], "--json").json["k8s_name"]
    inputs = tmp_path / "in.csv"
    inputs.write_text("x\n1\n-1\n")
    ran = kinetic("run", f"{FILE}:double", "--map", str(inputs), "--json")
    assert ran.code == 1
    (batch,) = kinetic("batches", "list", "--json").json["items"]
    assert batch["counts"] == {"SUCCEEDED": 1, "FAILED": 1}
    assert batch["reason"].endswith("ValueError: below zero")
    assert kinetic("batches", "cleanup", batch["group_id"], "-y").code == 0
    assert kinetic("jobs", "cleanup", job).code == 0
    assert kinetic("jobs", "list", "--json").json["items"] == []
    assert configured.call("GET", "batch/v1/jobs")["items"] == []
    assert kinetic("jobs", "status", job).code == 3


def test_a_missing_permission_points_to_the_doctor(
    kinetic: Kinetic, configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = kinetic("jobs", "list", "--kube-context", "dev")
    assert refused.code == 4, refused.err
    assert "kinetic doctor" in refused.err


def test_a_context_that_is_not_there_is_a_wrong_setting(
    kinetic: Kinetic, configured: Namespace
) -> None:
    assert kinetic("jobs", "list", "--kube-context", "nowhere").code == 2


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
