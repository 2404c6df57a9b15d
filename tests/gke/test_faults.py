"""Batches while servers and connections fail: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from tests.cluster.fixtures import Namespace

from .conftest import IMAGE, until
from .proxy import Front, Relay

pytestmark = pytest.mark.timeout(180)  # the first one starts the control plane
slow = (pytest.mark.slow, pytest.mark.timeout(2400))
on_cluster = kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1)


@on_cluster
def marked(folder: str, x: int) -> int:
    """Leaves a mark of its own, each time it runs."""
    Path(folder, f"{x}.{os.environ['KINETIC_ATTEMPT']}.{time.time_ns()}").touch()
    time.sleep(0.1)
    return -x


class Sweep:
    """*number* items, each of which leaves a mark."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder / "marks"
        self.folder.mkdir()
        self.number = number

    async def begin(self, client: aio.Client) -> None:
        inputs = [(str(self.folder), x) for x in range(self.number)]
        self.batch = await client.run_async_map(marked, inputs, max_concurrent=16)

    async def reach(self, part: float) -> None:
        """Wait until so many have run."""
        await until(lambda: sum(self.runs().values()) >= part * self.number)

    def runs(self) -> Counter[int]:
        """How often each of them has run."""
        return Counter(int(path.name.partition(".")[0]) for path in self.folder.iterdir())

    async def end(self) -> None:
        """All values are there, and each item has run once."""
        assert await self.batch.results() == [-x for x in range(self.number)]
        assert self.runs() == dict.fromkeys(range(self.number), 1)


@pytest.fixture
def through(configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lead the client to another port than the API server's, and everybody to another GCS."""

    def lead(api: int | None = None, gcs: str | None = None) -> None:
        if api is not None:
            config = json.loads(configured.control_plane.kubeconfig.read_text())
            config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{api}"
            path = tmp_path / "kubeconfig"
            path.write_text(json.dumps(config))
            monkeypatch.setenv("KUBECONFIG", str(path))
        if gcs is not None:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs)
            configured.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs)

    return lead


def lists(namespace: Namespace) -> int:
    """How often kinetic had to begin from a list: who can, goes on watching from where he was."""
    return namespace.control_plane.requests(namespace.name)["list pods"]


async def test_the_api_server_dies_forgets_and_knows_the_old_token_no_more(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    plane, sweep = configured.control_plane, Sweep(tmp_path, 40)
    await sweep.begin(client)
    await sweep.reach(1 / 4)
    before = lists(configured)
    await asyncio.to_thread(plane.kill_api)
    await asyncio.to_thread(plane.compact)  # while nobody can tell of what comes last
    await asyncio.to_thread(plane.expire_token)  # which starts it again
    await sweep.end()
    assert lists(configured) > before, "410: what there was to go on from is gone"


@pytest.mark.parametrize("number", [pytest.param(500, marks=slow)])
async def test_the_api_server_dies_and_forgets_amid_hundreds_of_jobs(
    client: aio.Client, configured: Namespace, tmp_path: Path, number: int
) -> None:
    plane, sweep = configured.control_plane, Sweep(tmp_path, number)
    await sweep.begin(client)
    for part, fault in ((1 / 5, plane.forget), (2 / 5, plane.expire_token), (3 / 5, plane.forget)):
        await sweep.reach(part)
        await asyncio.to_thread(fault)
    await sweep.reach(4 / 5)
    await asyncio.to_thread(plane.kill_api)
    await asyncio.sleep(20)  # so long it is gone
    await asyncio.to_thread(plane.start_api)
    await sweep.end()
    assert lists(configured) >= 4


@pytest.mark.parametrize(("number", "seconds"), [(4, 2), pytest.param(60, 30, marks=slow)])
async def test_the_bucket_answers_503(
    gcs_server: str, through, tmp_path: Path, number: int, seconds: float
) -> None:
    sweep = Sweep(tmp_path, number)
    async with Front(gcs_server) as front:
        through(gcs=front.url)
        async with aio.Client() as client:
            await sweep.begin(client)
            await sweep.reach(1 / 4)
            front.fail(seconds, "create")
            await sweep.end()
    assert "create" in {one.kind for one in front.asked if one.status == 503}


@pytest.mark.parametrize("number", [6, pytest.param(100, marks=slow)])
async def test_connections_are_reset(
    configured: Namespace, gcs_server: str, through, tmp_path: Path, number: int
) -> None:
    sweep = Sweep(tmp_path, number)
    bucket = int(gcs_server.rpartition(":")[2])
    async with Relay(configured.control_plane.port) as api, Relay(bucket) as gcs:
        through(api.port, f"http://127.0.0.1:{gcs.port}")
        async with aio.Client() as client:
            await sweep.begin(client)
            for part in (1 / 4, 1 / 2, 3 / 4):
                await sweep.reach(part)
                api.cut()
                gcs.cut()
            await sweep.end()
        assert api.cuts and gcs.cuts


@pytest.mark.parametrize("number", [pytest.param(40, marks=slow)])
async def test_connections_are_half_open(
    configured: Namespace, gcs_server: str, through, tmp_path: Path, number: int
) -> None:
    """Nothing comes through them any more, and nobody says so."""
    sweep = Sweep(tmp_path, number)
    bucket = int(gcs_server.rpartition(":")[2])
    async with Relay(configured.control_plane.port) as api, Relay(bucket) as gcs:
        through(api.port, f"http://127.0.0.1:{gcs.port}")
        async with aio.Client() as client:
            await sweep.begin(client)
            await sweep.reach(1 / 4)
            api.fall_silent()
            gcs.fall_silent()
            await sweep.end()
        assert api.cuts and gcs.cuts
