"""Watch a batch from a terminal while its API server dies and comes back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from kinetic import aio
from tests.cluster.fixtures import Namespace, on_cluster, until
from tests.terminals import Terminal


@on_cluster
def waits(file: str) -> None:
    import time

    while not os.path.exists(file):
        time.sleep(0.1)


async def test_the_watch_outlives_the_api_server(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    batch = await client.run_async_map(waits, [str(file)] * 2)
    await until(lambda: batch.longest_running(2))
    screen = Terminal(columns=200)
    watching = screen.start("-m", "kinetic", "batches", "watch", batch.group_id)
    await asyncio.to_thread(screen.shows, b"2 running")
    plane = configured.control_plane
    await asyncio.to_thread(plane.kill_api)
    await asyncio.to_thread(screen.shows, b"was interrupted")
    await asyncio.to_thread(plane.start_api)
    file.touch()
    await asyncio.to_thread(screen.rest)
    assert watching.wait(60) == 0
    assert b"2/2" in screen.raw
    screen.close()
    assert await batch.results() == [None, None]
