"""Clients that die at every step of their work; tests copy this file into a project and run it.

Usage: ``steps.py submit|clean|batch|lazy|cancel|remove FOLDER``. A step is a request to the store
or to the platform. For NUMBER = 1, 2, …, the script forks a client that kills itself before that
step, and prints ``died NUMBER``. It ends after the first client that survives.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kinetic import aio, configuration
from kinetic.aio.images.current import CurrentInterpreter
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec, ObjectInfo

steps_left = 0
"""A client kills itself when this reaches 0."""


def step() -> None:
    """Count a step, and die if it is the chosen one."""
    global steps_left
    steps_left -= 1
    if steps_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class Store(DirectoryStore):
    async def create(self, name: str, *args: Any, **options: Any) -> bool:
        step()
        return await super().create(name, *args, **options)

    async def look(self, name: str) -> ObjectInfo | None:
        step()
        return await super().look(name)

    async def renew(self, names: Collection[str]) -> set[str]:
        step()
        return await super().renew(names)

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        step()
        return await super().replace(name, body, generation=generation)

    async def delete(self, names: Collection[str]) -> None:
        for name in names:
            step()
            await super().delete([name])


class Cluster(LocalCluster):
    async def launch(self, job: JobSpec) -> None:
        step()
        await super().launch(job)
        step()

    async def delete(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        keep_logs: bool = False,
    ) -> None:
        step()
        await super().delete(names=names, labels=labels, keep_logs=keep_logs)
        step()


def platform() -> Platform:
    home = configuration.home(os.environ)
    cluster = Cluster(home)
    return Platform(
        store=Store(home / "store"),
        images=CurrentInterpreter(),
        cluster=cluster,
        id_marker="local-",
    )


def work(folder: str, number: int) -> int:
    """Leave a mark for this attempt, or another one if the attempt ran before."""
    name = f"{os.environ['KINETIC_JOB_ID']}.{os.environ['KINETIC_ATTEMPT']}"
    try:
        Path(folder, name).touch(exist_ok=False)
    except FileExistsError:
        Path(folder, f"twice.{name}").touch()
    return number * number


def hang(folder: str, number: int) -> None:
    """Leave a mark, and never end."""
    work(folder, number)
    while True:  # not one long sleep: Python would handle a signal that arrives early only after it
        time.sleep(0.05)


async def submit(client: aio.Client, folder: str) -> None:
    await (await client.submit(work, folder, 1)).result(cleanup=False)


async def clean(client: aio.Client, folder: str) -> None:
    await (await client.submit(work, folder, 2)).result(cleanup=True)


async def batch(client: aio.Client, folder: str) -> None:
    handle = await client.run_async_map(work, [(folder, n) for n in range(3)], max_concurrent=2)
    await handle.results(cleanup=False)


async def lazy(client: aio.Client, folder: str) -> None:
    inputs = ((folder, n) for n in range(2))
    handle = await client.run_async_map(work, inputs, max_concurrent=1)
    await handle.results(cleanup=False)


async def cancel(client: aio.Client, folder: str) -> None:
    handle = await client.run_async_map(hang, [(folder, n) for n in range(3)], max_concurrent=2)
    while not [*Path(folder).glob(f"{handle.group_id}*")]:
        await asyncio.sleep(0.005)
    await handle.cancel()


async def remove(client: aio.Client, folder: str) -> None:
    handle = await client.run_async_map(work, [(folder, n) for n in range(2)])
    await handle.results(cleanup=False)
    await handle.cleanup()


async def run_client(mode: str, folder: str) -> None:
    async with aio.Client(backend="local", platform=platform()) as client:
        await globals()[mode](client, folder)


if __name__ == "__main__":
    for name in ("archive", "payload", "tree"):
        importlib.import_module(
            f"kinetic._packing.{name}"
        )  # before the forks, so that all share it
    number, died = 0, True
    while died:
        number += 1
        pid = os.fork()
        if pid == 0:
            steps_left = number
            asyncio.run(run_client(sys.argv[1], sys.argv[2]))
            os._exit(0)
        died = os.waitpid(pid, 0)[1] == signal.SIGKILL
        print("died" if died else "lived", number, flush=True)
    print("over", flush=True)
