"""What jobs leave on this machine's disk and in its supervisor, and what bounds it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import kinetic
from kinetic import aio, errors

from .conftest import eventually


def write_nothing() -> str:
    assert os.path.isdir(os.environ["KINETIC_OUTPUT_DIR"]), "a file can be opened at once"
    return os.environ["KINETIC_OUTPUT_DIR"]


def write_if_odd(x: int) -> None:
    if x % 2:
        with open(os.path.join(os.environ["KINETIC_OUTPUT_DIR"], "x"), "w"):
            pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def outputs(home: Path) -> set[str]:
    root = home / "store" / "outputs"
    return {str(one.relative_to(root)) for one in root.rglob("*")}


async def test_a_job_without_output_leaves_no_output_directory(home: Path) -> None:
    async with aio.Client(backend="local") as client:
        job = await client.submit(write_nothing)
        assert await job.result(cleanup=False) == job.output_dir
        await eventually(lambda: outputs(home) == set())
        assert await job.outputs() == []


async def test_of_a_batch_only_output_directories_with_content_are_left(home: Path) -> None:
    async with aio.Client(backend="local") as client:
        batch = await client.run_async_map(write_if_odd, range(4))
        await batch.results()
        named = batch.group_id
        left = {named, f"{named}/1", f"{named}/1/x", f"{named}/3", f"{named}/3/x"}
        await eventually(lambda: outputs(home) == left)
        empty = await client.run_async_map(write_if_odd, [0, 2])
        await empty.results()
        await eventually(lambda: outputs(home) == left)


@pytest.mark.parametrize("fresh", ["0", "1"])
async def test_a_killed_job_leaves_no_empty_output_directory(
    home: Path, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_FRESH", fresh)
    async with aio.Client(backend="local") as client:
        job = await client.submit(die)
        with pytest.raises(errors.JobLost):
            await job.result()
        await eventually(lambda: outputs(home) == set())


async def test_an_output_directory_that_the_user_named_stays(home: Path, tmp_path: Path) -> None:
    named = kinetic.run(backend="local", output_dir=str(tmp_path / "mine"))(write_if_odd)
    async with aio.Client(backend="local") as client:
        await (await client.run_async_map(named, [0])).results()
        await eventually(lambda: not [*(home / "local/v1/work").glob("grp-*")])
    assert (tmp_path / "mine" / "0").is_dir()
