"""The Secret that pods read: there when they need it, and no longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from kinetic.aio.kubernetes.pending import Patience
from kinetic.aio.kubernetes.secrets import submission_secret
from kinetic.aio.ports import JobSpec, Phase
from kinetic.job_status import Reason
from tests.kubernetes.places import Place, until


def under(place: Place, number: int, fence: int) -> JobSpec:
    """An item of a batch, launched by the holder with this fence."""
    job = place.job(f"grp-a-{number}-1", group="grp-a", attempt=1)
    return replace(job, order=replace(job.order, fence=fence))


async def secrets(place: Place) -> list[str]:
    return [one["metadata"]["name"] for one in await place.items("secrets")]


async def test_a_batch_that_is_finished_has_none_and_one_that_goes_on_has_it_again(
    place: Place,
) -> None:
    cluster = await place.open()
    await cluster.finish("grp-a", 1)  # nobody has made one
    await cluster.keep_secret("grp-a", b"environment")
    await cluster.launch(under(place, 0, 1))
    await cluster.finish("grp-a", 1)
    assert await cluster.secret("grp-a") == b"environment"
    assert len(await secrets(place)) == 1
    for fence in (1, 2):
        await cluster.launch(under(place, fence, fence))
        assert (await until(cluster, f"grp-a-{fence}-1")).exit_code == 0
    await cluster.finish("grp-a", 2)
    await cluster.drop_secret(["grp-a"])
    assert await secrets(place) == []


async def test_who_was_superseded_removes_nothing_however_late_it_comes(place: Place) -> None:
    first, second = await place.open(), await place.open()
    await first.launch(under(place, 0, 1))
    await second.launch(under(place, 1, 2))
    await first.finish("grp-a", 1)
    assert await secrets(place) == ["grp-a"]
    await first.launch(under(place, 2, 1))  # a request of its own that comes late
    place.requests.clear()
    await second.launch(under(place, 3, 2))
    assert place.requests == {"create jobs": 1}
    await second.finish("grp-a", 2)
    assert await secrets(place) == []


async def test_a_job_whose_client_was_killed_before_it_made_the_secret_is_ended(
    place: Place,
) -> None:
    """By whoever watches it: it can never start, and has a place on a node."""
    patience = Patience(asked_s=0.5, slow_s=1.0, report_s=0.5, orphaned_s=1.5)
    cluster = await place.open(patience)
    job = place.job("one", environment={"TOKEN": "geheim"})
    at = Placement(namespace=place.namespace.name, secret=submission_secret(job))
    made: dict[str, Any] = job_manifest(job, at)
    await place.call("POST", "batch/v1/jobs", made)
    seen = await until(cluster, "one")
    assert (seen.phase, seen.reason) == (Phase.ENDED, Reason.SETUP)
    assert "Secret 'one'" in seen.message
    assert "submit it again" in seen.message
