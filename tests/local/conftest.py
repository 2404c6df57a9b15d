"""A local cluster whose jobs execute the ``source`` of their order instead of an attempt."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kinetic._supervisor.protocol import SupervisorPaths
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import JobSpec, Observation, Phase
from tests.jobs import DEADLINE_S, job_spec, until
from tests.orders import order_of, runner_with

STAND_IN = """
import json

from .processes import tell_supervisor


def main(order, key, executor, place):
    order = json.loads(order.client["facts"])
    tell_supervisor("called")
    space = {"order": order, "key": key, "executor": executor, "place": place, "code": 0}
    exec(compile(order["source"], "<job>", "exec"), space)
    return space["code"]
"""


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    """Make the folder of the test the project, in every test."""
    return small_project


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runner_with(STAND_IN, tmp_path_factory.mktemp("stand-in"))


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    """Return the environment of clients and the supervisor; it sets two slots."""
    return {**os.environ, "KINETIC_HOME": str(home), "KINETIC_LOCAL_SLOTS": "2"}


@pytest.fixture
async def cluster(home: Path, environ: dict[str, str], runner: Path) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(home, environ, runner=runner)
    yield cluster
    await cluster.aclose()


def spec(name: str, source: str = "", **changes: Any) -> JobSpec:
    """Make a job that executes *source*; its ``order`` has the extra *facts*."""
    facts = {"source": source, **changes.pop("facts", {})}
    return job_spec(name, facts, **{"order": order_of(facts, job_id=name), **changes})


async def run_job(cluster: LocalCluster, job: JobSpec, *phases: Phase) -> Observation:
    """Launch a job and wait until it is in one of *phases*: by default, until it has ended."""
    await cluster.launch(job)
    return await until(cluster, job.name, *phases, labels=dict(job.labels))


async def hear_job(cluster: LocalCluster, job: JobSpec) -> None:
    """Launch a job and wait for the first line of its log."""
    await cluster.launch(job)
    async for _ in cluster.logs(job.name, follow=True):
        break


def supervisors(home: Path) -> list[int]:
    """Find the supervisors of *home*, including those that still start."""
    found: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "kinetic._supervisor" in (command := process.cmdline()) and str(home) in command:
                found.append(process.pid)
    return found


def supervisor_pid(home: Path) -> int:
    """Return the first supervisor, or 0 if there is none."""
    return next(iter(supervisors(home)), 0)


def signal_supervisor(home: Path, number: int) -> int:
    """Signal the supervisor, which must exist, and return its process ID."""
    pid = supervisor_pid(home)
    assert pid > 0, "no supervisor; signaling 0 would hit the group of this test process"
    os.kill(pid, number)
    return pid


def parents(home: Path) -> list[int]:
    """Find the supervisor's warm parents."""
    with contextlib.suppress(psutil.Error):
        pid = supervisor_pid(home)
        return [child.pid for child in psutil.Process(pid).children()] if pid else []
    return []


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie doesn't."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def marked(home: Path) -> list[int]:
    """Find every process that carries the mark of *home*'s state folder."""
    from kinetic._supervisor.parents import processes_of

    return processes_of(str(SupervisorPaths(home).state))


def end_supervisor(home: Path) -> None:
    pid = signal_supervisor(home, signal.SIGTERM)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=40)
    assert not psutil.pid_exists(pid)


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that may use 64 MiB."""
    path = GROUPS / f"kinetic-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError as exc:
        pytest.skip(f"no memory control group can be made here: {exc}")
    yield path
    deadline = time.monotonic() + DEADLINE_S
    while path.exists():
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # the process has ended
                (GROUPS / "cgroup.procs").write_text(pid)
        try:
            path.rmdir()
        except OSError:  # a process has just forked another, or is still ending
            assert time.monotonic() < deadline
            time.sleep(0.05)
