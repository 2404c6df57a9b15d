"""A single job, from the call to its end: success, failure, cancellation or death."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic.job_status import JobStatus

from .crew import behaviour
from .harness import Harness, wait_at

LONG_S = 600.0


def add(a: int, b: int) -> int:
    return a + b


@behaviour
async def test_status_and_log_from_start_to_end(harness: Harness) -> None:
    gate = harness.gate()
    job = await harness.submit(wait_at, gate.path)
    assert await job.status() in (JobStatus.PENDING, JobStatus.RUNNING)
    async for line in job.logs(follow=True):
        assert line == "waiting", "the line arrives while the job runs"
        break
    await harness.running(job)
    gate.open()
    assert await job.result(cleanup=False) == "go"
    assert await job.status() is JobStatus.SUCCEEDED
    assert await job.reason() == ""
    assert await job == "go", "the value is kept by its handle"


@behaviour
async def test_status_changes_are_reported_in_order(harness: Harness) -> None:
    seen: list[JobStatus] = []

    def record(status: JobStatus) -> None:
        seen.append(status)
        raise RuntimeError("errors of a callback are ignored")

    gate = harness.gate()
    job = await harness.submit(wait_at, gate.path)
    waiting = asyncio.create_task(job.result(cleanup=False, on_status_change=record))
    await gate.entered()
    gate.open()
    await waiting
    assert seen[-1] is JobStatus.SUCCEEDED
    assert len(seen) == len(set(seen))
    late: list[JobStatus] = []
    await job.result(on_status_change=late.append)
    assert late == [JobStatus.SUCCEEDED]


@behaviour
async def test_a_result_cleans_up_after_its_value_arrived(harness: Harness) -> None:
    job = await harness.submit(add, 10, 32)
    assert await job == 42
    assert await harness.objects(job.job_id) == []
    assert await job.status() is JobStatus.NOT_FOUND


@behaviour
async def test_cleanup_leaves_nothing(harness: Harness) -> None:
    """Cancelling an ended job keeps its value; cleaning it up removes it."""
    job = await harness.submit(add, 1, 1)
    assert await job.result(cleanup=False) == 2
    assert await harness.objects(job.job_id)
    await job.cancel()
    assert await job.status() is JobStatus.SUCCEEDED
    assert await job == 2
    await job.cleanup()
    assert await job.status() is JobStatus.NOT_FOUND
    assert await harness.objects(job.job_id) == []
    assert job not in await harness.client.list_jobs()
    await job.cleanup()


@behaviour
async def test_a_running_job_can_be_cleaned_up_by_its_id(harness: Harness) -> None:
    gate = harness.gate()
    job = await harness.submit(wait_at, gate.path)
    await gate.entered()
    async with aio.Client() as other:
        await other.cleanup(job.job_id)
        await other.cleanup(job.job_id)
    assert await job.status() is JobStatus.NOT_FOUND
    assert await harness.objects(job.job_id) == []
    assert job not in await harness.client.list_jobs()


@behaviour
async def test_waiting_neither_ends_a_job_nor_owns_it(harness: Harness) -> None:
    gate = harness.gate()
    job = await harness.submit(wait_at, gate.path)
    waiting = asyncio.ensure_future(job.result())
    await gate.entered()
    with pytest.raises(TimeoutError) as caught:
        await job.result(timeout=0.01)
    assert isinstance(caught.value, errors.ResultTimeout)
    assert job.job_id in str(caught.value)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open("later")
    assert await job == "later"


@behaviour
async def test_a_call_owns_its_job(harness: Harness) -> None:
    gate = harness.gate()
    decorated = harness.on(wait_at)
    calling = asyncio.create_task(harness.client.run(decorated, gate.path))
    await gate.entered()
    [job_id] = [name.split(".")[1] for name in harness.marks("gate/in.*")]
    job = await harness.client.attach(job_id)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert await job.status() is JobStatus.NOT_FOUND
    assert await harness.objects(job_id) == []
    assert job not in await harness.client.list_jobs()


@behaviour
async def test_a_cancelled_job_is_reported_as_cancelled(harness: Harness) -> None:
    """The client that cancels and one that attaches later report it, and what the job printed."""
    gate = harness.gate()
    job = await harness.submit(wait_at, gate.path)
    async for _ in job.logs(follow=True):
        break
    await job.cancel()
    async with aio.Client() as other:
        for handle in (job, await other.attach(job.job_id)):
            assert [line async for line in handle.logs()] == ["waiting"]
            assert await handle.status() is JobStatus.NOT_FOUND
            cancellation = "cancelled (cancel() was called)"
            with pytest.raises(errors.JobCancelled, match=re.escape(cancellation)) as caught:
                await handle
            assert job.job_id in str(caught.value)
            assert await handle.reason() == cancellation
        assert job not in await other.list_jobs()
    await job.cancel()
    await job.cleanup()
    with pytest.raises(errors.NoLog):
        await job.tail()


@behaviour
async def test_another_client_attaches(harness: Harness) -> None:
    gate = harness.gate()
    job = await harness.submit(wait_at, gate.path)
    await gate.entered()
    async with aio.Client() as other:
        found = await other.attach(job.job_id)
        assert found == job
        assert found.to_dict() == job.to_dict()
        await harness.running(found)
        [listed] = [candidate for candidate in await other.list_jobs() if candidate == job]
        await harness.running(listed)
        gate.open("seen")
        assert await found.result(cleanup=False) == "seen"
        assert await (await other.attach(job.job_id)).result(cleanup=False) == "seen"
        assert [line async for line in found.logs()] == ["waiting"]
    rebuilt = aio.JobHandle[str].from_dict({**job.to_dict(), "news": True})
    assert await rebuilt.result() == "seen"
    assert await job.status() is JobStatus.NOT_FOUND


@behaviour
async def test_an_unknown_job_is_not_found(harness: Harness) -> None:
    marker = harness.ports.id_marker
    with pytest.raises(errors.NotFound, match=f"job-{marker}000000000000"):
        await harness.client.attach(f"job-{marker}000000000000")
    with pytest.raises(errors.NotFound, match=f"grp-{marker}000000000000"):
        await harness.client.attach_batch(f"grp-{marker}000000000000")


def die(how: str) -> None:
    print("last words", flush=True)
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGABRT)


@behaviour
async def test_a_process_that_dies_is_lost_and_says_how(harness: Harness) -> None:
    killed, exited, aborted = await asyncio.gather(
        *(harness.submit(die, how) for how in ("kill", "exit", "abort"))
    )
    with pytest.raises(errors.JobLost, match="SIGKILL") as caught:
        await killed
    assert "last words" in str(caught.value)
    assert caught.value.job_id == killed.job_id
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.reason, caught.value.exit_code) == ("lost", -signal.SIGKILL)
    assert await killed.status() is JobStatus.FAILED
    assert (await killed.reason()).startswith("lost: ")
    with pytest.raises(errors.JobLost, match="code 7") as caught:
        await exited
    assert caught.value.exit_code == 7
    with pytest.raises(errors.JobLost, match="SIGABRT"):
        await aborted


@behaviour
async def test_a_job_that_takes_all_its_memory_says_so(harness: Harness) -> None:
    def swell() -> Any:
        kept = []
        while True:
            kept.append(os.urandom(1 << 22))

    job = await harness.submit(harness.on(swell, memory="200Mi"))
    with pytest.raises((MemoryError, errors.JobError)) as caught:
        await job
    assert "memory" in str(caught.value).lower() + repr(caught.value).lower()
    assert (await job.reason()).startswith("out of memory: ")
    assert await job.status() is JobStatus.FAILED


class Slow:
    """Unpickling it in the job takes longer than the function's timeout."""

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (2.0,)


@behaviour
async def test_the_time_of_a_job_begins_with_its_function(harness: Harness) -> None:
    job = await harness.submit(harness.on(repr, timeout=1.5), Slow())
    assert await job.result() == "None"


@behaviour
async def test_a_job_that_runs_too_long_is_ended(harness: Harness) -> None:
    job = await harness.submit(harness.on(time.sleep, timeout=1.0), LONG_S)
    with pytest.raises(errors.JobError, match=r"timeout of 1 s") as caught:
        await job
    assert "deadline" in str(caught.value)
    assert (await job.reason()).startswith("deadline: ")


@behaviour
async def test_a_job_that_no_machine_has_room_for_says_so(harness: Harness) -> None:
    """The job requests all CPUs while another job uses some."""
    gate = harness.gate()
    other = await harness.submit(wait_at, gate.path)
    await gate.entered()
    impatient = harness.on(os.getcwd, cpu=16, start_timeout=1.0)
    job = await harness.submit(impatient)
    with pytest.raises(errors.JobLost, match=r"(for|of) 1 s") as caught:
        await job
    assert caught.value.reason == "unschedulable"
    assert (await job.reason()).startswith("unschedulable: ")
    gate.open()
    assert await other == "go"


@behaviour
async def test_a_client_bounds_its_unfinished_jobs(harness: Harness) -> None:
    gate = harness.gate()
    async with aio.Client(max_concurrent=1) as client:
        first = await client.submit(harness.on(wait_at), gate.path)
        await gate.entered()
        second = asyncio.create_task(client.submit(harness.on(add), 1, 2))
        done, _ = await asyncio.wait({second}, timeout=0.2)
        assert not done, "the only slot is taken"
        gate.open()
        await first
        assert await (await second) == 3


@behaviour
async def test_a_closed_client_leaves_its_jobs_and_says_so(harness: Harness) -> None:
    async with aio.Client() as first, aio.Client() as second:
        job = await first.submit(harness.on(add), 1, 1)
        await first.aclose()
        await first.aclose()
        with pytest.raises(errors.ClientClosed, match="closed"):
            await first.submit(harness.on(add), 1, 2)
        assert await (await second.attach(job.job_id)) == 2
