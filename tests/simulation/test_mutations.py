"""Each rule that is left out is missed: some course of events breaks an invariant."""

from __future__ import annotations

import pytest

from .mutations import MUTATIONS
from .scenario import play

SEEDS = 300


@pytest.mark.full
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rule_left_out_is_missed(name: str) -> None:
    mutation = MUTATIONS[name]
    for seed in range(SEEDS):
        report = play(seed, mutation.bend(), mutation.change)
        if getattr(report.violation, "which", None) == mutation.breaks:
            break
    else:
        pytest.fail(f"{name}: {mutation.breaks} was not broken by any of {SEEDS} seeds")
    for earlier in range(seed + 1):
        report = play(earlier, change=mutation.change)
        assert report.violation is None, report.told()
