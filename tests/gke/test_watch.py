"""A batch that is watched from a terminal while its cluster goes away and comes back."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from pathlib import Path

from kinetic import aio
from tests.cluster.fixtures import Namespace, on_cluster, until


@on_cluster
def waits(file: str) -> None:
    import time

    while not os.path.exists(file):
        time.sleep(0.1)


class Screen:
    """What a terminal has shown."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.text = ""
        asyncio.get_running_loop().add_reader(self.ours, self._read)

    def _read(self) -> None:
        try:
            self.text += os.read(self.ours, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            asyncio.get_running_loop().remove_reader(self.ours)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.ours)
        os.close(self.ours)


async def test_the_watch_outlives_the_api_server(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    batch = await client.run_async_map(waits, [str(file)] * 2)
    await until(lambda: batch.longest_running(2))
    screen = Screen()
    watching = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kinetic", "batches", "watch", batch.group_id),
        stdin=screen.theirs,
        stdout=screen.theirs,
        stderr=screen.theirs,
        env={**os.environ, "COLUMNS": "200", "LINES": "24", "TERM": "xterm"},
    )
    os.close(screen.theirs)
    await until(lambda: "2 running" in screen.text)
    plane = configured.control_plane
    await asyncio.to_thread(plane.kill_api)
    await until(lambda: "was interrupted" in screen.text)
    await asyncio.to_thread(plane.start_api)
    file.touch()
    assert await watching.wait() == 0
    await until(lambda: "2/2" in screen.text)
    screen.close()
    assert await batch.results() == [None, None]
