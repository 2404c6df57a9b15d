"""A submitter that tests kill at any moment; they copy this file into a project and run it.

Usage: ``sweeper.py listed|lazy FOLDER COUNT``. It prints ``ready`` before it does anything, then
the batch's ID, then ``over`` when every item has its outcome, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kinetic import aio

RETRIES = 2


def work(folder: str, number: int) -> int:
    """Leave a mark for this attempt; raise or die at the first attempt of some items."""
    attempt = os.environ["KINETIC_ATTEMPT"]
    name = f"{os.environ['KINETIC_JOB_ID']}.{attempt}"
    try:
        Path(folder, name).touch(exist_ok=False)
    except FileExistsError:
        Path(folder, f"twice.{name}").touch()
    time.sleep(0.01)
    if attempt == "1" and number % 5 == 1:
        raise ValueError(number)
    if attempt == "1" and number % 7 == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def lazily(folder: str, count: int) -> Iterator[tuple[str, int]]:
    """Yield the inputs, without telling how many there are."""
    for number in range(count):
        yield folder, number


async def main(mode: str, folder: str, count: int) -> None:
    async with aio.Client(backend="local") as client:
        inputs = lazily(folder, count)
        batch = await client.run_async_map(
            work,
            inputs if mode == "lazy" else [*inputs],
            max_concurrent=3,
            retries=RETRIES,
        )
        print("submitted", batch.group_id, flush=True)
        await batch.wait()
        print("over", flush=True)


if __name__ == "__main__":
    print("ready", flush=True)
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    sys.stdin.read()
