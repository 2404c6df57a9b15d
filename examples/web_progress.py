"""Run a batch for each request: stream its progress, and cancel it when the client disconnects.

    python examples/web_progress.py [PORT]
    curl -N 'http://127.0.0.1:8000/throws?count=200'    Ctrl-C ends curl, and so cancels the batch

web_sweep.py starts batches that outlive their request.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import cos, hypot, radians, sin

import uvicorn
from fastapi import FastAPI
from fastapi.sse import EventSourceResponse

import kinetic
from kinetic.aio import Client


@kinetic.run(backend="local", accelerator="cpu")
def distance(angle: float) -> float:
    """Throw a ball at 40 m/s and *angle* degrees; return how many metres it flies in air."""
    x, y, vx, vy = 0.0, 1.5, 40 * cos(radians(angle)), 40 * sin(radians(angle))
    while y > 0:
        drag = 0.0053 * hypot(vx, vy)
        vx, vy = vx - 0.0002 * drag * vx, vy - 0.0002 * (drag * vy + 9.81)
        x, y = x + 0.0002 * vx, y + 0.0002 * vy
    return x


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Client(backend="local") as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/throws", response_class=EventSourceResponse)
async def throws(count: int = 200) -> AsyncIterator[dict[str, object]]:
    angles = [90 * (number + 0.5) / count for number in range(count)]
    batch = await app.state.client.run_async_map(distance, angles, name="throws")
    async with batch:  # a disconnect ends the block, which cancels the batch
        async for now in batch.progress():
            yield {"ended": now.ended, "of": now.total, "running": now.running}
        results = [(outcome.unwrap(), angle) async for _, angle, outcome in batch.outcomes()]
    metres, angle = max(results)
    yield {"best angle": round(angle, 1), "metres": round(metres, 1)}


if __name__ == "__main__":
    # Without this limit, Ctrl-C would wait as long as a reader stays connected.
    port = int([*sys.argv, "8000"][1])
    uvicorn.run(app, port=port, log_level="warning", timeout_graceful_shutdown=3)
