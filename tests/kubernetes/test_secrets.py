"""The Secret that pods read exists exactly as long as they need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from kinetic.aio.kubernetes.pending import Patience
from kinetic.aio.kubernetes.secrets import submission_secret
from kinetic.aio.ports import JobSpec, Phase
from kinetic.job_status import Reason
from tests.jobs import until
from tests.kubernetes.places import Place


def item(place: Place, number: int, fence: int) -> JobSpec:
    """Make a batch's item as the lease holder with this fence launches it."""
    job = place.job(f"grp-a-{number}-1", group="grp-a", attempt=1)
    return replace(job, order=replace(job.order, fence=fence))


async def secrets(place: Place) -> list[str]:
    return [secret["metadata"]["name"] for secret in await place.items("secrets")]


async def test_finishing_a_batch_removes_its_secret_and_launching_restores_it(place: Place) -> None:
    cluster = await place.open()
    await cluster.finish("grp-a", 1)  # no Secret exists yet
    await cluster.keep_secret("grp-a", b"environment")
    await cluster.launch(item(place, 0, 1))
    await cluster.finish("grp-a", 1)
    assert await cluster.secret("grp-a") == b"environment"
    assert len(await secrets(place)) == 1
    for fence in (1, 2):
        await cluster.launch(item(place, fence, fence))
        assert (await until(cluster, f"grp-a-{fence}-1")).exit_code == 0
    await cluster.finish("grp-a", 2)
    await cluster.drop_secret(["grp-a"])
    assert await secrets(place) == []


async def test_a_superseded_holder_removes_nothing(place: Place) -> None:
    first, second = await place.open(), await place.open()
    await first.launch(item(place, 0, 1))
    await second.launch(item(place, 1, 2))
    await first.finish("grp-a", 1)
    assert await secrets(place) == ["grp-a"]
    await first.launch(item(place, 2, 1))  # the superseded holder's last launch comes late
    place.requests.clear()
    await second.launch(item(place, 3, 2))
    assert place.requests == {"create jobs": 1}
    await second.finish("grp-a", 2)
    assert await secrets(place) == []


async def test_a_job_whose_client_was_killed_before_it_created_the_secret_is_ended(
    place: Place,
) -> None:
    """Any watching client ends it, because it occupies a node but can never start."""
    patience = Patience(asked_s=0.5, slow_s=1.0, report_s=0.5, orphaned_s=1.5)
    cluster = await place.open(patience)
    job = place.job("one", environment={"TOKEN": "geheim"})
    at = Placement(namespace=place.namespace.name, secret=submission_secret(job))
    manifest: dict[str, Any] = job_manifest(job, at)
    await place.call("POST", "batch/v1/jobs", manifest)
    seen = await until(cluster, "one")
    assert (seen.phase, seen.reason) == (Phase.ENDED, Reason.SETUP)
    assert "Secret 'one'" in seen.message
    assert "submit the job again" in seen.message
