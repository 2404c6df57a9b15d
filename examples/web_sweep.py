"""A sweep of 1,000 throws behind a web server: start it, watch it, cancel it.

python examples/web_sweep.py [PORT]

curl -X POST   'localhost:8000/sweeps?throws=1000'  {"id": "grp-…"}
curl -N        localhost:8000/sweeps/grp-…          its progress, as server-sent events
curl -X DELETE localhost:8000/sweeps/grp-…          ends it

The application is a plain ASGI callable, so that it runs under any server and
inside any framework. It has one client, open as long as itself; all requests
share the event loop, and none of them holds it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from throwing import angles, reach

from kinetic.aio import BatchHandle, Client
from kinetic.errors import KineticError

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Sweep:
    """One batch, and the best throw so far."""

    def __init__(self, batch: BatchHandle[float]) -> None:
        self.batch = batch
        self.best = {"angle": 0.0, "metres": 0.0}
        self.trouble = ""
        self.collected = asyncio.Event()

    async def collect(self) -> None:
        try:
            async for _, angle, outcome in self.batch.outcomes():
                if outcome.ok and outcome.unwrap() > self.best["metres"]:
                    self.best = {"angle": angle, "metres": outcome.unwrap()}
        except KineticError as error:
            self.trouble = str(error)
        finally:
            self.collected.set()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """How far it is, whenever that has changed; any number of people may watch."""
        async for now in self.batch.progress():
            if now.finished:
                await self.collected.wait()
            counts = {"succeeded": now.succeeded, "failed": now.failed, "cancelled": now.cancelled}
            told = {"best": self.best, "trouble": self.trouble}
            yield {"total": now.total, **counts, "seconds_left": now.eta, **told}


class Application:
    """``async with`` is its lifetime: what is unfinished when it ends is cancelled."""

    def __init__(self) -> None:
        self.sweeps: dict[str, Sweep] = {}
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> None:
        self._client = await self._open.enter_async_context(Client(backend="local"))
        self._tasks = await self._open.enter_async_context(asyncio.TaskGroup())

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def start(self, throws: int) -> str:
        batch = await self._client.run_async_map(reach, angles(throws), name="throws", retries=2)
        await self._open.enter_async_context(batch)
        sweep = self.sweeps[batch.group_id] = Sweep(batch)
        self._tasks.create_task(sweep.collect())
        return batch.group_id

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        method, place = scope["method"], scope["path"].strip("/").split("/")
        match method, *place:
            case "POST", "sweeps":
                query = parse_qs(scope["query_string"].decode())
                started = await self.start(int(query.get("throws", ["1000"])[0]))
                await answer(send, 201, {"id": started})
            case "GET", "sweeps", name if name in self.sweeps:
                await stream(self.sweeps[name].events(), receive, send)
            case "DELETE", "sweeps", name if name in self.sweeps:
                await self.sweeps[name].batch.cancel()
                await answer(send, 200, await self.sweeps[name].batch.status_counts())
            case _:
                await answer(send, 404, {"error": "there is POST /sweeps and /sweeps/ID"})


async def answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode() + b"\n"})


async def stream(events: AsyncIterator[dict[str, Any]], receive: Receive, send: Send) -> None:
    """Send events until they end, or until whoever reads them has gone away."""

    async def tell() -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in events:
            line = f"data: {json.dumps(event)}\n\n"
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(tell()), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


app = Application()

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    uvicorn.run(app, port=port, log_level="warning", timeout_graceful_shutdown=3)
