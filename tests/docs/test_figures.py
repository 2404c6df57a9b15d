"""The figures of README and the site are what their programs draw, from what was recorded."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from docs import draw_figures
from tests import programs
from tests.docs import looks
from tests.report.browser import CHROMIUM, MISSING, Browser

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


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_letters_of_a_figure_are_inside_it() -> None:
    boxes = "[...document.querySelectorAll('text')].map((one) => one.getBBox())"
    outside = f"{boxes}.filter((box) => box.x < -1 || box.x + box.width > {draw_figures.WIDTH})"
    with Browser() as browser:
        for figure in sorted(STATIC.glob("*-light.svg")):
            looks.show(browser, figure, width=draw_figures.WIDTH)
            assert browser.ask(f"{boxes}.length") > 10
            assert browser.ask(f"{outside}.length") == 0, figure.name


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_pictures_are_taken(tmp_path: Path) -> None:
    programs.python("-m", "docs.take_pictures", tmp_path)
    for name in ("report-light.png", "report-dark.png", "card.png"):
        widths = [
            struct.unpack(">8x4s4sI", (folder / name).read_bytes()[:20])
            for folder in (tmp_path, STATIC)
        ]
        assert widths[0] == widths[1] and widths[0][1] == b"IHDR"
