"""Leave out one rule of the workers: some course of events must break an invariant."""

from __future__ import annotations

import inspect

import pytest

from kinetic._runner.worker.pull import Pull

from .mutations import MUTATIONS
from .scenario import play

SEEDS = 300
EVERYDAY = ("check before claim", "retry blind", "lost overwrites", "heartbeat", "retry in place")
NAMES = [
    pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.full]) for name in MUTATIONS
]


@pytest.mark.parametrize("name", NAMES)
def test_leaving_out_a_rule_breaks_its_invariant(name: str) -> None:
    mutation = MUTATIONS[name]
    for seed in range(SEEDS):
        report = play(seed, mutation.behavior(), mutation.change)
        if report.violation is not None and report.violation.invariant == mutation.breaks:
            break
    else:
        pytest.fail(f"{name}: none of {SEEDS} seeds broke {mutation.breaks}")
    for earlier in range(seed + 1):
        report = play(earlier, change=mutation.change)
        assert report.violation is None, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_protocol_survives_the_plans_of_mutations(name: str) -> None:
    for seed in range(100):
        report = play(seed, change=MUTATIONS[name].change)
        assert report.violation is None, report.text()


def test_mutations_replace_methods_that_exist() -> None:
    """A method that nothing calls would leave out no rule."""
    for name, mutation in MUTATIONS.items():
        rules = mutation.pull
        for method in filter(inspect.isfunction, vars(rules).values() if rules is not Pull else ()):
            assert hasattr(rules.__base__, method.__name__), f"{name}: {method.__name__}"
