"""Watch jobs while the API server restarts or freezes."""

from __future__ import annotations

import asyncio

import pytest

from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.ports import Phase
from tests.jobs import watching
from tests.kubernetes.places import Place


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
