"""Run every `python` block of README.md and docs/, and check the types of all blocks.

A `python` block runs as a separate script in an empty project. A `py` block needs something that a
test lacks, and its first line says what. On the pages of examples, it's an excerpt, which
test_examples.py finds in its example.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinetic import configuration
from tests import programs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_PAGES = ("README.md", "docs/index.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"# needs .+, so the tests of this page don't run it\n")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def blocks() -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            name = f"{page.relative_to(ROOT).as_posix()}:{line}"
            yield pytest.param(block[1], id=name, marks=pytest.mark.full)


@pytest.mark.parametrize("block", [*blocks()])
def test_the_block_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()  # marks the root of the reader's project
    script = tmp_path / "block.py"
    script.write_text(block)
    completed = programs.run(
        *(sys.executable, "-W", "error", script),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    printed = completed.stdout + completed.stderr
    assert completed.returncode == 0 and "Traceback" not in completed.stderr, printed


def excerpts() -> dict[Path, str]:
    """Return the `py` blocks of each page as one program, except for the pages of examples."""
    programs = {page: "\n".join(EXCERPT.findall(page.read_text())) for page in PAGES}
    examples = ROOT / "docs" / "examples"
    return {
        page: program
        for page, program in programs.items()
        if program and page.with_suffix("") != examples and examples not in page.parents
    }


def test_a_block_that_does_not_run_says_why() -> None:
    assert [page for page, program in excerpts().items() if not REASON.match(program)] == []


@pytest.mark.full
@pytest.mark.xdist_group(programs.MYPY)
def test_the_types_of_the_blocks_are_right(tmp_path: Path) -> None:
    checked = {f"{page.stem}_excerpts": program for page, program in excerpts().items()}
    for block in blocks():
        checked[re.sub(r"\W", "_", block.id)] = block.values[0]
    for name, program in checked.items():
        (tmp_path / f"{name}.py").write_text(program)
    report = programs.mypy(tmp_path).stdout
    assert f"no issues found in {len(checked)} source files" in report, report


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not broken


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [name for name in configuration.VARIABLES if f"`{name}`" not in page] == []


def test_the_first_program_is_the_first_example_and_short() -> None:
    example = (ROOT / "examples" / "sweep.py").read_text()
    program = example.partition('"""\n\n')[2]
    readme, index = ([*BLOCK.findall((ROOT / page).read_text())] for page in FIRST_PAGES)
    assert readme[0] == program and readme[:2] == index[:2]
    lengths = [sum(bool(line.strip()) for line in block.splitlines()) for block in readme]
    assert max(lengths) <= 15


def test_readme_has_the_commands_that_ci_runs() -> None:
    """.ci/run takes its commands from README's `sh` blocks by their order."""
    commands = re.findall(r"^```sh\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.M | re.S)
    called = [re.findall(r"examples/sweep\.py|pytest|tox run", command) for command in commands]
    assert called == [["examples/sweep.py"], ["pytest"], ["tox run"]]
