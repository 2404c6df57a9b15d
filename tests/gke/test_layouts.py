"""The cluster's nodes decide whether eight TPU chips are on one machine or on two."""

from __future__ import annotations

import asyncio
import os

import pytest

import kinetic
from kinetic import aio
from tests.cluster.fixtures import IMAGE, Namespace

pytestmark = pytest.mark.usefixtures("groups")
DEADLINE_S = 120.0


@kinetic.run(accelerator="tpu-v6e-8", container_image=IMAGE, cpu=0.1)
def hosts() -> str:
    return os.environ.get("KINETIC_HOSTS", "1")


@pytest.mark.parametrize(
    ("machine", "chips", "count", "backend", "name"),
    [
        ("ct6e-standard-8t", 8, 1, "gke", "tpu-v6e-8"),
        ("ct6e-standard-4t", 4, 2, "pathways", "tpu-v6e-8:hosts=2"),
    ],
)
async def test_the_nodes_of_a_cluster_decide_how_many_hosts_a_slice_has(
    configured: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    chips: int,
    count: int,
    backend: str,
    name: str,
) -> None:
    monkeypatch.setenv("KINETIC_MULTIHOST", "jobset")
    labels = {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-nodepool": "tpu-v6e-1a2b",
        "node.kubernetes.io/instance-type": machine,
    }
    taint = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}
    for number in range(count):
        await asyncio.to_thread(
            configured.kubelet.add_node, f"v6e-{number}", tpu=chips, labels=labels, taints=[taint]
        )
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        job = await client.submit(hosts)
        assert (job.backend, job.accelerator) == (backend, name)
        assert await job.result(cleanup=False) == str(count)
        batch = await client.run_async_map(hosts, [{}], input_mode="kwargs")
        assert await batch.results() == [str(count)]
        await batch.cleanup()
        await job.cleanup()
