"""The file of a report: its size, its contents, and that texts in it can't run code."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from kinetic._progress.standing import Goal
from kinetic._progress.tally import State
from kinetic._report.facts import BatchReport, Curves
from kinetic._report.page import MAX_CURVE_POINTS, MAX_ITEMS, limit, render, render_live
from tests.report.batches import hostile, largest, search, sweep


class Parsed(HTMLParser):
    """The elements of a page, and the text of its scripts and its style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag in self.texts:
            self._inside = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data


def facts(page: str) -> dict[str, Any]:
    return json.loads(Parsed(page).texts["script"][0])


@pytest.mark.parametrize(
    ("size", "max_bytes"),
    [
        (0, 300_000),
        (1, 300_000),
        (1_000, 300_000),
        pytest.param(10_000, 2_000_000, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("make", [sweep, search, hostile])
def test_a_page_is_small(size: int, max_bytes: int, make: Callable[[int], BatchReport]) -> None:
    assert limit(size) <= max_bytes
    report = make(size)
    page = render(report)
    assert len(page.encode()) <= max_bytes
    assert len(facts(page)["items"]["state"]) == size
    assert facts(page)["left_out"] == []


def test_a_page_has_curves_of_limited_length() -> None:
    curve = [(step, 1 / step) for step in range(1, 5_000)]
    report = replace(sweep(3), curves=Curves(by_item={1: curve, 2: [(0, 2.5)]}, reported=2))
    shown = facts(render(report))["curves"]
    assert (shown["names"], shown["reported"]) == ([""], 2)
    (row, steps, (values,)), last = shown["shown"]
    assert row == 1 and len(steps) == len(values) == MAX_CURVE_POINTS
    assert (steps[0], steps[-1]) == (1, 4_999)
    assert values == pytest.approx([1 / step for step in steps], rel=1e-4)
    assert last == [2, [0], [[2.5]]]


def test_a_live_page_may_ask_its_own_server_only() -> None:
    page = Parsed(render_live(sweep(3)))
    (policy,) = [
        str(attributes["content"])
        for attributes in page.attributes
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert json.loads(page.texts["script"][0])["live"] is True
    assert page.texts["script"][1] == Parsed(render(sweep(3))).texts["script"][1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\beval\b", page.texts["script"][2])


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 30, 1_000, 10_000])
def test_the_largest_page_keeps_its_limit_and_names_what_it_lacks(size: int) -> None:
    page = render(largest(size))
    assert len(page.encode()) <= limit(size)
    shown = facts(page)
    assert len(shown["items"]["state"]) == size
    assert shown["failures"], "failures are always shown"
    columns = {column["name"] for column in shown["columns"]}
    assert columns | {*shown["left_out"]} | {name for _, name, _ in shown["constants"]} >= {
        *(f"{prefix}{number}" for prefix in ("n", "rn") for number in range(8)),
        *("t0", "t1"),
    }
    if size == 10_000:
        assert {"rn0", "n0"} <= columns, "numbers are kept rather than texts"
        assert shown["items"]["unlisted"] > 0


def test_a_page_with_too_many_items_lists_the_failed_ones() -> None:
    report = replace(sweep(MAX_ITEMS + 2_000), goal=Goal(direction="minimize", metric="loss"))
    shown = facts(render(report))
    assert len(shown["items"]["state"]) == MAX_ITEMS
    assert shown["known"] == sum(shown["counts"]) == MAX_ITEMS + 2_000
    listed = {*shown["items"]["index"]}
    assert len(listed) == MAX_ITEMS
    assert {item.index for item in report.items if item.state is State.FAILED} <= listed
    best, _ = shown["sweep"]["best"]
    assert {*shown["slowest"], best} <= listed


def test_no_text_becomes_markup() -> None:
    plain, odd = Parsed(render(sweep(60))), Parsed(render(hostile(60)))
    assert odd.tags == plain.tags
    assert [attributes for attributes in odd.attributes if "content" not in attributes] == [
        attributes for attributes in plain.attributes if "content" not in attributes
    ]
    assert odd.texts["style"] == plain.texts["style"]
    assert odd.texts["script"][1:] == plain.texts["script"][1:]
    assert odd.texts["title"] == ["</script><script>document.title='pwned'</script>"]


def test_texts_are_unchanged_in_the_page() -> None:
    shown = facts(render(hostile(60)))
    assert shown["function"] == "<img src=x onerror=\"document.title='pwned'\">"
    assert shown["tags"][1][0] == "two lines red", "no control character is kept"
    assert "שלום עולם" in {column["name"] for column in shown["columns"]}
    raw = Parsed(render(hostile(60))).texts["script"][0]
    assert raw.isascii()
    assert not re.search(r"[<>&]", raw)


def test_the_policy_lets_only_the_scripts_of_the_page_run() -> None:
    page = Parsed(render(sweep(3)))
    (policy,) = [
        str(attributes["content"])
        for attributes in page.attributes
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src {source(page.texts['style'][0])}",
        f"script-src {source(page.texts['script'][1])}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    used = {name for attributes in page.attributes for name in attributes}
    assert not {name for name in used if name.startswith("on") or name in ("src", "style")}
    links = [attributes["href"] for attributes in page.attributes if "href" in attributes]
    assert {str(link)[0] for link in links} == {"#"}


def test_the_script_turns_texts_into_text_only() -> None:
    """It calls nothing that interprets markup or code."""
    script = Parsed(render(sweep(1))).texts["script"][1]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|"
        r"DOMParser|srcdoc|createContextualFragment|\bfetch\b|XMLHttp|import\(",
        script,
    )


def test_columns_are_numbers_texts_or_the_same_for_all() -> None:
    inputs = [
        {"a": 1, "b": "x", "c": 0.1, "d": True, "big": 1 << 60, "same": 7},
        {"a": None, "b": 2, "c": "nan", "d": False, "big": 3, "same": 7},
        {"b": None, "c": 1e-300, "d": True, "same": 7},
    ]
    report = sweep(3)
    items = tuple(
        replace(item, input=given, result={})
        for item, given in zip(report.items, inputs, strict=True)
    )
    shown = facts(render(replace(report, items=items)))
    assert shown["constants"] == [["input", "same", 7]]
    columns = {column["name"]: column for column in shown["columns"]}
    assert columns["a"]["kind"] == columns["c"]["kind"] == "number"
    assert columns["a"]["values"] == [1, None, None]
    assert columns["c"]["values"] == [0.1, "nan", 1e-300]
    assert columns["b"]["texts"] == ["x", "2", "None"]
    assert columns["d"]["texts"] == ["True", "False"]
    assert columns["big"]["texts"] == [str(1 << 60), "3"]
    assert columns["big"]["values"] == [0, 1, None]
