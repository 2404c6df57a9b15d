"""Whom SIGTERM interrupts: the job, and not what it forks."""

from __future__ import annotations

import subprocess
import sys

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
    done = subprocess.run(
        [sys.executable, "-c", JOB], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["-15", "stopped"], "")
