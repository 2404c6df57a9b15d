"""Run a user's script in another process; it prints its progress line by line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "KINETIC_PROGRESS": "off", "KINETIC_PACKAGE_ROOT": ""}
PRELUDE = """
import asyncio, itertools, os, pathlib, signal, sys, threading, time
import kinetic
from kinetic import JobStatus, aio

here = os.getcwd()

def remote(function):
    return kinetic.run(**{options!r})(function)

def until(condition):
    while not condition():
        time.sleep(0.02)
"""


class Script:
    """A running script whose warnings are errors; ``pid`` is its process ID."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._errors = ""
        self.pid = process.pid

    @classmethod
    async def started(cls, code: str, folder: Path, options: Mapping[str, Any]) -> Self:
        """Start *code*; ``remote`` in it decorates with *options*."""
        (folder / "pyproject.toml").touch()
        prelude = PRELUDE.replace("{options!r}", repr(dict(options)))
        (folder / "script.py").write_text(prelude + textwrap.dedent(code))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-W", "error", "script.py"),
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def line(self) -> str:
        """Return the next line that the script prints."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise AssertionError(f"the script ended; its standard error:\n{(await self.end())[2]}")
        return line.rstrip("\n")

    async def expect(self, *lines: str) -> None:
        """Check that the script prints *lines* next."""
        for line in lines:
            actual = await self.line()
            if actual != line:
                await self.kill()
                raise AssertionError(f"{actual!r} != {line!r}:\n{(await self.end())[2]}")

    async def wait_for_error(self, text: str) -> None:
        """Wait until a line of standard error contains *text*."""
        assert self._process.stderr is not None
        line = ""
        while text not in line:
            line = (await self._process.stderr.readline()).decode()
            self._errors += line
            assert line, f"{text!r} isn't in its standard error:\n{self._errors}"

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    async def end(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit status, the rest of the output, and standard error."""
        out, err = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, out.decode(), self._errors + err.decode()

    async def kill(self) -> None:
        """Kill the script if it still runs, and wait until it has ended."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
