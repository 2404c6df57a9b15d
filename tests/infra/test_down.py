"""`down` removes exactly the resources that have kinetic's name and label."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kinetic.accelerators import parse
from kinetic.aio.infra import Infrastructure, Pool, Site
from kinetic.aio.infra.resources import Action
from tests.infra.google import Google
from tests.infra.sites import cut_off, down, opened, public_package, state_of, up

PROJECT = "cloudresourcemanager/v3/projects/acme-1"


async def test_down_removes_all_that_up_created(infra: Infrastructure, google: Google) -> None:
    await up(infra)
    await infra.apply(await infra.plan_pool(Pool(accelerator=parse("tpu7x-2x2x2"))))
    google.documents["storage/storage/v1/b/acme-1-kn-lab-jobs/o/default%2Fjob-1"] = {
        "name": "default/job-1"
    }
    google.in_use = 2
    planned = await down(infra)
    assert planned.plan.usd_per_hour < -0.2
    assert not google.documents
    assert not google.policies[PROJECT]["bindings"]
    assert not (await infra.plan_down()).plan.changes


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
    infra: Infrastructure, google: Google, site: Site
) -> None:
    await up(infra)
    async with opened(google, replace(site, namespace="team-b")) as other:
        await up(other)
        assert not (await infra.plan_up()).plan.steps
    bindings = google.policies["storage/storage/v1/b/acme-1-kn-lab-jobs"]["bindings"]
    readers = {binding["condition"]["title"]: binding["members"] for binding in bindings}
    (first,), (second,) = readers.values()
    assert first != second
    await down(infra)
    assert not google.documents


async def test_a_resource_without_kinetics_mark_stays(
    infra: Infrastructure, google: Google
) -> None:
    await up(infra)
    bucket = google.documents["storage/storage/v1/b/acme-1-kn-lab-jobs"]
    bucket["labels"] = {"team": "others"}
    account = "iam/v1/projects/acme-1/serviceAccounts/kn-lab-builds@acme-1.iam.gserviceaccount.com"
    google.documents[account] |= {"description": "mine", "displayName": "mine"}
    planned = await down(infra)
    kept = {change.name for change in planned.plan.changes if change.action is Action.KEEP}
    assert kept >= {"acme-1-kn-lab-jobs", account.rpartition("/")[2]}
    assert set(google.documents) == {"storage/storage/v1/b/acme-1-kn-lab-jobs", account}


async def test_buckets_stay_unless_they_may_be_destroyed(
    infra: Infrastructure, google: Google
) -> None:
    await up(infra)
    await down(infra, force_destroy=False)
    assert set(google.documents) == {
        "storage/storage/v1/b/acme-1-kn-lab-jobs",
        "storage/storage/v1/b/acme-1-kn-lab-builds",
    }


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
