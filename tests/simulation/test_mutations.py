"""Leave out one rule of the client: some course of events must break an invariant."""

from __future__ import annotations

import pytest

from .crew_mutations import EDITS
from .scenario import play

SEEDS = 40


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EDITS)
def test_leaving_out_a_rule_breaks_its_invariant(name: str) -> None:
    edit = EDITS[name]
    for seed in range(SEEDS):
        with edit.applied():
            report = play(seed, change=edit.change)
        if getattr(report.violation, "invariant", None) == edit.breaks:
            break
    else:
        pytest.fail(f"{name}: none of {SEEDS} seeds broke {edit.breaks}")
    for earlier in range(seed + 1):
        report = play(earlier, change=edit.change)
        assert report.violation is None, report.text()
