"""Tables on terminals of any width, and text of others that stays text."""

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
def test_ids_and_reasons_are_whole_on_every_terminal(width: int | None) -> None:
    lines = lay_out(NAMES, ROWS, width)
    assert width is None or all(cell_len(line) <= width for line in lines)
    whole = " ".join(" ".join(lines).split())
    for row in ROWS:
        assert any(line.startswith(row[0]) for line in lines)
        assert row[-1] == "—" or row[-1] in whole


def test_a_narrow_table_drops_empty_columns_and_has_the_reason_below_its_row() -> None:
    assert lay_out(NAMES, ROWS, None)[0].split() == ["JOB", "ID", *NAMES[1:]]
    header, first, *_ = lay_out(NAMES, ROWS, 80)
    assert "AGE" in header and "COST" not in header and "REASON" not in header
    assert "user error" not in first


@pytest.mark.parametrize("harm", ["\x1b[31m", "\x1b[2J", "\x1b]0;title\x07", "\u202e", "\u2067"])
def test_an_error_leaves_the_terminal_as_it_was(
    harm: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # where click leaves colors
    note(f"[b]it{harm} failed")
    assert capsys.readouterr().err == "kinetic: [b]it failed\n"
