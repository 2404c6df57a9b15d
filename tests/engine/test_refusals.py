"""A refusal that may be lifted pauses a batch instead of failing items."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec
from kinetic.testing import MemoryCluster, Run, carry_out, memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, dies, until

pytestmark = VIRTUAL

FORBIDDEN = errors.AuthError("cannot create jobs: a right is missing")
DENIED = errors.LaunchError("refused by the policy 'team'", reason="refused", passing=True)
INVALID = errors.LaunchError("the specification is invalid")

GOOD = 4
"""Items that have a value in the first round; the others fail."""


class Guarded(MemoryCluster):
    """Refuse workers and deletions with ``refusal`` unless it is None."""

    refusal: Exception | None = None
    refused = 0

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        self._guard()
        return await super().scale(job, number=number, ranks=ranks)

    async def delete(self, **selection: Any) -> None:
        self._guard()
        await super().delete(**selection)

    def _guard(self) -> None:
        if self.refusal is not None:
            self.refused += 1
            raise self.refusal

    def lift(self, after: float) -> None:
        """Accept all requests after *after* seconds."""
        asyncio.get_running_loop().call_later(after, setattr, self, "refusal", None)


async def fails_at_first(run: Run) -> int | None:
    order = run.spec.order
    return await (dies(run) if order.attempt == 1 and order.index >= GOOD else carry_out(run))


def guarded(refusal: Exception | None = None) -> tuple[Platform, Guarded]:
    plain = on_loop_time(memory_platform())
    cluster = Guarded(plain.store, fails_at_first)
    cluster.refusal = refusal
    return replace(plain, cluster=cluster), cluster


def square(x: int) -> int:
    return x * x


SQUARES = [x * x for x in range(30)]


async def refused(client: aio.Client, cluster: Guarded, refusal: Exception) -> aio.BatchHandle[int]:
    """Return a batch whose second round was refused."""
    batch = await client.run_async_map(square, range(30), max_concurrent=4)
    await batch.wait()
    cluster.refusal = refusal
    assert await batch.retry_failed() == 30 - GOOD
    await until(lambda: cluster.refused)
    return batch


@pytest.mark.parametrize("refusal", [FORBIDDEN, DENIED], ids=["right", "policy"])
async def test_a_passing_refusal_fails_no_item(
    refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    platform, cluster = guarded()
    async with aio.Client(platform=platform) as client:
        with caplog.at_level(logging.WARNING, logger="absl"):
            batch = await refused(client, cluster, refusal)
            cluster.lift(after=20)
            assert await batch.results(cleanup=False) == SQUARES
    messages = [message for message in caplog.messages if str(refusal) in message]
    assert len(messages) <= 1, "at most one warning"


async def test_a_pause_says_at_once_what_was_refused_and_until_when(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_SUBMIT_PATIENCE", "600")
    platform, cluster = guarded()
    async with aio.Client(platform=platform) as client:
        batch = await refused(client, cluster, FORBIDDEN)
        (message,) = [message for message in caplog.messages if "is paused" in message]
        for part in (batch.group_id, str(FORBIDDEN), "600 s", "KINETIC_SUBMIT_PATIENCE"):
            assert part in message
        cluster.lift(after=60)
        await batch.results(cleanup=False)


@pytest.mark.parametrize("refusal", [FORBIDDEN, INVALID], ids=["right", "invalid"])
async def test_refused_first_submissions_fail_at_once(refusal: Exception) -> None:
    platform, cluster = guarded(refusal)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(square, range(3))
        async with asyncio.timeout(5):
            results = await batch.results(return_exceptions=True, cleanup=False)
    assert [type(error) for error in results] == [type(refusal)] * 3
    assert cluster.refused == 1


async def test_what_can_never_be_taken_fails_at_once_after_others() -> None:
    platform, cluster = guarded()
    async with aio.Client(platform=platform) as client:
        batch = await refused(client, cluster, INVALID)
        async with asyncio.timeout(30):
            results = await batch.results(return_exceptions=True, cleanup=False)
    assert results[:GOOD] == SQUARES[:GOOD]
    assert {str(error) for error in results[GOOD:]} == {str(INVALID)}
    assert cluster.refused == 1


async def test_after_its_patience_a_batch_is_left_to_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KINETIC_SUBMIT_PATIENCE", "100")
    platform, cluster = guarded()
    loop = asyncio.get_running_loop()
    async with aio.Client(platform=platform) as client:
        batch = await refused(client, cluster, FORBIDDEN)
        began = loop.time()
        with pytest.raises(errors.SubmitterLost, match=r"resume.*a right is missing"):
            await batch.results()
        assert 80 < loop.time() - began < 130
        job = await batch.job(29)
        with pytest.raises(errors.SubmitterLost):
            await job.result(timeout=100)
        assert await batch.failures() == []
        cluster.refusal = None
        await batch.resume()
        assert await batch.results() == SQUARES


async def test_leaving_during_a_pause_ends_promptly() -> None:
    platform, cluster = guarded()
    async with aio.Client(platform=platform) as client:
        async with await refused(client, cluster, FORBIDDEN) as batch:
            await asyncio.sleep(60)
            async with asyncio.timeout(15):
                await batch.cancel()
        assert len([item async for item in batch.outcomes() if item.outcome.ok]) == GOOD


@pytest.mark.full
async def test_a_takeover_of_a_paused_batch_waits_too() -> None:
    platform, cluster = guarded()
    async with aio.Client(platform=platform) as first:
        batch = await refused(first, cluster, FORBIDDEN)
        async with aio.Client(platform=platform) as second:
            other = await second.attach_batch(batch.group_id)
            await other.resume(force=True)
            cluster.lift(after=60)
            assert await other.results(cleanup=False) == SQUARES


async def test_cleanup_during_a_pause_waits_for_it_to_pass() -> None:
    platform, cluster = guarded()
    async with aio.Client(platform=platform) as client:
        batch = await refused(client, cluster, FORBIDDEN)
        cluster.lift(after=60)
        await batch.cleanup()
        assert await cluster.find() == []
        assert await platform.store.list("batches/") == []
