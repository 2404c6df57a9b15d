"""Seeded courses of events with faults: every one keeps the protocol.

``KINETIC_SIMULATED_SEEDS=20000 pytest -m slow tests/simulation`` plays more of
them; ``python -m tests.simulation 17`` shows one.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .scenario import CALM_AFTER, play

SEEDS, BLOCK = 1000, 100


def played(seeds: range) -> Counter[str]:
    """Play them; the first that breaks an invariant fails with its whole course."""
    faults: Counter[str] = Counter()
    for seed in seeds:
        report = play(seed)
        if report.violation is not None:
            pytest.fail(f"{report.told()}\nagain: python -m tests.simulation {seed}", pytrace=False)
        faults += report.faults
        faults += report.seen
    return faults


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_every_course_keeps_the_protocol(first: int, pytestconfig: pytest.Config) -> None:
    if (only := pytestconfig.getoption("--seed")) is not None:
        report = play(only)
        print(report.told())
        assert report.violation is None, report.told()
        return
    faults = played(range(first, first + BLOCK))
    for what in ("pause", "kill", "outage", "resume", "twice", "dies", "zombie", "lost", "retry"):
        assert faults[what], f"no {what} in {BLOCK} seeds: the simulation has lost its teeth"
    for what in ("outcome: value", "outcome: error", "outcome: lost", "outcome: cancelled"):
        assert faults[what], f"no {what} in {BLOCK} seeds"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_courses_keep_the_protocol() -> None:
    played(range(SEEDS, SEEDS + int(os.environ.get("KINETIC_SIMULATED_SEEDS", "5000"))))


@pytest.mark.parametrize(
    "seed", [1705, 1885, 3532, 3702, 4281, 4732, 4763, 5544, 6242, 6359, 7393, 7884, 9976]
)
def test_what_went_wrong_once_does_not_again(seed: int) -> None:
    report = play(seed)
    assert report.violation is None, report.told()


def test_a_seed_is_one_course_of_events() -> None:
    for seed in (17, 71):
        one, other = play(seed), play(seed)
        assert one.trace == other.trace
        assert one.seconds >= CALM_AFTER
