"""Watches make clients faster, but correctness never depends on them.

The tests drop, delay or double each notification in turn. Every wait must still end with the true
outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.aio._engine.session import RECONCILE_S
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import JobLost, Unavailable
from kinetic.job_status import Reason
from kinetic.testing import MemoryCluster, Run, carry_out
from tests.engine.notifications import FAULTS, Fault, Unreliable
from tests.engine.world import PODS, SETS, VIRTUAL, claim, platform_with, preempted

ENDS_S = 240.0
"""Virtual seconds within which every wait ends; a lost notification costs at most a minute."""

WORK_S = 1.0


async def same(x: int) -> int:
    return x


async def fails(x: int) -> int:
    raise ValueError(x)


@kinetic.run(accelerator="cpu:hosts=2")
async def on_two(x: int) -> int:
    return x


async def works(run: Run) -> int | None:
    """Do the job's work after a while."""
    await asyncio.sleep(WORK_S)
    return await carry_out(run)


async def dies(run: Run) -> int | None:
    """Claim the attempt and end without an outcome."""
    await claim(run)
    await asyncio.sleep(WORK_S)
    return 9


async def dies_before(run: Run) -> int | None:
    """End without a claim or an outcome."""
    await asyncio.sleep(WORK_S)
    return 9


async def preempted_once(run: Run) -> int | None:
    """Let the first attempt commit that it was preempted, and the next one do its work."""
    if run.spec.order.attempt > 1:
        return await works(run)
    await claim(run)
    await asyncio.sleep(WORK_S)
    return await preempted(run)


async def commits_and_stays(run: Run) -> int | None:
    """Commit the outcome and never end."""
    await works(run)
    await asyncio.Event().wait()
    return 0


async def one_value(client: aio.Client) -> Any:
    return await client.submit(same, 3)


async def one_failure(client: aio.Client) -> Any:
    return await client.submit(fails, 3)


async def one_on_two_hosts(client: aio.Client) -> Any:
    return await client.submit(on_two, 3)


async def three(client: aio.Client) -> Any:
    return await client.run_async_map(same, range(3), max_concurrent=2, retries=1)


@dataclass(frozen=True)
class Course:
    """What is submitted, what its jobs do, and the outcome that every waiting client must see."""

    submit: Callable[[aio.Client], Awaitable[Any]]
    work: Callable[[Run], Any]
    truth: str
    flags: Mapping[str, Any] = field(default_factory=dict)


COURSES = {
    "a value": Course(one_value, works, "3"),
    "an exception": Course(one_failure, works, "ValueError"),
    "a death": Course(one_value, dies, "JobLost"),
    "a death before the claim": Course(one_value, dies_before, "JobLost"),
    "a process that stays": Course(one_value, commits_and_stays, "3"),
    "a preemption": Course(one_on_two_hosts, preempted_once, "3", SETS),
    "a batch": Course(three, works, "[0, 1, 2]"),
}


async def outcome_of(handle: Any) -> str:
    """Wait for *handle* and describe its outcome."""
    if isinstance(handle, aio.BatchHandle):
        await handle.wait()
        results = await handle.results(cleanup=False, return_exceptions=True)
        kinds = [type(result).__name__ for result in results if isinstance(result, Exception)]
        return f"['{kinds[0]}'] * {len(kinds)}" if kinds else str(results)
    try:
        return str(await handle.result(cleanup=False))
    except Exception as exc:
        return type(exc).__name__


async def attached(client: aio.Client, handle: Any) -> Any:
    if isinstance(handle, aio.BatchHandle):
        return await client.attach_batch(handle.group_id)
    return await client.attach(handle.job_id)


async def play(course: Course, submitter_fault: Fault, observer_fault: Fault) -> None:
    """Run *course* once while its submitter and an observer wait for it."""
    plain, cluster = platform_with(MemoryCluster, course.work)
    vars(cluster).update(course.flags)
    platforms = [
        replace(plain, cluster=Unreliable(cluster, fault))
        for fault in (submitter_fault, observer_fault)
    ]
    async with AsyncExitStack() as stack:
        submitter, observer = [
            await stack.enter_async_context(aio.Client(platform=platform)) for platform in platforms
        ]
        handle = await course.submit(submitter)
        waiting = [handle, await attached(observer, handle)]
        async with asyncio.timeout(ENDS_S):
            outcomes = await asyncio.gather(*map(outcome_of, waiting))
        assert outcomes == [course.truth] * 2


@pytest.mark.full
@VIRTUAL
@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("kind", FAULTS)
async def test_no_single_notification_is_needed(course: str, kind: str) -> None:
    cases = 0
    for receiver in ("submitter", "observer"):
        at, happened = 0, True
        while happened:
            fault, no_fault = Fault(kind, at), Fault("dropped", -1)
            submitter_fault, observer_fault = (
                (fault, no_fault) if receiver == "submitter" else (no_fault, fault)
            )
            try:
                await play(COURSES[course], submitter_fault, observer_fault)
            except Exception as exc:
                raise AssertionError(f"notification {at} of the {receiver} was {kind}") from exc
            happened = fault.happened
            at, cases = at + 1, cases + happened
    print(f"cases: {cases}")
    assert cases >= 2


@VIRTUAL
@pytest.mark.parametrize("course", COURSES)
async def test_no_notification_is_needed_at_all(course: str) -> None:
    class Mute(MemoryCluster):
        async def watch(self, labels: Mapping[str, str]) -> Any:
            await asyncio.Event().wait()
            yield

    platform, cluster = platform_with(Mute, COURSES[course].work)
    vars(cluster).update(COURSES[course].flags)
    async with aio.Client(platform=platform) as submitter:
        handle = await COURSES[course].submit(submitter)
        async with asyncio.timeout(4 * ENDS_S), aio.Client(platform=platform) as observer:
            assert await outcome_of(await attached(observer, handle)) == COURSES[course].truth
            assert await outcome_of(handle) == COURSES[course].truth


class SaysLast(MemoryCluster):
    """A cluster that reports a pod's end, and a second later that no attempt follows."""

    async def watch(self, labels: Mapping[str, str]) -> Any:
        async for seen in super().watch(labels):
            yield seen
            if seen.phase is Phase.ENDED:
                await asyncio.sleep(1.1)
                yield replace(seen, last=True)

    async def find(self, **wanted: Any) -> Any:
        """Never answer once a job has ended, so that only the watch reports the end."""
        found = await super().find(**wanted)
        if any(seen.phase is Phase.ENDED for seen in found):
            await asyncio.Event().wait()
        return found


@VIRTUAL
async def test_the_last_attempt_is_recognized_from_a_notification_of_any_attempt() -> None:
    plain, cluster = platform_with(SaysLast, preempted_once)
    vars(cluster).update(PODS)
    async with aio.Client(platform=plain) as client:
        job = await client.submit(same, 3)
        async with asyncio.timeout(ENDS_S):
            with pytest.raises(kinetic.errors.JobFailed, match="asked to stop"):
                await job.result(cleanup=False)


@VIRTUAL
async def test_a_job_whose_end_was_never_reported_is_closed_with_its_reason() -> None:
    plain, cluster = platform_with(MemoryCluster, dies)
    unreliable: Any = Unreliable(cluster, Fault("dropped", 1))
    async with aio.Client(platform=replace(plain, cluster=unreliable)) as client:
        job = await client.submit(same, 3)
        await asyncio.sleep(WORK_S / 2)
        name = f"kinetic-{job.job_id}"
        cluster.end(name, reason=Reason.OUT_OF_MEMORY, message="it took all there was")
        with pytest.raises(JobLost, match="it took all there was"):
            await job.result(cleanup=False)


class Breaking(MemoryCluster):
    """A cluster whose first watches break."""

    breaks = 2

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        if self.requests["watch"] < self.breaks:
            self.requests["watch"] += 1
            raise Unavailable("the network is down")
        async with aclosing(super().watch(labels)) as observations:
            async for seen in observations:
                yield seen


@VIRTUAL
async def test_a_watch_that_breaks_is_opened_again() -> None:
    platform, cluster = platform_with(Breaking, works)
    async with aio.Client(platform=platform) as client:
        clock = asyncio.get_running_loop().time
        batch = await three(client)
        began = clock()
        assert await batch.results() == [0, 1, 2]
        assert clock() - began < RECONCILE_S[0]
    assert cluster.requests["watch"] == cluster.breaks + 1
