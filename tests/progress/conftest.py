"""A user's script on a terminal, or on pipes."""

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
    """A process of a user; with *held*, the items of its `work` wait until they are `let` go on."""

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
            self.let("some", "all")
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

    def let(self, *which: str) -> None:
        """Let "some" of its items go on, the first five, or "all" the others."""
        for one in which:
            (self._folder / one).touch()

    def end(self) -> int:
        """Wait for it, reading its terminal."""
        if self.terminal is not None:
            self.terminal.until(lambda: self.process.poll() is not None)
            self.terminal.rest()
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Runs a script of a user, on a terminal or on pipes."""
    made: list[Script] = []

    def start(
        body: str,
        terminal: Terminal | None = None,
        *,
        held: bool = False,
        **environ: str,
    ) -> Script:
        made.append(Script(tmp_path, textwrap.dedent(body), environ, terminal, held))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate() if one.terminal is None else one.process.wait()
