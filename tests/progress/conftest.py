"""Run a user's script on a terminal or on pipes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs import ROOT
from tests.terminals import DEADLINE_S, Terminal, terminal

__all__ = ["terminal"]

HEAD = """
import kinetic, os, sys, threading, time

here = os.getcwd()

@kinetic.run(backend="local", accelerator="cpu")
def work(n):
    import os, time
    time.sleep(0.15)
    while not os.path.exists(f"{here}/{'some' if n < 5 else 'all'}"):
        time.sleep(0.01)
    if n == 3:
        raise ValueError(f"{n} is no good\\x1b[31m\\nat all")
    return n
"""


class Script:
    """A process of a user; with *held*, the items of its `work` wait until `release` is called."""

    def __init__(
        self,
        folder: Path,
        body: str,
        environ: dict[str, str],
        terminal: Terminal | None,
        held: bool,
    ) -> None:
        (folder / "pyproject.toml").touch()
        path = folder / "script.py"
        path.write_text(HEAD + body)
        self.terminal = terminal
        self._folder = folder
        if not held:
            self.release("some", "all")
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environ}
        if terminal is not None:
            self.process = terminal.start("-W", "error", path, cwd=folder, env=environ)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", path],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

    def release(self, *groups: str) -> None:
        """Let "some" items continue, which are the first five, or "all" the others."""
        for group in groups:
            (self._folder / group).touch()

    def end(self) -> int:
        """Wait for its end while reading its terminal, and return its exit code."""
        if self.terminal is not None:
            self.terminal.until(lambda: self.process.poll() is not None)
            self.terminal.rest()
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Return a function that starts a script on a terminal or on pipes."""
    scripts: list[Script] = []

    def start(
        body: str,
        terminal: Terminal | None = None,
        *,
        held: bool = False,
        **environ: str,
    ) -> Script:
        scripts.append(Script(tmp_path, textwrap.dedent(body), environ, terminal, held))
        return scripts[-1]

    yield start
    for script in scripts:
        if script.process.poll() is None:
            script.process.kill()
        script.process.communicate() if script.terminal is None else script.process.wait()
