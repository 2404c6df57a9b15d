"""A batch's budget: what counts against it, and what happens once it is spent."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic._runner.protocol import wire
from kinetic.outcome import Cancelled, Succeeded
from kinetic.testing import Run, carry_out
from tests.engine.world import VIRTUAL, World

pytestmark = VIRTUAL

HOUR = 3600.0


@pytest.fixture
def priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the price of a CPU hour to one dollar."""
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"cpu": 1.0}))
    monkeypatch.setenv("KINETIC_PRICES", str(file))
    return file


class HourLong:
    """A run's store that changes each outcome: its attempt took an hour."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.store, name)

    async def create(self, name: str, body: bytes, metadata: Any = None, **more: Any) -> bool:
        if name.endswith(".outcome") and metadata:
            order, key = self._run.spec.order, self._run.spec.key
            attempt = (order.scope, order.index, order.attempt)
            outcome = wire.Outcome.verified(metadata, key, *attempt)
            if outcome.started is not None and outcome.ended is not None:
                outcome = outcome._replace(started=outcome.ended - HOUR)
            metadata = {**metadata, **outcome.signed(key, *attempt)}
        return await self._run.store.create(name, body, metadata, **more)


async def for_an_hour(run: Run) -> int:
    await asyncio.sleep(0.1)  # otherwise workers run more items while the stop is stored
    changed: Any = copy.copy(run)
    changed.store = HourLong(run)
    return await carry_out(changed)


@pytest.fixture
async def world() -> World:
    world = World(for_an_hour)
    world.gate.set()
    return world


@kinetic.run(accelerator="cpu")
def an_hour(x: Any) -> Any:
    return x


@kinetic.run(accelerator="cpu")
def an_hour_of_failing(x: Any) -> Any:
    raise ValueError(x)


async def outcome_types(batch: aio.BatchHandle[Any]) -> list[str]:
    found = [item async for item in batch.outcomes(ordered=True)]
    return [type(item.outcome).__name__ for item in found]


async def test_without_a_price_it_is_refused_before_anything_is_sent(
    client: aio.Client, world: World
) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"no price of cpu.*KINETIC_PRICES"):
        await client.run_async_map(an_hour, [1], budget=1.0)
    assert await world.store.list("") == []


async def test_a_spent_budget_starts_nothing_and_lets_running_attempts_finish(
    client: aio.Client, world: World, priced: Path
) -> None:
    batch = await client.run_async_map(an_hour, range(10), max_concurrent=1, budget=3.5)
    assert await outcome_types(batch) == ["Succeeded"] * 4 + ["Cancelled"] * 6
    assert world.started == 4
    assert await batch.reason() == "budget=3.5 US dollars was spent, by estimate"
    found = [item.outcome async for item in batch.outcomes(ordered=True)]
    assert "(budget=3.5 US dollars was spent" in str(found[9].error)
    assert isinstance(found[0], Succeeded) and isinstance(found[9], Cancelled)
    with pytest.raises(errors.BatchError, match=r"6 were cancelled \(budget=3.5 US dollars was"):
        await batch.results(cleanup=False)
    last = [snapshot async for snapshot in batch.progress()][-1]
    assert "stopped: budget=3.5" in last.line()


async def test_attempts_count_not_items(client: aio.Client, world: World, priced: Path) -> None:
    batch = await client.run_async_map(
        an_hour_of_failing, range(3), max_concurrent=1, retries=9, budget=2.5
    )
    assert await outcome_types(batch) == ["Failed"] * 3
    assert world.started == 3  # of thirty possible


async def test_a_budget_ends_endless_inputs(client: aio.Client, world: World, priced: Path) -> None:

    def forever() -> Any:
        while True:
            yield 1

    batch = await client.run_async_map(an_hour, forever(), max_concurrent=2, budget=5.0)
    values = await batch.results(return_exceptions=True, cleanup=False)
    assert 5 <= values.count(1) <= 6  # one may run when the fifth ends


async def test_a_resumed_batch_keeps_its_budget_and_the_original_price(
    world: World, priced: Path
) -> None:
    world.gate.clear()
    async with aio.Client(platform=world.platform) as first:
        batch = await first.run_async_map(an_hour, range(10), max_concurrent=1, budget=3.0)
        await world.until_started(1)
        await batch.detach()
        group = batch.group_id
    priced.write_text(json.dumps({"cpu": 0.0001}))
    async with aio.Client(platform=world.platform) as second:
        batch = await second.attach_batch(group)
        await batch.resume()
        world.gate.set()
        assert (await outcome_types(batch)).count("Succeeded") == 3
        assert world.started == 3
        assert (await batch.estimate()).cost == pytest.approx(3.0, rel=0.01)


async def test_a_batch_without_a_budget_is_estimated_as_well(
    client: aio.Client, world: World, priced: Path
) -> None:
    world.gate.clear()
    batch = await client.run_async_map(an_hour, range(4), max_concurrent=2)
    began = await batch.estimate()
    assert (began.hours, began.expected_hours, began.cost) == (0.0, None, 0.0)
    world.gate.set()
    async for _ in batch.as_completed():
        now = await batch.estimate()
        assert now.cost in [pytest.approx(hours, rel=0.01) for hours in (1, 2, 3, 4)]
        assert now.expected_cost == pytest.approx(4.0, rel=0.01)
    async with aio.Client(platform=world.platform) as other:
        later = await (await other.attach_batch(batch.group_id)).estimate()
    assert later.hours == later.expected_hours == pytest.approx(4.0, rel=0.01)
    assert str(later).startswith("estimate: 4.00 of 4.00 hours of cpu, $4.00 of $4.00")


async def test_a_job_that_another_client_cleaned_up_has_no_estimate(
    client: aio.Client, world: World, priced: Path
) -> None:
    job = await client.submit(an_hour, 1)
    await job.wait()
    assert (await job.estimate()).cost == pytest.approx(1.0, rel=0.01)
    async with aio.Client(platform=world.platform) as other:
        await (await other.attach(job.job_id)).cleanup()
    with pytest.raises(errors.NotFound, match="cleaned up"):
        await job.estimate()
