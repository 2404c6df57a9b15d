"""Behaviour of jobs and batches that only the local platform shows; see tests/platforms."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kinetic
from kinetic import aio


@pytest.fixture
async def client():
    async with aio.Client(backend="local") as client:
        yield client


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("auto", 1, ((1,), {})),
        ("auto", (1, 2), ((1, 2), {})),
        ("auto", [1, 2], ((1, 2), {})),
        ("auto", {"a": 1}, ((), {"a": 1})),
        ("auto", {"not a name": 1}, (({"not a name": 1},), {})),
        ("auto", {"class": 1}, (({"class": 1},), {})),
        ("auto", Pair(1, 2), ((1, 2), {})),
        ("single", (1, 2), (((1, 2),), {})),
        ("args", (1, 2), ((1, 2), {})),
        ("kwargs", {"a": 1}, ((), {"a": 1})),
    ],
)
def test_inputs_become_calls(mode: str, value: object, expected: object) -> None:
    from kinetic.aio._preparing.inputs import as_call

    args, kwargs = as_call(value, mode)
    assert (args, kwargs) == expected


async def test_data_of_the_inputs_does_not_travel_with_the_project(
    client, tmp_path: Path, monkeypatch
) -> None:
    project = tmp_path / "project"
    (project / "shards").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    for number in range(2):
        (project / "shards" / f"{number}.txt").write_text(str(number))
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(project))
    monkeypatch.chdir(project)
    inputs = [{"shard": kinetic.Data(str(project / "shards" / f"{n}.txt"))} for n in range(2)]
    source = (
        "def read(shard):\n"
        "    import os\n"
        "    return open(shard).read(), sorted(os.listdir('.')), os.path.exists('shards/0.txt')\n"
    )
    (project / "reading.py").write_text(source)
    monkeypatch.syspath_prepend(str(project))
    import reading  # type: ignore[import-not-found]

    batch = await client.run_async_map(reading.read, inputs)
    assert [value[0] for value in await batch.results()] == ["0", "1"]
    assert not any(value[2] for value in await batch.results())


def fail_once(x: int) -> int:
    if os.environ["KINETIC_ATTEMPT"] == "1":
        raise ValueError("too big")
    return x


async def test_a_retry_is_logged_with_its_item_and_reason(client, caplog) -> None:
    caplog.set_level(logging.INFO, logger="absl")
    batch = await client.run_async_map(kinetic.run(accelerator="cpu")(fail_once), [3], retries=1)
    assert await batch.results() == [3]
    [line] = [message for message in caplog.messages if "attempt 2 follows" in message]
    assert f"{batch.group_id}-0" in line and "ValueError: too big" in line and "attempt 2" in line


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


async def test_an_error_of_init_is_in_the_log_and_says_why_other_items_are_cancelled(
    client,
) -> None:
    def load() -> str:
        raise RuntimeError("no such model file")

    def use(number: int, *, model: str) -> str:
        return model

    function = kinetic.run(accelerator="cpu", backend="local", init={"model": load})(use)
    batch = await client.run_async_map(function, range(3), max_concurrent=1, progress=False)
    cause = r"2 were cancelled \(the setup would fail for each of them\)"
    with pytest.raises(kinetic.BatchError, match=f"{cause}.*init= failed: RuntimeError: no such"):
        await batch.results()
    job = await batch.job(0)
    assert (await job.tail()).endswith("RuntimeError: no such model file")
    assert f"{job.job_id}: setup: init= failed" in await batch.reason()
    with pytest.raises(kinetic.errors.NoLog, match="it was cancelled before it began"):
        await (await batch.job(2)).tail()


async def test_an_item_that_was_never_sent_says_so_instead_of_a_log(client) -> None:
    function = kinetic.run(accelerator="cpu")(len)
    batch = await client.run_async_map(function, [[threading.Lock()]], progress=False)
    await batch.wait()
    job = await batch.job(0)
    with pytest.raises(kinetic.errors.NoLog, match=f"{job.job_id} has no log: it was never sent"):
        await job.tail()
