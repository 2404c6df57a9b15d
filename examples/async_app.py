"""An async application that hands its heavy work to jobs: one client, open as long as the app.

The loop stays free: a heartbeat goes on while the jobs run. What is still
running when the block is left, for whatever reason, is ended.
"""

from __future__ import annotations

import asyncio
import time

import kinetic
from kinetic.aio import Client


@kinetic.run(backend="local", accelerator="cpu")
def estimate_pi(seed: int, points: int = 400_000) -> float:
    """Monte Carlo on one core."""
    import random

    random.seed(seed)
    inside = sum(random.random() ** 2 + random.random() ** 2 < 1 for _ in range(points))
    return 4 * inside / points


async def heartbeat() -> None:
    while True:
        print(f"{time.strftime('%X')} still here")
        await asyncio.sleep(0.5)


async def main() -> None:
    async with asyncio.TaskGroup() as group, Client(backend="local") as client:
        beating = group.create_task(heartbeat())
        first = await client.submit(estimate_pi, 0)
        print("one job:", await first)
        async with await client.run_async_map(estimate_pi, range(1, 9)) as batch:
            total = 0.0
            async for job in batch.as_completed():
                total += await job
                print(f"  seed {job.group_index + 1} is in")
        print("eight jobs:", total / 8)
        beating.cancel()


if __name__ == "__main__":
    asyncio.run(main())
