"""Clients of a batch that tests trouble in every way; they copy this file into a project.

Usage: ``toiler.py listed|lazy FOLDER COUNT ISOLATION`` submits a batch, and
``toiler.py look|resume FOLDER COUNT GROUP`` takes part in one. It prints ``ready`` before it does
anything, then ``submitted`` and the batch's ID, then ``over`` when every item has its outcome, or
``error`` and why it can't go on; then it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kinetic
from kinetic import aio, errors

RETRIES = 2


def ancestors() -> list[int]:
    """Return the IDs of this process, of its parent, and so on, up to the first of the machine."""
    found, pid = [], os.getpid()
    with contextlib.suppress(OSError):  # one of them has just ended
        while pid > 1:
            found.append(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def note(folder: str, *entry: Any) -> None:
    """Add a line to the notes of all attempts; one write to a file takes effect as a whole."""
    fd = os.open(f"{folder}/notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(entry).encode() + b"\n")
    os.close(fd)


def work(folder: str, number: int) -> int:
    """Note the begin and the end of this attempt; some leave a process, and one in 20 raises."""
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    note(folder, "begin", number, attempt, ancestors())
    if number % 9 == 2:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(0.01 + number % 7 * 0.01)
    note(folder, "end", number, attempt)
    if number % 20 == 1:
        raise ValueError(number)
    return number * number


def lazily(inputs: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the inputs, without telling how many there are."""
    for entry in inputs:
        time.sleep(0.005)
        yield entry


async def finish(batch: Any, folder: str, count: int) -> None:
    """Take the batch over, and wait for all items; store the inputs that it lacks."""
    await batch.resume(force=True)
    try:
        await batch.wait()
    except errors.InputsUnfinished:
        rest = [(folder, number) for number in range(batch.stored, count)]
        await batch.resume(inputs=lazily(rest))


async def main(role: str, folder: str, count: int, subject: Any) -> None:
    inputs = [(folder, number) for number in range(count)]
    async with aio.Client(backend="local") as client:
        if role in ("listed", "lazy"):
            function: Any = kinetic.run(backend="local", accelerator="cpu", isolation=subject)(work)
            batch: Any = await client.run_async_map(
                function,
                inputs if role == "listed" else lazily(inputs),
                max_concurrent=2,
                retries=RETRIES,
            )
        else:
            batch = await client.attach_batch(subject)
        print("submitted", batch.group_id, flush=True)
        if role == "resume":
            await finish(batch, folder, count)
        await batch.wait()
        print("over", flush=True)


if __name__ == "__main__":
    print("ready", flush=True)
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
    except errors.KineticError as error:
        print("error", type(error).__name__, error, flush=True)
