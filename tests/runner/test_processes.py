"""What is told of processes, while they come and go."""

from __future__ import annotations

import select
import subprocess
import sys

import pytest

from kinetic._runner.job import processes
from tests import programs

MOTHER = """
import os, signal, sys
while True:
    short = [os.fork() or os._exit(0) for _ in range(100)]
    lasting = os.fork()
    if not lasting:
        signal.pause()
    for pid in short:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print(lasting, flush=True)
    if not sys.stdin.readline():
        os.kill(lasting, signal.SIGKILL)
        break
    for pid in short:
        os.waitpid(pid, 0)
    print("reaped", flush=True)
    sys.stdin.readline()
    os.kill(lasting, signal.SIGKILL)
    os.waitpid(lasting, 0)
"""
ROUNDS = 50


@pytest.mark.skipif(not processes.LINUX, reason="only Linux lists a process's children")
def test_no_child_is_passed_over_while_others_are_reaped() -> None:
    command = [sys.executable, "-c", MOTHER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as mother:
        assert mother.stdin is not None
        assert mother.stdout is not None
        for _ in range(ROUNDS):
            lasting = int(mother.stdout.readline())
            mother.stdin.write("reap\n")
            while not select.select([mother.stdout], [], [], 0)[0]:
                assert lasting in processes.children(mother.pid)
            assert mother.stdout.readline() == "reaped\n"
            assert processes.children(mother.pid) == [lasting]
            mother.stdin.write("next\n")
        mother.stdin.close()
        assert mother.wait(30) == 0


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
