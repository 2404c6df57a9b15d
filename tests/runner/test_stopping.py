"""Test that SIGTERM interrupts the job, and kills the processes that the job forked."""

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
