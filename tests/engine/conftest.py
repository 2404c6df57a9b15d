"""A platform in memory with a client, and virtual time that waits for worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from kinetic import aio
from kinetic.aio.platforms import Platform
from tests.engine.world import World

THREAD_LIMIT_S = 60.0
"""Seconds after which a worker thread counts as hanging."""


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    """Use the small project in every test of this folder."""
    return small_project


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest) -> None:
    """Stop virtual time during thread work, in every test that uses virtual time."""
    if request.node.get_closest_marker("looptime") is not None:
        request.getfixturevalue("threads_take_no_time")


@pytest.fixture
async def threads_take_no_time() -> None:
    """Stop virtual time while a worker thread pickles, rebuilds or runs something.

    Otherwise time jumps from timer to timer until the thread ends: half a second of thread work
    becomes an hour. Time doesn't stop for the thread that reads an iterator, which may block.
    """
    loop: Any = asyncio.get_running_loop()
    limiter = anyio.to_thread.current_default_thread_limiter()
    selector, start = loop._selector, loop.run_in_executor
    jumping, waiting = selector.select, type(selector).select
    working: set[asyncio.Future[Any]] = set()

    def select(timeout: float | None = None) -> Any:
        if (limiter.borrowed_tokens or working) and timeout != 0 and loop.looptime_on:
            done = waiting(selector, THREAD_LIMIT_S)  # a finished thread wakes the loop
            assert done, "a worker thread waits for a timer"
            return done
        return jumping(timeout)

    def run_in_executor(*args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = start(*args)
        working.add(future)
        future.add_done_callback(working.discard)
        return future

    selector.select, loop.run_in_executor = select, run_in_executor


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def platform(world: World) -> Platform:
    """The platform of `client` and `other`."""
    return world.platform


@pytest.fixture
async def client(platform: Platform) -> AsyncIterator[aio.Client]:
    async with aio.Client(platform=platform) as client:
        yield client


@pytest.fixture
async def other(platform: Platform) -> AsyncIterator[aio.Client]:
    """Another client of the same platform."""
    async with aio.Client(platform=platform) as client:
        yield client
