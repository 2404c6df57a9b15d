"""Run a program in another process and read line by line what it prints; most are user scripts."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest

from tests.programs import ROOT

DEADLINE_S = 60.0

PRELUDE = """
import asyncio, itertools, os, pathlib, pickle, signal, sys, threading, time
import kinetic
from kinetic import Cancelled, Completion, Failed, JobStatus, Lost, Succeeded, aio

here = os.getcwd()

def remote(function):
    return kinetic.run(**{options!r})(function)

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def prelude(**options: Any) -> str:
    """Return the beginning of a script: ``remote`` decorates with *options*."""
    return PRELUDE.replace("{options!r}", repr(options))


def until(condition: Callable[[], Any]) -> Any:
    """Wait until *condition* is true, and return its value."""
    deadline = time.monotonic() + DEADLINE_S
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


class Program:
    """Run this interpreter with warnings as errors; leaving the context kills the process.

    After *deadline* seconds without a line, the test fails. ``lines`` has all lines read so far.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = subprocess.PIPE,
        deadline: float = DEADLINE_S,
    ) -> None:
        self.lines: list[str] = []
        self._deadline = deadline
        self._unread = b""
        self._errors: str | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 # a pipe may block the process
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-W", "error", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=self._stderr,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    @property
    def errors(self) -> str:
        """What it has printed on standard error."""
        if self._errors is not None:
            return self._errors
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode(errors="replace")

    def line(self, expected: str = "a line") -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        give_up_at = time.monotonic() + self._deadline
        while b"\n" not in self._unread:
            left = max(0.0, give_up_at - time.monotonic())
            ready, _, _ = select.select([self.process.stdout], [], [], left)
            more = os.read(self.process.stdout.fileno(), 4096) if ready else b""
            if not more:
                self._fail(expected, "no more" if ready else "nothing within the deadline")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        self.lines.append(line.decode())
        return self.lines[-1]

    def hear(self, start: str) -> str:
        """Return the next line that begins with *start*."""
        while not (line := self.line(start)).startswith(start):
            pass
        return line

    def expect(self, *lines: str) -> None:
        """Check that it prints these lines next."""
        for line in lines:
            if (got := self.line(line)) != line:
                self._fail(line, repr(got))

    def prints(self, *lines: str) -> None:
        """Check that it prints these lines, nothing else, and ends with status 0."""
        with self:
            self.expect(*lines)
            ended = self.end()
            assert ended == (0, "", ""), ended

    def wait_for_error(self, text: str) -> None:
        """Wait until *text* is on its standard error."""
        until(lambda: text in self.errors or self.process.poll() is not None)
        assert text in self.errors, f"{text!r} isn't in its standard error:\n{self.errors}"

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def write_line(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return its exit status, unread output, and standard error."""
        out, _ = self.process.communicate(timeout=self._deadline)
        return self.process.returncode, (self._unread + (out or b"")).decode(), self.errors

    def kill(self) -> None:
        """Kill it if it still runs, and keep the lines that it printed before."""
        if self._errors is None:
            self.process.kill()
            if self.process.stdin is not None and not self.process.stdin.closed:
                out, _ = self.process.communicate()
                self.lines += (self._unread + (out or b"")).decode().splitlines()
            self._errors = self.errors
            self._stderr.close()

    def _fail(self, line: str, instead: str) -> NoReturn:
        self.kill()
        pytest.fail(f"expected {line!r}, got {instead}; its standard error:\n{self.errors}")


class Script(Program):
    """Run *code*, text or a file, as the only script of a project in *folder*."""

    def __init__(
        self,
        code: str | Path,
        *arguments: object,
        folder: Path,
        options: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        (folder / "pyproject.toml").touch()
        name = code.name if isinstance(code, Path) else "script.py"
        text = code.read_text() if isinstance(code, Path) else textwrap.dedent(code)
        (folder / name).write_text(text)
        # A slow machine would show progress of short jobs.
        own = {"KINETIC_PROGRESS": "off", "KINETIC_PACKAGE_ROOT": "", **(env or {})}
        super().__init__(*options, name, *arguments, cwd=folder, env=own, **settings)
