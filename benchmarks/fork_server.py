"""The least that isolates jobs: ``python fork_server.py SLOTS`` forks one process a job.

A line ``call<TAB>result`` on standard input asks for a job; the server writes the
same line when the job's process has ended. No claim, no check, no log, no limits, no
environment, no workspace, nothing that survives this process but the results.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import traceback
from collections import deque
from typing import NoReturn

import one_job


def main(slots: int) -> None:
    """Serve until standard input ends."""
    importlib.import_module("cloudpickle")  # jobs need it to load the function
    wake_reader, wake_writer = os.pipe()
    for descriptor in (wake_reader, wake_writer):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.disable()
    gc.freeze()
    waiting: deque[bytes] = deque()
    running: dict[int, bytes] = {}
    buffer = b""
    while True:
        ready, _, _ = select.select([0, wake_reader], [], [])
        if wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_reader, 4096)
            while running and (pid := os.waitpid(-1, os.WNOHANG)[0]):
                os.write(1, running.pop(pid) + b"\n")
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            waiting.extend(lines)
        while waiting and len(running) < slots:
            line = waiting.popleft()
            pid = os.fork()
            if pid == 0:
                run_job(line)
            running[pid] = line


def run_job(line: bytes) -> NoReturn:
    """Become the job of *line*, in a new session."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(2, 1)
        call, result = line.decode().split("\t")
        one_job.run(call, result)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
