"""Kill the submitter of a batch at any moment, take the batch over, and lose nothing."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from kinetic import aio, errors

from .conftest import DEADLINE_S, Scene

SWEEPER = Path(__file__).with_name("sweeper.py")
COUNT = 12
VALUES = [number * number for number in range(COUNT)]
EVERYDAY, MORE, KILLS = 5, 125, 4
"""Kills per run: 20 with the full tier, 500 with the slow one."""


def seeds() -> list[object]:
    full = [pytest.param(seed, marks=pytest.mark.full) for seed in range(1, EVERYDAY)]
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(EVERYDAY, MORE)]
    return [0, *full, *slow]


@pytest.mark.full
@pytest.mark.parametrize("seed", seeds())
async def test_a_batch_outlives_its_submitter(scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(KILLS):
        mode = chance.choice(["listed", "lazy"])
        before = {*scene.submissions()}
        with scene.client(SWEEPER, mode, scene.marks, COUNT) as submitter:
            # mostly while the batch runs, sometimes before it exists or while it starts
            submitter.hear("ready" if chance.random() < 0.25 else "submitted")
            time.sleep(chance.uniform(0, 0.8))
            submitter.kill()
        for group in {*scene.submissions()} - before:
            await take_over(scene, group)
    assert scene.started_twice() == []
    scene.assert_only_supervisor_left()


async def take_over(scene: Scene, group: str) -> None:
    """Resume the batch; check its results, the outcomes in the store, and which attempts ran."""
    async with aio.Client(backend="local") as client, asyncio.timeout(2 * DEADLINE_S):
        try:
            batch = await client.attach_batch(group)
        except errors.NotFound:
            return  # the submitter died before it wrote the manifest
        already = committed(scene, group)
        await batch.resume()
        try:
            values = await batch.results(cleanup=False)
        except errors.InputsUnfinished:
            rest = [(str(scene.marks), number) for number in range(batch.stored, COUNT)]
            await batch.resume(inputs=rest)
            values = await batch.results(cleanup=False)
    assert values == VALUES
    after = committed(scene, group)
    assert {*after} == {*range(COUNT)}
    assert already.items() <= after.items(), "committed outcomes don't change"
    for index, attempt in after.items():
        ran = [mark for mark in scene.started() if mark.startswith(f"{group}-{index}.")]
        assert all(int(mark.rpartition(".")[2]) <= attempt for mark in ran), "it ran again"


def committed(scene: Scene, group: str) -> dict[int, int]:
    """Return index → the attempt whose outcome is a value; at most one per item."""
    found: dict[int, int] = {}
    for index, number in scene.values(f"batches/{group}/"):
        assert index not in found, f"item {index} has two values"
        found[index] = number
    return found
