"""When another host than the first fails, the job's error names that host."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import JobFailed
from kinetic.testing import MemoryCluster
from tests.engine.world import platform_with, preempted

CAUSE = "host 2 of 4: out of memory: the container passed its memory limit of 2Gi"


@kinetic.run(accelerator="cpu:hosts=4")
def on_four(x: int) -> int:
    return x


class Hosts(MemoryCluster):
    """A cluster that says for ended jobs how another host ended."""

    silent = False
    """Whether only requests say it, not watches."""

    async def find(self, **selection: Any) -> list[Observation]:
        return [_with_cause(seen) for seen in await super().find(**selection)]

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        async for seen in super().watch(labels):
            yield seen if self.silent else _with_cause(seen)


def _with_cause(seen: Observation) -> Observation:
    return replace(seen, message=CAUSE, host=2) if seen.phase is Phase.ENDED else seen


@pytest.mark.parametrize("silent", [False, True])
async def test_the_failure_says_which_host_it_was(silent: bool) -> None:
    platform, cluster = platform_with(Hosts, preempted)
    cluster.silent = silent
    async with aio.Client(platform=platform) as client:
        job = await client.submit(on_four, 1)
        with pytest.raises(JobFailed, match="asked to stop") as caught:
            await job.result(timeout=60, cleanup=False)
        assert CAUSE in "".join(caught.value.__notes__)
        assert (await job.reason()).endswith(CAUSE)
    async with aio.Client(platform=platform) as later:
        assert (await (await later.attach(job.job_id)).reason()).endswith(CAUSE)
