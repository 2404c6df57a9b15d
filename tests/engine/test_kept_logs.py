"""The runner keeps a log that outlives its pod; following a log ends with the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import signing, wire
from kinetic.aio.job import JobHandle
from kinetic.testing import Run, carry_out, memory_platform
from kinetic.testing.cluster import MemoryCluster
from kinetic.testing.memory import MemoryStore


def same(x: int) -> int:
    return x


async def print_and_end(run: Run) -> int | None:
    """Print a line, then commit the outcome."""
    run.print("platform")
    return await carry_out(run)


async def lingers(run: Run) -> int | None:
    """Commit the outcome, print a last line, and never end."""
    run.print("first")
    await carry_out(run)
    run.print("last")
    await asyncio.sleep(1e9)
    return 0


async def keep(
    client: aio.Client, job: JobHandle[Any], text: str, host: int = 0, key: bytes | None = None
) -> str:
    """Write the log object that a runner writes at the end; return its name."""
    identity = (await job._follow()).submission.identity
    name, content = wire.log_key(identity.scope, 0, 1, host), text.encode()
    mac = signing.sign(key or identity.key, identity.scope, name, content)
    await client._platform.store.create(name, content, {"mac": mac})
    return name


async def without_pod(client: aio.Client) -> JobHandle[int]:
    job = await client.submit(same, 1)
    assert await job.result(cleanup=False) == 1
    await client._platform.cluster.delete(names=[f"kinetic-{job.job_id}"])
    return job


async def lines(job: JobHandle[Any], **options: Any) -> list[str]:
    return [line async for line in job.logs(**options)]


async def print_long_lines(run: Run) -> int | None:
    """Print lines of nearly a tail's limit, and one above it."""
    for line in ("a" * 900_000, "€" * 1_000_000, "b" * 900_000):
        run.print(line)
    return await carry_out(run)


async def test_a_tail_is_bounded_in_bytes_however_long_the_lines_are() -> None:
    async with aio.Client(platform=memory_platform(print_long_lines)) as client:
        job = await client.submit(same, 1)
        await job.result(cleanup=False)
        assert await job.tail(1) == await job.tail() == "b" * 900_000
        assert len(await job.tail(3)) == 900_000


async def test_what_the_platform_has_lost_is_read_from_the_store() -> None:
    async with aio.Client(platform=memory_platform(print_and_end)) as client:
        job = await without_pod(client)
        with pytest.raises(errors.NoLog):
            await lines(job)
        name = await keep(client, job, "one\ntwo\nthree\n")
        logs = [await lines(job, **options) for options in ({}, {"follow": True}, {"attempt": 1})]
        assert logs == [["one", "two", "three"]] * 3
        assert await job.tail(2) == "two\nthree"
        assert await job.tail(0) == ""
        await job.cleanup()
        assert await client._platform.store.list(name) == []


class Forgetful(MemoryCluster):
    """Ends each log with the error of a node that has removed it."""

    async def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        async for line in super().logs(name, tail=tail):
            yield line
        raise errors.NotFound("the node has removed the log")


async def test_a_log_that_ends_too_early_goes_on_from_the_store() -> None:
    store = MemoryStore()
    cluster = Forgetful(store, print_and_end)
    platform = replace(memory_platform(), store=store, cluster=cluster)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(same, 1)
        assert await job.result(cleanup=False) == 1
        await keep(client, job, "platform\nlast\n")
        for options in ({}, {"follow": True}, {"attempt": 1}, {"attempt": 1, "follow": True}):
            assert await lines(job, **options) == ["platform", "last"]
        assert await job.tail(5) == "platform", "where its lines end isn't known"


async def test_those_of_a_batch_go_with_it() -> None:
    async with aio.Client(platform=memory_platform(print_and_end)) as client:
        batch = await client.run_async_map(same, [1, 2])
        assert await batch.results(cleanup=False) == [1, 2]
        await keep(client, await batch.job(0), "kept")
        await batch.cleanup()
        assert not await client._platform.store.list("batches/")


async def test_what_the_platform_has_comes_first() -> None:
    async with aio.Client(platform=memory_platform(print_and_end)) as client:
        job = await client.submit(same, 1)
        assert await job.result(cleanup=False) == 1
        await keep(client, job, "kept")
        assert await lines(job) == ["platform"]


async def test_kept_logs_of_several_hosts_are_labeled() -> None:
    async with aio.Client(platform=memory_platform(print_and_end)) as client:
        job = await without_pod(client)
        await keep(client, job, "a\n", 0)
        await keep(client, job, "b\nc\n", 1)
        assert await lines(job) == ["[0] a", "[1] b", "[1] c"]


async def test_a_log_that_nobody_has_signed_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async with aio.Client(platform=memory_platform(print_and_end)) as client:
        job = await without_pod(client)
        await keep(client, job, "forged\n", key=b"x" * 32)
        with caplog.at_level(logging.WARNING), pytest.raises(errors.NoLog):
            await lines(job)
        assert "forged or damaged" in caplog.text


@pytest.mark.looptime
async def test_following_ends_with_the_job_whatever_its_platform_says() -> None:
    async with aio.Client(platform=memory_platform(lingers)) as client, asyncio.timeout(120):
        job = await client.submit(same, 1)
        assert await lines(job, follow=True) == ["first", "last"]
        assert await lines(job, follow=True, attempt=1) == ["first", "last"]
        await job.cancel()
        await job.cleanup()
