"""The page in a browser: layout, search, sorting, keyboard use, accessibility, and printing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kinetic._report.compare import merge
from kinetic._report.digest import POINTS, compute_statistics
from kinetic._report.facts import BatchReport
from kinetic._report.page import render, render_facts
from tests.report.batches import HOSTILE, STARTED, hostile, search, sweep
from tests.report.browser import CHROMIUM, MISSING, Browser

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
    pytest.mark.full,
    pytest.mark.xdist_group("browser"),
]

SCREENSHOTS = os.environ.get("KINETIC_TEST_SCREENSHOTS")
"""A folder in which to keep screenshots for inspection, if any."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def shown(browser: Browser, tmp_path: Path):
    """Return a function that opens a report; after the test, check that the page had no errors."""

    def show(report: BatchReport, **options: Any) -> Browser:
        page = tmp_path / "report.html"
        page.write_text(render(report), encoding="utf-8")
        browser.complaints.clear()
        browser.open(page, **options)
        return browser

    yield show
    assert browser.complaints == []


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)"
    )
    return found


def click(browser: Browser, selector: str, text: str) -> None:
    """Click the first element whose text begins with *text*."""
    browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".find((node) => node.textContent.trim().startsWith({json.dumps(text)})).click()"
    )


ROWS = "#items tbody tr:not(.more)"


@pytest.mark.parametrize(("size", "dark"), [(10, False), (10_000, True)])
@pytest.mark.parametrize("make", [sweep, search, hostile])
def test_a_page_of_any_size_is_drawn(shown, make, size: int, dark: bool, tmp_path: Path) -> None:
    report = make(size)
    browser = shown(report, dark=dark)
    assert len(texts(browser, ROWS)) == min(size, 100)
    assert browser.ask("document.querySelectorAll('figure svg').length") >= 5
    paper = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), (
        "no element is wider than the page"
    )
    points = browser.ask(
        "[...document.querySelectorAll('#results .points')]"
        ".map((node) => node.getAttribute('d').split('M').length - 1).reduce((a, b) => a + b, 0)"
    )
    assert points == sum(bool(item.result) for item in report.items)
    picture = browser.screenshot()
    assert picture.startswith(b"\x89PNG")
    if SCREENSHOTS:
        name = f"{make.__name__}-{size}-{'dark' if dark else 'light'}.png"
        (Path(SCREENSHOTS) / name).write_bytes(picture)


@pytest.mark.parametrize(("limit", "drawn"), [(16, True), (33, False)])
def test_a_caption_names_a_limit_only_if_it_is_drawn(shown, limit: int, drawn: bool) -> None:
    browser = shown(replace(sweep(60), max_concurrent=limit))
    assert bool(texts(browser, ".limit")) is drawn
    captions = [text for text in texts(browser, "figcaption") if "running at once" in text]
    assert len(captions) == 1 and ("max_concurrent" in captions[0]) is drawn


@pytest.mark.parametrize("size", [60, 1_000])
def test_hostile_texts_are_shown_and_do_nothing(shown, size: int) -> None:
    browser = shown(hostile(size))
    assert browser.ask("document.title") == HOSTILE[1]
    assert texts(browser, "h1") == [HOSTILE[1]]
    assert browser.ask("document.querySelectorAll('img, a[href^=javascript], iframe').length") == 0
    assert browser.ask("document.querySelectorAll('script').length") == 2
    assert HOSTILE[10][:99] in "".join(texts(browser, "thead th"))
    assert f"{HOSTILE[0]} (input, the same for all)" in texts(browser, "dt")
    assert any(HOSTILE[5] in text for text in texts(browser, "#items td"))
    directions = browser.ask(
        "[...document.querySelectorAll('bdi')].every((node) => "
        "getComputedStyle(node).unicodeBidi === 'isolate')"
    )
    assert directions
    browser.ask("document.querySelectorAll('summary').forEach((node) => node.click())")
    assert HOSTILE[1] in texts(browser, "pre")


def waited(item) -> float:
    """Return the seconds from the attempt before, or from the start, to the last attempt."""
    before = item.attempts[-2].ended if len(item.attempts) > 1 else STARTED
    return item.last.begun - before


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
        ("waited>20", lambda item: waited(item) > 20),
        ("waited<3", lambda item: waited(item) < 3),
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
    assert f"{len(expected)} of 90 items match" in texts(browser, "#filter [role=status]")[0]


@pytest.mark.parametrize("name", ["batch size", "a<=b"])
def test_a_name_in_quotation_marks_may_have_any_character(shown, name: str) -> None:
    report = sweep(9)
    items = [replace(item, input={name: item.index, "rate": 0.5}) for item in report.items]
    browser = shown(replace(report, items=tuple(items)))
    assert f'"{name}"<0' in texts(browser, "#search-help")[0]
    browser.ask("document.getElementById('search').focus()")
    browser.type(f'"{name}">6')
    browser.until(f"document.querySelectorAll({ROWS!r}).length < 9")
    assert texts(browser, f"{ROWS} th") == ["7", "8"]


def test_axes_of_neighboring_huge_integers_end(shown) -> None:
    report, huge = sweep(9), 2**53 - 2
    items = [replace(item, input={"at": huge + item.index % 2}) for item in report.items]
    browser = shown(replace(report, items=tuple(items)))
    assert len(texts(browser, ROWS)) == 9


def test_states_can_be_hidden_and_shown_again(shown) -> None:
    report = sweep(90)
    failed = sum(item.state.name == "FAILED" for item in report.items)
    browser = shown(report)
    browser.ask("document.querySelector('fieldset input').click()")
    browser.until(f"document.querySelectorAll({ROWS!r}).length === {failed}")
    click(browser, "button", "Show all")
    browser.until(f"document.querySelectorAll({ROWS!r}).length === 90")
    assert browser.ask(
        "[...document.querySelectorAll('fieldset input')].every((node) => node.checked)"
    )


def test_headings_sort_and_missing_values_come_last(shown) -> None:
    report = sweep(90)
    browser = shown(report)
    click(browser, "#items thead button", "loss")
    sort = "[...document.querySelectorAll('#items [aria-sort]')].map((node) => node.ariaSort)"
    assert browser.ask(sort) == ["ascending"]
    losses = {str(item.index): item.result.get("loss") for item in report.items}
    shown_losses = [losses[index] for index in texts(browser, f"{ROWS} th")]
    present = [loss for loss in shown_losses if loss is not None]
    assert present == sorted(present)
    assert losses[texts(browser, f"{ROWS} th")[-1]] is None
    click(browser, "#items thead button", "loss")
    assert browser.ask(sort) == ["descending"]
    shown_losses = [losses[index] for index in texts(browser, f"{ROWS} th")]
    present = [loss for loss in shown_losses if loss is not None]
    assert present == sorted(present, reverse=True)


def test_every_control_works_with_keys_and_has_a_name(shown) -> None:
    browser = shown(sweep(90))
    nameless = browser.ask(
        "[...document.querySelectorAll('button, input, select, summary, [tabindex]')]"
        ".filter((node) => !(node.textContent.trim() || node.ariaLabel || node.labels?.length || "
        "node.getAttribute('aria-labelledby'))).map((node) => node.outerHTML.slice(0, 200))"
    )
    assert nameless == []
    missing = browser.ask(
        "[...document.querySelectorAll('[aria-labelledby], [aria-describedby]')].filter((node) => "
        "[...(node.getAttribute('aria-labelledby') || '').split(' '), "
        "...(node.getAttribute('aria-describedby') || '').split(' ')].some((id) => "
        "id && !document.getElementById(id))).length"
    )
    assert missing == 0
    ids = browser.ask("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len({*ids})
    assert browser.ask(
        "[...document.querySelectorAll('table')].every((node) => node.caption && "
        "node.tHead.querySelectorAll('th[scope=col]').length && "
        "[...node.tBodies[0].rows].every((row) => row.matches('.more') || "
        "row.querySelector('th[scope=row]')))"
    ), "each table has a caption, and headings for its columns and its rows"
    tags = browser.ask("[...document.querySelectorAll('h1, h2, h3')].map((node) => node.tagName)")
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
    labels = "[...document.querySelectorAll('#results .label')].map((node) => node.textContent)"
    assert browser.ask(labels)[:2] == ["loss (result), logarithmic", "rate, logarithmic"]
    browser.ask(
        "(() => { const list = document.querySelectorAll('#results select')[1]; "
        "list.value = [...list.options].find((node) => node.text === 'optimizer').value; "
        "list.dispatchEvent(new Event('change')); })()"
    )
    assert browser.ask(labels)[1] == "optimizer"
    assert (
        browser.ask(
            "[...document.querySelectorAll('#results svg text')].map((node) => node.textContent)"
        ).count("adam")
        >= 1
    )


def choose(browser: Browser, label: str, option: str) -> None:
    """Choose an *option* of the list with that *label*."""
    browser.ask(
        "(() => { const list = [...document.querySelectorAll('label')]"
        f".find((node) => node.firstChild.textContent === {json.dumps(label)})"
        ".querySelector('select'); list.selectedIndex = [...list.options]"
        f".findIndex((node) => node.text === {json.dumps(option)});"
        "list.dispatchEvent(new Event('change')); })()"
    )


def best(browser: Browser) -> list[int]:
    return [int(text) for text in texts(browser, "#best table:first-of-type tbody th button")]


def expected_best(report: BatchReport, metric: str, *, maximize: bool = False) -> list[int]:
    sign = -1 if maximize else 1
    candidates = [item for item in report.items if metric in item.result]
    ranked = sorted(candidates, key=lambda item: (sign * item.result[metric], item.index))
    return [item.index for item in ranked[:10]]


@pytest.mark.parametrize(("direction", "other"), [("minimize", "highest"), ("maximize", "lowest")])
def test_the_ten_best_items_come_first_by_a_metric_that_can_be_changed(
    shown, direction: Any, other: str
) -> None:
    report = replace(sweep(90), direction=direction, metric="epochs")
    browser = shown(report)
    assert browser.ask("document.querySelector('main section').id") == "best"
    assert best(browser) == expected_best(report, "epochs", maximize=direction == "maximize")
    choose(browser, "Metric", "loss (result)")
    assert best(browser) == expected_best(report, "loss", maximize=direction == "maximize")
    choose(browser, "Best is", other)
    assert best(browser) == expected_best(report, "loss", maximize=direction == "minimize")


def test_the_best_so_far_improves_with_time_to_the_best_of_all(shown) -> None:
    report = sweep(90)
    browser = shown(report)
    drawn = browser.ask("document.querySelector('#best .step').getAttribute('d')")
    heights = [float(height) for height in re.findall(r"(?<=V)[\d.]+", drawn)]
    assert heights == sorted(heights), "lower losses are drawn lower"
    (first,) = expected_best(report, "loss")[:1]
    caption = texts(browser, "#best figcaption")[0]
    assert f"(item {first})" in caption and f"{len(heights) + 1} improvements" in caption


def test_inputs_are_listed_by_how_much_of_the_ranking_they_explain(shown) -> None:
    browser = shown(sweep(300))
    rows = browser.ask(
        "[...[...document.querySelectorAll('#best table')].at(-1).tBodies[0].rows]"
        ".map((row) => [...row.cells].slice(0, 2).map((cell) => cell.textContent))"
    )
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
        "[...document.querySelectorAll('#timeline .bar:not(.s-waiting)')]"
        ".flatMap((node) => node.getAttribute('d').split('M').slice(1).map((bar) => "
        "[...bar.split(/[ H]/).map(Number), Number(node.getAttribute('stroke-width'))]))"
    )
    assert len(bars) == sum(len(item.attempts) for item in report.items)
    assert all(to - left >= 1.9 and width >= 3 for left, _, to, width in bars)
    lanes = {height for _, height, _, _ in bars}
    assert len(lanes) == (size if size <= 60 else 16), "as many lanes as ran at once"


def short(report: BatchReport) -> BatchReport:
    """Return the report with attempts that took a hundredth of their time."""
    items = tuple(
        replace(
            item,
            attempts=tuple(
                attempt._replace(ended=attempt.begun + (attempt.ended - attempt.begun) / 100)
                for attempt in item.attempts
                if attempt.begun is not None and attempt.ended is not None
            ),
        )
        for item in report.items
    )
    return replace(report, items=items)


def compared() -> BatchReport:
    return merge([search(30, name="first"), search(40, seed=2, name="second one"), sweep(20)])


@pytest.mark.parametrize("make", [sweep, search, hostile, lambda size: compared()])
def test_a_phone_shows_every_column(shown, make) -> None:
    width = 360
    browser = shown(make(60), width=width)
    browser.ask("document.querySelectorAll('summary').forEach((node) => node.click())")
    browser.ask("document.querySelector('#items tbody button').click()")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    cut = browser.ask(
        "[...document.querySelectorAll('main *, header *')].filter((node) => "
        "!node.closest('.hidden, thead, pre') && (node.getBoundingClientRect().right > innerWidth "
        "|| (node.matches('.wide') && node.scrollWidth > node.clientWidth)))"
        ".map((node) => node.outerHTML.slice(0, 200))"
    )
    assert cut == []
    heads = texts(browser, "#items thead th")
    (first, *_) = browser.ask(
        f"[...document.querySelectorAll({json.dumps(ROWS)})]"
        ".map((row) => [...row.cells].map((cell) => cell.dataset.label))"
    )
    assert len(first) == len(heads) and first[:2] in (["Item", "State"], ["Item", "Batch"])
    choose(browser, "Sort by", "Took, descending")
    assert browser.ask("document.querySelector('[aria-sort]').textContent") == "Took ▼"


def test_the_page_prints(shown) -> None:
    browser = shown(sweep(90), dark=True)
    assert browser.printed().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('.controls')).display") == "none"


def test_a_list_of_contents_comes_first_and_the_filter_above_what_it_filters(shown) -> None:
    browser = shown(search(60))
    links = "[...document.querySelectorAll('#contents a')].map((node) => node.hash.slice(1))"
    sections = "[...document.querySelectorAll('main section')].map((node) => node.id)"
    assert browser.ask(links) == browser.ask(sections)
    assert [*browser.ask(sections)][:3] == ["sweep", "best", "curves"]
    assert "Snapshot taken" in texts(browser, "dt")
    before = (
        "document.getElementById('search').compareDocumentPosition(document.getElementById('{}'))"
        " & Node.DOCUMENT_POSITION_FOLLOWING"
    )
    changes = ("best", "curves", "results", "timeline", "items")
    for name in changes:
        assert browser.ask(before.format(name))
    state = "['best', 'curves', 'results', 'timeline', 'items', 'time', 'durations', 'retries']"
    state += ".map((id) => document.getElementById(id).innerText.length)"
    old = browser.ask(state)
    browser.ask("document.getElementById('search').focus()")
    browser.type("layers=2 rate<0.0001")
    browser.until(f"document.querySelectorAll({ROWS!r}).length < 20")
    new = browser.ask(state)
    assert [before != after for before, after in zip(old, new, strict=True)] == [True] * 5 + [
        False
    ] * 3


def test_a_sweep_has_its_best_trial_its_rungs_and_the_share_of_pruned_trials(shown) -> None:
    report = search(120)
    browser = shown(report)
    text = browser.ask("document.getElementById('sweep').innerText")
    pruned = sum(item.state.name == "PRUNED" for item in report.items)
    (best,) = expected_best(report, "loss")[:1]
    assert f"{120 - pruned} of 120 ended trials are complete" in text
    assert f"{pruned} were pruned ({Decimal(100 * pruned) / 120:.3g} %)" in text
    assert f"trial {best}" in text
    cells = "[...row.cells].slice(0, 3).map((cell) => cell.textContent)"
    rows = f"[...document.querySelectorAll('#sweep tbody tr')].map((row) => {cells})"
    rungs = compute_statistics(report).rungs
    assert browser.ask(rows) == [
        [f"step {rung}", str(count), str(left)] for rung, count, left in rungs
    ]
    assert f"{pruned} pruned" in " ".join(texts(browser, "#legend li"))
    click(browser, "#sweep button", f"trial {best}")
    browser.until(f"document.querySelectorAll({ROWS!r}).length === 1")


CURVES = (
    "[...document.querySelectorAll('#curves .curve')]"
    ".map((node) => node.getAttribute('d').split('M').length - 1).reduce((a, b) => a + b, 0)"
)


def test_curves_are_drawn_of_the_items_that_match(shown) -> None:
    report = search(120)
    browser = shown(report)
    assert browser.ask(CURVES) == 120
    ends = "[...document.querySelectorAll('#curves .points')]"
    ends += ".flatMap((node) => node.getAttribute('d').split('M').slice(1)).length"
    assert browser.ask(ends) == sum(item.state.name == "PRUNED" for item in report.items)
    browser.ask("document.querySelector('#curves .chart').focus()")
    browser.press("ArrowRight")
    assert texts(browser, "#curves output")[0].startswith("item 0: ")
    assert browser.ask("document.querySelector('#curves .over').getAttribute('d').length") > 10
    choose(browser, "Curve of", "accuracy")
    labels = texts(browser, "#curves .label")
    assert labels[0].startswith("accuracy") and labels[1].startswith("step")
    browser.ask("document.getElementById('search').focus()")
    browser.type("layers=4")
    browser.until(f"{CURVES} < 120")
    assert browser.ask(CURVES) == sum(item.input["layers"] == 4 for item in report.items)


def test_a_page_without_reports_has_no_curves(shown) -> None:
    assert not shown(sweep(20)).ask("!!document.getElementById('curves')")


def test_the_number_of_an_item_opens_its_details_and_the_command_for_its_log(shown) -> None:
    browser = shown(sweep(90))
    click(browser, "#items tbody button", "17")
    (more,) = texts(browser, "#items .more:not([hidden])")
    assert "kinetic jobs logs grp-1-17" in more and "rate" in more
    assert browser.ask("document.querySelectorAll('#items .more a').length") == 0
    click(browser, ".more button", "Copy")
    assert browser.ask("getSelection().toString()") == "kinetic jobs logs grp-1-17"
    click(browser, "#items tbody button", "17")
    assert texts(browser, "#items .more:not([hidden])") == []


def test_a_comparison_tells_the_batches_apart(shown) -> None:
    report = compared()
    browser = shown(report)
    assert texts(browser, "h1") == ["Comparison of 3 batches"]
    names = [text.strip() for text in texts(browser, "#batches tbody th")]
    assert names == ["first", "second one", "sweep"]
    assert len(texts(browser, "#best .line")) == 3, "one line for each batch"
    browser.ask("document.getElementById('search').focus()")
    browser.type('batch="second one" #7')
    browser.until(f"document.querySelectorAll({ROWS!r}).length === 1")
    assert texts(browser, f"{ROWS} td")[0] == "second one"
    click(browser, "button", "Show all")
    (best,) = expected_best(report, "loss")[:1]
    browser.ask("document.querySelector('#best tbody button').click()")
    browser.until(f"document.querySelectorAll({ROWS!r}).length === 1")
    part = [part for part in report.parts if part.first <= best][-1]
    command = f"kinetic jobs logs {part.report.group_id}-{best - part.first}"
    assert command in texts(browser, "#items .more:not([hidden])")[0]


def test_the_concurrency_of_many_items_is_a_line_within_its_range(shown) -> None:
    browser = shown(short(sweep(3_000)))
    line = browser.ask("document.querySelector('#time .step').getAttribute('d')")
    across = [float(x) for x in re.findall(r"(?<=H)[\d.]+", line)]
    assert len(across) <= POINTS + 1 and across == sorted(across)
    assert browser.ask("document.querySelector('#time .under').getAttribute('d')").endswith("Z")
    assert any("the area is its range" in text for text in texts(browser, "figcaption"))


def test_new_facts_are_drawn_and_the_choices_of_the_reader_stay(shown) -> None:
    browser = shown(search(60))
    choose(browser, "Best is", "highest")
    click(browser, "#items thead button", "rate")
    click(browser, "#items tbody button", texts(browser, f"{ROWS} th")[0])
    browser.ask("document.getElementById('search').focus()")
    browser.type("layers=2")
    browser.until("document.querySelector('#filter [role=status]').textContent.includes('match')")
    browser.ask("document.getElementById('items').scrollIntoView({behavior: 'instant'})")
    rows, top = len(texts(browser, ROWS)), browser.ask("scrollY")
    detail = render_facts(search(90), ended=False)
    browser.ask(f"document.dispatchEvent(new CustomEvent('kinetic-facts', {{detail: {detail}}}))")
    assert rows < len(texts(browser, ROWS)) < 90, "the search still applies"
    assert texts(browser, "#subtitle")[0].startswith("90 items")
    assert browser.ask("[document.activeElement.id, document.activeElement.value]") == [
        "search",
        "layers=2",
    ]
    assert browser.ask("scrollY") == top
    assert browser.ask("document.querySelector('#items [aria-sort]').textContent") == "rate ▲"
    assert len(texts(browser, "#items .more:not([hidden])")) == 1
    chosen = "[...document.querySelectorAll('#best select')].map((node) => "
    assert browser.ask(f"{chosen} node.selectedOptions[0].text)")[1] == "highest"
    assert browser.ask("document.querySelectorAll('#items .more a[href^=\"log/\"]').length") == 1


@pytest.mark.parametrize("case", ["no items", "no notes", "nothing ended"])
def test_the_page_says_what_it_has_no_data_for(shown, case: str) -> None:
    report = sweep(5)
    if case == "no items":
        report = replace(report, items=(), total=None)
    elif case == "no notes":
        items = tuple(replace(item, input={}, result={}) for item in report.items)
        report = replace(report, items=items)
    else:
        items = tuple(type(item)(index=item.index) for item in report.items)
        report = replace(report, items=items)
    browser = shown(report)
    text = " ".join(texts(browser, "main"))
    assert {
        "no items": "Nothing has ended yet",
        "no notes": "have no numbers or short texts",
        "nothing ended": "No attempt has begun",
    }[case] in text
    assert "NaN" not in text and "undefined" not in text and "Infinity" not in text
