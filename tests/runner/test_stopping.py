"""Whom SIGTERM interrupts: the job, and not what it forks."""

from __future__ import annotations

import sys

import pytest

from tests import programs

JOB = """
import os, signal, time
from kinetic._runner.job.processes import Stopped, Stopping

stopping = Stopping()
stopping.install()
try:
    with stopping.interruptible():
        ready, tell = os.pipe()
        worker = os.fork()
        if not worker:
            os.write(tell, b"!")
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


def test_a_worker_of_the_users_dies_of_the_signal_without_a_word() -> None:
    """As `multiprocessing.Pool.terminate` ends those it has forked."""
    done = programs.run(sys.executable, "-c", JOB, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["-15", "stopped"], "")


AT_ONCE = """
import os, signal, time
from kinetic._runner.job.processes import Stopping

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # the worker runs after it is killed
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
def test_a_worker_that_is_killed_before_it_runs_dies_as_well() -> None:
    """`multiprocessing.Pool` waits forever for one that does not."""
    done = programs.run(sys.executable, "-c", AT_ONCE)
    assert ({*done.stdout.split()}, done.stderr) == ({"-15"}, "")
