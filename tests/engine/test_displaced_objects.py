"""A directory store with a directory in an object's place, or with an unreadable object.

The damage affects only its own item, or its own batch in a list.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from kinetic.testing import MemoryCluster, Run, carry_out, memory_platform
from tests.engine.privileges import without_privileges

HANGS_S = 30.0


def platform_in(folder: Path, work: Any = carry_out) -> Platform:
    store = DirectoryStore(folder, shared=True)  # in which claims and outcomes are files
    cluster = MemoryCluster(store, work)
    return replace(memory_platform(), store=store, cluster=cluster)


async def same(x: int) -> int:
    return x


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    async with asyncio.timeout(HANGS_S):
        yield tmp_path / "store"


def replace_by_directory(root: Path, pattern: str) -> None:
    """Replace the one object that matches by a directory."""
    (path,) = root.rglob(pattern)
    path.unlink()
    path.mkdir()


async def test_resuming_reports_a_directory_in_place_of_the_lease(folder: Path) -> None:
    platform = platform_in(folder)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(2))
        await batch.results(cleanup=False)
    replace_by_directory(folder, "lease")
    async with aio.Client(platform=platform) as client:
        batch = await client.attach_batch(batch.group_id)
        with pytest.raises(errors.WireError, match=r"lease .*remove it"):
            await batch.resume(force=True)


async def test_a_directory_where_an_outcome_is_to_be_costs_its_item(folder: Path) -> None:
    async def work(run: Run) -> int:
        if run.spec.name.endswith("-1-1"):
            attempts = folder / run.spec.order.scope / "attempts" / "000000"
            (attempts / "00000001.0001.outcome").mkdir(parents=True)
        return await carry_out(run)

    async with aio.Client(platform=platform_in(folder, work)) as client:
        batch = await client.run_async_map(same, range(3))
        first, second, third = await batch.results(cleanup=False, return_exceptions=True)
        assert (first, third) == (0, 2)
        assert isinstance(second, errors.WireError)


@pytest.mark.parametrize("suffix", ["outcome", "claim"])
async def test_a_directory_where_an_object_of_a_job_is_to_be_is_named(
    folder: Path, suffix: str
) -> None:
    async def work(run: Run) -> int:
        attempts = folder / run.spec.order.scope / "attempts" / "000000"
        (attempts / f"00000000.0001.{suffix}").mkdir(parents=True)
        if suffix == "claim":
            return 1  # the job thinks that another process has claimed the attempt
        return await carry_out(run)

    async with aio.Client(platform=platform_in(folder, work)) as client:
        job = await client.submit(same, 3)
        with pytest.raises(errors.WireError, match=suffix):
            await job.result()


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may do anything")
def test_what_may_not_be_read_is_left_out_of_lists_and_costs_its_item(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.engine.unreadable", str(tmp_path / "store")],
        check=False,
        preexec_fn=without_privileges,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
