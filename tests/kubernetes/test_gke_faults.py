"""Jobs whose nodes, pods or API server fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kinetic.accelerators import parse
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.ports import JobSpec, Observation, Phase, Resources
from kinetic.job_status import Reason
from tests.kubernetes.places import Place, gone, names, until, watching


async def run(place: Place, name: str, **more: Any) -> tuple[GkeCluster, Observation, str]:
    """A job that waits for ever; the last is its pod, as the kubelet is told of it."""
    cluster = await place.open()
    await cluster.launch(place.job(name, gate="never", attempt=1, **more))
    seen = await until(cluster, name, Phase.RUNNING)
    (pod,) = await place.items("pods")
    return cluster, seen, f"{place.namespace.name}/{pod['metadata']['name']}"


async def order(what: Callable[..., None], *about: str) -> None:
    await asyncio.to_thread(what, *about)


async def test_a_job_that_is_killed_for_memory_says_so(place: Place) -> None:
    memory = Resources(cpu=0.1, memory_bytes=512 * 1024**2)
    cluster, before, pod = await run(place, "one-1", resources=memory)
    await order(place.namespace.kubelet.oom, pod)
    seen = await until(cluster, "one-1")
    assert (seen.phase, seen.reason, seen.exit_code) == (Phase.ENDED, Reason.OUT_OF_MEMORY, 137)
    assert seen.executor == before.executor


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", ["evict", "lose_node", "shut_down"])
async def test_what_the_platform_did_to_a_pod_is_told(place: Place, fault: str) -> None:
    kubelet = place.namespace.kubelet
    await asyncio.to_thread(kubelet.add_node, "gpu-1", gpu=1)
    job = Resources(accelerator=parse("gpu-t4"), cpu=0.1)
    labels = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
    await asyncio.to_thread(kubelet.remove_node, "gpu-1")
    await asyncio.to_thread(kubelet.add_node, "gpu-1", gpu=1, labels=labels)
    cluster, before, pod = await run(place, "one-1", resources=job)
    async with asyncio.timeout(100), watching(cluster) as watch:
        act = getattr(kubelet, fault)
        acting = asyncio.create_task(order(act, pod if fault == "evict" else "gpu-1"))
        wanted = {"evict": "EVICTED", "lose_node": "NODE_LOST", "shut_down": "PREEMPTED"}[fault]
        async for seen in watch:
            if seen.reason is not None and seen.name == "one-1":
                assert seen.executor == before.executor
                if seen.reason.name == wanted:
                    break
        await acting
        if fault == "lose_node":  # the pod cannot confirm anything: the next comes when it is gone
            await order(kubelet.collect, "gpu-1")
        async for seen in watch:
            if seen.name == "one-2":
                break
    assert (seen.phase, seen.labels["kinetic.dev/attempt"]) == (Phase.PENDING, "2")


@pytest.mark.timeout(180)
async def test_no_end_is_missed_when_the_api_server_is_restarted(place: Place) -> None:
    cluster = await place.open(rhythm=Rhythm(longest_pause_s=0.5))
    jobs = [place.job(f"n{number}", gate="gate") for number in range(24)]
    plane = place.namespace.control_plane
    told: dict[str, set[Phase]] = {job.name: set() for job in jobs}

    async def launch(job: JobSpec) -> None:
        await cluster.launch(job)

    async with asyncio.timeout(120), watching(cluster) as watch:
        launching = asyncio.gather(*(launch(job) for job in jobs[:12]))
        async for seen in watch:
            told[seen.name].add(seen.phase)
            if sum(Phase.RUNNING in phases for phases in told.values()) == 12:
                break
        await launching
        launching = asyncio.gather(*(launch(job) for job in jobs[12:]))
        plane.kill_api()
        place.let_go("gate")
        plane.compact()
        plane.start_api()  # it holds the loop, as a laptop that sleeps does
        async for seen in watch:
            told[seen.name].add(seen.phase)
            if all(Phase.ENDED in phases for phases in told.values()):
                break
        await launching
    assert len(await place.items("batch/v1/jobs")) == 24
    assert len(await place.items("pods")) == 24


@pytest.mark.timeout(180)
async def test_a_server_that_is_silent_is_left(place: Place) -> None:
    cluster = await place.open(rhythm=Rhythm(idle_s=1.0, longest_pause_s=0.5))
    await cluster.launch(place.job("one", gate="gate"))
    async with asyncio.timeout(100), watching(cluster) as watch:
        async for seen in watch:
            if seen.phase is Phase.RUNNING:
                break
        with place.namespace.control_plane.frozen_api():
            await asyncio.sleep(2.5)  # that long the server is frozen
        place.let_go("gate")
        async for seen in watch:
            if seen.phase is Phase.ENDED:
                break


async def test_what_was_removed_while_nobody_watched_is_gone(place: Place) -> None:
    cluster = await place.open()
    await cluster.launch(place.job("one", gate="never"))
    await until(cluster, "one", Phase.RUNNING)
    await cluster.delete(labels={"test": "yes"})
    await gone(cluster, "one")
    assert await names(cluster) == []
    await cluster.launch(place.job("two"))
    async with asyncio.timeout(60), watching(cluster) as watch:
        assert (await anext(watch)).name == "two"
