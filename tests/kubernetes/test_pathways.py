"""Jobs on several hosts on a real control plane: sets that can't start, and clients' views."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kinetic.accelerators import parse
from kinetic.aio.kubernetes.sets import KINDS
from kinetic.aio.ports import Phase, Resources
from kinetic.job_status import Reason
from tests.jobs import gone, names, until, watching
from tests.kubernetes.places import Place

pytestmark = pytest.mark.usefixtures("groups")
TWO = Resources(accelerator=parse("cpu:hosts=2"), cpu=0.1)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_set_that_waits_too_long_never_starts(place: Place, kind: str) -> None:
    cluster, other = await place.open_groups(kind), await place.open_groups(kind)
    late = replace(place.job("late", start_timeout=0.7), resources=replace(TWO, cpu=1000))
    await cluster.launch(late)
    seen = await until(cluster, "late")
    assert (seen.phase, seen.reason, seen.executor) == (Phase.ENDED, Reason.UNSCHEDULABLE, "")
    assert "start_timeout of 0.7 s" in seen.message
    assert [found.message for found in await other.find(names=["late"])] == [seen.message]
    await cluster.delete(labels={"test": "yes"})
    await gone(cluster, "late")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_set_whose_pods_are_refused_says_why(place: Place, kind: str) -> None:
    cluster = await place.open_groups(kind, service_account="nobody")
    await cluster.launch(replace(place.job("none"), resources=TWO))
    async with asyncio.timeout(60), watching(cluster) as watch:
        async for seen in watch:
            if seen.reason is not None:
                break
    assert (seen.phase, seen.reason) == (Phase.PENDING, Reason.SETUP)
    assert "nobody" in seen.message
    await cluster.delete(names=["none"])
    await gone(cluster, "none")


@pytest.mark.parametrize("kind", KINDS)
async def test_several_hosts_are_one_job_that_a_client_for_single_jobs_does_not_list(
    place: Place, kind: str
) -> None:
    cluster, single = await place.open_groups(kind), await place.open()
    await cluster.launch(replace(place.job("both", gate="never"), resources=TWO))
    seen = await until(cluster, "both", Phase.RUNNING)
    async with asyncio.timeout(60):  # the job runs once its first host does; the other may be late
        while len(pods := {pod["metadata"]["uid"] for pod in await place.items("pods")}) < 2:
            await asyncio.sleep(0.05)
    assert len(pods) == 2
    assert seen.executor in pods
    assert await names(cluster) == ["both"]
    assert await names(single) == []
    (owner,) = (await place.items("secrets"))[0]["metadata"]["ownerReferences"]
    assert owner["kind"] == KINDS[kind].name
    await cluster.delete(names=["both"])
    await gone(cluster, "both")
