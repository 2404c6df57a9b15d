"""Watch jobs while the API server restarts or freezes."""

from __future__ import annotations

import asyncio

import pytest

from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.ports import Phase
from tests.jobs import watching
from tests.kubernetes.places import Place


@pytest.mark.timeout(180)
async def test_no_end_is_missed_when_the_api_server_is_restarted(place: Place) -> None:
    cluster = await place.open(rhythm=Rhythm(longest_pause_s=0.5))
    jobs = [place.job(f"n{number}", gate="gate") for number in range(24)]
    plane = place.namespace.control_plane
    phases: dict[str, set[Phase]] = {job.name: set() for job in jobs}

    async with asyncio.timeout(120), watching(cluster) as watch:
        launching = asyncio.gather(*(cluster.launch(job) for job in jobs[:12]))
        async for seen in watch:
            phases[seen.name].add(seen.phase)
            if sum(Phase.RUNNING in found for found in phases.values()) == 12:
                break
        await launching
        launching = asyncio.gather(*(cluster.launch(job) for job in jobs[12:]))
        plane.kill_api()
        place.open_gate("gate")
        plane.compact()
        plane.start_api()  # blocks the event loop, like a laptop that sleeps
        async for seen in watch:
            phases[seen.name].add(seen.phase)
            if all(Phase.ENDED in found for found in phases.values()):
                break
        await launching
    assert len(await place.items("batch/v1/jobs")) == 24
    assert len(await place.items("pods")) == 24


@pytest.mark.timeout(180)
async def test_a_watch_reconnects_when_the_server_falls_silent(place: Place) -> None:
    cluster = await place.open(rhythm=Rhythm(idle_s=1.0, longest_pause_s=0.5))
    await cluster.launch(place.job("one", gate="gate"))
    async with asyncio.timeout(100), watching(cluster) as watch:
        async for seen in watch:
            if seen.phase is Phase.RUNNING:
                break
        with place.namespace.control_plane.frozen_api():
            await asyncio.sleep(2.5)  # how long the server is frozen
        place.open_gate("gate")
        async for seen in watch:
            if seen.phase is Phase.ENDED:
                break
