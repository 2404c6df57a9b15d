"""Run the behaviours of a module side by side on one platform; each is the body of a test."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Self

import pytest

from kinetic import aio, configuration
from kinetic.aio.platforms import open_platform

from .harness import DEADLINE_S, LONG_S, Harness, Platform

Behaviour = Callable[[Harness], Awaitable[None]]
Test = Callable[..., None]


def behaviour(function: Behaviour) -> Test:
    """Make *function* a test. The crew starts it; the test waits for its end."""
    return _test(function, DEADLINE_S)


def long_behaviour(function: Behaviour) -> Test:
    """Make *function* a test that takes minutes and runs only with the slow ones."""
    marked: Test = pytest.mark.slow(_test(function, LONG_S))
    return marked


def _test(function: Behaviour, deadline: float) -> Test:
    @functools.wraps(function)
    def test(crew: Crew) -> None:
        crew.end(function)

    parameter = inspect.Parameter("crew", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    test.deadline = deadline  # type: ignore[attr-defined]
    timed: Test = pytest.mark.timeout(2 * deadline)(test)  # the first one starts the control plane
    return timed


class Crew:
    """``with Crew(platform) as crew:`` runs behaviours on the platform's kind of event loop.

    Leaving the block cancels those that still run.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._turns = asyncio.Semaphore(platform.side_by_side)
        self._tasks: dict[Behaviour, asyncio.Task[None]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._loop = stack.enter_context(asyncio.Runner(loop_factory=self._platform.new_loop))
            self._loop.run(self._open())
            stack.callback(lambda: self._loop.run(self._close()))
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(aio.Client())
            self._ports = await open_platform(configuration.resolve())
            stack.push_async_callback(self._ports.aclose)
            self._opened = stack.pop_all()

    async def _close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._opened.aclose()

    def begin(self, item: Any) -> None:
        """Run the behaviour of the test *item* when its turn comes."""
        test = getattr(item.module, item.originalname)
        behaviour, deadline = test.__wrapped__, test.deadline
        work = self._run(behaviour, deadline)
        self._tasks[behaviour] = self._loop.get_loop().create_task(work)

    def end(self, function: Behaviour) -> None:
        """Wait until *function* has ended, and raise what it raised."""
        task = self._tasks[function]
        self._loop.run(asyncio.wait({task}))
        task.result()

    async def _run(self, function: Behaviour, deadline: float) -> None:
        folder = self._platform.folder / function.__name__
        folder.mkdir()
        harness = Harness(self._platform, self._client, self._ports, folder)
        async with self._turns, asyncio.timeout(deadline):
            await function(harness)
