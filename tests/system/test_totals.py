"""The totals of a large batch are exact, although some items raise and some die silently."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import pytest

from kinetic import Failed, Lost, Succeeded, aio
from kinetic._runner.protocol import wire
from tests.scripts import Program

from .conftest import Scene

RETRIES = 2


def troubled(number: int) -> int:
    """Raise for one number in 20 and die for one in 50; for a few more, only at attempt 1."""
    first = os.environ["KINETIC_ATTEMPT"] == "1"
    if number % 20 == 0 or (first and number % 33 == 5):
        raise ValueError(number)
    if number % 50 == 7 or (first and number % 97 == 3):
        os._exit(9)
    return number * number


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "count",
    [100, pytest.param(1000, marks=pytest.mark.full), pytest.param(10_000, marks=pytest.mark.slow)],
)
async def test_the_totals_of_a_troubled_batch_are_exact(scene: Scene, count: int) -> None:
    async with aio.Client(backend="local") as client:
        batch = await client.run_async_map(troubled, range(count), retries=RETRIES)
        await check_totals(scene, batch, count)


def submit_and_die(count: int) -> None:
    """Submit the batch, and kill this process as soon as it has the handle."""

    async def submit() -> None:
        async with aio.Client(backend="local") as client:
            await client.run_async_map(troubled, range(count), retries=RETRIES)
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(submit())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "count",
    [pytest.param(200, marks=pytest.mark.full), pytest.param(10_000, marks=pytest.mark.slow)],
)
async def test_the_totals_are_exact_without_any_client(scene: Scene, count: int) -> None:
    code = f"from {__name__} import submit_and_die; submit_and_die({count})"
    with Program("-c", code, deadline=300) as submitter:
        status, *_ = await asyncio.to_thread(submitter.end)
    assert status == -signal.SIGKILL
    (group,) = scene.submissions()
    while not any(b'"kind": "done"' in it.read_bytes() for it in scene.requests(group)):
        await asyncio.sleep(0.1)
    async with aio.Client(backend="local") as client:
        await check_totals(scene, await client.attach_batch(group), count)


async def check_totals(scene: Scene, batch: aio.BatchHandle[Any, Any], count: int) -> None:
    raising = {n for n in range(count) if n % 20 == 0}
    dying = {n for n in range(count) if n % 50 == 7}
    seen: Counter[int] = Counter()
    async for index, given, outcome in batch.outcomes():
        seen[index] += 1
        assert given == index
        match outcome:
            case Succeeded(value):
                assert value == index * index and index not in raising | dying
            case Failed(error):
                assert index in raising and isinstance(error, ValueError)
            case Lost():
                assert index in dying
            case _:
                raise AssertionError(outcome)
    assert seen == Counter(range(count))
    assert await batch.status_counts() == {
        "SUCCEEDED": count - len(raising | dying),
        "FAILED": len(raising | dying),
    }
    claims = Counter(
        wire.parse_attempt_key(stored.name)[0]
        for stored in scene.objects.list("batches/")
        if stored.name.endswith(".claim")
    )
    assert {claims[n] for n in raising | dying} == {1 + RETRIES}
    once_more = {n for n in range(count) if n % 33 == 5 or n % 97 == 3} - raising - dying
    assert {claims[n] for n in once_more} == {2}
    assert sum(claims.values()) == count + RETRIES * len(raising | dying) + len(once_more)
    scene.assert_only_supervisor_left()
