"""Every page is easy to read, belongs to a table of contents, and ends with where to go next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.prose import MAX_WORDS, PAGES, ROOT, read

INCLUDE = re.compile(r"```\{include\} (\S+)\n```\n")
INCLUDED_PART = re.compile(
    r"^```\{include\} (\S+)\n:start-after: (.+)\n:end-before: (.+)\n```$", re.MULTILINE
)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)

WRITTEN = [page for page in PAGES if not INCLUDE.fullmatch(page.read_text())]
"""The pages with text; each of the others only includes a file, which is in `PAGES`, too."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_at_most_one_sentence_of_twenty_is_long(page: Path) -> None:
    prose = read(page)
    assert len(prose.long) <= len(prose.sentences) / 20, f"over {MAX_WORDS} words: {prose.long}"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_no_sentence_begins_with_a_clause_as_its_subject(page: Path) -> None:
    assert read(page).oddly_begun == []


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_a_page_opens_with_a_title_and_ends_with_where_to_go_next(page: Path) -> None:
    assert page.read_text().startswith("# ")
    assert read(page).last_paragraph.startswith("Next: ")


def test_no_page_has_the_markers_of_a_merge_conflict() -> None:
    mark = re.compile(r"^(?:<{7} |={7}$|>{7} )", re.MULTILINE)
    assert [name(page) for page in PAGES if mark.search(page.read_text())] == []


def test_an_included_part_exists() -> None:
    parts = [(page, *part) for page in PAGES for part in INCLUDED_PART.findall(page.read_text())]
    assert parts
    for page, file, start, end in parts:
        assert end in (page.parent / file).read_text().partition(start)[2]


def test_every_page_is_in_a_table_of_contents_once() -> None:
    listed = [
        page.parent / f"{entry}.md"
        for page in PAGES
        for tree in TOCTREE.findall(page.read_text())
        for entry in tree.split("\n")
        if entry and not entry.startswith(":")
    ]
    docs = [page for page in PAGES if (ROOT / "docs") in page.parents and page.stem != "index"]
    assert sorted(listed) == sorted(docs)


def test_a_long_sentence_and_a_clause_as_a_subject_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n"
        f"It is {'very ' * MAX_WORDS}long. This one isn't.\n\n"
        "- Who reads slowly misses some. What does it cost?\n\n"
        "```python\n# Who\n```\n\n"
        "| Who | a | table |\n"
    )
    prose = read(page)
    assert [sentence.split()[-1] for sentence in prose.long] == ["long."]
    assert prose.oddly_begun == ["Who reads slowly misses some."]
    assert len(prose.sentences) == 4
