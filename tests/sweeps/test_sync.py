"""Test sweeps of the sync API."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import kinetic
from kinetic import aio
from kinetic.errors import SweepError
from kinetic.sweeps import Choice, GridSearch, Int, RandomSearch
from tests.sweeps.jobs import GRID, SPACE, returns, train, waits


def test_a_function_sweeps(small_project) -> None:
    with train.sweep(RandomSearch(SPACE, seed=1), trials=6, max_concurrent=2) as sweep:
        seen = [trial.number for trial in sweep]
    assert sorted(seen) == [*range(6)] and len(sweep.trials()) == 6
    assert sweep.best.value == min(trial.value for trial in sweep.trials())
    assert isinstance(sweep.batch, kinetic.BatchHandle) and "best" in repr(sweep)
    assert "rate" in sweep._repr_mimebundle_()["text/html"]


async def test_an_application_with_a_loop_iterates_it(small_project) -> None:
    with pytest.warns(RuntimeWarning, match="blocks the event loop"):
        sweep = train.sweep(GridSearch(GRID), trials=None)
    assert len([trial async for trial in sweep]) == 6


def test_the_batch_of_a_sweep_is_its_last_one(small_project, tmp_path: Path) -> None:
    space = {"folder": Choice([str(tmp_path)]), "number": Int(1, 99)}

    async def begin() -> str:
        async with aio.Client(backend="local") as client:
            first = await client.sweep(waits, RandomSearch(space), trials=1, name="more")
            while not first.batch.sealed:
                await asyncio.sleep(0.01)
            await first.batch.detach()
        return first.batch.group_id

    first = asyncio.run(begin())
    with waits.sweep(RandomSearch(space), trials=2, name="more", resume=True) as sweep:
        assert sweep.batch.group_id == first
        Path(tmp_path, "go").touch()
        sweep.wait()
        assert sweep.batch.group_id != first and sweep.batch is sweep.batch
    assert {batch.group_id for batch in kinetic.list_batches()} == {first, sweep.batch.group_id}


def test_breaking_out_of_the_loop_ends_the_sweep(small_project) -> None:
    with train.sweep(RandomSearch(SPACE), trials=None, max_concurrent=2) as sweep:
        for _ in sweep:
            break
    assert sweep.batch.finished
    assert all(trial.state != "running" for trial in sweep.trials())


def test_stop_and_wait(small_project) -> None:
    with train.sweep(RandomSearch(SPACE), trials=None, max_concurrent=2) as sweep:
        next(iter(sweep))
        sweep.stop()
        sweep.wait()
    assert {trial.state for trial in sweep.trials()} == {"complete"}


def test_an_error_has_no_frames_of_kinetic(small_project) -> None:
    with returns.sweep(GridSearch({"value": Choice(["raise"])}), trials=1) as sweep:
        sweep.wait()
    with pytest.raises(SweepError, match="trial 0"):
        _ = sweep.best
