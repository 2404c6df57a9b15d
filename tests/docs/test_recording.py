"""README's recording shows the output of the first example, as docs/record_sweep.py records it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "docs" / "_static" / "sweep.svg"
SVG = "{http://www.w3.org/2000/svg}"


def last_lines(recording: Path) -> list[str]:
    """Return the lines of the last frame, without the live line."""
    root = ElementTree.fromstring(recording.read_text(encoding="utf-8"))
    texts = {group.get("id"): "".join(group.itertext()) for group in root.iter(f"{SVG}g")}
    uses = list(root.iter(f"{SVG}use"))
    first = max(n for n, use in enumerate(uses) if texts[use.attrib["href"][1:]].startswith("$ "))
    lines = [texts[use.attrib["href"][1:]] for use in uses[first:]]
    return [line for line in lines if line.startswith(("$", "best:"))]


@pytest.mark.full
def test_the_recording_shows_what_the_example_prints(tmp_path: Path) -> None:
    recorded = tmp_path / "sweep.svg"
    programs.python("-W", "error", "docs/record_sweep.py", recorded)
    assert last_lines(RECORDING) == last_lines(recorded)
    assert last_lines(recorded)[-1].startswith("best: {'rate': 0.001")


def test_the_first_frame_shows_a_result_and_a_phone_shows_the_letters() -> None:
    root = ElementTree.fromstring(RECORDING.read_text(encoding="utf-8"))
    texts = {group.get("id"): "".join(group.itertext()) for group in root.iter(f"{SVG}g")}
    (film,) = root.findall(f"{SVG}svg")
    height = int(film.attrib["height"])
    uses = [(int(use.attrib["y"]), texts[use.attrib["href"][1:]]) for use in film.iter(f"{SVG}use")]
    assert [text for y, text in uses if y < height and re.match(r"0\.\d+ \{'rate'", text)]
    assert 14 * 368 / int(root.attrib["width"]) > 11  # 368 pixels: a page on a screen of 400


def test_the_recording_is_small_and_needs_no_network() -> None:
    text = RECORDING.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text and "@import" not in text
