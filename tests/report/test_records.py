"""The records of a batch: a table of its items, and the best of them."""

from __future__ import annotations

import importlib
import math
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kinetic import aio
from kinetic.aio.platforms import Platform
from kinetic.errors import ConfigurationError, NotFound, Pruned
from kinetic.testing import memory_platform
from tests.engine.world import VIRTUAL, World

pytestmark = [VIRTUAL, pytest.mark.usefixtures("small_project")]


def train(rate: float, sizes: tuple[int, ...] = ()) -> Any:
    if rate > 5:
        raise ValueError(f"rate {rate} is too large")
    loss = {0: math.nan, 3: math.inf}.get(rate) or 1 / rate
    return {"loss": loss, "size": len(sizes), "weights": object}


def stop_early(x: float) -> float:
    if x > 1:
        raise Pruned(int(x), {"loss": x} if x > 2 else x)
    return x


def double(x: float) -> float:
    return 2 * x


@pytest.fixture
def platform() -> Platform:
    return memory_platform()


@pytest.fixture
async def client(platform: Platform):
    async with aio.Client(backend="local", platform=platform) as client:
        yield client


async def ended(client: aio.Client, function: Any, inputs: list[Any]) -> aio.BatchHandle[Any]:
    batch = await client.run_async_map(function, inputs, retries=1)
    await batch.wait()
    return batch


async def test_a_record_has_the_scalars_the_state_and_the_times_of_an_item(
    client: aio.Client,
) -> None:
    before = datetime.now(UTC)
    batch = await ended(client, train, [{"rate": 2.0, "sizes": (3, 4)}, 7.0])
    good, bad = await batch.records()
    times = {"began_at", "ended_at", "seconds"}
    assert {name: value for name, value in good.items() if name not in times} == {
        "index": 0,
        "job_id": f"{batch.group_id}-0",
        "state": "succeeded",
        "reason": "",
        "attempts": 1,
        "input.rate": 2.0,
        "input.sizes[0]": 3,
        "input.sizes[1]": 4,
        "result.loss": 0.5,
        "result.size": 2,
    }
    assert before - timedelta(minutes=1) < good["began_at"] <= good["ended_at"]
    seconds = (good["ended_at"] - good["began_at"]).total_seconds()
    assert good["seconds"] == pytest.approx(seconds, abs=1e-5)
    assert (bad["state"], bad["attempts"], bad["input.rate"]) == ("failed", 2, 7.0)
    assert bad["reason"] == "ValueError: rate 7.0 is too large"
    assert "result.loss" not in bad


async def test_items_that_wait_and_cancelled_ones_have_records() -> None:
    world = World()
    async with aio.Client(backend="local", platform=world.platform) as client:
        batch = await client.run_async_map(double, [1.0, 2.0], max_concurrent=1)
        await world.until_started(1)
        waiting = (await batch.records())[1]
        assert (waiting["state"], waiting["input.x"]) == ("waiting", 2.0)
        assert (waiting["attempts"], waiting["began_at"], waiting["seconds"]) == (0, None, None)
        with pytest.raises(ConfigurationError, match=r"no item .* numeric result yet"):
            await batch.best()
        await batch.cancel()
        assert [record["state"] for record in await batch.records()] == ["cancelled"] * 2


async def test_a_pruned_item_has_the_step_and_the_value_of_its_last_report(
    client: aio.Client, platform: Platform
) -> None:
    batch = await ended(client, stop_early, [1.0, 2.0, 3.0])
    records = await batch.records()
    assert [record["state"] for record in records] == ["succeeded", "pruned", "pruned"]
    assert [record["reason"] for record in records] == [
        "",
        *map("pruned at step {}".format, (2, 3)),
    ]
    assert (records[1]["pruned.step"], records[1]["pruned.value"]) == (2, 2.0)
    assert (records[2]["pruned.step"], records[2]["pruned.value.loss"]) == (3, 3.0)
    assert ["result" in record for record in records] == [True, False, False]
    assert [name for _, name in await batch.shown_statuses()] == ["SUCCEEDED", "PRUNED", "PRUNED"]
    assert await batch.status_counts() == {"SUCCEEDED": 3}
    assert await (await batch.job(1)).noted() == {"step": 2, "value": 2.0}
    await batch.results()
    async with aio.Client(platform=platform) as other:
        attached = await other.attach_batch(batch.group_id)
        assert await attached.records() == records
        assert await (await attached.job(1)).shown_status() == "PRUNED"
        progress = [value async for value in attached.progress()][-1]
        assert (progress.succeeded, progress.pruned, progress.finished) == (1, 2, True)


async def test_another_process_has_the_records_of_collected_results(
    client: aio.Client, platform: Platform
) -> None:
    batch = await ended(client, double, [3.0, 1.0, 2.0])
    records = await batch.records()
    assert [record["result"] for record in records] == [6.0, 2.0, 4.0]
    await batch.results()
    async with aio.Client(platform=platform) as other:
        attached = await other.attach_batch(batch.group_id)
        assert await attached.records() == records
        assert await attached.best() == records[1]


async def test_the_best_item_by_metric_and_direction(client: aio.Client) -> None:
    batch = await ended(client, train, [0.0, 1.0, 4.0, 2.0, 7.0, 3.0])
    assert (await batch.best("loss"))["index"] == 2
    assert (await batch.best("loss", "maximize"))["index"] == 1, "nan and inf are never the best"
    assert (await batch.best("size"))["index"] == 0, "the first of equal ones"
    with pytest.raises(ConfigurationError, match="'loss', 'size'"):
        await batch.best()
    with pytest.raises(ConfigurationError, match="'los'; did you mean 'loss'"):
        await batch.best("los")
    with pytest.raises(ConfigurationError, match="direction"):
        await batch.best("loss", "up")  # type: ignore[arg-type]


async def test_a_list_of_numbers_has_a_metric_per_position(client: aio.Client) -> None:
    def pair(x: float) -> tuple[float, float]:
        return x, -x

    batch = await ended(client, pair, [1.0, 2.0])
    assert (await batch.records())[1]["result[1]"] == -2.0
    assert (await batch.best("[1]"))["input.x"] == 2.0


async def test_a_dataframe_has_a_row_per_item(client: aio.Client) -> None:
    pandas: Any = importlib.import_module("pandas")  # it has no types
    batch = await ended(client, train, [0.0, 2.0, 7.0])
    frame = await batch.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.name == "index" and [*frame.index] == [0, 1, 2]
    assert frame["result.loss"].dtype == "float64" and frame["result.loss"].idxmin() == 1
    assert pandas.isna(frame.loc[[0, 2], "result.loss"]).all(), "nan, and no result"
    assert str(frame["ended_at"].dtype).startswith("datetime64[") and (frame["seconds"] >= 0).all()


async def test_a_dataframe_of_no_items_has_the_columns(client: aio.Client) -> None:
    batch = await client.run_async_map(double, (x for x in ()))
    await batch.wait()
    assert await batch.records() == []
    assert "state" in (await batch.to_dataframe()).columns


async def test_without_pandas_the_error_names_the_remedies(
    client: aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await ended(client, double, [1.0])
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it weren't installed
    with pytest.raises(ConfigurationError, match=r"pip install pandas.*records\(\)"):
        await batch.to_dataframe()


async def test_a_batch_that_was_cleaned_up_has_no_records(
    client: aio.Client, platform: Platform
) -> None:
    batch = await ended(client, double, [1.0])
    async with aio.Client(backend="local", platform=platform) as other:
        [listed] = await other.list_batches()
        await batch.cleanup()
        for handle in (batch, listed):
            with pytest.raises(NotFound, match="cleaned up"):
                await handle.records()
            with pytest.raises(NotFound, match="cleaned up"):
                await handle.best()
