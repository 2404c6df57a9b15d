"""The site: it builds offline without a warning, and a browser shows it without a server."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import pytest

from tests import programs
from tests.docs import looks
from tests.docs.prose import PAGES
from tests.docs.searches import SEARCHES
from tests.report.browser import CHROMIUM, MISSING, Browser

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("site"), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
GENERATED = {"genindex.html", "py-modindex.html", "search.html"}
"""Pages that have no source, so they have no text for a description."""
NO_NETWORK = "http://127.0.0.1:9"


def run(*command: str | Path, **environment: str) -> None:
    programs.output(*command, env={**os.environ, **environment}, timeout=380)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str | Path:
    """Return an interpreter that has Sphinx: this one, or a new one with the group `site`."""
    if importlib.util.find_spec("sphinx"):
        return sys.executable
    home = tmp_path_factory.mktemp("sphinx") / "venv"
    uv = (sys.executable, "-m", "uv", "--quiet")
    run(*uv, "venv", "--python", sys.executable, home)
    python = home / "bin" / "python"
    install = (*uv, "pip", "install", "--python", python, "-c", "constraints.txt")
    run(*install, "--group", "site", "-e", ".")
    return python


@pytest.fixture(scope="module")
def site(python: str | Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    html = tmp_path_factory.mktemp("site")
    build = (python, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", html)
    run(*build, http_proxy=NO_NETWORK, https_proxy=NO_NETWORK)
    return html


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with Browser() as browser:
        yield browser


def test_every_public_name_has_an_entry(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes()
    entries = zlib.decompress(inventory.split(b"\n", 4)[4]).decode()
    described = set(re.findall(r"^(kinetic[\w.]*) py:", entries, re.MULTILINE))
    rows = re.findall(
        r"^\| `(kinetic[\w.]*)` \| (.*) \|$", (ROOT / "docs/api.md").read_text(), re.M
    )
    modules = {name: importlib.import_module(name) for name, _ in rows}
    missing = []
    for module, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            value = getattr(modules[module], name)
            paths = {
                f"{other}.{name}" for other in modules if vars(modules[other]).get(name) is value
            }
            paths.add(f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}")
            if not paths & described and not isinstance(value, ModuleType):
                missing.append(f"{module}.{name}")
    assert missing == []


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*")
    found = [match for page in site.rglob("*.html") for match in loads.findall(page.read_text())]
    assert found == []


def test_the_text_for_language_models_has_what_pages_include(site: Path) -> None:
    lines = (site / "llms-full.txt").read_text().splitlines()
    pages = [page for page in PAGES if page.name != "README.md" or page.parent != ROOT]
    titles = [page.read_text().partition("\n")[0] for page in pages]
    assert [title for title in titles if title.startswith("# ") and title not in lines] == []
    assert [line for line in lines if "{include}" in line] == []


def test_the_list_for_language_models_links_to_files_beside_it(site: Path) -> None:
    links = re.findall(r"^- \[.*\]\((.*)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(links) > 20
    assert [link for link in links if link.startswith("/") or not (site / link).is_file()] == []


@pytest.mark.parametrize("theme", looks.THEMES)
@pytest.mark.parametrize("width", looks.WIDTHS)
def test_pages_are_readable_on_a_desktop_and_on_a_phone(
    site: Path, browser: Browser, width: int, theme: str
) -> None:
    """Each page on a dark phone, where width and contrast matter most; each kind elsewhere, too."""
    skipped = {site / "404.html", *(site / "_downloads").rglob("*")}  # the host's page, examples
    all_pages = {page.relative_to(site).as_posix() for page in {*site.rglob("*.html")} - skipped}
    pages = all_pages if (width, theme) == (400, "dark") else {*looks.PAGES}
    found, backgrounds = {}, set()
    for page in sorted(pages):
        looks.show(browser, site / page, width=width, theme=theme)
        expected = ["no description"] if page in GENERATED else []
        found[page] = [text for text in looks.findings(browser) if text not in expected]
        backgrounds.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert {page: findings for page, findings in found.items() if findings} == {}
    (background,) = backgrounds
    assert (max(map(int, re.findall(r"\d+", background)[:3])) < 128) is (theme == "dark")


def test_figures_follow_the_theme_that_a_reader_chooses(site: Path, browser: Browser) -> None:
    looks.show(browser, site / "index.html", width=1280)
    images = "[...document.images].filter((one) => one.checkVisibility()).map((one) => one.src)"
    for theme, other in (("dark", "light"), ("light", "dark")):
        browser.ask(f"document.body.dataset.theme = '{theme}'")
        shown = browser.ask(images)
        assert [src for src in shown if f"-{other}." in src] == []
        assert len([src for src in shown if f"-{theme}." in src]) == 3


def test_a_page_has_an_icon_and_a_card(site: Path) -> None:
    head = (site / "index.html").read_text().partition("</head>")[0]
    for pattern in (
        r'<link rel="shortcut icon" href="([^"]*)"',
        r'property="og:image" content="([^"]*)"',
    ):
        (file,) = re.findall(pattern, head)
        assert (site / file).stat().st_size > 100


def test_what_makes_a_page_hard_to_read_is_found(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><h1>a</h1><h3 id=x>b</h3><p id=x style='color: #999'>pale</p>"
        "<img src='none.png'><a href='#'>here</a><a href='#'></a><button></button><input>"
        "<p style='width: 2000px'>wide</p><script>console.error('an error')</script>"
    )
    looks.show(browser, page, width=400)
    found = "\n".join(looks.findings(browser))
    for expected in (
        *("an error", "ERR_FILE_NOT_FOUND", "contrast: 2.85", "no alt text", "image missing"),
        *("link text says nothing", "link without text", "button without text"),
        *("field without label", "heading skips a level", "id twice: x", "no language"),
        *("no title", "no description", "wider than 400"),
    ):
        assert expected in found


def test_the_search_finds_pages_without_a_server(site: Path, browser: Browser) -> None:
    looks.show(browser, site / "search.html", "?q=run_async_map", width=1280)
    links = "[...document.querySelectorAll('#search-results li a')].map((one) => one.href)"
    browser.until(f"{links}.some((one) => one.includes('api/kinetic.html'))")


def test_a_word_of_the_field_finds_the_page_about_it(site: Path, browser: Browser) -> None:
    links = "[...document.querySelectorAll('#search-results li > a')].map((one) => one.href)"
    ended = "typeof Search !== 'undefined' && Search.title?.innerText === 'Search Results'"
    looks.show(browser, site / "search.html", "?q=batch", width=1280)
    browser.until(ended)
    found = {}
    for query in SEARCHES:
        browser.ask("document.getElementById('search-results').replaceChildren()")
        address = json.dumps(f"?q={quote(query)}")  # search_scorer.js reads it
        browser.ask(f"history.replaceState(null, '', {address})")
        browser.ask(f"Search.performSearch({json.dumps(query)})")
        browser.until(ended)
        addresses = [address.partition("#")[0] for address in browser.ask(links)[:3]]
        found[query] = [address.removeprefix(f"{site.as_uri()}/") for address in addresses]
    pages = {query: {f"{page}.html" for page in pages} for query, pages in SEARCHES.items()}
    assert {
        query: results for query, results in found.items() if not pages[query] & {*results}
    } == {}
