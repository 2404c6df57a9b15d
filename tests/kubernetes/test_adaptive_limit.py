"""How many requests at a time a server gets: it grows, halves when refused, and is told."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress

import pytest

from kinetic.aio.kubernetes.api import AdaptiveLimit

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]


class Server:
    """Takes *capacity* requests at a time, each for *lasts* seconds, and refuses all others."""

    def __init__(self, capacity: int, lasts: float = 0.1) -> None:
        self.capacity = capacity
        self.lasts = lasts
        self.busy = self.most = self.done = self.refused = 0

    async def serve(self, level: AdaptiveLimit) -> bool:
        async with level.turn() as turn:
            if self.busy >= self.capacity:
                self.refused += 1
                turn.refused = True
                return False
            self.busy += 1
            self.most = max(self.most, self.busy)
            try:
                await asyncio.sleep(self.lasts * random.uniform(0.9, 1.1))
            finally:
                self.busy -= 1
            self.done += 1
            return True

    async def served(self, level: AdaptiveLimit) -> None:
        while not await self.serve(level):
            await asyncio.sleep(random.uniform(0, 0.05))


async def test_it_finds_what_a_server_takes() -> None:
    level, server = AdaptiveLimit("c", first=4, most=256), Server(40)
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(server.served(level) for _ in range(1500)))
    assert server.done == 1500
    assert server.refused < 200
    assert server.most == 40
    best = 1500 / server.capacity * server.lasts
    assert loop.time() < 2 * best


async def test_it_rises_to_its_bound_where_nothing_is_refused_and_no_further() -> None:
    level, server = AdaptiveLimit("c", first=4, most=64), Server(1000)
    await asyncio.gather(*(server.served(level) for _ in range(800)))
    assert (server.refused, server.most, level.now) == (0, 64, 64)


async def test_it_does_not_rise_while_it_is_not_used_up() -> None:
    level, server = AdaptiveLimit("c", first=4, most=64), Server(1000)
    for _ in range(100):
        await asyncio.gather(server.serve(level), server.serve(level))
    assert level.now == 4


async def test_those_refused_together_halve_it_once() -> None:
    level, server = AdaptiveLimit("c", first=32, most=64), Server(0)
    gate = asyncio.Event()

    async def one() -> None:
        async with level.turn() as turn:
            await gate.wait()
            turn.refused = True

    tasks = [asyncio.create_task(one()) for _ in range(32)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert level.now == 16
    for expected in (8, 4, 2, 1, 1, 1):
        await server.serve(level)
        assert level.now == expected


async def test_what_fails_otherwise_neither_raises_nor_lowers_it() -> None:
    level = AdaptiveLimit("c", first=1, most=64)
    for _ in range(10):
        with suppress(ValueError):
            async with level.turn():
                raise ValueError
    assert level.now == 1


async def test_turns_come_in_order_and_those_who_leave_hold_nobody_up() -> None:
    level, order = AdaptiveLimit("c", first=1, most=1), []

    async def one(number: int) -> None:
        async with level.turn():
            order.append(number)
            await asyncio.sleep(1)

    tasks = [asyncio.create_task(one(number)) for number in range(6)]
    await asyncio.sleep(0.5)
    tasks[2].cancel()
    await asyncio.sleep(0)
    assert level.waiting == 4
    await asyncio.sleep(0.5 + 1e-9)  # the turn of 1 is given in this moment
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number in order if number != 1] == [0, 3, 4, 5]
    async with level.turn():
        assert level.waiting == 0


async def test_those_who_ask_again_go_first() -> None:
    level, order = AdaptiveLimit("c", first=1, most=1), []

    async def one(name: str, again: bool) -> None:
        async with level.turn(again=again):
            order.append(name)
            await asyncio.sleep(1)

    asked = [one("a", False), one("b", False), one("c", False), one("again", True)]
    await asyncio.gather(*asked)
    assert order == ["a", "again", "b", "c"]


async def test_one_who_is_cancelled_when_its_turn_comes_passes_it_on() -> None:
    level = AdaptiveLimit("c", first=1, most=1)
    first = level.turn()
    await first.__aenter__()

    async def one() -> None:
        async with level.turn():
            pass

    second, third = asyncio.create_task(one()), asyncio.create_task(one())
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)  # its turn is given here, and taken in the next step
    second.cancel()
    async with asyncio.timeout(1):
        await third
    assert second.cancelled()


async def test_one_who_is_cancelled_right_before_its_turn_is_cancelled() -> None:
    level = AdaptiveLimit("c", first=1, most=1)
    first = level.turn()
    await first.__aenter__()

    async def one() -> None:
        async with level.turn():
            pass

    second, third = asyncio.create_task(one()), asyncio.create_task(one())
    await asyncio.sleep(0)
    second.cancel()  # hears of it in its next step
    await first.__aexit__(None, None, None)
    async with asyncio.timeout(1):
        await third
    assert second.cancelled()


async def test_it_is_told_when_the_limit_is_what_holds_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="absl")
    level, server = AdaptiveLimit("the cluster 'c'", first=2, most=2), Server(100, lasts=3.0)
    await asyncio.gather(*(server.served(level) for _ in range(60)))
    told = [record.getMessage() for record in caplog.records]
    assert "the API server of the cluster 'c' is the limit now: 2 requests at a time" in told[0]
    assert 1 <= len(told) <= 2  # 90 s of it; once a minute


async def test_who_is_not_held_up_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="absl")
    level, server = AdaptiveLimit("c", first=2, most=2), Server(100, lasts=1.0)
    await asyncio.gather(*(server.served(level) for _ in range(8)))
    assert not caplog.records
