"""A job counts as out of memory only if the kernel's counters say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinetic._runner.job.kernel_kills import KernelKills, kills_on_machine
from kinetic.aio.local.cluster import LocalCluster
from kinetic.job_status import Reason
from tests.jobs import eventually

from .conftest import run_job, spec, supervisor_pid


def test_a_kill_counts_for_jobs_that_were_there() -> None:
    readings = iter([3, 4, 4, 5])
    kills = KernelKills(lambda: next(readings))
    kills.refresh_if_stale(100.0)  # reads 4: earlier kills don't count
    kills.refresh_if_stale(101.0)  # too soon to read again
    assert not kills.has_increased()  # 4
    assert kills.has_increased()  # 5


def test_without_a_counter_nothing_is_claimed() -> None:
    assert not KernelKills(lambda: None).has_increased()


@pytest.mark.skipif(not Path("/proc/vmstat").exists(), reason="needs Linux")
def test_this_machine_has_a_counter() -> None:
    assert kills_on_machine() is not None


async def test_a_job_the_kernel_killed_ran_out_of_memory(
    cluster: LocalCluster, home: Path, group: Path
) -> None:
    await cluster.find()  # starts a supervisor; it counts from its first job on
    (group / "cgroup.procs").write_text(str(supervisor_pid(home)))
    seen = await run_job(cluster, spec("killed", "import os; os.kill(os.getpid(), 9)"))
    assert seen.reason is Reason.LOST
    seen = await run_job(cluster, spec("greedy", "bytearray(256 << 20)"))
    assert (seen.reason, seen.exit_code) == (Reason.OUT_OF_MEMORY, -9)
    message = "its process was killed by the kernel, because the machine ran out of memory"
    assert seen.message == message
    assert (await run_job(cluster, spec("next"))).exit_code == 0
    await eventually(lambda: supervisor_pid(home))
