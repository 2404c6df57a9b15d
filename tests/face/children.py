"""Functions that children of multiprocessing run; a spawned child imports this module."""

from __future__ import annotations

import asyncio

from kinetic._sync.portal import PORTAL

_tasks: list[asyncio.Task[None]] = []


async def _double(number: int) -> int:
    return 2 * number


async def _hook() -> None:
    print("hook in the child")


async def _run_forever() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned in the child", flush=True)


async def _start_task() -> None:
    _tasks.append(asyncio.create_task(_run_forever()))
    await asyncio.sleep(0)


def work() -> None:
    PORTAL.on_close(_hook)
    print("child", PORTAL.call(_double, 3))
    PORTAL.call(_start_task)
