"""Data that is to be mounted, in a cluster without the driver that mounts it."""

from __future__ import annotations

import asyncio

import pytest

import kinetic
from kinetic import aio, errors

from .conftest import IMAGE

DEADLINE_S = 120.0


@pytest.mark.timeout(180)
async def test_a_job_whose_storage_driver_is_not_in_the_cluster_fails(client: aio.Client) -> None:
    @kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1)
    def read(path: str) -> str:
        return path

    data = kinetic.Data("gs://bucket/set/", fuse=True)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(errors.JobError, match=r"no storage driver gcsfuse\.csi"):
            await client.run(read, data)
