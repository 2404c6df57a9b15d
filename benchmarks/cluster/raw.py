"""Nothing but requests: what another client sent, sent again, and a watch on pods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from anyio.from_thread import start_blocking_portal

from benchmarks.cluster.place import CPU, Corner, Place
from benchmarks.cluster.recorder import Asked, Tape
from kinetic.aio._engine.submission import LABEL_INDEX

__all__ = ["complete", "submit", "watching"]

AT_ONCE = 32
"""Requests under way, as many as kinetic's launcher has."""

TELL = """import os, time
log = os.environ.get('KINETIC_TERMINATION_LOG', '/dev/termination-log')
open(log, 'w').write(repr(time.time()))
"""
"""The command of a pod: it writes the time of its end to its termination message."""

FOREVER = aiohttp.ClientTimeout(total=None)


@asynccontextmanager
async def _session(place: Place) -> AsyncIterator[aiohttp.ClientSession]:
    user = place.user
    connector = aiohttp.TCPConnector(ssl=user.tls(), limit=2 * AT_ONCE)
    headers = {"Authorization": f"Bearer {user.token}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        await _read(session, "GET", f"{user.server}/readyz", None, {})  # as warm as a first job
        yield session


async def _read(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, headers: Any
) -> bytes:
    async with session.request(method, url, data=body, headers=headers) as answer:
        text = await answer.read()
        # A replayed create or replace may conflict: it was refused, but it cost the same.
        assert answer.status < 300 or answer.status in (409, 412), (url, answer.status, text[:500])
        return text


async def submit(place: Place, corner: Corner, tape: Tape) -> tuple[float, float]:
    """Send the writes of *tape*, bytes that are ready, and look at no answer.

    Those that make Jobs come last, `AT_ONCE` at a time.

    Returns:
        When it began, and the processor seconds it took here.
    """
    wanted = [one.within(tape.corner, corner) for one in tape.requests if one.writes]
    jobs = [one for one in wanted if one.makes_job]
    server = place.user.server

    async def send(one: Asked) -> None:
        url = f"{server if one.api else place.gcs}{one.path}"
        await _read(session, one.method, url, one.body, one.headers)

    async with _session(place) as session:
        began, used = time.time(), time.process_time()
        await _each(send, [one for one in wanted if not one.makes_job])
        await _each(send, jobs)
        return began, time.process_time() - used


async def _each(send: Callable[[Asked], Any], requests: Sequence[Asked]) -> None:
    left = iter(requests)

    async def work() -> None:
        for one in left:
            await send(one)

    await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(requests)))))


def _job(name: str, image: str) -> bytes:
    container = {
        "name": "main",
        "image": image,
        "command": ["python3", "-I", "-S", "-c", TELL],
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
    place: Place, corner: Corner, jobs: int, most: int
) -> tuple[float, list[tuple[float, float]]]:
    """Run *jobs* that do nothing, *most* at a time, and see their pods end.

    Returns:
        When it began; and when each process ended, and when that was seen.
    """
    server = place.user.server
    space = f"{server}/apis/batch/v1/namespaces/{corner.name}/jobs"
    pods = f"{server}/api/v1/namespaces/{corner.name}/pods?watch=1"
    room = asyncio.Semaphore(most)
    seen: dict[str, tuple[float, float]] = {}

    async def launch(number: int) -> None:
        await room.acquire()
        headers = {"Content-Type": "application/json"}
        await _read(session, "POST", space, _job(f"job-{number}", place.image), headers)

    async def watch(answer: aiohttp.ClientResponse) -> None:
        async for name, _, said in _ends(answer):
            if name not in seen:
                seen[name] = (float(said), time.time())
                room.release()
                if len(seen) == jobs:
                    return

    async with (
        _session(place) as session,
        session.get(pods, timeout=FOREVER, read_bufsize=2**22) as answer,
    ):
        began = time.time()
        watcher = asyncio.ensure_future(watch(answer))
        await asyncio.gather(*(launch(number) for number in range(jobs)))
        await watcher
    return began, [*seen.values()]


@contextmanager
def watching(place: Place, corner: Corner, items: int) -> Iterator[Future[dict[int, float]]]:
    """Watch in a thread when the pod of each item of a batch ends."""
    pods = f"{place.user.server}/api/v1/namespaces/{corner.name}/pods?watch=1"

    async def watch() -> dict[int, float]:
        seen: dict[int, float] = {}
        async with (
            _session(place) as session,
            session.get(pods, timeout=FOREVER, read_bufsize=2**22) as answer,
        ):
            async for _, labels, _ in _ends(answer):
                seen.setdefault(int(labels[LABEL_INDEX]), time.time())
                if len(seen) == items:
                    break
        return seen

    with start_blocking_portal() as portal:
        watcher = portal.start_task_soon(watch)
        try:
            yield watcher
        finally:
            watcher.cancel()


async def _ends(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, str], str]]:
    """Name, labels and message of each pod of the stream that has ended."""
    async for line in answer.content:
        found = json.loads(line)["object"]
        states = found["status"].get("containerStatuses", ())
        if ended := next((one["state"].get("terminated") for one in states), None):
            yield found["metadata"]["name"], found["metadata"]["labels"], ended.get("message", "")
