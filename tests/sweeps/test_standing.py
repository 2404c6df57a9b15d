"""How a sweep stands: the best so far and the rungs, in this process and in another one."""

from __future__ import annotations

import pytest

from kinetic import aio
from kinetic._progress.standing import Goal, Standing
from kinetic.errors import Pruned
from kinetic.sweeps import ASHA, Choice, GridSearch
from kinetic.testing import memory_platform
from tests.engine.world import VIRTUAL


def train(rate: int) -> dict[str, float]:
    if rate > 5:
        raise Pruned(rate, 1.0)
    return {"loss": 10.0 - rate, "size": rate}


@VIRTUAL
@pytest.mark.parametrize(("direction", "best"), [("minimize", (5, 5.0)), ("maximize", (0, 10.0))])
async def test_every_process_shows_how_a_sweep_stands(small_project, direction, best) -> None:
    platform = memory_platform()
    search = GridSearch(
        {"rate": Choice([*range(10)])}, direction=direction, pruner=ASHA(first=2, reduction=3)
    )
    async with aio.Client(backend="local", platform=platform) as client:
        async with await client.sweep(train, search, trials=None, metric="loss") as sweep:
            await sweep.wait()
        for collected in (False, True):
            if collected:
                await sweep.batch.results()
            async with aio.Client(backend="local", platform=platform) as other:
                attached = await other.attach_batch(sweep.batch.group_id)
                last = [progress async for progress in attached.progress()][-1]
                assert last.best == best == (sweep.best.number, sweep.best.value)
                assert last.rungs == ((6, 4),) and last.pruned == 4
                assert f"4 pruned; best {best[1]:g} (item {best[0]})" in last.line()


async def test_a_batch_that_is_no_sweep_has_no_best(small_project) -> None:
    async with aio.Client(backend="local", platform=memory_platform()) as client:
        batch = await client.run_async_map(train, [1, 2])
        last = [progress async for progress in batch.progress()][-1]
        assert last.best is None and last.rungs == ()


def test_the_value_of_a_result() -> None:
    minimize = Goal(direction="minimize")
    assert minimize.value_of({"result": 3}) == 3.0
    assert minimize.value_of({"loss": 3.0}) == 3.0, "the only number"
    assert minimize.value_of({"loss": 3.0, "size": 1}) is None
    assert minimize.value_of({"result": "nan"}) is None
    named = Goal(direction="minimize", metric="loss")
    assert named.value_of({"loss": 2.0, "size": 1}) == 2.0
    assert named.value_of({"result": 4.0}) == 4.0, "a function may return the number itself"
    assert named.value_of({"size": 1}) is None


def test_the_rung_of_a_pruned_trial_is_the_last_one_that_it_has_reached() -> None:
    standing = Standing(Goal(direction="minimize", first=2, reduction=3))
    for index, step in enumerate((0, 1, 2, 5, 6, 17, 18, 100)):
        standing.note_pruned(index, {"step": step, "value": 1.0})
        standing.note_pruned(index, {"step": step, "value": 1.0})
    assert standing.rungs() == ((0, 2), (2, 2), (6, 2), (18, 1), (54, 1))
