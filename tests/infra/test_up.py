"""`up` creates everything once, can be repeated after any failure, and first reports problems."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from kinetic.aio._net.google import GoogleClient
from kinetic.aio.infra import Infrastructure, Site
from kinetic.aio.infra.resources import Action, Resource
from kinetic.aio.infra.setup import SERVICES
from kinetic.errors import AuthError, ConfigurationError, KineticError, Refused
from tests.infra.google import Google
from tests.infra.sites import QUICK, Tokens, cut_off, opened, state_of, up

CLUSTER = "container/v1/projects/acme-1/locations/us-central1-a/clusters/lab"
BUCKET = "storage/storage/v1/b/acme-1-kn-lab-jobs"


async def test_up_creates_everything_and_then_plans_nothing(
    infra: Infrastructure, google: Google
) -> None:
    planned = await up(infra)
    assert {change.action for change in planned.plan.changes} == {Action.CREATE, Action.UPDATE}
    kinds = {re.split(r"[/.]", key)[-2] for key in google.documents}
    assert {"clusters", "networks", "subnetworks", "routers", "repositories", "b"} <= kinds
    assert len(google.objects) == 5
    writes = google.writes
    again = await up(infra)
    assert {change.action for change in again.plan.changes} == {Action.KEEP}
    assert google.writes == writes


@pytest.mark.parametrize(
    "names",
    [
        {"cluster": "a" * 20},
        {
            "project": "subsidiary.example.com:a-project-of-twenty-1",
            "cluster": "a-long-cluster-name",
        },
        {"namespace": 'x") || true || ("'},
    ],
)
def test_names_that_google_would_refuse_are_refused(names: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        Site(**{"project": "acme-1", "zone": "us-central1-a", "cluster": "lab", **names})


async def test_down_stops_if_it_can_not_list_clusters(lab: Infrastructure, google: Google) -> None:
    google.unlisted = True
    with pytest.raises(AuthError, match="list the clusters"):
        await lab.plan_down()


class LapsedLogin(Tokens):
    """Expired credentials: every request fails with the same error."""

    async def get(self) -> str:
        raise AuthError("log in")


async def test_without_credentials_the_plan_ends_with_one_error(google: Google, site: Site) -> None:
    credentials: Any = LapsedLogin()
    lapsed = GoogleClient(google.environ, QUICK, credentials=credentials)
    async with Infrastructure(site, environ=google.environ, google=lapsed) as infra:
        with pytest.raises(AuthError, match=r"^log in$"):
            await infra.plan_up()


async def test_an_autopilot_cluster_is_found_in_its_region(
    infra: Infrastructure, google: Google
) -> None:
    await infra.apply(await infra.plan_up(shape="autopilot"))
    assert not (await infra.plan_up(shape="autopilot")).plan.steps
    assert (await infra.status()).state == "RUNNING"
    assert await infra.list_pools() == []
    await infra.apply(await infra.plan_down(force_destroy=True))
    assert not google.documents


@pytest.mark.full
async def test_up_cut_off_at_any_write_can_be_repeated(google: Google, site: Site) -> None:
    complete = Google(machines=google.machines)
    await _serve_and_set_up(complete, site)
    expected, cuts = state_of(complete), complete.writes
    assert cuts > 20
    for number in range(1, cuts + 1):
        for when in ("before", "after"):
            interrupted = Google(machines=google.machines)
            await _serve_and_set_up(interrupted, site, cut=(number, when))
            assert state_of(interrupted) == expected, f"cut off {when} write {number}"


async def _serve_and_set_up(google: Google, site: Site, cut: tuple[int, str] | None = None) -> None:
    """Serve *google* and run `up`, after one that was *cut* off at a write, if any."""
    from aiohttp import web

    runner = web.AppRunner(google.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    google.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        if cut is not None:
            async with opened(google, site) as infra:
                await cut_off(google, up(infra), *cut)
        async with opened(google, site) as infra:
            await up(infra)
    finally:
        await runner.cleanup()


async def test_two_at_once_end_in_the_same_state(google: Google, site: Site) -> None:
    async with opened(google, site) as first, opened(google, site) as second:
        await asyncio.gather(up(first), up(second))
        again = await first.plan_up()
    assert not again.plan.steps


async def test_everything_missing_is_reported_at_once(
    infra: Infrastructure, google: Google
) -> None:
    from kinetic.aio.infra.preflight import PERMISSIONS

    google.permissions = {*PERMISSIONS} - {
        "container.clusters.create",
        "compute.networks.create",
        "storage.buckets.create",
    }
    google.billing = False
    google.enabled.add("compute.googleapis.com")
    google.machines = {"us-central1-a": ("ct4p-hightpu-4t",)}
    with pytest.raises(ConfigurationError) as caught:
        await infra.plan_up()
    message = str(caught.value)
    for part in (
        "container.clusters.create, ",
        "compute.networks.create",
        "storage.buckets.create",
        "billing",
        "us-central1-a has none",
    ):
        assert part in message
    assert google.writes == 0


async def test_a_zone_without_e2_gets_another_machine(
    infra: Infrastructure, google: Google
) -> None:
    google.enabled.add("compute.googleapis.com")
    google.machines = {"us-central1-a": ("n1-standard-4", "n2d-standard-4")}
    await up(infra)
    pool = google.documents[f"{CLUSTER}/nodePools/system"]
    assert pool["config"]["machineType"] == "n2d-standard-4"


@pytest.mark.parametrize("trap", ["disabled", "enabled", "enabling"])
async def test_a_zone_without_e2_gets_another_machine_also_in_a_fresh_project(
    infra: Infrastructure, google: Google, trap: str
) -> None:
    google.machines = {"us-central1-a": ("ct4p-hightpu-4t", "n4-standard-4")}
    if trap != "disabled":
        google.enabled |= {*SERVICES}
    if trap == "enabling":  # as if an earlier `up` was interrupted just after it enabled the APIs
        google.starting.update(dict.fromkeys(SERVICES, 2))
    planned = await up(infra)
    (change,) = [change for change in planned.plan.changes if change.kind == "cluster"]
    assert ("or similar" in change.reason) == (trap != "enabled")
    config = google.documents[f"{CLUSTER}/nodePools/system"]["config"]
    assert (config["machineType"], config["diskType"]) == ("n4-standard-4", "hyperdisk-balanced")
    google.documents[CLUSTER]["status"] = "ERROR"
    planned = await infra.plan_up()
    (cluster,) = [each for each in planned.resources if each.kind == "cluster"]
    assert isinstance(cluster, Resource) and "n4-standard-4" in str(cluster.create.body)
    google.documents[CLUSTER]["status"] = "RUNNING"
    google.machines = {"us-central1-a": ("ct4p-hightpu-4t",)}
    assert not (await infra.plan_up()).plan.steps  # the cluster has its machines already


@pytest.mark.parametrize(
    ("machines", "message"),
    [({"us-central1-a": ("ct4p-hightpu-4t",)}, "us-central1-a has none"), ({}, "no zone")],
)
async def test_a_zone_without_any_machine_is_refused_before_anything_is_created(
    infra: Infrastructure, google: Google, machines: dict[str, tuple[str, ...]], message: str
) -> None:
    google.machines = machines
    planned = await infra.plan_up()
    with pytest.raises(KineticError, match=message):
        await infra.apply(planned)
    assert not google.documents


async def test_a_cluster_of_this_name_in_another_zone_is_an_error(
    lab: Infrastructure, google: Google
) -> None:
    elsewhere = Site(project="acme-1", zone="us-central1-b", cluster="lab")
    google.machines["us-central1-b"] = ("e2-standard-4",)
    async with opened(google, elsewhere) as other:
        with pytest.raises(ConfigurationError, match="us-central1-a"):
            await other.plan_up()


async def test_drift_is_shown_and_repaired_where_possible(
    lab: Infrastructure, google: Google
) -> None:
    google.documents[BUCKET]["lifecycle"] = {"rule": []}
    cluster = google.documents[CLUSTER]
    cluster["releaseChannel"] = {"channel": "RAPID"}
    planned = await lab.plan_up()
    found = {
        change.kind: change for change in planned.plan.changes if change.action is not Action.KEEP
    }
    assert found["bucket"].action is Action.UPDATE
    assert found["cluster"].action is Action.DIFFERS
    assert "RAPID" in found["cluster"].reason
    await lab.apply(planned)
    again = await lab.plan_up()
    assert not again.plan.steps


async def test_the_public_endpoint_of_an_old_cluster_is_opened(
    lab: Infrastructure, google: Google
) -> None:
    google.documents[CLUSTER]["releaseChannel"] = {"channel": "RAPID"}
    planned = await lab.plan_up(public_endpoint=True)
    (change,) = planned.plan.steps
    assert change.action is Action.UPDATE and "ipEndpointsConfig" in change.reason
    await lab.apply(planned)
    endpoints = google.documents[CLUSTER]["controlPlaneEndpointsConfig"]
    assert endpoints["ipEndpointsConfig"] == {"enabled": True}
    assert endpoints["dnsEndpointConfig"]["allowExternalTraffic"]
    again = await lab.plan_up(public_endpoint=True)
    (found,) = [change for change in again.plan.changes if change.action is not Action.KEEP]
    assert found.action is Action.DIFFERS
    assert not (await lab.plan_up()).plan.steps


async def test_a_foreign_resource_of_the_same_name_stops_up_before_the_first_write(
    infra: Infrastructure, google: Google
) -> None:
    google.enabled |= {"compute.googleapis.com", "storage.googleapis.com"}
    google.documents["compute/compute/v1/projects/acme-1/global/networks/kn-lab"] = {
        "name": "kn-lab",
        "description": "ours, keep out",
    }
    google.documents[BUCKET] = {"_foreign": "another project"}
    planned = await infra.plan_up()
    assert {change.kind for change in planned.plan.obstacles} == {"network", "bucket"}
    with pytest.raises(Refused, match="kn-lab"):
        await infra.apply(planned)
    assert google.writes == 0


@pytest.mark.parametrize("trap", ["unknown", "enabling", "busy", "conflicts", "looks"])
async def test_up_waits_for_temporary_errors(
    infra: Infrastructure, google: Google, trap: str
) -> None:
    setattr(google, trap, 3)
    await up(infra)
    assert not (await infra.plan_up()).plan.steps
    if trap == "conflicts":
        bindings = [each for policy in google.policies.values() for each in policy["bindings"]]
        assert sum(binding["role"] == "roles/viewer" for binding in bindings) == 3


async def test_a_cluster_that_is_broken_is_reported(lab: Infrastructure, google: Google) -> None:
    cluster = google.documents[CLUSTER]
    cluster |= {"status": "DEGRADED", "conditions": [{"message": "the subnet is full"}]}
    planned = await lab.plan_up()
    found = next(change for change in planned.plan.changes if change.kind == "cluster")
    assert found.action is Action.DIFFERS
    assert "the subnet is full" in found.reason


async def test_one_failure_does_not_stop_the_other_changes(
    infra: Infrastructure, google: Google
) -> None:
    google.enabled |= {*SERVICES}
    planned = await infra.plan_up()
    google.documents[
        "compute/compute/v1/projects/acme-1/regions/us-central1/routers/kn-lab-router"
    ] = {
        "name": "kn-lab-router",
        "description": "not ours",
    }
    with pytest.raises(KineticError, match="kn-lab-router"):
        await infra.apply(planned)
    assert BUCKET in google.documents
    assert not any("/clusters/" in key for key in google.documents)


async def test_pods_reach_the_objects_of_their_namespace_only(
    lab: Infrastructure, google: Google
) -> None:
    (binding,) = google.policies[BUCKET]["bindings"]
    assert "objects/default/" in binding["condition"]["expression"]
    account = google.objects["/lab/api/v1/namespaces/default/serviceaccounts/kinetic"]
    assert "kn-lab-workers@" in str(account["metadata"]["annotations"])


async def test_builds_may_read_their_sources_and_write_their_logs(
    lab: Infrastructure, google: Google
) -> None:
    (binding,) = google.policies["storage/storage/v1/b/acme-1-kn-lab-builds"]["bindings"]
    assert binding["role"] == "roles/storage.objectAdmin"  # as the error of a failed build advises
    assert binding["members"] == ["serviceAccount:kn-lab-builds@acme-1.iam.gserviceaccount.com"]


async def test_missing_permissions_name_the_role(infra: Infrastructure, google: Google) -> None:
    google.permissions = set()
    with pytest.raises(ConfigurationError, match="roles/editor"):
        await infra.plan_up()
