"""The page as a browser shows it: what a person reads, types, hears and prints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kinetic._report.facts import BatchReport
from kinetic._report.page import render
from tests.report.batches import HOSTILE, hostile, sweep
from tests.report.browser import CHROMIUM, MISSING, Browser

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
    pytest.mark.full,
    pytest.mark.xdist_group("browser"),
]

KEPT = os.environ.get("KINETIC_TEST_SCREENSHOTS")
"""A folder for the pictures, for who wants to look at them."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def shown(browser: Browser, tmp_path: Path):
    """Opens a report; the page has complained of nothing at the end of the test."""

    def show(report: BatchReport, **how: Any) -> Browser:
        page = tmp_path / "report.html"
        page.write_text(render(report), encoding="utf-8")
        browser.complaints.clear()
        browser.open(page, **how)
        return browser

    yield show
    assert browser.complaints == []


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
    )
    return found


def click(browser: Browser, selector: str, words: str) -> None:
    """Click the first that begins with *words*."""
    browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".find((one) => one.textContent.trim().startsWith({json.dumps(words)})).click()"
    )


ROWS = "#items tbody tr"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [10, 10_000])
@pytest.mark.parametrize("make", [sweep, hostile])
def test_a_page_of_any_size_is_drawn(shown, make, size: int, dark: bool, tmp_path: Path) -> None:
    report = make(size)
    browser = shown(report, dark=dark)
    assert len(texts(browser, ROWS)) == min(size, 100)
    assert browser.ask("document.querySelectorAll('figure svg').length") >= 5
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), "nothing hangs out"
    points = browser.ask(
        "[...document.querySelectorAll('#results .points')]"
        ".map((one) => one.getAttribute('d').split('M').length - 1).reduce((a, b) => a + b, 0)"
    )
    assert points == sum(bool(item.result) for item in report.items)
    picture = browser.screenshot()
    assert picture.startswith(b"\x89PNG")
    if KEPT:
        name = f"{make.__name__}-{size}-{'dark' if dark else 'light'}.png"
        (Path(KEPT) / name).write_bytes(picture)


@pytest.mark.parametrize(("limit", "drawn"), [(16, True), (33, False)])
def test_a_limit_is_told_of_only_where_it_is_drawn(shown, limit: int, drawn: bool) -> None:
    browser = shown(replace(sweep(60), max_concurrent=limit))
    assert bool(texts(browser, ".limit")) is drawn
    told = [one for one in texts(browser, "figcaption") if "running at once" in one]
    assert len(told) == 1 and ("max_concurrent" in told[0]) is drawn


@pytest.mark.parametrize("size", [60, 1_000])
def test_what_is_said_is_text_and_does_nothing(shown, size: int) -> None:
    browser = shown(hostile(size))
    assert browser.ask("document.title") == HOSTILE[1]
    assert texts(browser, "h1") == [HOSTILE[1]]
    assert browser.ask("document.querySelectorAll('img, a[href^=javascript], iframe').length") == 0
    assert browser.ask("document.querySelectorAll('script').length") == 2
    assert HOSTILE[10][:99] in "".join(texts(browser, "thead th"))
    assert f"{HOSTILE[0]} (input, the same for all)" in texts(browser, "dt")
    assert any(HOSTILE[5] in one for one in texts(browser, "#items td"))
    directions = browser.ask(
        "[...document.querySelectorAll('bdi')].every((one) => "
        "getComputedStyle(one).unicodeBidi === 'isolate')"
    )
    assert directions
    browser.ask("document.querySelectorAll('summary').forEach((one) => one.click())")
    assert HOSTILE[1] in texts(browser, "pre")


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("#17", lambda item: item.index == 17),
        ("layers=4", lambda item: item.input["layers"] == 4),
        (
            "rate<0.001 layers>2",
            lambda item: item.input["rate"] < 1e-3 and item.input["layers"] > 2,
        ),
        ("OPTIMIZER=Adam", lambda item: item.input["optimizer"] == "adam"),
        ("attempts>1", lambda item: len(item.attempts) > 1),
        ("failure=1", lambda item: item.state.name == "FAILED"),
        ('"loss is nan" sgd', lambda item: bool(item.message) and item.input["optimizer"] == "sgd"),
        ("nothing like this", lambda item: False),
        ("took<", lambda item: False),
        ("constructor=1", lambda item: False),
    ],
)
def test_a_search_shows_the_items_that_match(shown, query: str, wanted) -> None:
    report = sweep(90)
    browser = shown(report)
    browser.ask("document.getElementById('search').focus()")
    browser.type(query)
    expected = [str(item.index) for item in report.items if wanted(item)]
    browser.until(f"document.querySelectorAll({ROWS!r}).length === {len(expected)}")
    assert texts(browser, f"{ROWS} th") == expected
    assert f"{len(expected)} of 90 items match" in texts(browser, "#items [role=status]")[0]


def test_states_are_left_out_and_shown_again(shown) -> None:
    report = sweep(90)
    bad = sum(item.state.name == "FAILED" for item in report.items)
    browser = shown(report)
    browser.ask("document.querySelector('fieldset input').click()")
    browser.until(f"document.querySelectorAll({ROWS!r}).length === {bad}")
    click(browser, "button", "Show all")
    browser.until(f"document.querySelectorAll({ROWS!r}).length === 90")
    assert browser.ask(
        "[...document.querySelectorAll('fieldset input')].every((one) => one.checked)"
    )


def test_headings_sort_and_what_is_not_there_comes_last(shown) -> None:
    report = sweep(90)
    browser = shown(report)
    click(browser, "#items thead button", "loss")
    sort = "[...document.querySelectorAll('#items [aria-sort]')].map((one) => one.ariaSort)"
    assert browser.ask(sort) == ["ascending"]
    losses = {str(item.index): item.result.get("loss") for item in report.items}
    there = [losses[one] for one in texts(browser, f"{ROWS} th") if losses[one] is not None]
    assert there == sorted(there)
    assert losses[texts(browser, f"{ROWS} th")[-1]] is None
    click(browser, "#items thead button", "loss")
    assert browser.ask(sort) == ["descending"]
    there = [losses[one] for one in texts(browser, f"{ROWS} th") if losses[one] is not None]
    assert there == sorted(there, reverse=True)


def test_everything_can_be_done_with_keys_and_has_a_name(shown) -> None:
    browser = shown(sweep(90))
    nameless = browser.ask(
        "[...document.querySelectorAll('button, input, select, summary, [tabindex]')]"
        ".filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length || "
        "one.getAttribute('aria-labelledby'))).map((one) => one.outerHTML.slice(0, 200))"
    )
    assert nameless == []
    missing = browser.ask(
        "[...document.querySelectorAll('[aria-labelledby], [aria-describedby]')].filter((one) => "
        "[...(one.getAttribute('aria-labelledby') || '').split(' '), "
        "...(one.getAttribute('aria-describedby') || '').split(' ')].some((id) => "
        "id && !document.getElementById(id))).length"
    )
    assert missing == 0
    ids = browser.ask("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len({*ids})
    assert browser.ask(
        "[...document.querySelectorAll('table')].every((one) => one.caption && "
        "one.tHead.querySelectorAll('th[scope=col]').length && "
        "[...one.tBodies[0].rows].every((row) => row.querySelector('th[scope=row]')))"
    ), "each table has a caption, and headings for its columns and its rows"
    tags = browser.ask("[...document.querySelectorAll('h1, h2, h3')].map((one) => one.tagName)")
    levels = [int(tag[1]) for tag in tags]
    assert levels[0] == 1 and 3 in levels
    assert all(after - before <= 1 for before, after in pairwise(levels))

    browser.ask("document.querySelector('.chart[tabindex]').focus()")
    browser.press("ArrowRight")
    first = texts(browser, "output")[0]
    assert first.startswith("item ") and "rate=" in first and "loss=" in first
    browser.press("ArrowRight")
    assert texts(browser, "output")[0] != first
    browser.press("ArrowLeft")
    assert texts(browser, "output")[0] == first
    browser.press("Enter")
    browser.until(f"document.querySelectorAll({ROWS!r}).length === 1")
    assert texts(browser, f"{ROWS} th") == [first.split(":")[0].removeprefix("item ")]
    assert browser.ask("document.activeElement.id") == "items"


def test_a_choice_draws_another_plot(shown) -> None:
    browser = shown(sweep(90))
    labels = "[...document.querySelectorAll('#results .label')].map((one) => one.textContent)"
    assert browser.ask(labels)[:2] == ["loss (result), logarithmic", "rate, logarithmic"]
    browser.ask(
        "(() => { const list = document.querySelectorAll('#results select')[1]; "
        "list.value = [...list.options].find((one) => one.text === 'optimizer').value; "
        "list.dispatchEvent(new Event('change')); })()"
    )
    assert browser.ask(labels)[1] == "optimizer"
    assert (
        browser.ask(
            "[...document.querySelectorAll('#results svg text')].map((one) => one.textContent)"
        ).count("adam")
        >= 1
    )


def choose(browser: Browser, label: str, words: str) -> None:
    """Choose the option *words* of the list with that *label*."""
    browser.ask(
        "(() => { const list = [...document.querySelectorAll('label')]"
        f".find((one) => one.firstChild.textContent === {json.dumps(label)})"
        ".querySelector('select'); list.selectedIndex = [...list.options]"
        f".findIndex((one) => one.text === {json.dumps(words)});"
        "list.dispatchEvent(new Event('change')); })()"
    )


def best(browser: Browser) -> list[int]:
    return [int(one) for one in texts(browser, "#best table:first-of-type tbody th button")]


def expected_best(report: BatchReport, metric: str, *, maximize: bool = False) -> list[int]:
    sign = -1 if maximize else 1
    there = [item for item in report.items if metric in item.result]
    ranked = sorted(there, key=lambda item: (sign * item.result[metric], item.index))
    return [item.index for item in ranked[:10]]


@pytest.mark.parametrize(("direction", "other"), [("minimize", "highest"), ("maximize", "lowest")])
def test_the_ten_best_items_come_first_by_a_metric_that_can_be_changed(
    shown, direction: Any, other: str
) -> None:
    report = replace(sweep(90), direction=direction, metric="epochs")
    browser = shown(report)
    assert browser.ask("document.querySelector('main > section').id") == "best"
    assert best(browser) == expected_best(report, "epochs", maximize=direction == "maximize")
    choose(browser, "Metric", "loss (result)")
    assert best(browser) == expected_best(report, "loss", maximize=direction == "maximize")
    choose(browser, "Best is", other)
    assert best(browser) == expected_best(report, "loss", maximize=direction == "minimize")


def test_the_best_so_far_improves_with_time_to_the_best_of_all(shown) -> None:
    report = sweep(90)
    browser = shown(report)
    drawn = browser.ask("document.querySelector('#best .step').getAttribute('d')")
    heights = [float(one) for one in re.findall(r"(?<=V)[\d.]+", drawn)]
    assert heights == sorted(heights), "lower losses are drawn lower"
    (first,) = expected_best(report, "loss")[:1]
    caption = texts(browser, "#best figcaption")[0]
    assert f"(item {first})" in caption and f"{len(heights) + 1} improvements" in caption


def test_inputs_are_listed_by_how_much_of_the_ranking_they_explain(shown) -> None:
    browser = shown(sweep(300))
    rows = [
        one.split()
        for one in browser.ask(
            "[...document.querySelectorAll('#best table')].at(-1).tBodies[0].innerText"
        ).splitlines()
    ]
    shares = {name: float(share) for name, share in rows}
    assert [*shares] == ["rate", "layers", "optimizer"], "loss is rate times layers"
    assert shares["rate"] > 0.8 and shares["optimizer"] < 0.05


def test_without_a_numeric_result_there_are_no_best_items(shown) -> None:
    report = sweep(20)
    items = tuple(replace(item, result={}) for item in report.items)
    assert not shown(replace(report, items=items)).ask("!!document.getElementById('best')")


@pytest.mark.parametrize("size", [60, 300, 3_000])
def test_every_attempt_is_a_bar_that_can_be_seen(shown, size: int) -> None:
    report = short(sweep(size))
    browser = shown(report)
    bars = browser.ask(
        "[...document.querySelectorAll('#time figure:first-of-type .bar:not(.s-waiting)')]"
        ".flatMap((one) => one.getAttribute('d').split('M').slice(1).map((bar) => "
        "[...bar.split(/[ H]/).map(Number), Number(one.getAttribute('stroke-width'))]))"
    )
    assert len(bars) == sum(len(item.attempts) for item in report.items)
    assert all(to - left >= 1.9 and width >= 3 for left, _, to, width in bars)
    lanes = {height for _, height, _, _ in bars}
    assert len(lanes) == (size if size <= 60 else 16), "as many lanes as ran at once"


def short(report: BatchReport) -> BatchReport:
    """The same where each attempt took a hundredth of its time."""
    items = tuple(
        replace(
            item,
            attempts=tuple(
                replace(one, ended=one.begun + (one.ended - one.begun) / 100)
                for one in item.attempts
                if one.begun is not None and one.ended is not None
            ),
        )
        for item in report.items
    )
    return replace(report, items=items)


def test_it_fits_a_telephone_and_paper(shown) -> None:
    browser = shown(sweep(90), width=360)
    assert browser.ask("document.documentElement.scrollWidth <= 360")
    outside = browser.ask(
        "[...document.querySelectorAll('button, select, input, label')].filter((one) => "
        "!one.closest('.wide') && one.getBoundingClientRect().right > innerWidth)"
        ".map((one) => one.textContent)"
    )
    assert outside == []
    browser = shown(sweep(90), dark=True)
    assert browser.printed().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('.controls')).display") == "none"


@pytest.mark.parametrize("left", ["no items", "no notes", "nothing ended"])
def test_with_little_to_show_it_says_so(shown, left: str) -> None:
    report = sweep(5)
    if left == "no items":
        report = replace(report, items=(), total=None)
    elif left == "no notes":
        items = tuple(replace(item, input={}, result={}) for item in report.items)
        report = replace(report, items=items)
    else:
        items = tuple(type(item)(index=item.index) for item in report.items)
        report = replace(report, items=items)
    browser = shown(report)
    words = " ".join(texts(browser, "main"))
    assert {
        "no items": "Nothing has ended yet",
        "no notes": "have no numbers or short texts",
        "nothing ended": "No attempt has begun",
    }[left] in words
    assert "NaN" not in words and "undefined" not in words and "Infinity" not in words
