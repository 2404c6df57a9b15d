"""What several workers take from: in order, once each, and with few wake-ups."""

from __future__ import annotations

import asyncio

from kinetic.aio._engine.launcher import WorkQueue


class Crew:
    """Workers that note what they took; while ``open`` is not set, each waits with what it has."""

    def __init__(self, line: WorkQueue[int], count: int) -> None:
        self.taken: list[tuple[int, int]] = []
        self.open = asyncio.Event()
        self._line = line
        self.tasks = [asyncio.create_task(self._work(number)) for number in range(count)]

    async def _work(self, number: int) -> None:
        while True:
            thing = await self._line.get()
            self.taken.append((number, thing))
            await self.open.wait()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_worker_takes_a_burst_that_needs_no_waiting() -> None:
    line: WorkQueue[int] = WorkQueue()
    crew = Crew(line, 3)
    crew.open.set()
    await turns()
    for thing in range(10):
        line.put(thing)
    await turns()
    assert crew.taken == [(0, thing) for thing in range(10)]
    await crew.end()


async def test_those_that_wait_are_joined_by_the_others() -> None:
    line: WorkQueue[int] = WorkQueue()
    crew = Crew(line, 3)
    await turns()
    for thing in range(5):
        line.put(thing)
    await turns()
    assert crew.taken == [(0, 0), (1, 1), (2, 2)]
    crew.open.set()
    await turns()
    assert [thing for _, thing in crew.taken] == [0, 1, 2, 3, 4]
    await crew.end()


async def test_a_call_to_one_that_is_cancelled_goes_to_the_next() -> None:
    line: WorkQueue[int] = WorkQueue()
    crew = Crew(line, 2)
    await turns()
    line.put(7)
    crew.tasks[0].cancel()  # after it was called, and before it came to its turn
    await turns()
    assert crew.taken == [(1, 7)]
    crew.tasks[1].cancel()
    await turns()
    line.put(8)
    assert await line.get() == 8
    await crew.end()
