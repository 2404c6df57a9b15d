"""Every Python block of README.md and docs/ runs, as a script of its own in an empty project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinetic import configuration

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def blocks() -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            name = f"{page.relative_to(ROOT).as_posix()}:{line}"
            tier = () if page.name == "README.md" else pytest.mark.full
            yield pytest.param(block[1], id=name, marks=tier)


def run(script: Path, *, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", [*blocks()])
def test_the_block_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()  # where the reader's project would begin
    script = tmp_path / "block.py"
    script.write_text(block)
    run(script, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not broken


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [name for name in configuration.VARIABLES if f"`{name}`" not in page] == []


def test_ci_runs_what_readme_tells() -> None:
    """.ci/run takes its commands from README's `sh` blocks, so those must be the ones meant."""
    commands = re.findall(r"^```sh\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert [re.findall(r"examples/sweep\.py|pytest|tox run", one) for one in commands] == [
        ["examples/sweep.py"],
        ["pytest"],
        ["tox run"],
    ]
