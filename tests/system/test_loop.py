"""Packing, sending, and reading back large values don't block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio

MB = 1_000_000
PICKLED_S = 0.1
"""Limit for one stall while a thread pickles a value of up to 1.4 million objects.

The C pickler's table of objects grows in one step, without releasing the GIL.
"""
PICKLED_ALONE = 1.5
"""The same limit on a slower machine, as a multiple of the longest stall by `pickle` alone."""

CODED = 2
"""Limit for one stall while a thread encodes or decodes a string, as a multiple of that time.

Python encodes and decodes a whole string without releasing the GIL.
"""


@pytest.fixture
async def client() -> AsyncIterator[aio.Client]:
    """Yield a client whose supervisor and warm parent run, and whose modules are loaded."""
    async with aio.Client(backend="local") as client:
        assert await client.run(abs, -1) == 1
        yield client


@pytest.fixture(autouse=True)
def project(empty_project: Path) -> Path:
    return empty_project


def array() -> Any:
    numpy = pytest.importorskip("numpy")
    return numpy.zeros(50 * MB // 8)


async def undisturbed(loop_guard: Any, value: object, work: Callable[[], Awaitable[Any]]) -> Any:
    """Return what *work* returns in a run that doesn't hold the loop.

    Other processes may disturb two of three runs.
    """
    limit_s = max(PICKLED_S, CODED * coding_s(value) if isinstance(value, str) else 0.0)
    with loop_guard(math.inf) as alone:
        await asyncio.to_thread(lambda: pickle.loads(pickle.dumps(value)))
    limit_s = max(limit_s, PICKLED_ALONE * alone.worst)
    for _ in range(2):
        with contextlib.suppress(pytest.fail.Exception):
            with loop_guard(limit_s):
                return await work()
    with loop_guard(limit_s):
        return await work()


def coding_s(text: str) -> float:
    """Return how many seconds encoding or decoding *text* takes, whichever is slower."""
    start = time.perf_counter()
    encoded = text.encode()
    middle = time.perf_counter()
    encoded.decode()
    return max(middle - start, time.perf_counter() - middle)


LARGE: dict[str, Callable[[], Any]] = {
    "an array of 50 MB": array,
    "a list of a million numbers": lambda: [float(number) for number in range(MB)],
    "100 MB of bytes": lambda: bytes(100 * MB),
    "a dict of a million numbers": lambda: {f"key {n}": n for n in range(MB)},
    "a dict of 200,000 words": lambda: {f"key {n}": [f"value {n}"] for n in range(200_000)},
    "1,300,000 words": lambda: [f"word {n}" for n in range(1_300_000)],
    "300,000 rows": lambda: [{"id": n, "text": f"row {n}", "at": [n]} for n in range(300_000)],
    "a string of 100 MB": lambda: "x" * 100 * MB,
    "a string of 100 MB in UTF-8": lambda: "€" * 33 * MB,
}


EVERYDAY = ("an array of 50 MB", "100 MB of bytes", "a dict of 200,000 words")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in EVERYDAY else pytest.mark.full) for kind in LARGE],
)
async def test_while_large_arguments_are_submitted(
    client: aio.Client, loop_guard: Any, kind: str
) -> None:
    value = LARGE[kind]()

    async def submit() -> int:
        return await (await client.submit(len, value))

    assert await undisturbed(loop_guard, value, submit) == len(value)


RESULTS = {
    "100 MB of bytes": "b'x' * 100_000_000",
    "a million numbers": "[float(number) for number in range(1_000_000)]",
    "a million words": "[f'word {number}' for number in range(1_000_000)]",
    "a dict of 300,000 words": "{f'key {n}': f'value {n}' for n in range(300_000)}",
    "a string of 100 MB": "'x' * 100_000_000",
    "a string of 100 MB in UTF-8": "'€' * 33_000_000",
}


@pytest.mark.full
@pytest.mark.parametrize("kind", RESULTS)
async def test_while_a_large_result_is_collected(
    client: aio.Client, loop_guard: Any, kind: str
) -> None:
    value = eval(RESULTS[kind])

    async def collect() -> int:
        return len(await (await client.submit(eval, RESULTS[kind])))

    assert await undisturbed(loop_guard, value, collect) == len(value)


@pytest.mark.full
async def test_while_a_project_is_packed_and_packed_again(
    client: aio.Client, loop_guard: Any, project: Path
) -> None:
    chance = random.Random(0)
    for number in range(300):
        path = project / f"package{number % 10}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(chance.randbytes(5000) + bytes(20_000))
    for content in (b"new", b"newer"):
        (project / "changed.py").write_bytes(content)
        with loop_guard():
            job = await client.submit(abs, -1)
            assert await job == 1


@pytest.mark.full
async def test_while_a_batch_runs(client: aio.Client, loop_guard: Any) -> None:
    with loop_guard():
        batch = await client.run_async_map(abs, range(-200, 0))
        await batch.status_counts()
        assert await batch.results() == [*range(200, 0, -1)]
        assert await batch.status_counts() == {"SUCCEEDED": 200}
        await batch.cleanup()


@pytest.mark.full
async def test_while_a_batch_of_large_inputs_is_submitted(
    client: aio.Client, loop_guard: Any
) -> None:
    inputs = [bytes(MB) for _ in range(50)]
    with loop_guard():
        batch = await client.run_async_map(len, inputs)
        assert await batch.results() == [MB] * 50


@pytest.mark.full
async def test_while_another_client_lists_and_attaches(client: aio.Client, loop_guard: Any) -> None:
    batch = await client.run_async_map(abs, range(-100, 0))
    await batch.results(cleanup=False)
    jobs = [await client.submit(abs, -n) for n in range(20)]
    async with aio.Client(backend="local") as other:
        await other.list_jobs()
        with loop_guard():
            assert len(await other.list_jobs()) == 120
            found = await other.attach_batch(batch.group_id)
            assert await found.status_counts() == {"SUCCEEDED": 100}
            assert await found.results(cleanup=False) == [*range(100, 0, -1)]
            for job in jobs:
                assert await (await other.attach(job.job_id)).result(cleanup=False) >= 0
