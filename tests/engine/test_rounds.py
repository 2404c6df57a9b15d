"""Test how a client begins and scales rounds of workers that only the store knows the items of."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic._labels import ROUND
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.testing import memory_platform
from tests.engine.severed import on_loop_time

pytestmark = pytest.mark.looptime(noop_cycles=300)

ENDS_S = 20.0
"""How long a deleted worker takes to end."""

LATE_S = 600.0
"""The same on a node that doesn't answer."""


def nop(_: int) -> None: ...


class Round:
    def __init__(self, labels: Mapping[str, str], size: int) -> None:
        self.labels = labels
        self.size = size
        self.ends_at = float("inf")


class Rounds:
    """A cluster whose workers take no item, as if each waited for a machine."""

    shows_items = False
    replaces = True

    def __init__(self, cluster: Any, *, in_queue: bool = False) -> None:
        self._cluster = cluster
        self._in_queue = in_queue
        self.rounds: dict[int, Round] = {}
        self.begun: list[tuple[int, list[int]]] = []
        """The number of each new round, and the rounds that had workers at that moment."""
        self.refusal: Exception | None = None
        self.ends_s = ENDS_S
        self.phase = Phase.PENDING
        self.outage: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def living(self) -> list[int]:
        now = asyncio.get_running_loop().time()
        return [number for number, it in self.rounds.items() if now < it.ends_at]

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        if self.refusal is not None:
            raise self.refusal
        if number not in self.rounds:
            self.begun.append((number, self.living()))
            self.rounds[number] = Round(job.labels, ranks.stop)
        return await self.grow(job.name, ranks.stop)

    async def grow(self, name: str, workers: int) -> int:
        found = self.rounds[int(name.rpartition("-r")[2])]
        if not self._in_queue:
            found.size = max(found.size, workers)
        return found.size

    async def delete(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        keep_logs: bool = False,
    ) -> None:
        for it in self.rounds.values():
            if labels is not None and labels.items() <= it.labels.items():
                it.ends_at = min(it.ends_at, asyncio.get_running_loop().time() + self.ends_s)

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        if self.outage is not None:
            raise self.outage
        found: list[Observation] = []
        for number in self.living():
            it = self.rounds[number]
            name = f"{it.labels['kinetic.dev/submission']}-r{number}"
            found += [
                Observation(
                    name=f"{name}.job.{rank}.0",
                    phase=self.phase,
                    labels={**it.labels, ROUND: str(number)},
                )
                for rank in range(it.size)
            ]
        return found

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Report the first workers, and then nothing more, as a watch that has lost its login."""
        while not self.rounds:
            await asyncio.sleep(1)
        for seen in await self.find(labels=labels):
            yield seen
        await asyncio.Event().wait()

    async def tell(self, labels: Mapping[str, str]) -> None: ...

    async def item_log(self, *args: Any, **_: Any) -> AsyncGenerator[str]:
        raise errors.NotFound(str(args))
        yield ""


def with_rounds(platform: Platform, *, in_queue: bool = False) -> tuple[Platform, Rounds]:
    rounds: Any = Rounds(platform.cluster, in_queue=in_queue)
    return dataclasses.replace(on_loop_time(platform), cluster=rounds), rounds


@pytest.mark.parametrize("ends_s", [ENDS_S, pytest.param(LATE_S, marks=pytest.mark.full)])
async def test_a_retry_after_a_stop_begins_another_round_when_the_stopped_workers_have_ended(
    caplog: pytest.LogCaptureFixture, ends_s: float
) -> None:
    platform, rounds = with_rounds(memory_platform())
    rounds.ends_s = ends_s
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(nop, [1, 2, 3], max_concurrent=2)
        await batch.cancel()
        assert await batch.retry_failed() == 3
        assert rounds.living() == [0]
        while len(rounds.begun) < 2:
            await asyncio.sleep(1)
        (first, _), (second, others) = rounds.begun
        # Its number is greater than that of the stop, so a late deletion doesn't reach it.
        assert first == 0 and second > 1
        assert others == [] == [number for number in rounds.living() if number < second]
        warnings = [text for text in caplog.messages if "haven't ended" in text]
        assert len(warnings) == (ends_s == LATE_S)
        await batch.cancel()
        await batch.cleanup()


async def test_in_a_queue_more_workers_come_with_the_next_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    platform, rounds = with_rounds(memory_platform(), in_queue=True)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(nop, range(5), max_concurrent=2)
        assert rounds.rounds[0].size == 2
        assert await batch.scale(4) == 2
        assert "next round has 4" in caplog.text
        await batch.cancel()
        await batch.retry_failed()
        while len(rounds.begun) < 2:
            await asyncio.sleep(1)
        assert rounds.rounds[rounds.begun[1][0]].size == 4
        await batch.cancel()
        await batch.cleanup()


async def test_workers_that_can_not_start_are_deleted_when_their_items_have_failed() -> None:
    """A queue would admit them later, without work and without the batch's Secret."""
    platform, rounds = with_rounds(memory_platform())
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(nop, [1, 2])
        rounds.refusal = errors.LaunchError("queue 'team' can never hold it")
        await batch.scale(3)
        with pytest.raises(errors.BatchError, match="can never hold it"):
            await batch.results(cleanup=False)
        await asyncio.sleep(ENDS_S)
        assert rounds.living() == []


async def test_a_quota_that_stays_used_up_ends_a_batch_after_its_start_timeout() -> None:
    platform, rounds = with_rounds(memory_platform())
    rounds.refusal = errors.Throttled("quota 'few' is used up", retryable=True)
    async with aio.Client(platform=platform) as client:
        function = kinetic.run(start_timeout=60)(nop)
        batch = await client.run_async_map(function, [1, 2])
        with pytest.raises(errors.BatchError, match="quota 'few' is used up"):
            await batch.results(cleanup=False)
        patient = await client.run_async_map(nop, [1, 2])
        await patient.cancel()
        assert await patient.status_counts() == {"NOT_FOUND": 2}


async def test_workers_whose_end_no_watch_reports_are_replaced() -> None:
    platform, rounds = with_rounds(memory_platform())
    rounds.phase = Phase.RUNNING
    async with aio.Client(platform=platform) as client, asyncio.timeout(1000):
        batch = await client.run_async_map(nop, [1, 2])
        await asyncio.sleep(5)
        rounds.rounds.clear()  # a user deletes the Job
        while len(rounds.begun) < 2:
            await asyncio.sleep(1)
        await batch.cancel()


async def test_only_the_platform_says_that_no_worker_could_start() -> None:
    platform, rounds = with_rounds(memory_platform())
    function = kinetic.run(start_timeout=60)(nop)
    async with aio.Client(platform=platform) as client, asyncio.timeout(2000):
        batch = await client.run_async_map(function, [1, 2])
        await asyncio.sleep(5)
        rounds.outage = errors.Unavailable("the login has expired", retryable=True)
        await asyncio.sleep(200)
        rounds.outage, rounds.phase = None, Phase.RUNNING
        await asyncio.sleep(200)
        assert await batch.status_counts() == {"PENDING": 2}
        rounds.phase = Phase.PENDING
        with pytest.raises(errors.BatchError, match="no worker could start for 60 s"):
            await batch.results(cleanup=False)
