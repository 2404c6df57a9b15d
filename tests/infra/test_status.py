"""`status` shows the resources, the work, and the costs, and names what it can't see."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from kinetic.accelerators import parse
from kinetic.aio.infra import Infrastructure, Pool, Queue, Site
from kinetic.errors import KineticError
from tests.infra.google import Google
from tests.infra.sites import client, opened

PODS = "/lab/api/v1/pods"


def items(*objects: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": [*objects]}


def pod(name: str, batch: str, phase: str, node: str = "") -> dict[str, Any]:
    labels = {"kinetic.dev/submission": batch, "kinetic.dev/user": "ana"}
    return {
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }


def node(name: str, pool: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"cloud.google.com/gke-nodepool": pool}}}


def queue(name: str, pending: int, admitted: int) -> dict[str, Any]:
    status = {"pendingWorkloads": pending, "admittedWorkloads": admitted}
    return {"metadata": {"name": name}, "status": status}


def group(name: str, version: str) -> dict[str, Any]:
    return {"name": name, "preferredVersion": {"version": version}}


def add_nodes_and_work(google: Google) -> None:
    kueue = "/lab/apis/kueue.x-k8s.io/v1beta2"
    groups = [group("kueue.x-k8s.io", "v1beta2"), group("leaderworkerset.x-k8s.io", "v1")]
    google.objects |= {
        "/lab/apis": {"groups": groups},
        "/lab/api/v1/nodes": items(
            node("s", "system"), node("n-1", "gpu-l4-spot"), node("n-2", "gpu-l4-spot")
        ),
        PODS: items(
            pod("a-0", "batch-a", "Running", "n-1"),
            pod("a-1", "batch-a", "Pending"),
            pod("b-0", "batch-b", "Succeeded", "n-2"),
        ),
        f"{kueue}/namespaces/default/localqueues": items(queue("team", 3, 1)),
        f"{kueue}/clusterqueues": items(queue("all", 3, 2)),
    }


async def test_status_shows_pools_queues_controllers_and_work(
    lab: Infrastructure, google: Google
) -> None:
    await lab.apply(await lab.plan_pool(Pool(accelerator=parse("gpu-l4:spot"))))
    add_nodes_and_work(google)
    found = await lab.status()
    assert found.unseen == ()
    assert found.controllers == ("LeaderWorkerSet", "Kueue")
    assert found.queues == (
        Queue(kind="LocalQueue", name="team", pending=3, admitted=1),
        Queue(kind="ClusterQueue", name="all", pending=3, admitted=2),
    )
    (work,) = found.work
    assert (work.id, work.user, work.running, work.waiting) == ("batch-a", "ana", 1, 1)
    pools = {pool.name: pool for pool in found.pools}
    gpus = pools["gpu-l4-spot"]
    assert (gpus.nodes, gpus.used, gpus.spot) == (2, 1, True)
    assert gpus.usd_per_hour is not None
    fixed = 0.10 + 0.044 + 0.134
    assert found.usd_per_hour == pytest.approx(fixed + gpus.usd_per_hour)
    assert found.to_dict()["queues"][0]["name"] == "team"
    with pytest.raises(FrozenInstanceError):
        found.state = "x"  # type: ignore[misc]


async def test_invisible_parts_are_named(lab: Infrastructure, google: Google) -> None:
    add_nodes_and_work(google)
    del google.objects["/lab/api/v1/nodes"], google.objects[PODS]
    google.objects["/lab/api/v1/namespaces/default/pods"] = items(pod("a", "batch-a", "Running"))
    google.documents["storage/storage/v1/b/acme-1-kn-lab-jobs"]["_foreign"] = "not yours"
    found = await lab.status()
    text = "\n".join(found.unseen)
    for part in ("bucket acme-1-kn-lab-jobs", "nodes: ", "jobs of all namespaces", "pool system"):
        assert part in text
    assert [part.exists for part in found.parts if part.name == "acme-1-kn-lab-jobs"] == [None]
    assert [(pool.nodes, pool.used, pool.usd_per_hour) for pool in found.pools] == [(None,) * 3]
    assert [work.id for work in found.work] == ["batch-a"]


async def test_a_cluster_that_another_tool_made_lacks_nothing(
    lab: Infrastructure, google: Google
) -> None:
    key = "container/v1/projects/acme-1/locations/us-central1-a/clusters/lab"
    google.documents[key]["resourceLabels"] = {"team": "others"}
    del google.documents["storage/storage/v1/b/acme-1-kn-lab-jobs"]
    parts = (await lab.status()).parts
    assert {part.exists for part in parts} == {True}
    assert "acme-1-kn-lab-jobs" not in {part.name for part in parts}


async def test_a_regional_cluster_is_reached_in_its_region(google: Google, site: Site) -> None:
    async with opened(google, site) as infra:
        await infra.apply(await infra.plan_up(shape="autopilot"))
    async with Infrastructure(site, environ=google.environ, google=client(google)) as infra:
        found = await infra.status()
    assert found.zone == "us-central1"
    asked = "/v1/projects/acme-1/locations/us-central1/clusters/lab"
    assert google.requests.count(f"GET container {asked}") > 1
    assert not any("/us-central1-a/clusters" in request for request in google.requests)


@pytest.mark.full
async def test_a_request_without_answer_has_a_limit(
    lab: Infrastructure, google: Google, site: Site
) -> None:
    add_nodes_and_work(google)
    google.silent = {"/lab/apis"}
    async with opened(google, site, look_s=5.0) as other:
        found = await other.status()
    assert found.controllers == ()
    assert "controllers: no answer within 5 s" in found.unseen
    assert found.work


async def test_a_site_without_anything_is_absent(infra: Infrastructure, google: Google) -> None:
    found = await infra.status()
    assert (found.state, found.usd_per_hour, found.pools) == ("absent", 0.0, ())


@pytest.mark.full
async def test_a_status_that_sees_nothing_is_a_failure(google: Google, site: Site) -> None:
    google.unlisted = True
    google.enabled |= {f"{api}.googleapis.com" for api in ("container", "storage", "compute")}
    async with opened(google, site) as infra:
        found = await infra.status()
        assert "location of the cluster" in found.unseen[0]
    google.url = "http://127.0.0.1:1"
    async with opened(google, site) as infra:
        with pytest.raises(KineticError):
            await infra.status()
