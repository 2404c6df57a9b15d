"""Test the list of a process's children, and the exit of the runner."""

from __future__ import annotations

import select
import subprocess
import sys

import pytest

from kinetic._runner.job import processes
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
