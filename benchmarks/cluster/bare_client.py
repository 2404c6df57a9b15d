"""The bare contender: it sends recorded requests again, creates Jobs, and watches pods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from benchmarks.cluster.recorder import RecordedRequest, Recording
from benchmarks.cluster.servers import CPU, Cluster, Workspace

MAX_CONCURRENT = 64
"""How many requests to send at a time: as many as kinetic sends to an API server."""

REPORT_TIME = """import os, time
log = os.environ.get('KINETIC_TERMINATION_LOG', '/dev/termination-log')
open(log, 'w').write(repr(time.time()))
"""
"""The command of a pod: it writes the time of its end to its termination message."""

NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


@asynccontextmanager
async def _session(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with the contenders' account, and connect it to the API server."""
    user = cluster.user
    connector = aiohttp.TCPConnector(ssl=user.tls(), limit=2 * MAX_CONCURRENT)
    headers = {"Authorization": f"Bearer {user.token}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        await _read(session, "GET", f"{user.server}/readyz", None, {})  # connect before the turn
        yield session


async def _read(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, headers: Any
) -> bytes:
    """Send one request, and return the body of the answer."""
    async with session.request(method, url, data=body, headers=headers) as answer:
        text = await answer.read()
        # A repeated creation or replacement may conflict. The server's refusal costs as much.
        assert answer.status < 300 or answer.status in (409, 412), (url, answer.status, text[:500])
        return text


async def submit(
    cluster: Cluster, workspace: Workspace, recording: Recording
) -> tuple[float, float]:
    """Send the recorded requests that write, `MAX_CONCURRENT` at a time; don't parse the answers.

    The requests that create Jobs come last.

    Returns:
        When it started, and the processor seconds that it took in this process.
    """
    writes = [
        request.moved(recording.workspace, workspace)
        for request in recording.requests
        if request.is_write
    ]
    server = cluster.user.server

    async def send(request: RecordedRequest) -> None:
        url = f"{server if request.api else cluster.gcs}{request.path}"
        await _read(session, request.method, url, request.body, request.headers)

    async with _session(cluster) as session:
        started_at, cpu_before = time.time(), time.process_time()
        await _send_all(send, [request for request in writes if not request.creates_job])
        await _send_all(send, [request for request in writes if request.creates_job])
        return started_at, time.process_time() - cpu_before


async def _send_all(
    send: Callable[[RecordedRequest], Any], requests: Sequence[RecordedRequest]
) -> None:
    """Send *requests* in order, `MAX_CONCURRENT` at a time."""
    remaining = iter(requests)

    async def work() -> None:
        for request in remaining:
            await send(request)

    await asyncio.gather(*(work() for _ in range(min(MAX_CONCURRENT, len(requests)))))


def _job(name: str, image: str) -> bytes:
    """Return the manifest of a Job whose pod reports the time."""
    container = {
        "name": "main",
        "image": image,
        "command": ["python3", "-I", "-S", "-c", REPORT_TIME],
        "resources": {"requests": {"cpu": str(CPU)}},
    }
    pod = {"restartPolicy": "Never", "containers": [container]}
    return json.dumps(
        {
            "metadata": {"name": name},
            "spec": {"completionMode": "Indexed", "completions": 1, "template": {"spec": pod}},
        }
    ).encode()


async def complete(
    cluster: Cluster, workspace: Workspace, jobs: int, limit: int
) -> tuple[float, list[tuple[float, float]]]:
    """Run *jobs* Jobs that only report the time, *limit* at once, and watch their pods end.

    Returns:
        When it started; and when each process ended, and when the watch saw that.
    """
    server = cluster.user.server
    jobs_url = f"{server}/apis/batch/v1/namespaces/{workspace.name}/jobs"
    pods = f"{server}/api/v1/namespaces/{workspace.name}/pods?watch=1"
    free_slots = asyncio.Semaphore(limit)
    moments: dict[str, tuple[float, float]] = {}

    async def launch(number: int) -> None:
        await free_slots.acquire()
        headers = {"Content-Type": "application/json"}
        await _read(session, "POST", jobs_url, _job(f"job-{number}", cluster.image), headers)

    async def watch(answer: aiohttp.ClientResponse) -> None:
        async for name, message in _ended_pods(answer):
            if name not in moments:
                moments[name] = (float(message), time.time())
                free_slots.release()
                if len(moments) == jobs:
                    return

    async with (
        _session(cluster) as session,
        session.get(pods, timeout=NO_TIMEOUT, read_bufsize=2**22) as answer,
    ):
        started_at = time.time()
        watcher = asyncio.ensure_future(watch(answer))
        await asyncio.gather(*(launch(number) for number in range(jobs)))
        await watcher
    return started_at, [*moments.values()]


async def _ended_pods(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """Yield name and termination message of each ended pod in a watch's stream."""
    async for line in answer.content:
        pod = json.loads(line)["object"]
        statuses = pod["status"].get("containerStatuses", ())
        if ended := next((status["state"].get("terminated") for status in statuses), None):
            yield pod["metadata"]["name"], ended.get("message", "")
