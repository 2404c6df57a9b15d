"""A client that tests kill at any moment; they copy this file into a project and run it.

Usage: ``victim.py jobs|batch|gated FOLDER COUNT SECONDS``. It prints ``ready`` before it does
anything, then the IDs it submitted, then their results, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

from kinetic import aio


def work(folder: str, number: int, seconds: float) -> int:
    """Leave a mark for this attempt, sleep, and wait while a ``held`` file exists."""
    name = f"{os.environ['KINETIC_JOB_ID']}.{os.environ['KINETIC_ATTEMPT']}"
    try:
        Path(folder, name).touch(exist_ok=False)
    except FileExistsError:
        Path(folder, f"twice.{name}").touch()
    time.sleep(seconds)
    while Path(folder, f"held.{number}").exists():
        time.sleep(0.005)
    return number * number


def gated(folder: str, number: int, seconds: float) -> int:
    """Leave a mark, and wait for a ``go`` file."""
    work(folder, number, 0)
    gates = [Path(folder, "go"), Path(folder, f"go.{number}")]
    while not any(gate.exists() for gate in gates):
        time.sleep(0.005)
    return number * number


async def jobs(folder: str, count: int, seconds: float) -> None:
    async with aio.Client(backend="local") as client:

        async def submit(number: int) -> None:
            job = await client.submit(work, folder, number, seconds)
            print("submitted", job.job_id, flush=True)
            try:
                value = await job.result(cleanup=False)
            except Exception as error:
                print("ended", job.job_id, type(error).__name__, flush=True)
            else:
                print("ended", job.job_id, value, flush=True)

        await asyncio.gather(*map(submit, range(count)))


async def batch(folder: str, count: int, seconds: float, function: Any = work) -> None:
    async with aio.Client(backend="local") as client:
        inputs = [(folder, number, seconds) for number in range(count)]
        handle = await client.run_async_map(function, inputs, max_concurrent=2)
        print("submitted", handle.group_id, flush=True)
        values = await handle.results(return_exceptions=True, cleanup=False)
        for index, value in enumerate(values):
            shown = type(value).__name__ if isinstance(value, Exception) else value
            print("ended", f"{handle.group_id}-{index}", shown, flush=True)


if __name__ == "__main__":
    print("ready", flush=True)
    mode, folder, count, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    modes: dict[str, Any] = {"jobs": jobs, "batch": batch}
    modes["gated"] = functools.partial(batch, function=gated)
    asyncio.run(modes[mode](folder, count, seconds))
    print("over", flush=True)
    sys.stdin.read()
