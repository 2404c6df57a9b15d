"""A Python process under test: a script that tells how far it is, line by line."""

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
    """What *condition* returns, once it is true."""
    deadline = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def listener() -> socket.socket:
    """Listens on a port that, once it is free again, nobody gets who takes any."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)  # below those that the system gives
        with contextlib.suppress(OSError):  # somebody has it
            return socket.create_server(("127.0.0.1", port))


class Child:
    """Runs *code* with warnings as errors; used as a context manager, it leaves no process.

    With a *folder* the code becomes a script there, of a project of its own. After *deadline*
    seconds without a word it is taken for hung.
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
        """The next line the child prints."""
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
        """Give the child a line on its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Wait for the child: its exit status, what else it printed, and its standard error."""
        out, err = self._process.communicate(timeout=self._deadline)
        return self._process.returncode, (self._read + out).decode(), (self._noise + err).decode()
