"""The recorded tables of benchmarks/README.md are what ``python -m benchmarks.record`` writes.

The figures on docs/performance.md are those of the same run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import record
from tests import programs

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"
KERAS_KINETIC = "keras-kinetic==0.0.4"
FIGURES = [
    ("| submitit LocalExecutor | N |", "throughput", 0, "submitit LocalExecutor", "median/s"),
    ("| Lithops localhost | N |", "throughput", 0, "Lithops localhost", "median/s"),
    ("| a new Python interpreter per job | N |", "throughput", 0, "fresh interpreter", "median/s"),
    ("| **kinetic** | N | yes |", "throughput", 0, "kinetic", "median/s"),
    ("| Dask LocalCluster | N |", "throughput", 0, "Dask LocalCluster", "median/s"),
    ("| Parsl HTEX | N |", "throughput", 0, "Parsl HTEX", "median/s"),
    ("| Ray | N |", "throughput", 0, "Ray", "median/s"),
    ("| ProcessPoolExecutor | N |", "throughput", 0, "ProcessPoolExecutor", "median/s"),
    ("job costs about N ms of processor time", "throughput", 1, "kinetic", "all"),
    ("two jobs at a time, kinetic runs N jobs per second", "throughput", 2, "kinetic", "median/s"),
    ("the call until you have the value | N ms |", "latency", 0, "kinetic", "median ms"),
    ("| `python -c pass`, for comparison | N ms |", "latency", 0, "python -c pass", "median ms"),
    ("with four at a time | N ms |", "kubernetes", 3, "kinetic", "p50 ms"),
    ("which asks every five seconds | N ms |", "kubernetes", 3, KERAS_KINETIC, "p50 ms"),
    ("with the same content | N |", "kubernetes", 1, "bare aiohttp loop", "median/s"),
    ("with the same content | 147 | N ms |", "kubernetes", 1, "bare aiohttp loop", "cpu ms/job"),
    ("| **kinetic** | N | 8.4 ms |", "kubernetes", 1, "kinetic", "median/s"),
    ("| **kinetic** | 74 | N ms |", "kubernetes", 1, "kinetic", "cpu ms/job"),
    ("| keras-kinetic 0.0.4, a batch | N | 22.0 ms |", "kubernetes", 1, KERAS_KINETIC, "median/s"),
    ("| keras-kinetic 0.0.4, a batch | 29 | N ms |", "kubernetes", 1, KERAS_KINETIC, "cpu ms/job"),
    ("in memory (1 slot; 2 slots) | N; 0.42 |", "workers", 0, "memory, 1 slots", "x bare"),
    (
        "ProcessPoolExecutor, in memory; on a disk (1 slot) | N; 0.27 |",
        "workers",
        0,
        "memory, 1 slots",
        "x pool",
    ),
    ("the time of a new ProcessPoolExecutor | N |", "workers", 1, "kinetic", "x pool"),
    ("depends on the result | N ms |", "workers", 2, "a lazy input", "p50"),
    ("your program N µs of processor time", "fanout", 0, "engine, wait()", "100,000"),
    ("and N µs with `results()`", "fanout", 0, "engine, results()", "100,000"),
    ("A waiting item takes N bytes", "fanout", 1, "waiting", "10,000"),
    ("| `import kinetic` | N ms |", "imports", 0, "import kinetic", "median ms"),
    ("the decorator, on first use | N ms |", "imports", 0, "kinetic.run", "median ms"),
    ("| `kinetic --help` | N ms |", "cli", 0, "kinetic --help", "median ms"),
    ("with 1,000 jobs | N ms |", "cli", 0, "jobs list, many", "median ms"),
    ("packs it in N s", "pack", 0, "kinetic, cold", "median s"),
    ("An unchanged project takes N s", "pack", 0, "kinetic, unchanged", "median s"),
]
"""Text on the page with its figure as N; the question, the number of its table, row, and column."""


def recorded() -> dict[str, list[dict[str, dict[str, str]]]]:
    """Return the cells of the last run of each question: per table, by row and column."""
    tables: dict[str, list[dict[str, dict[str, str]]]] = {}
    name, head = "", [""]
    for entry in map(json.loads, record.RUN.read_text().splitlines()):
        match entry:
            case {"question": {"name": name}}:
                tables[name] = []
            case {"head": head}:
                tables[name].append({})
            case {"row": [row, *cells]}:
                tables[name][-1][row] = dict(zip(head[1:], cells, strict=False))
    return tables


def test_the_page_for_users_has_the_figures_of_the_recorded_run() -> None:
    page, tables = " ".join(PERFORMANCE.read_text().split()), recorded()
    for text, question, number, row, column in FIGURES:
        before, _, after = text.partition("N")
        found = re.findall(re.escape(before) + r"([\d.,]+)" + re.escape(after), page)
        assert found, text
        for figure in found:
            decimals = len(figure.partition(".")[2])
            value = float(tables[question][number][row][column])
            assert figure == f"{value:,.{decimals}f}", text


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
