"""Answers to requests may be older than what the watches report meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.job_status import JobStatus
from kinetic.testing import MemoryCluster, MemoryStore, Run, carry_out, memory_platform
from tests.engine.severed import on_loop_time, severed
from tests.engine.world import VIRTUAL, Passing, claim


async def wait_for_gate(x: int, gate: str) -> int:
    """Wait until the file *gate* exists."""
    while not os.path.exists(gate):
        await asyncio.sleep(1)
    return x


class Held:
    """A platform whose jobs claim their attempts and run until the gate file exists."""

    def __init__(self, folder: Path, work: Any = carry_out) -> None:
        self.gate = folder / "gate"
        self.store = MemoryStore()
        self.cluster = MemoryCluster(self.store, work)
        plain = on_loop_time(memory_platform())
        self.platform: Platform = replace(plain, store=self.store, cluster=self.cluster)

    def inputs(self, count: int) -> list[tuple[int, str]]:
        return [(index, str(self.gate)) for index in range(count)]

    async def claimed(self, count: int) -> None:
        """Wait until *count* attempts are claimed."""
        async with asyncio.timeout(1000):
            while await self._claims() < count:
                await asyncio.sleep(0.1)

    async def _claims(self) -> int:
        listed = await self.store.list("batches/")
        return sum(stored.name.endswith(".claim") for stored in listed)


@pytest.fixture
async def world(tmp_path: Path) -> Held:
    return Held(tmp_path)


async def hangs(run: Run) -> int | None:
    """Claim the attempt and ignore requests to stop."""
    await claim(run)
    await asyncio.Event().wait()
    return 1


async def abandoned(world: Held, count: int) -> str:
    """Start a batch whose submitter vanishes while all items run."""
    platform, cut = severed(world.platform)
    client = aio.Client(platform=platform)
    batch = await client.run_async_map(wait_for_gate, world.inputs(count))
    await world.claimed(count)
    cut.set()
    await client.aclose()
    return batch.group_id


@VIRTUAL
async def test_those_that_died_together_are_asked_about_together(tmp_path: Path) -> None:
    world = Held(tmp_path, hangs)
    group = await abandoned(world, 30)
    for index in range(30):
        world.cluster.end(f"{group}-{index}-1")
    await world.cluster.delete(labels={})  # the cluster forgets them
    async with aio.Client(platform=world.platform) as client:
        batch = await client.attach_batch(group)
        world.cluster.requests.clear()
        await batch.resume()
        outcomes = [item.outcome async for item in batch.outcomes()]
    assert {type(outcome).__name__ for outcome in outcomes} == {"Lost"}
    assert world.cluster.requests["find"] <= 5, "not one request per item"


class TellsMeanwhile(Passing):
    """Answer requests with a pending job, which starts before the answer arrives."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.asked = asyncio.Event()
        self.late = False

    async def find(self, **selection: Any) -> list[Observation]:
        found = await self.port.find(**selection)
        if not self.late:
            return found
        self.asked.set()
        await asyncio.sleep(1)
        return [replace(seen, phase=Phase.PENDING, executor="") for seen in found]

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        async for seen in self.port.watch(labels):
            if self.late and seen.phase is Phase.RUNNING:
                await self.asked.wait()
            yield seen


@VIRTUAL
async def test_resuming_ignores_answers_older_than_notifications(world: Held) -> None:
    group = await abandoned(world, 2)
    cluster: Any = TellsMeanwhile(world.cluster)
    platform = replace(world.platform, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        batch = await client.attach_batch(group)
        cluster.late = True
        await batch.resume(force=True)
        assert {status for _, status in await batch.statuses()} == {JobStatus.RUNNING}
        cluster.late = False
        world.gate.touch()
        assert await batch.results() == [0, 1]


@VIRTUAL
async def test_a_check_of_an_attempt_ignores_answers_older_than_notifications(world: Held) -> None:
    cluster: Any = TellsMeanwhile(world.cluster)
    cluster.late = True
    platform = replace(world.platform, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(wait_for_gate, world.inputs(2))
        await cluster.asked.wait()
        await asyncio.sleep(5)
        assert {status for _, status in await batch.statuses()} == {JobStatus.RUNNING}
        cluster.late = False
        world.gate.touch()
        assert await batch.results() == [0, 1]
