"""Test what a notebook shows of a sweep's trials."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from kinetic.sweeps import State, Trial
from kinetic.sweeps._overview import POINTS, ROWS, overview


def trials(*values: float) -> list[Trial]:
    return [Trial(n, {"rate": value}, State.COMPLETE, value) for n, value in enumerate(values)]


def first_cells(html: str) -> list[str]:
    return re.findall(r"<tr><td>(\d+)</td>", html)


def circles(html: str) -> list[dict[str, str]]:
    plot = html[html.index("<svg") : html.index("</svg>") + len("</svg>")]
    return [circle.attrib for circle in ElementTree.fromstring(plot).iter("circle")]


@pytest.mark.parametrize(("direction", "first"), [("minimize", "1"), ("maximize", "2")])
def test_the_best_trials_come_first(direction, first) -> None:
    assert first_cells(overview(trials(2.0, 1.0, 3.0), direction))[0] == first


def test_the_table_has_only_the_best_complete_trials() -> None:
    pruned = Trial(9, {"rate": 0}, State.PRUNED, -5.0, step=3)
    failed = Trial(8, {"rate": 0}, State.FAILED, None)
    html = overview([pruned, failed, *trials(*range(1, ROWS + 3))], "minimize")
    assert first_cells(html) == [str(number) for number in range(ROWS)]
    drawn = circles(html)
    assert len(drawn) == ROWS + 3 and drawn[0]["fill"] == "none", "the pruned one is hollow"


def test_there_is_nothing_to_show_without_a_complete_trial() -> None:
    assert overview([], "minimize") == ""
    assert overview([Trial(0, {}, State.PRUNED, 1.0)], "minimize") == ""


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [1e-9, 1e9], [-1.7e308, 1.7e308], [0, 5]])
def test_every_point_is_in_the_plot(values) -> None:
    html = overview(trials(*values), "minimize")
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', html)[0])
    for circle in circles(html):
        assert 0 < float(circle["cx"]) < width and 0 < float(circle["cy"]) < height


def test_lower_values_are_lower_in_the_plot_and_large_ratios_get_a_logarithmic_axis() -> None:
    html = overview(trials(0.001, 1.0, 1000.0), "maximize")
    low, middle, high = (float(circle["cy"]) for circle in circles(html))
    assert low > middle > high and math.isclose(low - middle, middle - high, abs_tol=0.2)
    assert "logarithmic" in html and "logarithmic" not in overview(trials(1.0, 2.0), "minimize")


def test_many_trials_make_no_more_points() -> None:
    html = overview(trials(*(float(n % 97) for n in range(10_000))), "minimize")
    assert len(circles(html)) == POINTS and "Values of 10000 trials" in html


def test_what_users_name_is_escaped() -> None:
    html = overview([Trial(0, {"<b>": "<script>"}, State.COMPLETE, 1.0)], "minimize")
    assert "<b>" not in html and "<script>" not in html and "&lt;script&gt;" in html
