"""`down` removes exactly the resources that have kinetic's name and label."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kinetic.accelerators import parse
from kinetic.aio.infra import Infrastructure, Pool, Site
from kinetic.aio.infra.resources import Action
from kinetic.aio.infra.setup import SERVICES, Shape
from kinetic.errors import ConfigurationError, Unavailable
from tests.infra.google import Google
from tests.infra.sites import cut_off, down, opened, public_package, state_of, up

PROJECT = "cloudresourcemanager/v3/projects/acme-1"
BUCKET = "storage/storage/v1/b/acme-1-kn-lab-jobs"
CLUSTER = "container/v1/projects/acme-1/locations/us-central1-a/clusters/lab"


async def test_down_removes_all_that_up_created(lab: Infrastructure, google: Google) -> None:
    await lab.apply(await lab.plan_pool(Pool(accelerator=parse("tpu7x-2x2x2"))))
    google.documents[f"{BUCKET}/o/default%2Fjob-1"] = {"name": "default/job-1"}
    google.in_use = 2
    planned = await down(lab)
    assert planned.plan.usd_per_hour < -0.2
    assert not google.documents
    removed = [request for request in google.requests if request.startswith("DELETE ")]
    (cluster_at,) = [at for at, request in enumerate(removed) if request.endswith("/clusters/lab")]
    (policy_at,) = [at for at, request in enumerate(removed) if "/resourcePolicies/" in request]
    assert cluster_at < policy_at  # nodes use the policy
    assert not google.policies[PROJECT]["bindings"]
    assert not (await lab.plan_down()).plan.changes


async def test_a_second_cluster_of_the_project_stays(google: Google, site: Site) -> None:
    other = Site(project="acme-1", zone="us-central1-a", cluster="lab-2")
    async with opened(google, other) as second:
        await up(second)
        before = state_of(google)["documents"]
        async with opened(google, site) as first:
            await up(first)
            await down(first)
        assert state_of(google)["documents"] == before
        assert not (await second.plan_up()).plan.steps


async def test_each_namespace_has_its_own_account_and_down_removes_all(
    lab: Infrastructure, google: Google, site: Site
) -> None:
    async with opened(google, replace(site, namespace="team-b")) as other:
        await up(other)
        assert not (await lab.plan_up()).plan.steps
    bindings = google.policies[BUCKET]["bindings"]
    readers = {binding["condition"]["title"]: binding["members"] for binding in bindings}
    (first,), (second,) = readers.values()
    assert first != second
    await down(lab)
    assert not google.documents


async def test_a_resource_without_kinetics_mark_stays(lab: Infrastructure, google: Google) -> None:
    bucket = google.documents[BUCKET]
    bucket["labels"] = {"team": "others"}
    account = "iam/v1/projects/acme-1/serviceAccounts/kn-lab-builds@acme-1.iam.gserviceaccount.com"
    google.documents[account] |= {"description": "mine", "displayName": "mine"}
    planned = await down(lab)
    kept = {change.name for change in planned.plan.changes if change.action is Action.KEEP}
    assert kept >= {"acme-1-kn-lab-jobs", account.rpartition("/")[2]}
    assert set(google.documents) == {BUCKET, account}


async def test_buckets_stay_unless_they_may_be_destroyed(
    lab: Infrastructure, google: Google
) -> None:
    await lab.apply(await lab.plan_down())
    assert set(google.documents) == {BUCKET, "storage/storage/v1/b/acme-1-kn-lab-builds"}


async def test_the_plan_counts_the_objects_and_jobs_that_go(
    lab: Infrastructure, google: Google
) -> None:
    for name in (
        "default/jobs/job-gke-0123456789ab/handle.json",
        "default/jobs/job-gke-0123456789ab/attempts/000000/00000000.0001.outcome",
        "team/jobs/job-gke-ba9876543210/handle.json",
        "team/batches/grp-gke-0123456789ab/manifest",
        "team/batches/grp-gke-0123456789ab/values/00000000.0001.job-x",
        "packages/jobs/0123",
    ):
        google.documents[f"{BUCKET}/o/{name.replace('/', '%2F')}"] = {"name": name}
    phases = ("Running", "Pending", "Succeeded")
    pods = [
        {
            "metadata": {"name": phase, "labels": {"kinetic.dev/submission": phase}},
            "status": {"phase": phase},
        }
        for phase in phases
    ]
    google.objects["/lab/api/v1/pods"] = {"metadata": {"resourceVersion": "1"}, "items": pods}
    reasons = {change.name: change.reason for change in (await down(lab)).plan.changes}
    assert reasons["acme-1-kn-lab-jobs"] == "objects: 6, jobs: 2, batches: 1"
    assert reasons["acme-1-kn-lab-builds"] == "objects: 0, jobs: 0, batches: 0"
    assert reasons["lab"].endswith("run or wait on it: 2")
    assert not google.documents


@pytest.mark.parametrize("zone", ["us-central1-b", "us-central1", "europe-west4-a", "europe-west4"])
async def test_another_location_than_the_clusters_is_refused(
    lab: Infrastructure, google: Google, zone: str
) -> None:
    google.documents[CLUSTER]["status"] = "STOPPING"
    writes = google.writes
    async with opened(google, Site(project="acme-1", zone=zone, cluster="lab")) as elsewhere:
        for planning in (
            elsewhere.plan_down(force_destroy=True),
            elsewhere.plan_pool(Pool(accelerator=parse("gpu-l4"))),
            elsewhere.plan_pool_removal("system"),
            elsewhere.list_pools(),
        ):
            with pytest.raises(ConfigurationError, match=r"STOPPING.*--zone us-central1-a"):
                await planning
        found = await elsewhere.status()
    assert (found.state, found.namesakes, found.left) == ("absent", ("us-central1-a",), ())
    assert google.writes == writes


async def test_a_listing_without_some_zones_is_refused(
    infra: Infrastructure, google: Google
) -> None:
    google.unlisted_zones = ["europe-west4-a"]
    google.enabled |= {*SERVICES}
    with pytest.raises(Unavailable, match="europe-west4-a"):
        await infra.plan_up()
    google.unlisted_zones = []
    await up(infra)
    google.unlisted_zones = ["europe-west4-a"]
    with pytest.raises(Unavailable, match="europe-west4-a"):
        await infra.plan_down()
    assert not (await infra.plan_up()).plan.steps  # the cluster is known
    assert any("europe-west4-a" in line for line in (await infra.status()).unseen)


async def test_what_a_removed_cluster_left_in_another_region_is_refused(
    lab: Infrastructure, google: Google
) -> None:
    await lab.apply(await lab.plan_down())
    elsewhere = Site(project="acme-1", zone="europe-west4-a", cluster="lab")
    async with opened(google, elsewhere) as other:
        with pytest.raises(ConfigurationError, match="--zone of us-central1"):
            await other.plan_down(force_destroy=True)
    nearby = Site(project="acme-1", zone="us-central1-b", cluster="lab")
    async with opened(google, nearby) as other:
        await down(other)
    assert not google.documents


async def test_buckets_in_another_region_are_reported_and_can_be_removed(
    lab: Infrastructure, google: Google
) -> None:
    await lab.apply(await lab.plan_down())
    google.machines["europe-west4-a"] = ("e2-standard-4",)
    elsewhere = Site(project="acme-1", zone="europe-west4-a", cluster="lab")
    async with opened(google, elsewhere) as other:
        planned = await up(other)
        reasons = [change.reason for change in planned.plan.changes if change.kind == "bucket"]
        assert "'US-CENTRAL1'" in reasons[0] and "'US'" in reasons[1]
        for key in [key for key in google.documents if "/clusters/" in key]:
            del google.documents[key]
        await down(other)
    assert not google.documents


async def test_a_disabled_api_of_clusters_hides_none(infra: Infrastructure, google: Google) -> None:
    assert not (await infra.plan_down()).plan.changes
    await up(infra)
    google.enabled.remove("container.googleapis.com")  # as a quota project without this API
    with pytest.raises(ConfigurationError, match="Kubernetes Engine API"):
        await infra.plan_down()


@pytest.mark.parametrize(
    ("location", "shared"),
    [
        ("us-central1-b", {"subnetworks", "routers", "repositories", "resourcePolicies"}),
        ("us-central1", {"subnetworks", "routers", "repositories", "resourcePolicies"}),
        ("us-east1-c", {"repositories"}),
        ("europe-west4-a", set()),
    ],
)
async def test_down_keeps_what_a_cluster_of_the_same_name_uses(
    lab: Infrastructure, google: Google, site: Site, location: str, shared: set[str]
) -> None:
    await lab.apply(await lab.plan_pool(Pool(accelerator=parse("tpu7x-2x2x2"))))
    clusters = {
        key: google.documents.pop(key) for key in [*google.documents] if "/clusters/" in key
    }
    google.machines[location] = ("e2-standard-4",)
    before = {*google.documents}
    other_site = replace(site, zone=location)
    async with opened(google, other_site) as other:
        shape: Shape = "autopilot" if location == "us-central1" else "standard"
        await other.apply(await other.plan_up(shape=shape))
        google.documents |= clusters
        planned = await down(lab)
        assert planned.namesakes == (location,)
        assert not [key for key in google.documents if key in clusters]
        gone = {key.split("/")[-2] for key in before - {*google.documents}}
        assert gone == {"subnetworks", "routers", "repositories", "resourcePolicies"} - shared
        assert not (await other.plan_up(shape=shape)).plan.steps
        assert not (await down(other)).namesakes
    assert not google.documents


async def test_a_cluster_without_kinetics_label_keeps_what_it_uses(
    lab: Infrastructure, google: Google
) -> None:
    google.documents[CLUSTER]["resourceLabels"] = {"team": "others"}
    planned = await lab.plan_down(force_destroy=True)
    assert not planned.plan.steps
    reasons = {change.name: change.reason for change in planned.plan.changes}
    assert "kinetic's labels" in reasons["lab"] and "uses it" in reasons["acme-1-kn-lab-jobs"]


@pytest.mark.full
async def test_down_cut_off_at_any_write_can_be_repeated(google: Google, site: Site) -> None:
    async with opened(google, site) as infra:
        await up(infra)
        start = google.writes
        await down(infra)
        cuts = google.writes - start
        for number in range(1, cuts + 1):
            for when in ("before", "after"):
                await up(infra)
                await cut_off(google, down(infra), number, when)
                await down(infra)
                assert not google.documents, f"cut off {when} write {number}"


@pytest.mark.full
async def test_down_of_an_adopted_cluster_can_be_repeated_after_any_cut(
    google: Google, site: Site
) -> None:
    async with opened(google, site) as infra:
        public_package(google)
        await up(infra)
        start = google.writes
        await down(infra)
        for number in range(1, google.writes - start + 1):
            public_package(google)
            await up(infra)
            await cut_off(google, down(infra), number)
            await down(infra)
            assert not google.documents, f"cut off after write {number}"


async def test_up_adopts_a_cluster_of_the_public_package(
    infra: Infrastructure, google: Google
) -> None:
    public_package(google)
    planned = await infra.plan_up()
    assert not planned.plan.obstacles
    created = {change.name for change in planned.plan.changes if change.action is Action.CREATE}
    assert "kn-lab-workers@acme-1.iam.gserviceaccount.com" in created
    assert not {"lab", "kn-lab-router", "acme-1-kn-lab-jobs"} & created
    await infra.apply(planned)
    await down(infra)
    assert not google.documents
