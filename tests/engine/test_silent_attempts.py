"""Clients ask about attempts that the platform never reports, and retry failed requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio
from kinetic._runner.protocol import signing, wire
from kinetic.aio.ports import ObjectInfo, Observation, Phase
from kinetic.errors import BackendError, JobLost
from kinetic.testing import MemoryCluster, carry_out, memory_platform
from tests.engine.severed import on_loop_time
from tests.engine.world import VIRTUAL, Passing, claim, dies, platform_with


class Silent(MemoryCluster):
    """A cluster that never reports first attempts."""

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        async for seen in super().watch(labels):
            if not seen.name.endswith("-1"):
                yield seen


def same(x: int) -> int:
    return x


async def dies_once(run: Any) -> int | None:
    """Item 0's first attempt dies."""
    return await (dies(run) if run.spec.name.endswith("-0-1") else carry_out(run))


@VIRTUAL
async def test_unreported_ends_are_noticed() -> None:
    platform, _ = platform_with(Silent, dies_once)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(4), max_concurrent=2, retries=1)
        assert await batch.results(timeout=400) == [0, 1, 2, 3]


class Doubled(MemoryCluster):
    """A cluster that reports a second process of item 0's first attempt instead of the first."""

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        async for seen in super().watch(labels):
            doubled = seen.name.endswith("-0-1") and seen.phase is Phase.ENDED
            yield replace(seen, executor="the other") if doubled else seen


@VIRTUAL
async def test_the_end_of_another_process_does_not_stop_the_polling() -> None:
    platform, _ = platform_with(Doubled, dies_once)
    async with aio.Client(platform=platform) as client:
        batch = await client.run_async_map(same, range(3), max_concurrent=2, retries=1)
        assert await batch.results(timeout=400) == [0, 1, 2]


class Unreachable(MemoryCluster):
    """A cluster whose logs begin but never end, as on a lost node."""

    async def logs(self, name: str, **options: Any) -> AsyncGenerator[str]:
        yield "what was read before"
        await asyncio.Event().wait()


@VIRTUAL
async def test_an_end_whose_log_cannot_be_read_is_reported_soon() -> None:
    platform, _ = platform_with(Unreachable, dies)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(same, 1)
        with pytest.raises(JobLost, match="what was read before"):
            await job.result(timeout=60)


class Broken(MemoryCluster):
    """A cluster whose first watch breaks after it reports a running job, which then vanishes."""

    breaks = True

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        async for seen in super().watch(labels):
            yield seen
            if self.breaks and seen.phase is Phase.RUNNING:
                self.breaks = False
                await asyncio.sleep(1)  # the job claims its attempt
                await self.delete(names=[seen.name])
                raise BackendError("the watch is not allowed for a moment")


@VIRTUAL
async def test_a_job_that_vanished_while_nobody_watched_is_found_out() -> None:
    platform, _ = platform_with(Broken, never_ends)
    async with aio.Client(platform=platform) as client:
        job = await client.submit(same, 1)
        async with asyncio.timeout(60):
            with pytest.raises(JobLost, match="gone from the platform"):
                await job.result()


async def never_ends(run: Any) -> int | None:
    """Claim the attempt and run until asked to stop."""
    await claim(run)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(10**6)
    return 9


async def keeps_its_log_and_dies(run: Any) -> int | None:
    scope, key = run.spec.order.scope, run.spec.key
    name = wire.log_key(scope, 0, 1, 0)
    output = b"the last words\n"
    mac = signing.sign(key, scope, name, output)
    await run.store.create(name, output, {"mac": mac})
    return await dies(run)


@VIRTUAL
async def test_an_error_ends_with_what_was_kept_where_the_platform_has_no_log() -> None:
    platform = on_loop_time(memory_platform(keeps_its_log_and_dies))
    async with aio.Client(platform=platform) as client:
        job = await client.submit(same, 1)
        with pytest.raises(JobLost, match="the last words"):
            await job.result(timeout=400)


class Illegible(MemoryCluster):
    """A cluster whose logs raise an error that the port doesn't allow."""

    async def logs(self, name: str, **options: Any) -> AsyncGenerator[str]:
        raise OSError(5, "Input/output error")
        yield


class Unkept(Passing):
    """A store where kept logs can't be listed."""

    async def list(self, prefix: str) -> list[ObjectInfo]:
        if "/logs/" in prefix:
            raise OSError(5, "Input/output error")
        found: list[ObjectInfo] = await self.port.list(prefix)
        return found


@VIRTUAL
async def test_a_log_is_never_needed_for_an_outcome() -> None:
    platform, _ = platform_with(Illegible, dies)
    store: Any = Unkept(platform.store)
    async with aio.Client(platform=replace(platform, store=store)) as client:
        batch = await client.run_async_map(same, range(3))
        await batch.wait(timeout=60)
        results = await batch.results(return_exceptions=True)
        assert {type(result) for result in results} == {JobLost}
        job = await client.submit(same, 3)
        with pytest.raises(JobLost):
            await job.result(timeout=60)
