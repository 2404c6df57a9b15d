"""Show the built site in a headless Chromium, check how it looks, and take screenshots.

    tox run -e site
    python -m tests.docs.looks .tox/site/html FOLDER [PAGE ...]

A page is a path such as ``guides/batches.html``. It writes one picture for each page, width, and
theme, and prints what `audit.js` finds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.report.browser import Browser

__all__ = ["PAGES", "THEMES", "WIDTHS", "findings", "show"]

PAGES = [
    *("index.html", "getting_started.html", "examples.html"),
    *("examples/keras_training.html", "guides/batches.html"),
    *("api/kinetic.html", "cli.html", "performance.html"),
]
"""One page of each kind."""
WIDTHS = (1280, 400)
THEMES = ("light", "dark")
AUDIT = Path(__file__).with_name("audit.js").read_text(encoding="utf-8")


def show(
    browser: Browser, page: Path, query: str = "", *, width: int, theme: str = "light"
) -> None:
    """Open *page* as a reader does whose browser has this width and theme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.call("Page.navigate", url="about:blank")
    browser.until("location.href === 'about:blank'")
    browser.complaints.clear()
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.call("Emulation.setEmulatedMedia", media="", features=[scheme])
    browser.call("Page.navigate", url=page.as_uri() + query)
    browser.until(f"document.readyState === 'complete' && location.href.includes('{page.name}')")


def findings(browser: Browser) -> list[str]:
    """Return what is wrong with the page that the browser shows."""
    ignored = "it asked for data:"
    noted = [text for text in browser.complaints if not text.startswith(ignored)]
    return [*noted, *browser.ask(AUDIT)]


def main(site: Path, folder: Path, pages: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    with Browser() as browser:
        for page in pages:
            for width in WIDTHS:
                for theme in THEMES:
                    show(browser, site / page, width=width, theme=theme)
                    name = page.removesuffix(".html").replace("/", "-")
                    file = folder / f"{name}-{width}-{theme}.png"
                    file.write_bytes(browser.screenshot())
                    found = findings(browser)
                    failed += len(found)
                    print(file, *found, sep="\n    ")
    return 1 if failed else 0


if __name__ == "__main__":
    site, folder, *pages = sys.argv[1:]
    sys.exit(main(Path(site).resolve(), Path(folder), pages or PAGES))
