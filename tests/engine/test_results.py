"""`result` returns a job's value to every caller and shows its output meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import frames, pickles, wire
from kinetic.aio._submissions.results import failure_of, value_of
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.testing import memory_platform
from tests.engine.world import Passing


def as_list(value: object) -> list[object]:
    return [value]


@pytest.fixture
async def platform() -> Platform:
    return memory_platform()


@pytest.mark.parametrize("obtained", ["submitted", "attached", "listed"])
async def test_concurrent_callers_of_result_all_get_the_value(
    platform: Platform, client: aio.Client, obtained: str
) -> None:
    job = await client.submit(as_list, 1)
    async with aio.Client(platform=platform) as other:
        if obtained == "attached":
            job = await other.attach(job.job_id)
        elif obtained == "listed":
            [job] = await other.list_jobs()
        values = await asyncio.gather(*(job.result() for _ in range(3)))
        assert values == [[1]] * 3
        assert all(value is values[0] for value in values), "the value is read once"
        assert await job.result() is values[0]
    assert await client.list_jobs() == []


async def test_concurrent_callers_of_an_item_s_result_all_get_the_value(client: aio.Client) -> None:
    batch = await client.run_async_map(as_list, [1])
    job = await batch.job(0)
    assert await asyncio.gather(*(job.result() for _ in range(3))) == [[1]] * 3
    assert await batch.results() == [[1]]


async def test_bytecode_of_another_python_is_not_run(platform: Platform) -> None:
    plain, code = pickles.dumps([1]), pickles.dumps(lambda: 1)
    assert frames.unpack(plain).fields == {}, "every Python can read it"
    version = frames.unpack(code).fields["python"]
    assert sys.version.startswith(version)
    body = frames.pack(frames.unpack(code).frames, {"python": "3.5"})
    with pytest.raises(errors.JobFailed, match=r"of Python 3\.5; .* with Python 3\.5") as caught:
        await value_of(platform.store, wire.Outcome(kind=wire.Kind.VALUE), body, "job-1")
    assert caught.value.phase == "result deserialization"
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
    ("kind", "message", "kept"),
    [
        (Forbidden, "can't show the output of {}: you may not get pods/log", []),
        (Endless, "lines of the output of {}", ["kinetic-{}"]),
    ],
)
async def test_incomplete_output_is_reported_and_costs_no_result(
    platform: Platform,
    caplog: pytest.LogCaptureFixture,
    kind: type[Passing],
    message: str,
    kept: list[str],
) -> None:
    opened = replace(platform, cluster=kind(platform.cluster))
    async with aio.Client(platform=opened) as client:
        job = await client.submit(as_list, 1)
        assert await job.result(stream_logs=True) == [1]
        names = [name.format(job.job_id) for name in kept]
        assert [seen.name for seen in await platform.cluster.find()] == names
    assert message.format(job.job_id) in caplog.text


class Lasting(Endless):
    """A cluster whose processes outlive their outcomes until they are deleted."""

    async def find(self, **selection: Any) -> list[Observation]:
        return [replace(seen, phase=Phase.RUNNING) for seen in await self.port.find(**selection)]


@pytest.mark.looptime(noop_cycles=300)
async def test_a_result_ends_a_process_whose_output_has_no_end(platform: Platform) -> None:
    opened = replace(platform, cluster=Lasting(platform.cluster))
    async with aio.Client(platform=opened) as client:
        job = await client.submit(as_list, 1)
        assert await job.result(stream_logs=True) == [1]
        assert await platform.cluster.find() == []
