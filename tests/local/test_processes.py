"""No process of a job outlives it, however the process hides."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import Phase
from tests.jobs import DEADLINE_S, eventually, gone, lines, until

from .conftest import alive, hear_job, parents, run_job, spec

# A child in its session, one in its own group, a daemon that forked twice, one that ran exec,
# one that ran exec with an empty environment, and a daemon with a daemon: each records its PID.
FAMILY = """
import os, subprocess, sys, time

def tell(pid):
    with open(order["pids"], "a") as file:
        file.write(f"{pid}\\n")

def daemon(run):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    tell(os.getpid())
    run()

def sleep():
    time.sleep(60)
    os._exit(0)

tell(subprocess.Popen(["sleep", "60"]).pid)
tell(subprocess.Popen(["sleep", "60"], process_group=0).pid)
daemon(sleep)
daemon(lambda: os.execvp("sleep", ["sleep", "60"]))
daemon(lambda: os.execvpe("/bin/sleep", ["sleep", "60"], {}))
daemon(lambda: (daemon(sleep), sleep()))
while len(open(order["pids"]).readlines()) < 7:
    time.sleep(0.01)
tell(os.getpid())
print("up", flush=True)
"""


def family(path: Path) -> list[psutil.Process]:
    """Return the processes once all have recorded their PIDs and run exec; until then, nothing."""
    if not path.exists() or len(numbers := path.read_text().split()) < 8:
        return []
    found = [psutil.Process(int(number)) for number in numbers]
    executed = [process for process in found if process.name() == "sleep"]
    return found if len(executed) == 4 else []


def survivors(processes: list[psutil.Process]) -> list[str]:
    return [str(process) for process in processes if alive(process.pid)]


async def start(cluster: LocalCluster, name: str, path: Path, then: str) -> list[psutil.Process]:
    job = spec(name, FAMILY + then, facts={"pids": str(path)})
    await cluster.launch(job)
    return await eventually(lambda: family(path))


@pytest.mark.parametrize("then", ["time.sleep(60)", "import signal; signal.pause()"])
async def test_cancelling_ends_the_whole_tree(
    cluster: LocalCluster, tmp_path: Path, then: str
) -> None:
    processes = await start(cluster, "tree", tmp_path / "pids", then)
    await cluster.delete(names=["tree"])
    await gone(cluster, "tree")
    assert survivors(processes) == []


async def test_an_ordinary_end_leaves_nothing_either(cluster: LocalCluster, tmp_path: Path) -> None:
    await cluster.launch(spec("gate", "import signal; signal.pause()"))
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    processes = await start(cluster, "tree", tmp_path / "pids", f"open({str(gate)!r}).read()")
    await until(cluster, "tree", Phase.RUNNING)
    hidden = [process for process in processes if process.environ() == {}]
    gate.write_text("")
    seen = await until(cluster, "tree")
    # The hidden one could belong to the other job, so it ends with that job.
    assert (
        seen.exit_code,
        survivors([process for process in processes if process not in hidden]),
    ) == (0, [])
    await cluster.delete(names=["gate"])
    await eventually(lambda: not survivors(processes))


async def test_one_job_s_end_does_not_touch_another(cluster: LocalCluster, tmp_path: Path) -> None:
    processes = await start(cluster, "tree", tmp_path / "pids", "time.sleep(60)")
    for i in range(5):
        await run_job(cluster, spec(f"short{i}", "import subprocess; subprocess.Popen(['true'])"))
    assert len(survivors(processes)) == 8
    await cluster.delete(names=["tree"])
    await eventually(lambda: not survivors(processes))


async def test_the_grace_is_the_job_s(cluster: LocalCluster, tmp_path: Path) -> None:
    source = (
        "import signal, sys, time\n"
        "def stop(*a):\n"
        "    time.sleep(order['needs']); open(order['done'], 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('up', flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    for name, grace, needs in (("patient", DEADLINE_S, 0.1), ("hasty", 0.0, 10.0)):
        done = tmp_path / name
        job = spec(name, source, facts={"done": str(done), "needs": needs}, grace=grace)
        await hear_job(cluster, job)
        await cluster.delete(names=[name])
        await gone(cluster, name)
    assert (tmp_path / "patient").exists()
    assert not (tmp_path / "hasty").exists()


@pytest.mark.parametrize("ready", [True, False])
async def test_a_parent_that_is_killed_takes_its_jobs_with_it(
    cluster: LocalCluster, home: Path, tmp_path: Path, ready: bool
) -> None:
    processes: list[psutil.Process] = []
    if ready:
        processes = await start(cluster, "tree", tmp_path / "pids", "time.sleep(60)")
    else:
        await cluster.launch(spec("tree", "import time; time.sleep(60)"))
    (parent,) = await eventually(lambda: parents(home))
    os.kill(parent, 9)
    seen = await until(cluster, "tree", Phase.ENDED)
    assert seen.reason is not None and "died" in seen.message and str(parent) in seen.message
    assert survivors(processes) == []
    assert (await run_job(cluster, spec("next"))).exit_code == 0  # a new parent serves it


SHARES = """
from multiprocessing import shared_memory
for _ in range(20):
    print(shared_memory.SharedMemory(create=True, size=1).name)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for shared memory in /dev/shm")
async def test_no_shared_memory_outlives_its_job(cluster: LocalCluster) -> None:
    await run_job(cluster, spec("sharing", SHARES))
    names = [line for line in await lines(cluster, "sharing") if line.startswith("psm_")]
    assert len(names) == 20
    assert [name for name in names if Path("/dev/shm", name).exists()] == []
