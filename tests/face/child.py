"""A Python process under test, whose script reports its progress line by line."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait until *condition* is true, and return its value."""
    deadline = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def listener() -> socket.socket:
    """Listen on a port that the system gives to no client once it is free again."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)  # below the ephemeral range
        with contextlib.suppress(OSError):  # in use
            return socket.create_server(("127.0.0.1", port))


class Child:
    """Run *code* with warnings as errors; the context manager kills the process on leaving.

    With a *folder*, *code* is the only script of a project there. After *deadline* seconds
    without output, the test fails.
    """

    def __init__(
        self, code: str, *options: str, folder: Path | None = None, deadline: float = DEADLINE
    ) -> None:
        self._deadline = deadline
        what = ["-c", textwrap.dedent(code)]
        if folder is not None:
            (folder / "pyproject.toml").touch()
            (folder / "script.py").write_text(textwrap.dedent(code))
            what = ["script.py"]
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-W", "error", *options, *what],
            cwd=folder or ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._read = b""
        self._noise = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def expect(self, *lines: str) -> None:
        """Check that the child prints these lines next."""
        for line in lines:
            if (got := self.line(line)) != line:
                self._fail(line, repr(got))

    def prints(self, *lines: str) -> None:
        """Check that the child prints these lines, nothing else, and ends with status 0."""
        with self:
            self.expect(*lines)
            assert self.end() == (0, "", "")

    def line(self, wanted: str = "a line") -> str:
        """Return the next line that the child prints."""
        until = time.monotonic() + self._deadline
        while b"\n" not in self._read:
            self._read += self._more(self._process.stdout, wanted, until)
        got, _, self._read = self._read.partition(b"\n")
        return got.decode()

    def hears(self, words: str) -> None:
        """Wait until *words* are on the child's standard error."""
        until = time.monotonic() + self._deadline
        while words.encode() not in self._noise:
            self._noise += self._more(self._process.stderr, words, until)

    def _more(self, stream: IO[bytes] | None, wanted: str, until: float) -> bytes:
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
        more = os.read(stream.fileno(), 4096) if ready else b""
        if not more:
            self._fail(wanted, "no more" if ready else "nothing within the deadline")
        return more

    def _fail(self, line: str, instead: str) -> NoReturn:
        self._process.kill()
        noise = (self._noise + self._process.communicate()[1]).decode()
        pytest.fail(f"wanted {line!r}, got {instead}; its standard error:\n{noise}")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def say(self, line: str) -> None:
        """Write a line to the child's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Wait for the child; return its exit status, unread output, and standard error."""
        out, err = self._process.communicate(timeout=self._deadline)
        return self._process.returncode, (self._read + out).decode(), (self._noise + err).decode()
