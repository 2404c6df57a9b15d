"""Several streams as one, without taking from any of them more than is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from typing import TypeVar

__all__ = ["merged"]

T = TypeVar("T")


async def merged(streams: Collection[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """What any of *streams* gives, as it comes; ends when all have, fails when one does.

    Nothing is awaited between two items, so that a stream which only tells the
    latest goes on doing that. They are closed with it.
    """
    waiting: dict[asyncio.Task[T | None], AsyncGenerator[T]] = {}
    idle = [*streams]
    try:
        while idle or waiting:
            for stream in idle:
                waiting[asyncio.create_task(_next(stream), name="kinetic merged stream")] = stream
            idle.clear()
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                if (item := task.result()) is None:
                    continue
                yield item
                idle.append(stream)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T]) -> T | None:
    """The next item; none of them is None."""
    return await anext(stream, None)
