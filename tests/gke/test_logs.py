"""Read the logs of jobs whose pods are replaced or deleted, and of items that are retried."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from kinetic import aio
from tests.cluster.fixtures import Namespace, on_cluster, until

DEADLINE_S = 100.0


@on_cluster
def marked(folder: str) -> str:
    """Print lines and leave a marker; the first attempt then runs until it is stopped."""
    attempt = os.environ["KINETIC_ATTEMPT"]
    for number in range(3):
        print(f"{attempt}: line {number}", flush=True)
    Path(folder, attempt).touch(exist_ok=False)
    if attempt == "1":
        time.sleep(600)
    print(f"{attempt}: last", flush=True)
    return attempt


async def test_a_log_goes_on_with_the_pod_that_replaces_a_disrupted_one(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    """Each follower gets every line once."""
    async with asyncio.timeout(DEADLINE_S), aio.Client() as other:
        job = await client.submit(marked, str(tmp_path))
        found = await other.attach(job.job_id)

        logs: list[list[str]] = [[], []]

        async def follow(handle: aio.JobHandle[str], lines: list[str]) -> list[str]:
            async for line in handle.logs(follow=True):
                lines.append(line)  # noqa: PERF401 # the test reads the list before the log ends
            return lines

        followers = zip((job, found), logs, strict=True)
        following = [asyncio.create_task(follow(*pair)) for pair in followers]
        await until(lambda: (tmp_path / "1").exists())
        # Without this wait, the pod and its log may be gone before anybody asks for the log.
        await until(lambda: all("1: line 2" in lines for lines in logs))
        (pod,) = (await asyncio.to_thread(configured.call, "GET", "pods"))["items"]
        name = f"{configured.name}/{pod['metadata']['name']}"
        await asyncio.to_thread(configured.kubelet.preempt, name)
        assert await job.result(cleanup=False) == "2"
        for lines in await asyncio.gather(*following):
            printed = [line for line in lines if line[:2] in ("1:", "2:")]
            first = [f"1: line {number}" for number in range(3)]
            assert printed == [*first, *(f"2: line {number}" for number in range(3)), "2: last"]
        await job.cleanup()
