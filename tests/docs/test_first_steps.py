"""Whoever types the commands for a first job on a TPU ends with a value, here and there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
STEPS = re.compile(r"^```\w*\n(git clone [^`]*?tpu-v6e-8\n)```$", re.MULTILINE)


def steps(page: str) -> str:
    (found,) = STEPS.findall((ROOT / page).read_text())
    return found


def test_readme_and_the_index_have_the_same_commands() -> None:
    """test_console.py parses those of the index."""
    assert steps("README.md") == steps("docs/index.md")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_commands_end_with_a_value(tmp_path: Path, home: Path) -> None:
    """All but the cloud's part: the last command runs here, because this machine has no TPU."""
    script = steps("README.md")
    for command, here in (
        ("git clone URL-OF-THIS-REPOSITORY kinetic\n", f"ln -s {ROOT} kinetic\n"),
        ("python3 -m venv", f"{sys.executable} -m venv"),
        ("gcloud auth application-default login\n", ""),
        (re.findall(r"kinetic up .*\n", script)[0], ""),
        (" --accelerator tpu-v6e-8", ""),
    ):
        assert command in script
        script = script.replace(command, here)
    environ = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_QUIET": "1"}
    ran = programs.run("bash", "-euc", script, cwd=tmp_path, env=environ, timeout=280)
    assert (ran.returncode, ran.stdout) == (0, f"{0.9**5!r}\n" * 2), ran.stderr
