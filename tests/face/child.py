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
    """Listen on a port that, once free again, the system never assigns to a client."""
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
        program = ["-c", textwrap.dedent(code)]
        if folder is not None:
            (folder / "pyproject.toml").touch()
            (folder / "script.py").write_text(textwrap.dedent(code))
            program = ["script.py"]
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-W", "error", *options, *program],
            cwd=folder or ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._stdout = b""
        self._stderr = b""

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
            ended = self.end()
            assert ended == (0, "", ""), ended

    def line(self, expected: str = "a line") -> str:
        """Return the next line that the child prints."""
        deadline = time.monotonic() + self._deadline
        while b"\n" not in self._stdout:
            self._stdout += self._read_more(self._process.stdout, expected, deadline)
        got, _, self._stdout = self._stdout.partition(b"\n")
        return got.decode()

    def wait_for_stderr(self, text: str) -> None:
        """Wait until *text* is on the child's standard error."""
        deadline = time.monotonic() + self._deadline
        while text.encode() not in self._stderr:
            self._stderr += self._read_more(self._process.stderr, text, deadline)

    def _read_more(self, stream: IO[bytes] | None, expected: str, deadline: float) -> bytes:
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        more = os.read(stream.fileno(), 4096) if ready else b""
        if not more:
            self._fail(expected, "no more" if ready else "nothing within the deadline")
        return more

    def _fail(self, line: str, instead: str) -> NoReturn:
        self._process.kill()
        stderr = (self._stderr + self._process.communicate()[1]).decode()
        pytest.fail(f"expected {line!r}, got {instead}; its standard error:\n{stderr}")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def write_line(self, line: str) -> None:
        """Write a line to the child's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Wait for the child; return its exit status, unread output, and standard error."""
        out, err = self._process.communicate(timeout=self._deadline)
        return (
            self._process.returncode,
            (self._stdout + out).decode(),
            (self._stderr + err).decode(),
        )
