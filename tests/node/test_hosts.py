"""Run a job in several pods, which stand-ins for the controllers create."""

from __future__ import annotations

import asyncio
import os

import pytest

import kinetic
from kinetic import aio
from tests.cluster.fixtures import Namespace
from tests.gke.sets import COLLECTIONS, kind, permitted
from tests.node.images import JOBS

from .conftest import gone

__all__ = ["kind", "permitted"]

DEADLINE_S = 180.0
on_hosts = kinetic.run(
    accelerator="cpu:hosts=3",
    container_image=JOBS,
    cpu=0.3,
    capture_env_vars=["STORAGE_EMULATOR_HOST"],
)
pytestmark = pytest.mark.usefixtures("controllers")


@on_hosts
def here() -> tuple[str, str]:
    print("here is", os.environ["KINETIC_HOST"], flush=True)
    return os.environ["KINETIC_HOST"], os.environ["KINETIC_HOSTS"]


async def test_three_pods_run_it_once_and_go(
    kind: str, permitted: Namespace, client: aio.Client
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(here)
        lines = [line async for line in job.logs(follow=True)]
        assert sorted(lines) == [f"[{host}] here is {host}" for host in range(3)]
        assert await job.result(cleanup=False) == ("0", "3")
        if kind == "lws":  # it goes without a cleanup
            await gone(permitted, COLLECTIONS[kind])
        await job.cleanup()
        await gone(permitted, COLLECTIONS[kind])
