"""The submitter replaces disrupted attempts, and repeats launches that are refused for now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
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
from tests.engine.world import SETS, VIRTUAL, claim, platform_with, preempted


@kinetic.run(accelerator="cpu:hosts=4")
def on_four(x: int) -> int:
    if x < 0:
        raise ValueError("below zero")
    return x + 1


def disrupted(times: int) -> Callable[[Any], Awaitable[int]]:
    """Preempt the first *times* attempts; later ones do their work."""

    async def work(run: Any) -> int:
        number = run.spec.order.attempt
        return await (preempted(run) if number <= times else carry_out(run))

    return work


class Cluster(MemoryCluster):
    """A cluster that records launches and raises *refuses* in turn for attempts after the first."""

    def __init__(self, *args: Any, refuses: list[BackendError | LaunchError] | None = None) -> None:
        super().__init__(*args)
        self.launched: list[str] = []
        self.refuses = refuses or []
        self.silent: list[BackendError] = []
        """Errors of the next requests about one attempt."""
        self.held: asyncio.Event | None = None
        self.cause: tuple[Reason, str] | None = None
        self.tells_cause = False
        """Whether its watches report the ``cause`` too."""
        self.reached = asyncio.Event()
        self.mute = False
        """Whether its watches report nothing."""

    async def find(self, **wanted: Any) -> list[Observation]:
        """Find jobs, and give the ended ones the ``cause``, as if another host had failed."""
        if self.silent and len(wanted.get("names", ())) == 1:
            raise self.silent.pop()
        return [self._with_cause(seen) for seen in await super().find(**wanted)]

    def _with_cause(self, seen: Observation) -> Observation:
        if self.cause is None or seen.phase is not Phase.ENDED:
            return seen
        return replace(seen, reason=self.cause[0], message=self.cause[1], host=2)

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
                    yield self._with_cause(seen) if self.tells_cause else seen

    def lose(self, name: str) -> None:
        """Forget a running job without a notification, as if it vanished while nobody watched."""
        job = self._jobs.pop(name)
        job.observation = replace(job.observation, phase=Phase.GONE)
        assert job.task is not None
        job.task.cancel()


class Store(MemoryStore):
    """A store that raises ``silent`` in turn when a client looks whether the job still exists."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: list[BackendError] = []
        self.stop_errors: list[BackendError] = []
        """Errors of the next requests to stop."""

    async def create(self, name: str, *args: Any, **kwargs: Any) -> bool:
        if self.stop_errors and "/control/" in name:
            raise self.stop_errors.pop()
        return await super().create(name, *args, **kwargs)

    async def look(self, name: str) -> ObjectInfo | None:
        if self.silent:
            raise self.silent.pop()
        return await super().look(name)


def platform_of(work: Any, **options: Any) -> tuple[Any, Cluster]:
    store = Store()
    cluster = Cluster(store, work, **options)
    vars(cluster).update(SETS)
    return replace(memory_platform(), store=store, cluster=cluster), cluster


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
@pytest.mark.parametrize("told", [False, True])
async def test_what_another_host_did_by_itself_is_not_repeated(
    reason: Reason, launches: int, told: bool
) -> None:
    platform, cluster = platform_of(disrupted(1))
    cluster.tells_cause = told
    cluster.cause = (reason, "host 2 of 4: something happened")
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        if launches > 1:
            assert await job.result(timeout=60) == 2
        else:
            with pytest.raises(JobFailed, match="asked to stop") as caught:
                await job.result(timeout=60, cleanup=False)
            assert "host 2 of 4" in "".join(caught.value.__notes__)
            async with aio.Client(platform=platform) as later:
                for handle in (job, await later.attach(job.job_id)):
                    assert (await handle.reason()).endswith("host 2 of 4: something happened")
        assert len(cluster.launched) == launches


async def test_a_launch_that_may_work_later_is_repeated_and_one_that_never_will_ends_it() -> None:
    refusals = [Unavailable("no answer", retryable=True)]
    platform, cluster = platform_of(disrupted(1), refuses=refusals)
    async with aio.Client(platform=platform) as client:
        assert await (await client.submit(on_four, 1)).result(timeout=60) == 2
    platform, cluster = platform_of(disrupted(1), refuses=[LaunchError("no quota")])
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        with pytest.raises(JobFailed, match="asked to stop"):
            await job.result(timeout=60, cleanup=False)
        assert len(cluster.launched) == 1


@pytest.mark.parametrize("port", ["cluster", "store"])
async def test_requests_that_fail_around_a_relaunch_are_repeated(port: str) -> None:
    platform, cluster = platform_of(disrupted(1))
    silent: Any = {"cluster": cluster, "store": platform.store}[port]
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
    platform.store.stop_errors = [Unavailable("no answer", retryable=True)]
    if not launch:
        cluster.cause = (Reason.USER_ERROR, "host 2 of 4: something happened")
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        with pytest.raises(JobFailed, match="asked to stop"):
            await job.result(timeout=30, cleanup=False)
        assert not platform.store.stop_errors


async def test_a_waiting_caller_gets_the_error_of_writing_the_end() -> None:
    platform, _ = platform_of(disrupted(1), refuses=[LaunchError("no quota")])
    platform.store.stop_errors = [AuthError("no right")]
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


async def test_a_later_client_waits_for_the_submitter() -> None:
    platform, cluster = platform_of(disrupted(1))
    cluster.held = asyncio.Event()
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await cluster.reached.wait()
        async with aio.Client(platform=platform) as other:
            attached = await other.attach(job.job_id)
            with pytest.raises(ResultTimeout):
                await attached.result(timeout=2, cleanup=False)  # it polls each second
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
        cluster.held.set()  # it wakes up too late, and deletes what it launches
        while len(cluster.launched) < 2 or await cluster.find(labels={"app": "kinetic"}):
            await asyncio.sleep(0.01)
        with pytest.raises(JobFailed, match="asked to stop"):
            await job.result(timeout=60, cleanup=False)


async def test_a_later_client_gets_the_value_of_a_relaunched_attempt() -> None:
    platform, _ = platform_of(disrupted(2))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await job.wait(60)
    async with aio.Client(platform=platform) as other:
        assert await (await other.attach(job.job_id)).result(timeout=60) == 2


async def test_a_client_that_never_polled_cleans_up_all_attempts() -> None:
    platform, cluster = platform_of(disrupted(2))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await job.wait(60)
    assert await cluster.find(labels={"app": "kinetic"})
    async with aio.Client(platform=platform) as other:
        await (await other.attach(job.job_id)).cleanup()
    assert await cluster.find(labels={"app": "kinetic"}) == []


@VIRTUAL
async def test_a_leftover_job_of_the_previous_attempt_does_not_delay_the_end() -> None:
    """The submitter died before it deleted the earlier attempt, which a finalizer may keep."""
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
    started = asyncio.Event()

    async def work(run: Any) -> int:
        order = run.spec.order
        if order.attempt == 1:
            return await preempted(run)
        if claimed:
            await claim(run)
        started.set()
        return await asyncio.Event().wait()

    platform, cluster = platform_of(work)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        await started.wait()
        cluster.lose(cluster.launched[-1])
        while (await job.status()).value == "PENDING":  # the reply to its launch is outstanding
            await asyncio.sleep(0.01)
        with pytest.raises(JobLost, match="gone"):
            await job.result(timeout=10, cleanup=False)


async def test_cleanup_ends_the_wait_for_a_job_that_was_never_reported() -> None:
    async def work(run: Any) -> int:
        return await asyncio.Event().wait()

    platform, cluster = platform_of(work)
    cluster.mute = True
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        (waiting,) = (task for task in asyncio.all_tasks() if "end of" in task.get_name())
        await job.cleanup()
        await asyncio.wait({waiting}, timeout=10)
        assert waiting.done()


class Full(MemoryCluster):
    """A cluster whose quota has no room for workers before the time ``until``."""

    until = 0.0

    async def scale(self, *args: Any, **kwargs: Any) -> int | None:
        if asyncio.get_running_loop().time() < self.until:
            raise errors.Throttled("quota 'few' is used up", retryable=True)
        return await super().scale(*args, **kwargs)


def same(x: int) -> int:
    return x


@VIRTUAL
@pytest.mark.parametrize("start_timeout", [None, 300])
async def test_a_used_up_quota_is_waited_for_until_the_start_timeout(
    start_timeout: int | None,
) -> None:
    platform, cluster = platform_with(Full)
    loop = asyncio.get_running_loop()
    began = loop.time()
    cluster.until = began + 2000
    async with aio.Client(platform=platform) as client:
        function = same if start_timeout is None else kinetic.run(start_timeout=start_timeout)(same)
        batch = await client.run_async_map(function, range(6), max_concurrent=2)
        values = await batch.results(timeout=3000, cleanup=False, return_exceptions=True)
        if start_timeout is None:
            assert values == [*range(6)]
            assert loop.time() - began >= 2000
        else:
            assert all("quota 'few' is used up" in str(refused) for refused in values)
            assert start_timeout <= loop.time() - began < 2000
