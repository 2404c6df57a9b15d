"""Several processes that want the same image, and one that dies while it has it built."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from kinetic.aio.images.bundled import Pace
from tests.images.conftest import Cloud
from tests.images.services import BuildServer, Status, Underway

pytestmark = pytest.mark.timeout(120)
SLOW = Pace(look_s=0.05, patience_s=3600.0)
ROOT = Path(__file__).parents[2]


async def start(cloud: Cloud, project: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.images.process", str(project), json.dumps(cloud.environ)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )


async def test_processes_have_it_built_once(cloud: Cloud, project: Path) -> None:
    waiting = asyncio.Event()

    async def script(server: BuildServer, one: Underway) -> None:
        await waiting.wait()
        server.end(one, Status.SUCCESS)

    cloud.builds.script = script
    started = [await start(cloud, project) for _ in range(2)]
    async with asyncio.timeout(50):
        # Both have looked, one has a build, the other one sees whose turn it is.
        while not cloud.builds.builds or cloud.registry.asked[404] < 4:
            await asyncio.sleep(0.02)
    waiting.set()
    said = [(await one.communicate())[0] for one in started]
    assert said[0] == said[1] != b""
    assert cloud.builds.calls["create"] == 1


async def test_the_build_of_a_process_that_was_killed_is_gone_on_with_at_once(
    cloud: Cloud, project: Path, request_of
) -> None:
    go = asyncio.Event()

    async def script(server: BuildServer, one: Underway) -> None:
        await go.wait()
        server.end(one, Status.SUCCESS)

    cloud.builds.script = script
    killed = await start(cloud, project)
    objects = cloud.bucket.objects
    async with asyncio.timeout(50):
        while not (marked := [name for name in objects if b'"build-1"' in objects[name].body]):
            await asyncio.sleep(0.02)
    killed.kill()
    await killed.wait()
    (marker,) = marked
    left = objects[marker].body
    async with asyncio.timeout(50):  # no marker's patience is needed
        resolving = asyncio.create_task(cloud.images(pace=SLOW).resolve(request_of()))
        while objects[marker].body == left:
            await asyncio.sleep(0.01)
        go.set()
        await resolving
    assert cloud.builds.calls["create"] == 1
    assert [name for name in cloud.bucket.objects if not name.startswith("logs/")] == []
