"""A job of its own whose disrupted attempts are replaced by whoever has submitted it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.aio.ports import JobSpec, ObjectInfo, Observation, Phase
from kinetic.errors import (
    AuthError,
    BackendError,
    JobFailed,
    JobLost,
    LaunchError,
    ResultTimeout,
    Unavailable,
)
from kinetic.job_status import Reason
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.engine.world import VIRTUAL, claim, preempted


@kinetic.run(accelerator="cpu:hosts=4")
def on_four(x: int) -> int:
    if x < 0:
        raise ValueError("below zero")
    return x + 1


def disrupted(times: int) -> Callable[[Any], Awaitable[int]]:
    """So many attempts are; the next one does its work."""

    async def work(run: Any) -> int:
        number = run.spec.order.attempt
        return await (preempted(run) if number <= times else carry_out(run))

    return work


class Cluster(MemoryCluster):
    """Keeps what it was asked for; *refuses* attempts after the first with these, one each time."""

    def __init__(self, *args: Any, refuses: list[BackendError | LaunchError] | None = None) -> None:
        super().__init__(*args)
        self.launched: list[str] = []
        self.refuses = refuses or []
        self.silent: list[BackendError] = []
        """What is said when it is asked about one attempt alone, one each time."""
        self.held: asyncio.Event | None = None
        self.cause: tuple[Reason, str] | None = None
        self.reached = asyncio.Event()
        self.mute = False
        """Whether its watches tell nothing."""

    async def find(self, **wanted: Any) -> list[Observation]:
        """With the *cause* that another host has ended it with."""
        if self.silent and len(wanted.get("names", ())) == 1:
            raise self.silent.pop()
        found = await super().find(**wanted)
        if self.cause is None:
            return found
        reason, words = self.cause
        return [
            replace(one, reason=reason, message=words, host=2) if one.phase is Phase.ENDED else one
            for one in found
        ]

    async def launch(self, job: JobSpec) -> None:
        if self.launched:
            if self.held is not None:
                self.reached.set()
                await self.held.wait()
            if self.refuses:
                raise self.refuses.pop(0)
        self.launched.append(job.name)
        await super().launch(job)

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        async with aclosing(super().watch(labels)) as news:
            async for seen in news:
                if not self.mute:
                    yield seen

    def lose(self, name: str) -> None:
        """Forget a job that runs, and tell nobody: what went while nobody watched."""
        job = self._jobs.pop(name)
        job.observation = replace(job.observation, phase=Phase.GONE)
        assert job.task is not None
        job.task.cancel()


class Store(MemoryStore):
    """Answers with *silent* when it is asked whether the job is still there, one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: list[BackendError] = []
        self.closed: list[BackendError] = []
        """What a request to stop is answered with, one each time."""

    async def create(self, name: str, *args: Any, **kwargs: Any) -> bool:
        if self.closed and "/control/" in name:
            raise self.closed.pop()
        return await super().create(name, *args, **kwargs)

    async def look(self, name: str) -> ObjectInfo | None:
        if self.silent:
            raise self.silent.pop()
        return await super().look(name)


def platform_of(work: Any, **given: Any) -> tuple[Any, Cluster]:
    store = Store()
    cluster = Cluster(store, work, **given)
    return replace(memory_platform(), store=store, cluster=cluster, relaunches=True), cluster


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_what_was_disrupted_runs_again(times: int) -> None:
    platform, cluster = platform_of(disrupted(times))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        assert await job.result(timeout=60) == 2
        assert len(cluster.launched) == times + 1
        assert await cluster.find(labels={"app": "kinetic"}) == []


async def test_a_budget_ends_it_with_the_last_reason() -> None:
    platform, cluster = platform_of(disrupted(99))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        with pytest.raises(JobFailed, match="asked to stop"):
            await job.result(timeout=60, cleanup=False)
        assert len(cluster.launched) == 4
    async with aio.Client(platform=platform) as later:
        attached = await later.attach(job.job_id)
        assert (await attached.reason()).startswith("preempted")


async def test_a_failure_of_its_own_is_not_repeated() -> None:
    platform, cluster = platform_of(disrupted(0))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, -1)
        with pytest.raises(ValueError, match="below zero"):
            await job.result(timeout=60)
        assert len(cluster.launched) == 1


@pytest.mark.parametrize(
    ("reason", "launches"),
    [(Reason.USER_ERROR, 1), (Reason.OUT_OF_MEMORY, 1), (Reason.EVICTED, 2), (Reason.NODE_LOST, 2)],
)
async def test_what_another_host_did_by_itself_is_not_repeated(
    reason: Reason, launches: int
) -> None:
    platform, cluster = platform_of(disrupted(1))
    cluster.cause = (reason, "host 2 of 4: something happened")
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        if launches > 1:
            assert await job.result(timeout=60) == 2
        else:
            with pytest.raises(JobFailed, match="asked to stop") as caught:
                await job.result(timeout=60, cleanup=False)
            assert "host 2 of 4" in "".join(caught.value.__notes__)
        assert len(cluster.launched) == launches


async def test_a_launch_that_may_work_later_is_repeated_and_one_that_never_will_ends_it() -> None:
    passing = [Unavailable("no answer", retryable=True)]
    platform, cluster = platform_of(disrupted(1), refuses=passing)
    async with aio.Client(platform=platform) as client:
        assert await (await client.submit(on_four, 1)).result(timeout=60) == 2
    platform, cluster = platform_of(disrupted(1), refuses=[LaunchError("no quota")])
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        with pytest.raises(JobFailed, match="asked to stop"):
            await job.result(timeout=60, cleanup=False)
        assert len(cluster.launched) == 1


@pytest.mark.parametrize("who", ["cluster", "store"])
async def test_who_does_not_answer_beside_a_launch_is_asked_again(who: str) -> None:
    platform, cluster = platform_of(disrupted(1))
    silent: Any = {"cluster": cluster, "store": platform.store}[who]
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        silent.silent = [Unavailable("no answer", retryable=True)]
        assert await job.result(timeout=60) == 2
        assert not silent.silent
        assert len(cluster.launched) == 2


@pytest.mark.parametrize("launch", [True, False])
async def test_a_job_that_is_not_launched_again_ends_although_the_store_was_silent(
    launch: bool,
) -> None:
    platform, cluster = platform_of(disrupted(1), refuses=[LaunchError("no quota")])
    platform.store.closed = [Unavailable("no answer", retryable=True)]
    if not launch:
        cluster.cause = (Reason.USER_ERROR, "host 2 of 4: something happened")
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        with pytest.raises(JobFailed, match="asked to stop"):
            await job.result(timeout=30, cleanup=False)
        assert not platform.store.closed


async def test_who_waits_is_told_that_the_end_of_a_job_cannot_be_written() -> None:
    platform, _ = platform_of(disrupted(1), refuses=[LaunchError("no quota")])
    platform.store.closed = [AuthError("no right")]
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        with pytest.raises(AuthError, match="no right"):
            await job.result(timeout=30, cleanup=False)


@pytest.mark.parametrize("ends", ["cancel", "cleanup"])
async def test_a_job_that_another_client_ends_during_a_relaunch_leaves_nothing(ends: str) -> None:
    platform, cluster = platform_of(disrupted(1))
    cluster.held = asyncio.Event()
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await cluster.reached.wait()
        async with aio.Client(platform=platform) as other:
            if ends == "cancel":
                await (await other.attach(job.job_id)).cancel()
            else:
                await other.cleanup(job.job_id)
        cluster.held.set()
        while len(cluster.launched) < 2 or await cluster.find(labels={"app": "kinetic"}):
            await asyncio.sleep(0.01)
        if ends == "cancel":
            assert (await job.status()).value in ("FAILED", "NOT_FOUND")


async def test_who_comes_later_waits_for_the_submitter() -> None:
    platform, cluster = platform_of(disrupted(1))
    cluster.held = asyncio.Event()
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await cluster.reached.wait()
        async with aio.Client(platform=platform) as other:
            attached = await other.attach(job.job_id)
            with pytest.raises(ResultTimeout):
                await attached.result(timeout=2, cleanup=False)  # it looks again after a second
            cluster.held.set()
            assert await attached.result(timeout=60) == 2


@VIRTUAL
async def test_a_submitter_that_sleeps_is_waited_for_a_minute() -> None:
    platform, cluster = platform_of(disrupted(1))
    cluster.held = asyncio.Event()  # the submitter sleeps
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await cluster.reached.wait()
        async with aio.Client(platform=platform) as other:
            attached = await other.attach(job.job_id)
            with pytest.raises(JobFailed, match="asked to stop"):
                await attached.result(timeout=90, cleanup=False)
        cluster.held.set()  # and wakes up: it is too late, and what it launches is taken back
        while len(cluster.launched) < 2 or await cluster.find(labels={"app": "kinetic"}):
            await asyncio.sleep(0.01)
        with pytest.raises(JobFailed, match="asked to stop"):
            await job.result(timeout=60, cleanup=False)


async def test_who_comes_later_gets_the_value_of_an_attempt_that_was_launched_again() -> None:
    platform, _ = platform_of(disrupted(2))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await job.wait(60)
    async with aio.Client(platform=platform) as other:
        assert await (await other.attach(job.job_id)).result(timeout=60) == 2


async def test_who_has_not_looked_cleans_up_all_attempts() -> None:
    platform, cluster = platform_of(disrupted(2))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await job.wait(60)
    assert await cluster.find(labels={"app": "kinetic"})
    async with aio.Client(platform=platform) as other:
        await (await other.attach(job.job_id)).cleanup()
    assert await cluster.find(labels={"app": "kinetic"}) == []


@VIRTUAL
async def test_what_is_left_of_the_attempt_before_holds_up_no_end() -> None:
    """The submitter died before it deleted that; a finalizer may keep it for ever."""
    go = asyncio.Event()

    async def work(run: Any) -> int:
        await go.wait()
        return await preempted(run)

    platform, cluster = platform_of(work)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
    go.set()
    async with aio.Client(platform=platform) as later:
        attached = await later.attach(job.job_id)
        with pytest.raises(JobFailed, match="asked to stop"):
            await attached.result(timeout=90, cleanup=False)
    assert await cluster.find(labels={"app": "kinetic"})


@pytest.mark.parametrize("claimed", [True, False])
async def test_an_attempt_that_was_launched_again_and_vanished_unseen_is_lost(
    claimed: bool,
) -> None:
    begun = asyncio.Event()

    async def work(run: Any) -> int:
        order = run.spec.order
        if order.attempt == 1:
            return await preempted(run)
        if claimed:
            await claim(run)
        begun.set()
        return await asyncio.Event().wait()

    platform, cluster = platform_of(work)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await begun.wait()
        cluster.lose(cluster.launched[-1])
        while (await job.status()).value == "PENDING":  # its launch is not answered yet
            await asyncio.sleep(0.01)
        with pytest.raises(JobLost, match="gone"):
            await job.result(timeout=10, cleanup=False)


async def test_nothing_waits_on_for_a_job_that_was_cleaned_up_before_its_end_was_told() -> None:
    async def work(run: Any) -> int:
        return await asyncio.Event().wait()

    platform, cluster = platform_of(work)
    cluster.mute = True
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        (waiting,) = (one for one in asyncio.all_tasks() if "end of" in one.get_name())
        await job.cleanup()
        await asyncio.wait({waiting}, timeout=10)
        assert waiting.done()
