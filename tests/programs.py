"""Programs that a test runs to their end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).parents[1]


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = 110,
) -> CompletedProcess[str]:
    """Run a program and keep what it says; where kinetic is imported from, unless *cwd* says so."""
    words = [str(word) for word in command]
    return subprocess.run(
        words,
        cwd=cwd,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output(*command: str | Path, **how: object) -> str:
    """What a program prints, which must end well."""
    done = run(*command, **how)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*words: str | Path, **how: object) -> str:
    """The same of this interpreter: ``python("-c", code)``."""
    return output(sys.executable, *words, **how)
