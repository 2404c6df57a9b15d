"""Use kinetic like a list, or like another library: the error names what to call."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.sweeps import Int, RandomSearch
from kinetic.testing import memory_platform


def largest(x: int) -> int:
    return x


async def listed(batch: Any) -> list[Any]:
    return [item async for item in batch]


def test_the_error_of_an_operator_names_a_method(small_project: object) -> None:
    batch = kinetic.run(backend="local", accelerator="cpu")(abs).run_async_map([-1])
    uses: dict[str, Callable[[Any], Any]] = {
        "outcomes": iter,
        "results": list,
        "jobs": len,
        "job(index)": operator.itemgetter(0),
    }
    for method, use in uses.items():
        with pytest.raises(TypeError, match=f"a batch.*{re.escape(method)}"):
            use(batch)
    assert batch, "it is true, as other objects are"
    assert batch.results() == [1]


async def test_the_same_holds_in_asyncio(small_project: object) -> None:
    async with aio.Client(backend="local", platform=memory_platform()) as client:
        batch = await client.run_async_map(abs, [-1])
        with pytest.raises(TypeError, match="outcomes"):
            await listed(batch)
        with pytest.raises(TypeError, match="outcomes"):
            list(batch)  # type: ignore[call-overload]
        assert batch and await batch.results() == [1]


async def test_a_sync_statement_names_the_async_one(small_project: object) -> None:
    space = RandomSearch({"x": Int(1, 9)})
    async with aio.Client(backend="local", platform=memory_platform()) as client:
        batch = await client.run_async_map(abs, [-1])
        async with await client.sweep(largest, space, trials=1) as sweep:
            handles: list[Any] = [client, batch, sweep]
            for handle in handles:
                with pytest.raises(TypeError, match="`async with`"), handle:
                    pass
            job = await batch.job(0)
            streams: list[Any] = [batch.outcomes(), batch.as_completed(), job.logs(), sweep]
            for stream in streams:
                with pytest.raises(TypeError, match="`async for`"):
                    list(stream)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: kinetic.run("cpu")(largest).map, "run_async_map(inputs)"),
        (lambda: kinetic.run("cpu")(largest).submit, "run_async("),
        (lambda: kinetic.map, "f.run_async_map(inputs)"),
        (lambda: kinetic.Client, "kinetic.aio.Client"),
    ],
)
def test_the_name_of_another_library_leads_to_ours(use: Callable[[], Any], name: str) -> None:
    with pytest.raises(AttributeError, match=f": (call|use) {re.escape(name)}"):
        use()
