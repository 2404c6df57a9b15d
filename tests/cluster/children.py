"""Programs that run beside the tests and never after them."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# PR_SET_PDEATHSIG: the kernel ends it even when the tests are killed.
TIE = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('too late'); os.execv(sys.argv[2], sys.argv[2:])"
)
STARTER = ThreadPoolExecutor(1, thread_name_prefix="starts programs")
"""Who starts them: to the kernel the parent is a thread, and one of a test ends with its loop."""

POLL_S = 0.03
QUIET_PORTS = range(11000, 32000)
"""Below those that the kernel gives to clients: a server that is restarted finds its port free."""

_given: set[int] = set()
"""What was asked for earlier: who it was for may not listen yet, or not just now."""


class DidNotStart(Exception):
    """A program ended, or was not ready in time; with the end of its log."""


def start(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start *command* in the folder of its *log*, which it may outlive no more than we do."""
    tied = [sys.executable, "-I", "-S", "-c", TIE, str(os.getpid())]
    with log.open("ab") as file:
        starting = STARTER.submit(
            subprocess.Popen[bytes],
            [*(tied if sys.platform == "linux" else ()), *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=log.parent,
            env=dict(env),
        )
        return starting.result()


def await_ready(
    ready: Callable[[], object], process: subprocess.Popen[bytes], log: Path, deadline: float
) -> None:
    """Ask *ready* until it neither fails nor says no.

    Raises:
        DidNotStart: The process has ended, or *deadline* seconds are over.
    """
    until = time.monotonic() + deadline
    while True:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            if ready():
                return
        over = time.monotonic() > until
        if over or process.poll() is not None:
            how = f"is not ready after {deadline:g} s" if over else f"ended: {process.returncode}"
            raise DidNotStart(f"{log.stem} {how}\n{tail(log)}")
        time.sleep(POLL_S)


def tail(log: Path, size: int = 4000) -> str:
    """The end of a log, as text."""
    return log.read_bytes()[-size:].decode(errors="replace")


def free_port(host: str = "127.0.0.1") -> int:
    """A port of *host* that nobody listens on, that no client is given, and nobody else was."""
    while True:
        port = random.SystemRandom().choice(QUIET_PORTS)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            if port not in _given:
                _given.add(port)
                return port
