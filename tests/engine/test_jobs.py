"""What only the local platform can show of a job; tests/platforms has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kinetic import aio


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture
async def client():
    async with aio.Client(backend="local") as client:
        yield client


async def test_several_clients_in_one_loop_share_nothing() -> None:
    async with aio.Client(backend="local") as one, aio.Client(backend="local") as two:
        jobs = [await client.submit(add, 1, number) for number, client in enumerate((one, two))]
        assert [await job for job in jobs] == [1, 2]


@pytest.mark.full
async def test_a_result_of_one_gibibyte(client, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")

    def large() -> Any:
        import numpy

        return numpy.ones(1 << 27)

    job = await client.submit(large)
    value = await job
    assert value.nbytes == 1 << 30
    assert value[-1] == 1.0 and numpy.count_nonzero(value[:1000]) == 1000
