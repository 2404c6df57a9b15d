"""A refusal that may be lifted pauses a batch instead of failing items."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec
from kinetic.testing import MemoryCluster, Run, carry_out, memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, until

pytestmark = VIRTUAL

FORBIDDEN = errors.AuthError("cannot create jobs: a right is missing")
DENIED = errors.LaunchError("refused by the policy 'team'", reason="refused", passing=True)


class Guarded(MemoryCluster):
    """After ``free`` launches, refuse every request with ``refusal`` unless it is None."""

    refusal: Exception | None = None
    free = 0

    def __init__(self, platform: Platform, work=carry_out) -> None:
        super().__init__(platform.store, work)
        self.tried: Counter[str] = Counter()

    async def launch(self, job: JobSpec) -> None:
        self.tried[job.name] += 1
        if self.free <= 0:
            self._guard()
        self.free -= 1
        await super().launch(job)

    async def delete(self, **selection: Any) -> None:
        if self.free <= 0:
            self._guard()
        await super().delete(**selection)

    def _guard(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def lift(self, after: float) -> None:
        """Accept all requests after *after* seconds."""
        asyncio.get_running_loop().call_later(after, setattr, self, "refusal", None)


async def slow(run: Run) -> int | None:
    await asyncio.sleep(2)
    return await carry_out(run)


def guarded(refusal: Exception, *, free: int, work=slow) -> tuple[Platform, Guarded]:
    plain = on_loop_time(memory_platform(work))
    cluster = Guarded(plain, work)
    cluster.refusal, cluster.free = refusal, free
    return replace(plain, cluster=cluster), cluster


def square(x: int) -> int:
    return x * x


SQUARES = [x * x for x in range(30)]


@pytest.mark.parametrize("refusal", [FORBIDDEN, DENIED], ids=["right", "policy"])
async def test_a_passing_refusal_fails_no_item(
    refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    platform, cluster = guarded(refusal, free=14)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(30), max_concurrent=12, retries=1)
        await until(lambda: cluster.free == 0 and cluster.tried.total() > 14)
        with caplog.at_level(logging.WARNING, logger="absl"):
            cluster.lift(after=20)
            assert await batch.results(cleanup=False) == SQUARES
    messages = [message for message in caplog.messages if str(refusal) in message]
    assert len(messages) <= 1, "at most one warning"


async def test_a_pause_says_at_once_what_was_refused_and_until_when(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_SUBMIT_PATIENCE", "600")
    platform, cluster = guarded(FORBIDDEN, free=3)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(30), max_concurrent=3)
        await until(lambda: cluster.tried.total() > 3)
        (message,) = [message for message in caplog.messages if "is paused" in message]
        for part in (batch.group_id, str(FORBIDDEN), "600 s", "KINETIC_SUBMIT_PATIENCE"):
            assert part in message
        cluster.lift(after=60)
        await batch.results(cleanup=False)


async def test_refused_first_submissions_fail_at_once() -> None:
    platform, cluster = guarded(FORBIDDEN, free=0)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(3))
        async with asyncio.timeout(5):
            results = await batch.results(return_exceptions=True, cleanup=False)
    assert [type(error) for error in results] == [errors.AuthError] * 3
    assert set(cluster.tried.values()) == {1}


async def test_what_can_never_be_taken_fails_at_once_beside_others() -> None:
    invalid = errors.LaunchError("the specification is invalid")
    platform, cluster = guarded(invalid, free=2)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(4), max_concurrent=2)
        async with asyncio.timeout(30):
            results = await batch.results(return_exceptions=True, cleanup=False)
    assert results[:2] == [0, 1] and results[2:] == [invalid, invalid]
    assert set(cluster.tried.values()) == {1}


async def test_after_its_patience_a_batch_is_left_to_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KINETIC_SUBMIT_PATIENCE", "100")
    platform, cluster = guarded(FORBIDDEN, free=5)
    loop = asyncio.get_running_loop()
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(30), max_concurrent=5)
        with pytest.raises(errors.SubmitterLost, match=r"resume.*a right is missing"):
            await batch.results()
        assert 80 < loop.time() < 130
        assert await batch.failures() == []
        cluster.refusal = None
        await batch.resume()
        assert await batch.results() == SQUARES


async def test_leaving_during_a_pause_ends_promptly() -> None:
    platform, cluster = guarded(FORBIDDEN, free=4)
    async with aio.Client(platform=platform) as client:
        async with await client.run_async_map(square, range(30), max_concurrent=4) as batch:
            await until(lambda: cluster.tried.total() > 4)
            await asyncio.sleep(60)
            async with asyncio.timeout(5):
                await batch.cancel()
        assert len([item async for item in batch.outcomes() if item.outcome.ok]) == 4


@pytest.mark.full
async def test_a_takeover_of_a_paused_batch_waits_too() -> None:
    platform, cluster = guarded(FORBIDDEN, free=4)
    async with aio.Client(platform=platform) as first:
        batch = await first.run_async_map(square, range(30), max_concurrent=4)
        await until(lambda: cluster.tried.total() > 4)
        async with aio.Client(platform=platform) as second:
            other = await second.attach_batch(batch.group_id)
            await other.resume(force=True)
            cluster.lift(after=60)
            assert await other.results(cleanup=False) == SQUARES


async def test_cleanup_during_a_pause_waits_for_it_to_pass() -> None:
    platform, cluster = guarded(FORBIDDEN, free=4)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(30), max_concurrent=4)
        await until(lambda: cluster.tried.total() > 4)
        cluster.lift(after=60)
        await batch.cleanup()
        assert await cluster.find() == []
        assert await platform.store.list("batches/") == []
