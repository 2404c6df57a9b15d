"""Cancelled anywhere, a submission leaves nothing half-made."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kinetic import aio
from kinetic._tasks import release, shared
from kinetic.aio.local.store import DirectoryStore
from kinetic.errors import BackendError


def nothing() -> None:
    return None


@pytest.mark.parametrize("seed", range(6))
async def test_a_cancelled_submit_leaves_no_job(home: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with aio.Client(backend="local") as client:
        await (await client.submit(nothing))  # warm: what follows is the submission itself
        for _ in range(5):
            task = asyncio.ensure_future(client.submit(nothing))
            await asyncio.wait({task}, timeout=chance.random() * 0.03)
            if task.done():
                await (await task)
                continue
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                await (await task)
        assert await client.list_jobs() == []
    store = DirectoryStore(home / "store")
    assert [one.name for one in await store.list("jobs/")] == []


async def test_of_many_who_share_a_task_each_is_told_what_has_become_of_him() -> None:
    work = asyncio.create_task(asyncio.sleep(1000))
    early, both, waiting = (asyncio.create_task(shared(work, "the owner")) for _ in range(3))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.wait({early})
    assert early.cancelled() and not work.done()
    work.cancel()
    both.cancel()
    with pytest.raises(BackendError, match="the owner was closed meanwhile; open another"):
        await waiting
    await asyncio.wait({both})
    assert both.cancelled()


async def test_a_release_survives_any_number_of_cancellations() -> None:
    done = asyncio.Event()
    started = asyncio.Event()

    async def clean() -> None:
        started.set()
        await asyncio.sleep(0.05)
        done.set()

    task = asyncio.create_task(release(clean(), what="x"))
    await started.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_a_failing_release_is_logged_not_raised(caplog) -> None:
    async def fail() -> None:
        raise ValueError("the reason")

    await release(fail(), what="the thing")
    assert "the thing failed" in caplog.text and "the reason" in caplog.text


@pytest.mark.looptime
async def test_a_release_that_hangs_is_given_up(caplog) -> None:
    await release(asyncio.sleep(1000), what="the thing", grace=5)
    assert "gave up on the thing after 5 s" in caplog.text
