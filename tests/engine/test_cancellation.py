"""A submission that is cancelled at any point leaves nothing half-made."""

from __future__ import annotations

import asyncio

import pytest

from kinetic._tasks import await_shared, release
from kinetic.errors import BackendError


async def test_each_waiter_of_a_shared_task_gets_its_own_outcome() -> None:
    work = asyncio.create_task(asyncio.sleep(1000))
    cancelled, cancelled_with_work, waiting = (
        asyncio.create_task(await_shared(work, "the owner")) for _ in range(3)
    )
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert cancelled.cancelled() and not work.done()
    work.cancel()
    cancelled_with_work.cancel()
    with pytest.raises(BackendError, match="the owner was closed meanwhile; open another"):
        await waiting
    await asyncio.wait({cancelled_with_work})
    assert cancelled_with_work.cancelled()


async def test_a_release_survives_any_number_of_cancellations() -> None:
    done = asyncio.Event()
    started = asyncio.Event()

    async def clean() -> None:
        started.set()
        await asyncio.sleep(0.05)
        done.set()

    task = asyncio.create_task(release(clean(), operation="x"))
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

    await release(fail(), operation="the thing")
    assert "the thing failed" in caplog.text and "the reason" in caplog.text


@pytest.mark.looptime
async def test_a_release_that_hangs_is_given_up(caplog) -> None:
    await release(asyncio.sleep(1000), operation="the thing", grace=5)
    assert "gave up on the thing after 5 s" in caplog.text
