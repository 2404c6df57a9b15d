"""A batch isn't a list: the error of an operator for lists names the method to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.testing import memory_platform


async def listed(batch: Any) -> list[Any]:
    return [item async for item in batch]


@pytest.mark.parametrize(
    ("use", "method"),
    [(iter, "outcomes"), (list, "results"), (len, "jobs"), (lambda batch: batch[0], "job(index)")],
)
def test_the_error_of_an_operator_names_a_method(
    use: Callable[[Any], Any], method: str, small_project: object
) -> None:
    batch = kinetic.run(backend="local", accelerator="cpu")(abs).run_async_map([-1])
    with pytest.raises(TypeError, match="a batch") as caught:
        use(batch)
    assert method in str(caught.value)
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
