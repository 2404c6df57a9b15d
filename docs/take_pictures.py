"""Take the pictures of README and the site that need a browser, such as Chromium.

    python -m docs.take_pictures [FOLDER]    default: docs/_static

It runs examples/sweep.py, and writes report-light.png and report-dark.png: the results of the sweep
in its report. It also writes card.png, which services show beside a link to the site.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

import kinetic
from tests.report.browser import Browser

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "docs" / "_static"
REPORT_WIDTH = 480  # so narrow that a phone shows the letters of the plots
CARD = (1200, 630)  # the size that services recommend
CARD_PAGE = f"""<!doctype html><meta charset="utf-8">
<style>
body {{
  margin: 0; width: {CARD[0]}px; height: {CARD[1]}px; display: flex; align-items: center;
  background: #0f1b1f; color: #e6eaee; font-family: system-ui, "DejaVu Sans", sans-serif;
}}
img {{ width: 300px; margin: 0 70px 0 90px }}
h1 {{ margin: 0 0 24px; font-size: 104px }}
p {{ margin: 0; font-size: 40px; line-height: 1.4; color: #a3afba }}
</style>
<img src="{(STATIC / "logo.svg").as_uri()}">
<div><h1>kinetic</h1><p>Run any Python function<br>on cloud TPUs and GPUs:<br>
once, or ten thousand times.</p></div>
"""


def picture(browser: Browser, file: Path, element: str, width: int, scale: float) -> None:
    top, height = browser.ask(
        f"(({{y, height}}) => [y + scrollY, height])({element}.getBoundingClientRect())"
    )
    clip = {"x": 0, "y": top, "width": width, "height": round(height), "scale": scale}
    shot = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    file.write_bytes(base64.b64decode(shot["data"]))


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as pages, Browser() as browser:
        subprocess.run([sys.executable, "examples/sweep.py"], cwd=ROOT, check=True)
        (batch,) = kinetic.list_batches(limit=1)
        page = batch.report(Path(pages, "report.html"))
        for theme in ("light", "dark"):
            browser.open(Path(page), width=REPORT_WIDTH, dark=theme == "dark")
            file = folder / f"report-{theme}.png"
            picture(browser, file, "document.getElementById('results')", REPORT_WIDTH, 1.5)
        card = Path(pages, "card.html")
        card.write_text(f"{CARD_PAGE}<script>document.documentElement.dataset.ready = 1</script>")
        browser.open(card, width=CARD[0])
        picture(browser, folder / "card.png", "document.body", CARD[0], 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else STATIC)
