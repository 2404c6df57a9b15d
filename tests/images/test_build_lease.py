"""Whose turn it is: one at a time, and nothing of it left."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json

import pytest

from kinetic.aio._lease import ProcessIdentity
from kinetic.aio.images.bundled import Pace, turn
from kinetic.testing import MemoryStore
from tests.images.conftest import QUICK


async def never() -> bool:
    return False


async def test_one_at_a_time_and_everybody_in_the_end() -> None:
    store = MemoryStore()
    inside = most = entered = 0

    async def one() -> None:
        nonlocal inside, most, entered
        async with turn(store, "m", never, pace=Pace(look_s=0.001)) as held:
            assert held is not None
            entered, inside = entered + 1, inside + 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    async with asyncio.timeout(20):
        await asyncio.gather(*(one() for _ in range(20)))
    assert (most, entered) == (1, 20)
    assert await store.list("") == []


class Slow(MemoryStore):
    """Renewals take effect, and their answers never come."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed = asyncio.Event()

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        made = await super().replace(name, body, generation=generation)
        if b'"over": false' in body and b'"beat": 0' not in body:
            self.renewed.set()
            await asyncio.Event().wait()
        return made


async def test_a_renewal_that_was_cut_short_leaves_nothing() -> None:
    store = Slow()
    async with asyncio.timeout(20):
        async with turn(store, "m", never, pace=QUICK):
            await store.renewed.wait()
    assert await store.list("") == []


class Unanswered(MemoryStore):
    """The first thing that is replaced is, and the answer never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced = asyncio.Event()

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        made = await super().replace(name, body, generation=generation)
        if not self.replaced.is_set():
            self.replaced.set()
            await asyncio.Event().wait()
        return made


@pytest.mark.parametrize("build", ["", "b-1"])
async def test_a_take_over_that_was_cut_short_holds_nobody_up(build: str) -> None:
    store, ages = Unanswered(), itertools.count(0, 1000)
    owner = dataclasses.asdict(dataclasses.replace(ProcessIdentity.me(), host="elsewhere"))
    before = json.dumps({"token": "x", "owner": owner, "build": build}).encode()
    await store.create("m", before)

    async def one() -> str:
        async with turn(store, "m", never, clock=lambda: float(next(ages))) as held:
            assert held is not None
            return held.build

    first = asyncio.create_task(one())
    async with asyncio.timeout(20):
        await store.replaced.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        there = [json.loads((await store.get(info.name)).body) for info in await store.list("")]
        assert [(one["token"], one["build"]) for one in there] == ([("x", build)] if build else [])
        assert await one() == build
    assert await store.list("") == []


@pytest.mark.looptime
async def test_while_it_is_renewed_nobody_takes_it() -> None:
    store, clock = MemoryStore(), asyncio.get_running_loop().time
    taken = asyncio.Event()

    async def other() -> None:
        async with turn(store, "m", never, clock=clock):
            taken.set()

    async with turn(store, "m", never, clock=clock):
        waiting = asyncio.create_task(other())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(taken.wait(), 3600)
    await waiting
    assert await store.list("") == []


async def test_what_is_done_needs_no_turn() -> None:
    async def done() -> bool:
        return True

    store = MemoryStore()
    async with turn(store, "m", done, pace=QUICK) as held:
        assert held is None
    assert not store.requests
