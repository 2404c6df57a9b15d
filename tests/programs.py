"""Run programs to their end."""

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
    """Run a program and capture its output. By default *cwd* is the folder that has kinetic."""
    arguments = [str(argument) for argument in command]
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output(*command: str | Path, **options: object) -> str:
    """Run a program that must succeed, and return what it prints."""
    completed = run(*command, **options)  # type: ignore[arg-type]
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def python(*arguments: str | Path, **options: object) -> str:
    """Run this interpreter, such as ``python("-c", code)``, and return what it prints."""
    return output(sys.executable, *arguments, **options)


def mypy(*arguments: str | Path, timeout: float = 110) -> CompletedProcess[str]:
    """Check types strictly. All tests share the options, so each uses the cache of the one before.

    Missing libraries don't matter. Run the tests that call this in the group `MYPY`, because two
    processes can't share the cache.
    """
    options = (
        *("--strict", "--ignore-missing-imports", "--follow-imports=silent", "--config-file="),
        *("--allow-untyped-decorators", "--no-warn-return-any"),
        "--disable-error-code=empty-body",  # in documentation, `...` is a body
        *("--cache-dir", ROOT / ".mypy_cache" / "tests"),
    )
    return run(sys.executable, "-m", "mypy", *options, *arguments, timeout=timeout)


MYPY = "mypy"
