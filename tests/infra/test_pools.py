"""Node pools: the request for each accelerator, and settings that are refused before a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kinetic.accelerators import parse
from kinetic.aio.infra import Infrastructure, Pool, Site
from kinetic.aio.infra.pools import body
from kinetic.aio.infra.resources import Action
from kinetic.errors import ConfigurationError, NotFound, Refused
from tests.infra.google import Google
from tests.infra.sites import down, opened, public_package, up

POOLS = "container/v1/projects/acme-1/locations/us-central1-a/clusters/lab/nodePools"


async def add(infra: Infrastructure, name: str, **options: object) -> Pool:
    pool = Pool(accelerator=parse(name), **options)  # type: ignore[arg-type]
    await infra.apply(await infra.plan_pool(pool))
    return pool


@pytest.mark.parametrize(
    "name",
    ["tpu-v5e-1", "tpu-v6e-8", "tpu-v6e-16:spot", "tpu7x-4x4x4", "gpu-l4", "gpu-h100x8", "v5p-8"],
)
async def test_a_pool_is_added_once(lab: Infrastructure, google: Google, name: str) -> None:
    pool = await add(lab, name)
    assert google.documents[f"{POOLS}/{pool.name}"]["status"] == "RUNNING"
    writes = google.writes
    await add(lab, name)
    assert google.writes == writes


async def test_a_slice_of_several_hosts_fills_its_pool(infra: Infrastructure) -> None:
    pool = Pool(accelerator=parse("tpu-v6e-16"), min_nodes=4)
    sent = body(infra.site, pool)
    assert sent["autoscaling"]["totalMaxNodeCount"] == pool.accelerator.hosts == 4
    assert sent["placementPolicy"] == {"type": "COMPACT", "tpuTopology": "4x4"}
    with pytest.raises(ConfigurationError, match="0 or 4"):
        Pool(accelerator=parse("tpu-v6e-16"), min_nodes=2)


async def test_gpus_get_their_driver(infra: Infrastructure) -> None:
    (gpus,) = body(infra.site, Pool(accelerator=parse("gpu-l4x2")))["config"]["accelerators"]
    assert gpus["gpuDriverInstallationConfig"] == {"gpuDriverVersion": "LATEST"}
    assert gpus["acceleratorCount"] == "2"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cpu", {}, "no pool"),
        ("gpu-l4:spot", {"reservation": "r"}, "spot"),
        ("gpu-h200x8", {}, "networks"),
    ],
)
def test_an_impossible_pool_is_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Pool(accelerator=parse(name), **options)  # type: ignore[arg-type]


async def test_a_reservation_is_checked_first(lab: Infrastructure, google: Google) -> None:
    with pytest.raises(ConfigurationError, match="no reservation"):
        await add(lab, "gpu-l4", reservation="mine")
    key = "compute/compute/v1/projects/acme-1/zones/us-central1-a/reservations/mine"
    google.documents[key] = {
        "specificReservation": {
            "count": "2",
            "inUseCount": "2",
            "instanceProperties": {"machineType": "g2-standard-8"},
        }
    }
    with pytest.raises(ConfigurationError) as caught:
        await add(lab, "gpu-l4", reservation="mine")
    assert "g2-standard-8" in str(caught.value)
    assert "0 free" in str(caught.value)
    assert not any("gpu-l4" in key for key in google.documents)


async def test_a_quota_is_checked_first(lab: Infrastructure, google: Google) -> None:
    google.quotas["NVIDIA_L4_GPUS"] = (4.0, 3.0)
    await add(lab, "gpu-l4")
    with pytest.raises(ConfigurationError, match="NVIDIA_L4_GPUS"):
        await add(lab, "gpu-l4x2")


async def test_a_stock_out_names_zones_and_leaves_no_pool(
    lab: Infrastructure, google: Google
) -> None:
    google.stockout["us-central1-a"] = "us-central1-b,us-central1-c"
    with pytest.raises(Refused, match="us-central1-b, us-central1-c") as caught:
        await add(lab, "gpu-l4")
    assert caught.value.answer["zonesAvailable"] == ["us-central1-b", "us-central1-c"]
    assert not any("gpu-l4" in key for key in google.documents)
    await add(lab, "gpu-l4", zone="us-central1-b")
    assert google.documents[f"{POOLS}/gpu-l4"]["locations"] == ["us-central1-b"]
    assert not (await lab.plan_pool(Pool(accelerator=parse("gpu-l4")))).plan.steps


async def test_nodes_are_in_the_region_of_their_cluster(
    lab: Infrastructure, google: Google
) -> None:
    with pytest.raises(ConfigurationError, match="us-east1-b"):
        await add(lab, "gpu-l4", zone="us-east1-b")
    await add(lab, "gpu-l4", zone="us-central1-ai1a")  # a zone only for accelerators
    assert google.documents[f"{POOLS}/gpu-l4"]["locations"] == ["us-central1-ai1a"]


async def test_a_stock_out_of_the_cluster_leaves_no_cluster(
    infra: Infrastructure, google: Google, site: Site
) -> None:
    google.stockout["us-central1-a"] = "us-central1-b"
    with pytest.raises(Refused) as caught:
        await up(infra)
    assert caught.value.answer["kind"] == "cluster"
    assert not any("/clusters/" in key for key in google.documents)
    google.machines["us-central1-b"] = ("e2-standard-4",)
    async with opened(google, replace(site, zone="us-central1-b")) as other:
        await up(other)


async def test_pools_are_listed_changed_and_removed(lab: Infrastructure, google: Google) -> None:
    pool = await add(lab, "tpu-v6e-16:spot")
    (found,) = [each for each in await lab.list_pools() if each["name"] == pool.name]
    assert (found["topology"], found["spot"], found["max_nodes"]) == ("4x4", True, 4)
    planned = await lab.plan_pool(Pool(accelerator=parse("tpu-v6e-16:spot"), min_nodes=4))
    assert [change.action for change in planned.plan.changes] == [Action.UPDATE]
    assert planned.plan.usd_per_hour > 0
    before = (await lab.plan_down()).plan.usd_per_hour
    await lab.apply(planned)
    after = (await lab.plan_down()).plan.usd_per_hour
    assert after == pytest.approx(before - planned.plan.usd_per_hour)
    assert google.documents[f"{POOLS}/{pool.name}"]["autoscaling"]["totalMinNodeCount"] == 4
    with pytest.raises(NotFound, match=pool.name):
        await lab.plan_pool_removal("nosuch")
    removal = await lab.plan_pool_removal(pool.name)
    assert removal.plan.usd_per_hour == pytest.approx(-planned.plan.usd_per_hour)
    await lab.apply(removal)
    assert [pool["name"] for pool in await lab.list_pools()] == ["system"]


async def test_a_regional_cluster_gets_pools_in_a_zone(
    lab: Infrastructure, google: Google, site: Site
) -> None:
    for key in [key for key in google.documents if "/clusters/lab" in key]:
        document = google.documents.pop(key) | {"location": "us-central1"}
        google.documents[key.replace("us-central1-a", "us-central1")] = document
    pool = await add(lab, "gpu-l4")
    key = f"{POOLS.replace('us-central1-a', 'us-central1')}/{pool.name}"
    assert google.documents[key]["locations"] == ["us-central1-a"]
    planned = await lab.plan_pool_removal(pool.name)
    assert planned.plan.site.zone == "us-central1"
    await lab.apply(planned)
    assert key not in google.documents
    async with opened(google, replace(site, zone="us-central1")) as regional:
        with pytest.raises(ConfigurationError, match="--node-zone"):
            await add(regional, "gpu-l4")
        await add(regional, "gpu-l4", zone="us-central1-a")
    assert google.documents[key]["locations"] == ["us-central1-a"]


async def test_a_pool_without_kinetics_label_stays_as_it_is(
    lab: Infrastructure, google: Google
) -> None:
    config = {"machineType": "g2-standard-4", "labels": {"team": "others"}}
    google.documents[f"{POOLS}/gpu-l4"] = {"name": "gpu-l4", "config": config, "status": "ERROR"}
    automatic = {"name": "nap-1", "config": {}, "autoscaling": {"autoprovisioned": True}}
    google.documents[f"{POOLS}/nap-1"] = automatic
    before, writes = dict(google.documents), google.writes
    for name, reason in (
        ("gpu-l4", "g2-standard-4.*kinetic=true"),
        ("nap-1", "when its nodes are idle"),
        ("system", "kinetic down"),
    ):
        with pytest.raises(Refused, match=reason):
            await lab.plan_pool_removal(name)
    with pytest.raises(Refused, match="gpu-l4"):
        await add(lab, "gpu-l4", min_nodes=1)
    assert (google.documents, google.writes) == (before, writes)
    (note,) = (await lab.plan_down()).notes
    assert note.endswith("node pools that kinetic didn't make: gpu-l4")
    await down(lab)
    assert not google.documents


async def test_a_pool_of_the_public_package_is_removed(
    infra: Infrastructure, google: Google
) -> None:
    public_package(google)
    labels = {"kinetic": "true", "goog-packaged-solution": "kinetic"}
    pool = {"name": "tpu-v6e-8-1a2b", "config": {"labels": labels}, "status": "RUNNING"}
    google.documents[f"{POOLS}/tpu-v6e-8-1a2b"] = pool
    await infra.apply(await infra.plan_pool_removal("tpu-v6e-8-1a2b"))
    assert f"{POOLS}/tpu-v6e-8-1a2b" not in google.documents


async def test_a_pool_without_a_cluster_says_how_to_create_one(infra: Infrastructure) -> None:
    with pytest.raises(NotFound, match="kinetic up"):
        await infra.plan_pool(Pool(accelerator=parse("gpu-l4")))


async def test_each_slice_is_a_pool(lab: Infrastructure, google: Google) -> None:
    await add(lab, "tpu7x-4x4x4")
    planned = await lab.plan_pool(Pool(accelerator=parse("tpu7x-4x4x4")), slices=3)
    assert [(change.kind, change.name) for change in planned.plan.steps] == [
        ("node pool", "tpu7x-64-2"),
        ("node pool", "tpu7x-64-3"),
    ]
    await lab.apply(planned)
    assert len({pool["name"] for pool in await lab.list_pools()}) == 4
    with pytest.raises(ConfigurationError, match="--min-nodes"):
        await lab.plan_pool(Pool(accelerator=parse("gpu-l4")), slices=2)


async def test_a_quota_counts_all_slices(lab: Infrastructure, google: Google) -> None:
    google.quotas["TPU_LITE_PODSLICE_V5"] = (40.0, 0.0)
    with pytest.raises(ConfigurationError, match="needs 48"):
        await lab.plan_pool(Pool(accelerator=parse("tpu-v5e-16")), slices=3)
