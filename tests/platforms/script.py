"""Another process of the user's: a script that tells how far it is, line by line."""

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
OWN = {"PYTHONPATH": str(ROOT), "KINETIC_PROGRESS": "off", "KINETIC_PACKAGE_ROOT": ""}
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
    """Runs with warnings as errors; ``pid`` is its process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._complaints = ""
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
            env=os.environ | OWN,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process)

    async def line(self) -> str:
        """The next line it prints."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise AssertionError(f"it said no more, but:\n{(await self.end())[2]}")
        return line.rstrip("\n")

    async def expect(self, *lines: str) -> None:
        """The next lines it prints are these."""
        for line in lines:
            got = await self.line()
            if got != line:
                await self.kill()
                raise AssertionError(f"wanted {line!r}, got {got!r}:\n{(await self.end())[2]}")

    async def complaint(self, words: str) -> None:
        """Return once its standard error has a line with *words*."""
        assert self._process.stderr is not None
        line = ""
        while words not in line:
            line = (await self._process.stderr.readline()).decode()
            self._complaints += line
            assert line, f"it did not say {words!r}, but:\n{self._complaints}"

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    async def end(self) -> tuple[int, str, str]:
        """Wait for it: its exit status, what else it printed, and its standard error."""
        out, err = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, out.decode(), self._complaints + err.decode()

    async def kill(self) -> None:
        """Kill it, if it is still there, and wait until it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
