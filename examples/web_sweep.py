"""Run sweeps behind FastAPI: start one in the browser, watch its results, and cancel it.

    python examples/web_sweep.py [PORT]    then open http://127.0.0.1:8000

One client serves all requests. When the application stops, it cancels the sweeps that still run.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from math import cos, hypot, radians, sin
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import FileResponse
from fastapi.sse import EventSourceResponse

import kinetic
from kinetic.aio import BatchHandle, Client


@kinetic.run(backend="local", accelerator="cpu")
def distance(angle: float) -> float:
    """Throw a ball at 40 m/s and *angle* degrees; return how many metres it flies in air."""
    x, y, vx, vy = 0.0, 1.5, 40 * cos(radians(angle)), 40 * sin(radians(angle))
    while y > 0:
        drag = 0.0053 * hypot(vx, vy)
        vx, vy = vx - 0.002 * drag * vx, vy - 0.002 * (drag * vy + 9.81)
        x, y = x + 0.002 * vx, y + 0.002 * vy
    return x


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with Client(backend="local") as client, AsyncExitStack() as running:
        app.state.client, app.state.running = client, running
        yield  # serve requests; then cancel the batches in `running`


Batch = BatchHandle[float, float]
batches: dict[str, Batch] = {}
app = FastAPI(lifespan=lifespan)


def find_batch(batch_id: str) -> Batch:
    if batch_id not in batches:
        raise HTTPException(404, f"there is no sweep {batch_id}")
    return batches[batch_id]


@app.get("/")
async def page() -> FileResponse:
    return FileResponse(Path(__file__).with_suffix(".html"))


@app.post("/sweeps", status_code=201)
async def start(throws: int = 200) -> dict[str, str]:
    angles = [90 * (n + 0.5) / throws for n in range(throws)]
    batch = await app.state.client.run_async_map(distance, angles, name="throws", retries=2)
    batches[batch.group_id] = await app.state.running.enter_async_context(batch)
    return {"id": batch.group_id}


@app.get("/sweeps/{batch_id}", response_class=EventSourceResponse)
async def watch(batch: Annotated[Batch, Depends(find_batch)]) -> AsyncIterator[dict[str, object]]:
    async for _, angle, outcome in batch.outcomes():  # each reader gets every outcome
        yield {"angle": angle, "metres": outcome.unwrap() if outcome.ok else None}
    yield {"counts": await batch.status_counts()}


@app.delete("/sweeps/{batch_id}", status_code=204)
async def cancel(batch: Annotated[Batch, Depends(find_batch)]) -> None:
    await batch.cancel()


if __name__ == "__main__":
    port = int([*sys.argv, "8000"][1])
    uvicorn.run(app, port=port, log_level="warning", timeout_graceful_shutdown=3)  # pages stay open
