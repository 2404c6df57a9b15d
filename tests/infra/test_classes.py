"""Create, list, use, and remove ComputeClasses on the control plane of the tests."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.accelerators import parse
from kinetic.aio.infra import Infrastructure, Pool, Site
from kinetic.aio.infra.join import target_of
from kinetic.aio.infra.resources import Action
from kinetic.aio.kubernetes.access import Access, open_access
from kinetic.errors import ConfigurationError, NotFound, Refused
from tests.cluster.control_plane import ControlPlane
from tests.cluster.crds import compute_class
from tests.cluster.fixtures import IMAGE, Namespace, until
from tests.cluster.rest import Refused as NotServed
from tests.infra.google import Google
from tests.infra.sites import opened, up

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CLASSES = "/apis/cloud.google.com/v1/computeclasses"
CLUSTER = "container/v1/projects/acme-1/locations/us-central1-a/clusters/lab"
DEADLINE_S = 120.0


@kinetic.run(accelerator="gpu-l4:spot", container_image=IMAGE, cpu=0.1)
def where() -> str:
    return "here"


@pytest.fixture
async def definition(control_plane: ControlPlane) -> AsyncIterator[None]:
    """Define ComputeClasses in the cluster, as GKE does."""
    crd = compute_class()
    path = f"{DEFINITIONS}/{crd['metadata']['name']}"
    control_plane.call("POST", DEFINITIONS, crd)
    try:
        await until(lambda: _served(control_plane, CLASSES))
        yield
    finally:
        control_plane.call("DELETE", path)
        await until(lambda: not _served(control_plane, path))


def _served(plane: ControlPlane, path: str) -> bool:
    try:
        plane.call("GET", path)
    except NotServed:
        return False
    return True


@pytest.fixture
async def gke(
    google: Google, site: Site, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Infrastructure]:
    """Open an infrastructure whose cluster is the control plane of the tests."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))

    async def connect() -> Access:
        return await open_access(target_of(kube_context="admin", store="/s"), os.environ)

    async with opened(google, site) as first:
        await up(first)
    google.machines |= {
        f"us-central1-{letter}": ("e2-standard-4", "g2-standard-4", "ct6e-standard-8t")
        for letter in "abf"
    }
    google.machines["us-east1-b"] = ("g2-standard-4",)
    async with opened(google, site, connect=connect) as infra:
        yield infra


async def add(infra: Infrastructure, name: str, **options: Any) -> tuple[str, str, str]:
    planned = await infra.plan_pool(Pool(accelerator=parse(name)), **options)
    await infra.apply(planned)
    (change,) = planned.plan.changes
    return change.action.value, change.kind, change.name


@pytest.mark.usefixtures("definition")
async def test_a_class_tries_spot_first_in_all_zones_of_the_region(
    gke: Infrastructure, control_plane: ControlPlane, google: Google
) -> None:
    writes = google.writes
    planned = await gke.plan_pool(Pool(accelerator=parse("gpu-l4:spot")))
    (change,) = planned.plan.changes
    assert "spot, then on-demand g2-standard-4 in us-central1-a, us-central1-b" in change.reason
    await gke.apply(planned)
    created = control_plane.call("GET", f"{CLASSES}/gpu-l4-spot")
    rules = created["spec"]["priorities"]
    assert [rule["spot"] for rule in rules] == [True, False]
    zones = [f"us-central1-{letter}" for letter in "abf"]
    assert all(rule["location"]["zones"] == zones for rule in rules)
    assert created["spec"]["nodePoolConfig"]["serviceAccount"].startswith("kn-lab-nodes@")
    google.quotas["PREEMPTIBLE_NVIDIA_L4_GPUS"] = (1.0, 1.0)  # a node of the class has used it up
    assert await add(gke, "gpu-l4:spot") == ("keep", "ComputeClass", "gpu-l4-spot")
    assert await add(gke, "tpu-v6e-8") == ("create", "ComputeClass", "tpu-v6e-8")
    tpu = control_plane.call("GET", f"{CLASSES}/tpu-v6e-8")["spec"]["priorities"]
    assert [rule["tpu"]["topology"] for rule in tpu] == ["2x4"]
    assert google.writes == writes


@pytest.mark.usefixtures("definition")
async def test_classes_are_listed_shown_and_removed(
    gke: Infrastructure, control_plane: ControlPlane
) -> None:
    await add(gke, "gpu-l4:spot")
    (found,) = [pool for pool in await gke.list_pools() if pool["kind"] == "ComputeClass"]
    assert (found["name"], found["spot"], found["max_nodes"]) == ("gpu-l4-spot", True, None)
    status = await gke.status()
    (shown,) = [pool for pool in status.pools if pool.kind == "ComputeClass"]
    assert (shown.nodes, shown.used, shown.usd_per_hour) == (0, 0, None)
    assert not any("gpu-l4-spot" in unseen for unseen in status.unseen)
    with pytest.raises(NotFound, match="gpu-l4-spot, system"):
        await gke.plan_pool_removal("nosuch")
    await gke.apply(await gke.plan_pool_removal("gpu-l4-spot"))
    assert not control_plane.call("GET", CLASSES)["items"]


@pytest.mark.usefixtures("definition")
async def test_accelerators_that_a_class_does_not_support_get_a_node_pool(
    gke: Infrastructure,
) -> None:
    assert await add(gke, "gpu-l4", fixed=True) == ("create", "node pool", "gpu-l4")
    assert await add(gke, "gpu-l4") == ("keep", "node pool", "gpu-l4")
    assert await add(gke, "tpu-v6e-16") == ("create", "node pool", "tpu-v6e-16")
    await add(gke, "tpu-v6e-8")
    with pytest.raises(ConfigurationError, match="pool remove tpu-v6e-8"):
        await gke.plan_pool(Pool(accelerator=parse("tpu-v6e-8"), min_nodes=1))


@pytest.mark.usefixtures("definition")
async def test_a_class_without_kinetics_label_stays(
    gke: Infrastructure, control_plane: ControlPlane
) -> None:
    theirs = {
        "apiVersion": "cloud.google.com/v1",
        "kind": "ComputeClass",
        "metadata": {"name": "gpu-l4"},
        "spec": {"priorities": [{"spot": True}]},
    }
    control_plane.call("POST", CLASSES, theirs)
    planned = await gke.plan_pool(Pool(accelerator=parse("gpu-l4")))
    assert [change.action for change in planned.plan.changes] == [Action.FOREIGN]
    with pytest.raises(Refused, match="gpu-l4"):
        await gke.apply(planned)
    with pytest.raises(Refused, match="kinetic=true"):
        await gke.plan_pool_removal("gpu-l4")
    assert control_plane.call("GET", f"{CLASSES}/gpu-l4")


@pytest.mark.usefixtures("definition")
async def test_an_autopilot_cluster_gets_a_class(
    gke: Infrastructure, control_plane: ControlPlane, google: Google
) -> None:
    google.documents[CLUSTER]["autopilot"] = {"enabled": True}
    assert await add(gke, "gpu-l4:spot") == ("create", "ComputeClass", "gpu-l4-spot")
    created = control_plane.call("GET", f"{CLASSES}/gpu-l4-spot")
    assert "nodePoolConfig" not in created["spec"]
    assert [pool["name"] for pool in await gke.list_pools()] == ["gpu-l4-spot"]
    for name, options in (("tpu-v6e-16", {}), ("gpu-l4", {"fixed": True})):
        with pytest.raises(ConfigurationError, match="Autopilot"):
            await add(gke, name, **options)
    google.machines.clear()
    await add(gke, "gpu-l4")
    assert control_plane.call("GET", f"{CLASSES}/gpu-l4")
    for name in ("gpu-l4", "gpu-l4-spot"):
        await gke.apply(await gke.plan_pool_removal(name))
    with pytest.raises(NotFound, match="it has none"):
        await gke.plan_pool_removal("system")


async def test_a_cluster_without_classes_gets_a_node_pool(gke: Infrastructure) -> None:
    assert await add(gke, "gpu-l4:spot") == ("create", "node pool", "gpu-l4-spot")


@pytest.mark.usefixtures("definition")
async def test_a_zone_without_the_machine_needs_another_of_the_region(
    gke: Infrastructure, google: Google
) -> None:
    google.machines["us-central1-a"] = ("e2-standard-4",)
    planned = await gke.plan_pool(Pool(accelerator=parse("gpu-l4")))
    assert "us-central1-b" in planned.plan.changes[0].reason
    google.machines = {"us-east1-b": ("g2-standard-4",)}
    with pytest.raises(ConfigurationError, match="us-east1-b"):
        await gke.plan_pool(Pool(accelerator=parse("gpu-l4")))


PLUGIN = """#!{python}
import json, os
given = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
print(json.dumps({{"kind": "ExecCredential", "apiVersion": given["apiVersion"],
    "status": {{"token": "{token}"}}}}))
"""


@pytest.fixture
def on_gke(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Make the kubeconfig use GKE's login plugin, and a folder the store of jobs."""
    plugin = tmp_path / "gke-gcloud-auth-plugin"
    plugin.write_text(PLUGIN.format(python=sys.executable, token=namespace.admin.token))
    plugin.chmod(0o755)
    config = json.loads(namespace.kubeconfig.read_text())
    login = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}
    login["interactiveMode"] = "Never"
    for user in config["users"]:
        user["user"] = {"exec": login}
    (tmp_path / "config").write_text(json.dumps(config))
    (tmp_path / "store").mkdir()
    for key, value in {
        "KUBECONFIG": str(tmp_path / "config"),
        "KINETIC_KUBE_CONTEXT": "admin",
        "KINETIC_NAMESPACE": namespace.name,
        "KINETIC_STORE": str(tmp_path / "store"),
        "KINETIC_PACKAGE_ROOT": str(Path(__file__).parent),
    }.items():
        monkeypatch.setenv(key, value)
    return namespace


@pytest.mark.usefixtures("definition")
async def test_a_job_runs_on_the_nodes_of_its_class_also_without_spot(
    gke: Infrastructure, on_gke: Namespace
) -> None:
    await add(gke, "gpu-l4:spot")
    labels = {
        "cloud.google.com/gke-accelerator": "nvidia-l4",
        "cloud.google.com/compute-class": "gpu-l4-spot",
    }
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    await asyncio.to_thread(on_gke.kubelet.add_node, "l4", gpu=1, labels=labels, taints=[taint])
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        assert await client.run(where) == "here"
