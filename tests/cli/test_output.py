"""Tables on terminals of any width, and text of others that stays text."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.console import Console

from kinetic.cli.output import lay_out, note

NAMES = ("job id", "function", "status", "age", "cost", "reason")
ROWS = (
    (
        "grp-local-40969cc1230c-0",
        "train",
        "FAILED",
        "43 min 52 s",
        "—",
        "user error: " + "no " * 30,
    ),
    ("grp-local-40969cc1230c-1", "ünïcödé名前" * 6, "SUCCEEDED", "43 min 52 s", "—", "—"),
    ("grp-local-40969cc1230c-2", "[red]x[/red]", "FAILED", "43 min 52 s", "—", "lost: [b]gone[/b]"),
)


def laid_out(width: int) -> list[str]:
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as printed:
        lay_out(NAMES, ROWS, console)
    return printed.get().splitlines()


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 30])
def test_ids_and_reasons_are_whole_on_every_terminal(width: int) -> None:
    lines = laid_out(width)
    assert all(cell_len(line) <= width for line in lines)
    whole = " ".join(" ".join(lines).split())
    for row in ROWS:
        assert any(line.startswith(row[0]) for line in lines)
        assert row[-1] == "—" or row[-1].strip() in whole


def test_a_column_that_says_nothing_gives_way_first() -> None:
    assert "COST" in laid_out(200)[0] and "REASON" in laid_out(200)[0]
    assert "AGE" in laid_out(80)[0] and "COST" not in laid_out(80)[0]


@pytest.mark.parametrize("harm", ["\x1b[31m", "\x1b[2J", "\x1b]0;title\x07", "\u202e", "\u2067"])
def test_an_error_leaves_the_terminal_as_it_was(
    harm: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # where click leaves colours
    note(f"[b]it{harm} failed")
    assert capsys.readouterr().err == "kinetic: [b]it failed\n"
