"""The site: it builds offline without a warning, and a browser shows it without a server."""

from __future__ import annotations

import importlib
import importlib.util
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
from tests.docs.prose import PAGES
from tests.docs.searches import SEARCHES
from tests.report.browser import CHROMIUM, MISSING, Browser

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("site"), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
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


def show(browser: Browser, page: Path, query: str = "", *, width: int, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.call("Page.navigate", url="about:blank")
    browser.until("location.href === 'about:blank'")
    browser.complaints.clear()
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Emulation.setEmulatedMedia", media="", features=[scheme])
    browser.call("Page.navigate", url=page.as_uri() + query)
    browser.until(f"document.readyState === 'complete' && location.href.includes('{page.name}')")


def complaints(browser: Browser) -> list[str]:
    return [text for text in browser.complaints if not text.startswith("it asked for data:")]


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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_the_width_of_a_desktop_and_of_a_phone(
    site: Path, browser: Browser, width: int, dark: bool
) -> None:
    backgrounds = set()
    skipped = {site / "404.html", *(site / "_downloads").rglob("*")}  # the host's page, examples
    pages = {*site.rglob("*.html")} - skipped
    for page in sorted(pages) if not dark else [site / "index.html", site / "api/kinetic.html"]:
        show(browser, page, width=width, dark=dark)
        page_width = browser.ask("document.documentElement.scrollWidth")
        assert page_width <= width, page.name
        assert complaints(browser) == [], page.name
        backgrounds.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
    (background,) = backgrounds
    assert (max(map(int, re.findall(r"\d+", background)[:3])) < 128) is dark


def test_the_search_finds_pages_without_a_server(site: Path, browser: Browser) -> None:
    show(browser, site / "search.html", "?q=run_async_map", width=1280)
    links = "[...document.querySelectorAll('#search-results li a')].map((one) => one.href)"
    browser.until(f"{links}.some((one) => one.includes('api/kinetic.html'))")


def test_a_word_of_the_field_finds_the_page_about_it(site: Path, browser: Browser) -> None:
    links = "[...document.querySelectorAll('#search-results li > a')].map((one) => one.href)"
    found = {}
    for query in SEARCHES:
        address = f"{(site / 'search.html').as_uri()}?q={quote(query)}"
        browser.call("Page.navigate", url=address)
        ended = "typeof Search !== 'undefined' && Search.title?.innerText === 'Search Results'"
        browser.until(f"location.href === '{address}' && {ended}")
        addresses = [address.partition("#")[0] for address in browser.ask(links)[:3]]
        found[query] = [address.removeprefix(f"{site.as_uri()}/") for address in addresses]
    pages = {query: {f"{page}.html" for page in pages} for query, pages in SEARCHES.items()}
    assert {
        query: results for query, results in found.items() if not pages[query] & {*results}
    } == {}
