"""The recorded tables of benchmarks/README.md are what ``python -m benchmarks.record`` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record
from tests import programs


def test_the_page_has_the_tables_of_the_recorded_run() -> None:
    page = record.PAGE.read_text()
    assert record.replace_tables(page, record.RUN.read_text().splitlines()) == page


def test_the_page_shows_the_last_run_of_a_question() -> None:
    run = {"name": "pack", "machine": "a machine", "version": "1"}
    lines = [
        {"question": run},
        {"row": ["before", "1"]},
        {"question": run | {"version": "2"}},
        {"caption": "one file"},
        {"head": ["", "median s", "MB"]},
        {"row": ["kinetic, cold", "0.5"]},
    ]
    assert record.render_tables(map(json.dumps, lines)) == (
        "### `pack`\n\nVersion 2, a machine.\n\none file:\n\n"
        "|  | median s | MB |\n|---|---|---|\n| **kinetic, cold** | 0.5 |  |\n\n"
    )


@pytest.mark.full
def test_a_run_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    programs.python("-m", "benchmarks", "imports", "--quick", "--record", file)
    text = record.render_tables(file.read_text().splitlines())
    assert text.startswith("### `imports`\n\nVersion ")
    assert "| import asyncio |" in text
