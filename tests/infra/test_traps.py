"""Traps of Google's APIs: kinetic waits for temporary ones, and reports others with a fix."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic.accelerators import parse
from kinetic.aio.infra import Infrastructure, Pool, Site
from kinetic.aio.infra.resources import Action
from kinetic.errors import ConfigurationError, Refused
from tests.infra.google import Google
from tests.infra.sites import down, opened, public_package, up

CLUSTER = "container/v1/projects/acme-1/locations/us-central1-a/clusters/lab"


def pool(name: str, **options: Any) -> Pool:
    return Pool(accelerator=parse(name), **options)


async def test_a_pool_that_uses_up_its_quota_can_be_planned_again(
    lab: Infrastructure, google: Google
) -> None:
    google.quotas["NVIDIA_L4_GPUS"] = (1.0, 0.0)
    with pytest.raises(ConfigurationError, match="needs 3"):
        await lab.plan_pool(pool("gpu-l4", min_nodes=3))
    wanted = pool("gpu-l4", min_nodes=1)
    await lab.apply(await lab.plan_pool(wanted))
    google.quotas["NVIDIA_L4_GPUS"] = (1.0, 1.0)
    assert not (await lab.plan_pool(wanted)).plan.steps
    assert not (await lab.plan_up(pools=(wanted,))).plan.steps


async def test_a_reservation_is_read_in_its_own_project(
    lab: Infrastructure, google: Google
) -> None:
    shared = "projects/other-1/reservations/mine"
    key = "compute/compute/v1/projects/other-1/zones/us-central1-a/reservations/mine"
    google.documents[key] = {"specificReservation": {"count": "2", "inUseCount": "0"}}
    wanted = pool("gpu-l4", reservation=shared)
    await lab.apply(await lab.plan_pool(wanted))
    created = google.documents[f"{CLUSTER}/nodePools/gpu-l4-mine"]
    assert created["config"]["reservationAffinity"]["values"] == [shared]


def test_long_reservations_make_different_names() -> None:
    first, second = (pool("gpu-l4", reservation=f"{'r' * 50}{end}") for end in "ab")
    assert first.name != second.name
    assert len(first.name) <= 39


async def test_a_machine_that_the_zone_lacks_names_zones_that_have_it(
    lab: Infrastructure, google: Google
) -> None:
    google.machines["us-central1-c"] = ("g2-standard-4",)
    with pytest.raises(ConfigurationError, match="us-central1-c"):
        await lab.plan_pool(pool("gpu-l4"))


async def test_an_autopilot_cluster_takes_no_pools(infra: Infrastructure) -> None:
    with pytest.raises(ConfigurationError, match="--accelerator conflicts with --autopilot"):
        await infra.plan_up(shape="autopilot", pools=(pool("gpu-l4"),))


async def test_a_region_names_an_autopilot_cluster(infra: Infrastructure, google: Google) -> None:
    await infra.apply(await infra.plan_up(shape="autopilot"))
    regional = Site(project="acme-1", zone="us-central1", cluster="lab")
    async with opened(google, regional) as other:
        assert not (await other.plan_up(shape="autopilot")).plan.steps
        with pytest.raises(ConfigurationError, match="Autopilot"):
            await other.plan_pool(pool("gpu-l4", min_nodes=1))
        with pytest.raises(ConfigurationError, match=r"1\.30\.3"):
            await other.plan_pool(pool("gpu-l4"))
        assert await other.list_pools() == []
        with pytest.raises(ConfigurationError, match="zone"):
            await other.plan_up()
        await other.apply(await other.plan_down(force_destroy=True))
    assert not google.documents


def test_a_site_without_a_project_is_refused_and_other_clusters_are_joined() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a project: .*, run `kinetic init`"):
        Site(project="", zone="us-central1-a", cluster="lab")


async def test_a_cluster_in_error_is_created_again(lab: Infrastructure, google: Google) -> None:
    await lab.apply(await lab.plan_pool(pool("gpu-l4")))
    google.documents[CLUSTER] |= {"status": "ERROR", "statusMessage": "the subnet is full"}
    planned = await lab.plan_up(pools=(pool("gpu-l4"),))
    found = {step.kind: step for step in planned.plan.steps}
    assert found["cluster"].action is Action.REPLACE
    assert "the subnet is full" in found["cluster"].reason
    await lab.apply(planned)
    assert google.documents[CLUSTER]["status"] == "RUNNING"
    assert f"{CLUSTER}/nodePools/gpu-l4" in google.documents


async def test_a_cluster_that_is_being_deleted_is_created_again_afterwards(
    lab: Infrastructure, google: Google
) -> None:
    wanted = (pool("gpu-l4", min_nodes=1),)
    await lab.apply(await lab.plan_pool(*wanted))
    google.documents[CLUSTER] |= {"status": "STOPPING", "_leaves": 4}
    planned = await lab.plan_up(pools=wanted)
    assert planned.plan.usd_per_hour > 0.7  # the cluster and a node
    await lab.apply(planned)
    assert google.documents[CLUSTER]["status"] == "RUNNING"
    assert f"{CLUSTER}/nodePools/gpu-l4" in google.documents


async def test_a_failed_read_does_not_prove_that_a_cluster_is_gone(
    lab: Infrastructure, google: Google
) -> None:
    google.documents[CLUSTER] |= {"status": "STOPPING", "_leaves": 6}
    planned = await lab.plan_up()
    google.documents[CLUSTER]["_denied"] = 2
    await lab.apply(planned)
    assert google.documents[CLUSTER]["status"] == "RUNNING"


async def test_a_refusal_for_another_reason_than_a_running_operation_ends_at_once(
    lab: Infrastructure, google: Google
) -> None:
    google.broken = "Workload Identity must be enabled"
    with pytest.raises(Refused, match="Workload Identity"):
        await lab.apply(await lab.plan_pool(pool("gpu-l4")))


async def test_one_change_of_a_cluster_at_a_time(infra: Infrastructure, google: Google) -> None:
    google.strict, google.looks = True, 3
    names = ("gpu-l4", "tpu-v6e-8", "tpu-v5e-1")
    planned = await infra.plan_up(pools=tuple(pool(name) for name in names))
    await infra.apply(planned)
    assert google.refused == 0


async def test_up_waits_for_a_new_account_of_an_old_cluster(
    infra: Infrastructure, google: Google
) -> None:
    public_package(google)
    google.unknown = 3
    await up(infra)
    assert not (await infra.plan_up()).plan.steps


async def test_a_bucket_of_another_project_is_reported_at_once(
    infra: Infrastructure, google: Google
) -> None:
    google.documents["storage/storage/v1/b/acme-1-kn-lab-jobs"] = {"_foreign": "another project"}
    planned = await infra.plan_up()
    with pytest.raises(Refused, match="acme-1-kn-lab-jobs"):
        await infra.apply(planned)


async def test_a_project_that_is_being_deleted_is_reported(
    infra: Infrastructure, google: Google
) -> None:
    google.state = "DELETE_REQUESTED"
    with pytest.raises(ConfigurationError, match="DELETE_REQUESTED"):
        await infra.plan_up()


async def test_resources_that_outlive_the_cluster_are_named(
    lab: Infrastructure, google: Google
) -> None:
    parent = "compute/compute/v1/projects/acme-1"
    mine = {"goog-k8s-cluster-name": "lab", "goog-k8s-cluster-location": "us-central1-a"}
    theirs = {**mine, "goog-k8s-cluster-location": "us-east1-b"}
    for zone, name, labels in (
        ("us-central1-a", "pvc-1", {**mine, "goog-gke-volume": ""}),
        ("us-central1-f", "pvc-2", {**mine, "goog-gke-volume": ""}),
        ("us-central1-a", "node", mine),
        ("us-east1-b", "pvc-3", {**theirs, "goog-gke-volume": ""}),
        ("us-central1-a", "own", {}),
    ):
        disk = {"name": name, "labels": labels, "sizeGb": "100"}
        google.documents[f"{parent}/zones/{zone}/disks/{name}"] = disk
    rules = f"{parent}/regions/us-central1/forwardingRules"
    google.documents[f"{rules}/lb"] = {"name": "lb", "labels": mine}
    google.documents[f"{rules}/other"] = {"name": "other"}
    wanted = [
        "disk pvc-1 (us-central1-a)",
        "disk pvc-2 (us-central1-f)",
        "forwarding rule lb (us-central1)",
    ]
    planned = await lab.plan_down()
    assert ", ".join(wanted) in planned.notes[0]
    assert (await lab.status()).left == ()
    await lab.apply(planned)
    assert [*(await lab.status()).left] == wanted
    assert ", ".join(wanted) in (await lab.plan_down()).notes[0]


async def test_a_cluster_without_leader_worker_sets_says_how_to_install_them(
    infra: Infrastructure, google: Google
) -> None:
    (planned,) = (await infra.plan_up()).notes
    assert "lws/releases" in planned
    await up(infra)
    assert (await infra.plan_up()).notes == (planned,)
    google.objects["/lab/apis/leaderworkerset.x-k8s.io"] = {"kind": "APIGroup"}
    assert (await infra.plan_up()).notes == ()


async def test_a_removal_that_fails_late_is_repeated(lab: Infrastructure, google: Google) -> None:
    google.released_late = 2
    await down(lab)
    assert not google.documents
