"""A client ends the workers of a stopped batch whose client has died."""

from __future__ import annotations

import asyncio

import pytest

import kinetic
from kinetic import aio, configuration
from kinetic._runner.protocol import signing, wire
from kinetic.aio._submissions.control_log import ControlLog
from kinetic.aio._submissions.ids import scope_of
from kinetic.aio.platforms import open_platform
from tests.cluster.fixtures import IMAGE, Namespace


@kinetic.run(accelerator="cpu", cpu=9, container_image=IMAGE)  # the node fits one at a time
def wait(_: int) -> None:
    import time

    while True:
        time.sleep(1)


async def jobs(namespace: Namespace) -> int:
    """Count the pods of Jobs that haven't ended; one that reads the stop ends by itself."""
    answer = await asyncio.to_thread(namespace.call, "GET", "batch/v1/jobs")
    ended = {"Complete", "Failed"}
    return sum(
        job["spec"]["completions"]
        for job in answer["items"]
        if not any(condition["type"] in ended for condition in job["status"].get("conditions", ()))
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("found", ["attached to", "listed"])
async def test_the_next_client_deletes_the_jobs_that_a_dead_client_left(
    configured: Namespace, found: str
) -> None:
    """The dead client had stored its stop but deleted nothing."""
    async with aio.Client() as client:
        batch = await client.run_async_map(wait, range(20), max_concurrent=None)
        await batch.submitted()
        await batch.detach()
    assert await jobs(configured) == 20
    ports, scope = await open_platform(configuration.resolve()), scope_of(batch.group_id)
    key = signing.submission_key(await ports.cluster.root_key(), scope)
    await ControlLog(ports.store, scope, key).append(wire.Request(kind="stop", cause="cancel"))
    await ports.aclose()
    async with aio.Client() as client:
        if found == "attached to":
            await client.attach_batch(batch.group_id)
            # The one that ran has read the stop; Kubernetes reports the end of its Job 1 s later.
            assert await jobs(configured) <= 1
        else:
            (same,) = await client.list_batches()
            await same.statuses()
        async with asyncio.timeout(60):
            while await jobs(configured):
                await asyncio.sleep(0.1)
