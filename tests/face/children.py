"""What the children of multiprocessing run; a spawned one imports it."""

from __future__ import annotations

import asyncio

from kinetic._sync.portal import PORTAL

_tasks: list[asyncio.Task[None]] = []


async def _double(number: int) -> int:
    return 2 * number


async def _hook() -> None:
    print("hook in the child")


async def _for_ever() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned in the child", flush=True)


async def _begin() -> None:
    _tasks.append(asyncio.create_task(_for_ever()))
    await asyncio.sleep(0)


def work() -> None:
    PORTAL.on_close(_hook)
    print("child", PORTAL.call(_double, 3))
    PORTAL.call(_begin)
