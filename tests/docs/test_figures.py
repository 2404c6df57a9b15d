"""The figures of README and the site are what their programs draw, from what was recorded."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from docs import draw_figures
from tests import programs
from tests.report.browser import CHROMIUM, MISSING

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "docs" / "_static"


def test_the_figures_are_drawn_anew(tmp_path: Path) -> None:
    draw_figures.draw(tmp_path)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(drawn) == 4
    assert drawn == {name: (STATIC / name).read_text() for name in drawn}, (
        "run python docs/draw_figures.py"
    )


def test_the_tables_of_readme_have_the_rates_of_the_chart() -> None:
    readme = (ROOT / "README.md").read_text().replace("**", "")
    recorded = draw_figures.tables()
    (here,) = [rows for key, rows in recorded.items() if key.startswith("throughput: 1 slots")]
    for group in draw_figures.GROUPS.values():
        for contender in group:
            assert f"| {contender} | {draw_figures.rate(here[contender])} |" in readme
    submitted = recorded["kubernetes: submitting 200"]
    rates = [draw_figures.rate(submitted[name]) for name in ("kinetic", "keras-kinetic==0.0.4")]
    assert f"of 200 | {' | '.join(rates)} |" in readme


@pytest.mark.parametrize("name", ["how", "speed"])
def test_the_letters_of_a_figure_are_inside_it(name: str) -> None:
    """A letter of this font is at most 0.62 of its size wide, on the average of a line."""
    text = (STATIC / f"{name}-light.svg").read_text()
    for x, words in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="start">([^<]*)<', text):
        assert float(x) + 0.62 * 15 * len(words) <= draw_figures.WIDTH + 20, words


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_pictures_are_taken(tmp_path: Path) -> None:
    programs.python("-m", "docs.take_pictures", tmp_path)
    for file in (tmp_path / name for name in ("report-light.png", "report-dark.png", "card.png")):
        taken, kept = (read[:24] for read in (file.read_bytes(), (STATIC / file.name).read_bytes()))
        assert struct.unpack(">II", taken[16:]) == struct.unpack(">II", kept[16:])
