"""Test the children of a process: their list, SIGTERM, and the kernel's kills for memory."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

from kinetic._runner.job import processes
from kinetic._runner.job.kernel_kills import kills_in_container
from tests import programs

PARENT = """
import os, signal, sys
while True:
    short_lived = [os.fork() or os._exit(0) for _ in range(100)]
    long_lived = os.fork()
    if not long_lived:
        signal.pause()
    for pid in short_lived:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print(long_lived, flush=True)
    if not sys.stdin.readline():
        os.kill(long_lived, signal.SIGKILL)
        break
    for pid in short_lived:
        os.waitpid(pid, 0)
    print("reaped", flush=True)
    sys.stdin.readline()
    os.kill(long_lived, signal.SIGKILL)
    os.waitpid(long_lived, 0)
"""
ROUNDS = 50


@pytest.mark.skipif(not processes.LINUX, reason="only Linux lists a process's children")
def test_children_are_complete_while_others_are_reaped() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(ROUNDS):
            long_lived = int(parent.stdout.readline())
            parent.stdin.write("reap\n")
            while not select.select([parent.stdout], [], [], 0)[0]:
                assert long_lived in processes.children(parent.pid)
            assert parent.stdout.readline() == "reaped\n"
            assert processes.children(parent.pid) == [long_lived]
            parent.stdin.write("next\n")
        parent.stdin.close()
        assert parent.wait(30) == 0


EXIT = """
import logging, sys
from kinetic._runner import remote_runner
{}
sys.setprofile(lambda frame, event, called: event == "c_call" and print(called.__name__))
remote_runner.exit_process(0)
"""


@pytest.mark.parametrize(
    ("before", "bounded"),
    [
        pytest.param("", False, id="nothing to do"),
        pytest.param("logging.basicConfig()", True, id="a handler to flush"),
        pytest.param("import atexit; atexit.register(len, ())", True, id="a callback"),
    ],
)
def test_only_an_exit_with_callbacks_starts_a_thread_to_bound_it(
    before: str, bounded: bool
) -> None:
    assert ("start_new_thread" in programs.python("-c", EXIT.format(before))) is bounded


JOB = """
import os, signal, time
from kinetic._runner.job.processes import Stopped, Stopping

stopping = Stopping()
stopping.install()
try:
    with stopping:
        ready, report = os.pipe()
        worker = os.fork()
        if not worker:
            os.write(report, b"!")
            while True:
                time.sleep(0.05)
        os.read(ready, 1)
        os.kill(worker, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.05)
except Stopped:
    print("stopped")
"""


def test_sigterm_kills_a_forked_worker_without_a_message() -> None:
    """`multiprocessing.Pool.terminate` ends its workers with SIGTERM."""
    done = programs.run(sys.executable, "-c", JOB, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["-15", "stopped"], "")


FORKS_AND_KILLS = """
import os, signal, time
from kinetic._runner.job.processes import Stopping

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # so the worker runs only after the signal
Stopping().install()
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
for _ in range(20):
    worker = os.fork()
    if not worker:
        time.sleep(5)
        os._exit(0)
    os.kill(worker, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pins its processes to one processor")
def test_sigterm_kills_a_forked_worker_that_has_not_run_yet() -> None:
    """`multiprocessing.Pool` would wait forever for a worker that doesn't."""
    done = programs.run(sys.executable, "-c", FORKS_AND_KILLS)
    assert ({*done.stdout.split()}, done.stderr) == ({"-15"}, "")


VERSION_2 = "low 0\nhigh 0\nmax 31\noom 1\noom_kill 2\noom_group_kill 0\n"
VERSION_1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"


@pytest.mark.parametrize(
    ("found", "count"), [([VERSION_2, ""], 2), ([VERSION_1], 3), ([""], None), ([], None)]
)
def test_the_first_file_that_has_a_count_is_used(
    tmp_path: Path, found: list[str], count: int | None
) -> None:
    paths = [tmp_path / "absent"]
    for number, text in enumerate(found):
        paths.append(tmp_path / str(number))
        paths[-1].write_text(text)
    assert kills_in_container([str(path) for path in paths]) == count
