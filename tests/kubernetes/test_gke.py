"""Jobs on a real control plane, with nodes whose pods are processes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kinetic.aio.kubernetes.manifests import Paths, Placement, job_manifest
from kinetic.aio.kubernetes.pending import Patience
from kinetic.aio.ports import Image, Phase, Resources
from kinetic.errors import LaunchError, Throttled
from kinetic.job_status import Reason
from tests.cluster.rest import Refused
from tests.jobs import gone, lines, names, until, watching
from tests.kubernetes.places import Place, explained

# --- launch ---


async def test_the_api_server_answers_with_metadata_only(place: Place) -> None:
    cluster, at = await place.open(), Placement(namespace=place.namespace.name, secret="s")
    manifest, query = job_manifest(place.job("one"), at), {"dryRun": "All"}
    path = Paths(at.namespace).jobs
    answers = [
        await cluster._api.call("POST", path, query=query, body=manifest, metadata_only=only)
        for only in (False, True)
    ]
    whole, partial = (len(json.dumps(answer)) for answer in answers)
    assert answers[1]["metadata"]["name"] == "one"
    assert "spec" not in answers[1] and partial < 0.6 * whole


async def test_a_refused_launch_quotes_the_api_server(place: Place) -> None:
    cluster = await place.open()
    with pytest.raises(LaunchError, match="name"):
        await cluster.launch(place.job(""))
    bad = replace(place.job("one"), image=Image(uri="", command=("python3",)))
    with pytest.raises(LaunchError, match=r"one was refused: .*image") as refused:
        await cluster.launch(bad)
    assert refused.value.reason == "refused"
    assert await cluster.find() == []
    assert await place.items("secrets") == []


async def test_a_launch_beyond_a_quota_raises_throttled(place: Place) -> None:
    cluster = await place.open()
    await cluster.launch(place.job("one"))
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"count/jobs.batch": "1"}}}
    await place.call("POST", "resourcequotas", {"kind": "ResourceQuota", **quota})
    container = {"name": "main", "image": "example.test/image:1", "command": ["true"]}
    pod = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    probe = {"metadata": {"name": "probe"}, "spec": {"template": pod}}
    probe |= {"apiVersion": "batch/v1", "kind": "Job"}
    with pytest.raises(Refused, match="exceeded quota"):  # the quota takes effect after a moment
        async with asyncio.timeout(60):
            while True:
                await place.call("POST", "batch/v1/jobs", probe, dryRun="All")
                await asyncio.sleep(0.05)
    with pytest.raises(Throttled, match="two was refused: exceeded quota: few"):
        await cluster.launch(place.job("two"))


# --- watch ---


async def test_watching_a_running_job_takes_no_request(place: Place) -> None:
    # This patience doesn't ask why the job waits, however slowly it starts.
    cluster = await place.open(Patience(asked_s=600.0, slow_s=600.0))
    await cluster.launch(place.job("one", gate="gate"))
    async with asyncio.timeout(90), watching(cluster) as watch:
        async for seen in watch:
            if seen.phase is Phase.RUNNING:
                place.requests.clear()
                place.open_gate("gate")
            elif seen.phase is Phase.ENDED:
                break
    assert not place.requests


# --- attempts ---


@pytest.mark.timeout(120)
async def test_a_pod_that_replaces_a_disrupted_one_is_the_next_attempt(place: Place) -> None:
    cluster = await place.open()
    job = place.job("kinetic-job-a", gate="gate", attempt=1)
    await cluster.launch(job)
    first = await until(cluster, "kinetic-job-a", Phase.RUNNING)
    (pod,) = await place.items("pods")
    preempt = place.namespace.kubelet.preempt
    await asyncio.to_thread(preempt, f"{place.namespace.name}/{pod['metadata']['name']}")
    second = await until(cluster, "kinetic-job-a-2", Phase.PENDING)
    found = {seen.name: seen for seen in await cluster.find(labels={"test": "yes"})}
    ended = found["kinetic-job-a"]
    assert (ended.phase, ended.executor) == (Phase.ENDED, first.executor)
    assert ended.reason is Reason.PREEMPTED
    assert second.labels == {**job.labels, "kinetic.dev/attempt": "2"}
    running = await until(cluster, "kinetic-job-a-2", Phase.RUNNING)
    assert await names(cluster, names=["kinetic-job-a-2"]) == ["kinetic-job-a-2"]
    place.open_gate("gate")
    seen = await until(cluster, "kinetic-job-a-2")
    assert seen.executor == running.executor != first.executor
    assert await lines(cluster, "kinetic-job-a-2") == ["", "attempt 2", seen.executor]
    await cluster.delete(names=["kinetic-job-a-2"])
    await gone(cluster, "kinetic-job-a", "kinetic-job-a-2")


@pytest.mark.full
@pytest.mark.timeout(240)
async def test_a_job_whose_machine_is_replaced_waits_for_it(place: Place) -> None:
    """The autoscaler knows nothing of node pools that it doesn't scale."""
    kubelet, cluster = place.namespace.kubelet, await place.open()
    add_node = partial(asyncio.to_thread, kubelet.add_node, "large", cpu=32)
    await add_node()
    job = place.job("one", gate="gate", attempt=1, resources=Resources(cpu=20))
    await cluster.launch(job)
    await until(cluster, "one", Phase.RUNNING)
    (before,) = await place.items("pods")
    await asyncio.to_thread(kubelet.remove_node, "large")
    async with asyncio.timeout(200):
        while (
            len(pods := await place.items("pods")) > 1
            or pods[0]["metadata"]["uid"] == before["metadata"]["uid"]
        ):
            await asyncio.sleep(0.5)
        await place.call("POST", "events", not_scaled_up(pods[0]))
        async with watching(cluster) as watch:
            async for seen in watch:
                if seen.name == "one-2" and "had a node" in seen.message:
                    await add_node()
                elif seen.name == "one-2" and seen.phase is not Phase.PENDING:
                    assert seen.phase is Phase.RUNNING
                    break


def not_scaled_up(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the event of an autoscaler whose node pools can't hold *pod*."""
    metadata = pod["metadata"]
    return {
        "metadata": {"generateName": "scale-", "namespace": metadata["namespace"]},
        "involvedObject": {"kind": "Pod"}
        | {key: metadata[key] for key in ("name", "namespace", "uid")},
        "reason": "NotTriggerScaleUp",
        "message": "pod didn't trigger scale-up: 1 Insufficient cpu",
        "type": "Normal",
        "lastTimestamp": "2026-11-30T20:00:00Z",
    }


# --- jobs that don't start ---


async def test_an_image_that_does_not_exist_ends_the_job(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, other = await place.open(), await place.open()
    await asyncio.to_thread(place.namespace.kubelet.fail_pull, "nosuch")
    job = replace(place.job("one"), image=Image(uri="example.org/nosuch:1", command=("python3",)))
    await cluster.launch(job)
    seen = await until(cluster, "one")
    assert (seen.phase, seen.reason, seen.executor) == (Phase.ENDED, Reason.IMAGE_PULL, "")
    assert "example.org/nosuch:1" in seen.message
    assert [found.message for found in await other.find(names=["one"])] == [seen.message]
    assert "one cannot start" in caplog.text


async def test_many_jobs_that_wait_for_the_same_thing_share_requests_and_warnings(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await place.open()
    large = Resources(cpu=1000)
    jobs = [replace(place.job(f"n{number}"), resources=large) for number in range(12)]
    await asyncio.gather(*(cluster.launch(job) for job in jobs))
    for job in jobs:  # all wait for the same thing when the watch starts
        await explained(cluster, job.name, "1000 CPUs")
    place.requests.clear()
    compared: set[str] = set()
    async with asyncio.timeout(40), watching(cluster) as watch:
        async for seen in watch:
            if "cpu-1 has only" in seen.message:
                compared.add(seen.name)
            if len(compared) == 3:
                break
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                async for _ in watch:
                    pass
    assert place.requests["list events"] <= 9
    assert place.requests["list nodes"] == 1
    warnings = [line for line in caplog.messages if "1000 CPUs" in line]
    assert 1 <= len(warnings) <= 2, "one for the scheduler's message, one for the nodes' resources"
