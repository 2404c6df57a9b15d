"""What the tests that kill sweeps check: what was proposed, and what the optimizer was told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.scripts import Script

SEARCHER = Path(__file__).with_name("searcher.py")


def note(ended: dict[int, Any], submitter: Script) -> None:
    """Add the trials that a process has reported; none may differ from an earlier report."""
    for line in submitter.lines:
        if line.startswith("ended") and line.endswith("}"):  # a kill may cut the last line
            trial = json.loads(line.partition(" ")[2])
            assert ended.setdefault(trial["number"], trial) == trial, "a trial has changed"


def check(summary: Any, ended: dict[int, Any], count: int) -> None:
    """Check that every trial has ended well, and is what earlier processes have reported."""
    trials = summary["trials"]
    assert [trial["number"] for trial in trials] == [*range(count)]
    assert {trial["state"] for trial in trials} <= {"complete", "pruned"}
    assert {trial["number"]: trial for trial in trials} == ended
    assert len({trial["params"]["rate"] for trial in trials}) == count, "proposed twice"
    complete = [trial for trial in trials if trial["state"] == "complete"]
    assert all(trial["value"] == trial["params"]["rate"] for trial in complete)
    assert summary["best"] == min(trial["value"] for trial in complete)
    if summary["study"]:
        states = Counter(summary["study"])
        # A trial that a process asked for and didn't start is a failure of the study.
        assert states["COMPLETE"] + states["PRUNED"] == count
        assert {*states} <= {"COMPLETE", "PRUNED", "FAIL"}


def check_told(folder: Path, *, is_stored: bool) -> None:
    """Check that no process has told its study a trial twice, nor two processes a stored study."""
    told: Counter[int] = Counter()
    for log in folder.glob("told.*"):
        numbers = [json.loads(line)[0] for line in log.read_text().splitlines()]
        assert len({*numbers}) == len(numbers), f"{log.name} has told a trial twice"
        told.update(numbers)
    assert not is_stored or {*told.values()} == {1}, "two processes have told the same trial"
