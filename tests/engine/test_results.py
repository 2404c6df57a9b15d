"""What `result` gives, to one or to many, and what it shows meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import frames, pickles, wire
from kinetic.aio._engine.results import failure_of, value_of
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.testing import memory_platform
from tests.engine.world import Passing


def listed(value: object) -> list[object]:
    return [value]


@pytest.fixture
async def platform() -> Platform:
    return memory_platform()


@pytest.mark.parametrize("found", ["submitted", "attached", "listed"])
async def test_all_who_ask_at_once_for_one_result_get_it(
    platform: Platform, client: aio.Client, found: str
) -> None:
    job = await client.submit(listed, 1)
    async with aio.Client(platform=platform) as other:
        if found == "attached":
            job = await other.attach(job.job_id)
        elif found == "listed":
            [job] = await other.list_jobs()
        values = await asyncio.gather(*(job.result() for _ in range(3)))
        assert values == [[1]] * 3
        assert all(value is values[0] for value in values), "it was read once"
        assert await job.result() is values[0]
    assert await client.list_jobs() == []


async def test_jobs_of_another_store_are_left_out_of_a_list_with_a_warning(
    platform: Platform, client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of this machine are, when a program names another store than the one before."""
    elsewhere = replace(platform, store=memory_platform().store)
    async with aio.Client(platform=elsewhere) as other:
        theirs = await other.submit(listed, 1)
        ours = await client.submit(listed, 2)
        assert await other.list_jobs() == [theirs]
        assert [job.job_id for job in await client.list_jobs()] == [ours.job_id]
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert ours.job_id in told[0] and theirs.job_id in told[1] and len(told) == 2


async def test_all_who_ask_at_once_for_what_an_item_returned_get_it(client: aio.Client) -> None:
    batch = await client.run_async_map(listed, [1])
    job = await batch.job(0)
    assert await asyncio.gather(*(job.result() for _ in range(3))) == [[1]] * 3
    assert await batch.results() == [[1]]


async def test_bytecode_of_another_python_is_not_run(platform: Platform) -> None:
    plain, code = pickles.dumps([1]), pickles.dumps(lambda: 1)
    assert frames.unpack(plain).fields == {}, "which every Python can read"
    here = frames.unpack(code).fields["python"]
    assert sys.version.startswith(here)
    body = frames.pack(frames.unpack(code).frames, {"python": "3.5"})
    with pytest.raises(errors.JobFailed, match=r"of Python 3\.5; .* from Python 3\.5") as told:
        await value_of(platform.store, wire.Outcome(kind=wire.Kind.VALUE), body, "job-1")
    assert told.value.phase == "result deserialization"
    error = frames.pack([body], {"error": {"message": "what it said"}})
    outcome = wire.Outcome(kind=wire.Kind.ERROR)
    assert "what it said" in str(failure_of(outcome, error, "job-1"))


class Forbidden(Passing):
    async def logs(self, name: str, **options: Any) -> AsyncIterator[str]:
        raise errors.AuthError("you may not get pods/log")
        yield


class Endless(Passing):
    async def logs(self, name: str, **options: Any) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield


@pytest.mark.looptime(noop_cycles=300)
@pytest.mark.parametrize(
    ("kind", "words", "kept"),
    [
        (Forbidden, "can't show the output of {}: you may not get pods/log", []),
        (Endless, "lines of the output of {}", ["kinetic-{}"]),
    ],
)
async def test_output_that_cannot_be_shown_whole_is_told_and_costs_no_result(
    platform: Platform,
    caplog: pytest.LogCaptureFixture,
    kind: type[Passing],
    words: str,
    kept: list[str],
) -> None:
    opened = replace(platform, cluster=kind(platform.cluster))
    async with aio.Client(platform=opened) as client:
        job = await client.submit(listed, 1)
        assert await job.result(stream_logs=True) == [1]
        names = [one.format(job.job_id) for one in kept]
        assert [one.name for one in await platform.cluster.find()] == names
    assert words.format(job.job_id) in caplog.text


class Lasting(Endless):
    """Its processes outlive their outcome: somebody has to end them."""

    async def find(self, **which: Any) -> list[Observation]:
        return [replace(one, phase=Phase.RUNNING) for one in await self.port.find(**which)]


@pytest.mark.looptime(noop_cycles=300)
async def test_nothing_runs_on_whose_output_has_no_end(platform: Platform) -> None:
    opened = replace(platform, cluster=Lasting(platform.cluster))
    async with aio.Client(platform=opened) as client:
        job = await client.submit(listed, 1)
        assert await job.result(stream_logs=True) == [1]
        assert await platform.cluster.find() == []
