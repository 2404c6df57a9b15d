"""Tables fit terminals of any width, and control characters in errors are removed."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from kinetic.cli.output import lay_out, note

NAMES = ("JOB ID", "FUNCTION", "STATUS", "AGE", "COST", "REASON")
ID = "grp-local-40969cc1230c-"
ROWS = (
    (f"{ID}0", "train", "FAILED", "43 min 52 s", "—", "user error: " + "no " * 30 + "end"),
    (f"{ID}1", "ünïcödé名前" * 6, "SUCCEEDED", "43 min 52 s", "—", "—"),
    (f"{ID}2", "[red]x[/red]", "FAILED", "43 min 52 s", "—", "lost: [b]gone[/b]"),
)


@pytest.mark.parametrize("width", [None, 250, 100, 80, 70])
def test_ids_and_reasons_are_complete_on_every_terminal(width: int | None) -> None:
    lines = lay_out(NAMES, ROWS, width)
    assert width is None or all(cell_len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    for row in ROWS:
        assert any(line.startswith(row[0]) for line in lines)
        assert row[-1] == "—" or row[-1] in text


def test_a_narrow_table_drops_empty_columns_and_has_the_reason_below_its_row() -> None:
    assert lay_out(NAMES, ROWS, None)[0].split() == ["JOB", "ID", *NAMES[1:]]
    header, first, *_ = lay_out(NAMES, ROWS, 80)
    assert "AGE" in header and "COST" not in header and "REASON" not in header
    assert "user error" not in first


@pytest.mark.parametrize("control", ["\x1b[31m", "\x1b[2J", "\x1b]0;title\x07", "\u202e", "\u2067"])
def test_an_error_can_not_control_the_terminal(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # click keeps colors on a terminal
    note(f"[b]it{control} failed")
    assert capsys.readouterr().err == "kinetic: [b]it failed\n"
