"""Workers report the ends of many items at once; the client reads their outcomes together."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio
from kinetic._runner.protocol import frames, outcomes, wire
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.errors import JobLost, WireError
from kinetic.outcome import Failed, Lost, Succeeded
from kinetic.testing import MemoryCluster, memory_platform
from tests.engine.counting import CountingLoop, counted
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, until

BURST = 20
NONE = frames.pack([b"\x80\x05N."])
WORKER = "worker-process"

Metadata = Mapping[str, str]


def nop(_: int) -> None: ...


class Bursts(MemoryCluster):
    """A cluster with a worker that ends items when the test says so."""

    shows_items = replaces = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.job: JobSpec | None = None
        self._news: asyncio.Queue[Observation] = asyncio.Queue()

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        self.job = job
        return ranks.stop

    async def tell(self, labels: Mapping[str, str]) -> None: ...

    async def watch(self, labels: Mapping[str, str]) -> Any:
        while True:
            yield await self._news.get()

    async def store(
        self,
        index: int,
        number: int = 1,
        kind: wire.Kind = wire.Kind.VALUE,
        change: Callable[[dict[str, str]], Metadata] = lambda metadata: metadata,
    ) -> None:
        """Store the claim and the outcome of an attempt."""
        assert self.job is not None
        attempt_id, store = (self.job.order.scope, index, number), self._store
        body = NONE if kind is wire.Kind.VALUE else frames.pack([], {"error": {"message": "no"}})
        outcome = wire.Outcome(kind, executor=WORKER, body=outcomes.digest(body))
        claim, name = (wire.attempt_key(*attempt_id, part) for part in ("claim", "outcome"))
        await store.create(claim, b"", wire.claim_metadata(WORKER))
        await store.create(name, body, change(outcome.signed(self.job.key, *attempt_id)))

    def report(self, *ended: tuple[int, int]) -> None:
        """Report the ends of attempts."""
        assert self.job is not None
        self._news.put_nowait(
            Observation(
                name="submission",
                phase=Phase.RUNNING,
                labels=self.job.labels,
                executor=WORKER,
                ended=ended,
            )
        )


@pytest.fixture
def cluster() -> Bursts:
    return Bursts(memory_platform().store, None)


def platform_of(cluster: Bursts) -> Platform:
    platform = replace(memory_platform(), store=cluster._store)
    return replace(on_loop_time(platform), cluster=cluster)


async def begun(client: aio.Client, cluster: Bursts, items: Iterable[int], **options: Any) -> Any:
    """Start a batch, and wait until it has workers."""
    cluster.job = None
    batch = await client.run_async_map(nop, items, **options)
    await until(lambda: cluster.job is not None)
    return batch


@VIRTUAL
async def test_a_forged_outcome_is_the_end_of_its_own_item(cluster: Bursts) -> None:
    async with aio.Client(platform=platform_of(cluster)) as client:
        batch = await begun(client, cluster, range(3))
        await cluster.store(0)
        await cluster.store(1, change=lambda metadata: {**metadata, "mac": "0" * 64})
        await cluster.store(2)
        cluster.report((0, 1), (1, 1), (2, 1))
        began = asyncio.get_running_loop().time()
        found = {it.index: it.outcome async for it in batch.outcomes()}
        assert asyncio.get_running_loop().time() - began < 1
    assert found[0] == found[2] == Succeeded(None)
    assert isinstance(found[1], Failed) and isinstance(found[1].error, WireError)


@VIRTUAL
async def test_an_item_that_ended_without_an_outcome_is_lost(cluster: Bursts) -> None:
    async with aio.Client(platform=platform_of(cluster)) as client:
        batch = await begun(client, cluster, range(2))
        await cluster.store(0)
        claim = wire.attempt_key(cluster.job.order.scope, 1, 1, "claim")
        await cluster._store.create(claim, b"", wire.claim_metadata(WORKER))
        cluster.report((0, 1), (1, 1))
        found = {it.index: it.outcome async for it in batch.outcomes()}
    assert found[0] == Succeeded(None)
    assert isinstance(found[1], Lost) and isinstance(found[1].error, JobLost)


@VIRTUAL
async def test_failures_and_values_arrive_in_one_burst(cluster: Bursts) -> None:
    async with aio.Client(platform=platform_of(cluster)) as client:
        batch = await begun(client, cluster, range(3), retries=1)
        await cluster.store(0)
        for index, number in itertools.product((1, 2), (1, 2)):
            last = wire.Kind.VALUE if (index, number) == (1, 2) else wire.Kind.ERROR
            await cluster.store(index, number, last)
        cluster.report((0, 1), (1, 1), (2, 1), (1, 2), (2, 2))
        began = asyncio.get_running_loop().time()
        found = {it.index: it.outcome async for it in batch.outcomes()}
        assert asyncio.get_running_loop().time() - began < 1
    assert found[0] == found[1] == Succeeded(None)
    assert isinstance(found[2], Failed)


def test_the_items_of_a_burst_take_one_request_each_and_share_the_rest() -> None:
    items, counts = 50 * BURST, Counter[str]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        cluster = Bursts(memory_platform().store, None)
        async with aio.Client(platform=platform_of(cluster)) as client:
            batch = await begun(client, cluster, range(items))
            for index in range(items):
                await cluster.store(index)
            loop.counts.clear()
            cluster._store.requests.clear()
            with counted(counts):
                for start in range(0, items, BURST):
                    cluster.report(*((index, 1) for index in range(start, start + BURST)))
                    while not batch._batch.submission.is_final(start + BURST - 1):
                        await asyncio.sleep(0)
                await batch.wait()
            counts.update(loop.counts + cluster._store.requests)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())
    cost = {kind: count / items for kind, count in counts.items()}
    assert cost["get"] <= 1.02, "one for the outcome"
    assert cost.get("list", 0) == 0
    assert cost["tasks"] <= 2 / BURST
    assert cost["callbacks"] <= 15 / BURST
    assert cost["calls"] <= 290, "beginnings and ends of calls"
