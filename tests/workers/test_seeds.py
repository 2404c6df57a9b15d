"""Play seeded courses of workers with faults and requests: each keeps the protocol's invariants.

``KINETIC_SIMULATED_SEEDS=20000 pytest -m slow tests/workers`` plays more of them.
``python -m tests.workers 17`` shows one.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .scenario import CALM_AFTER, FAULTS, play

SEEDS, BLOCK = 900, 300
MORE = [pytest.param(first, marks=pytest.mark.full) for first in range(BLOCK, SEEDS, BLOCK)]
REQUESTS = (
    *("retry", "grow", "leave", "collect", "suspend", "stop", "stop item", "cleanup", "jobgone"),
    *("kill client", "sleep", "freeze producer"),
)
RESULTS = (
    *("value", "error", "lost", "cancelled"),
    *(
        "done all final",
        "done no producer",
        "stop cancelled",
        "stop cleanup",
        "stop setup",
        "stop timeout",
    ),
    *("stop budget", "stop fail_fast", "retry", "leave", "round", "sealed", "collected"),
    *("started", "round 0", "round 1"),
)


def play_all(seeds: range) -> Counter[str]:
    """Play the seeds, and count what happened; fail with the first course that errs."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        report = play(seed)
        if report.violation is not None:
            command = f"play it again: python -m tests.workers {seed}"
            pytest.fail(f"{report.text()}\n{command}", pytrace=False)
        counts += report.counts
    return counts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, *MORE])
def test_every_course_keeps_the_protocol(first: int) -> None:
    counts = play_all(range(first, first + BLOCK))
    rare = [kind for kind in (*FAULTS, *REQUESTS, *RESULTS) if not counts[kind]]
    assert not rare, f"none of these in {BLOCK} seeds: the simulation tests too little"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_courses_keep_the_protocol() -> None:
    count = int(os.environ.get("KINETIC_SIMULATED_SEEDS", "5000"))
    play_all(range(SEEDS, SEEDS + count))


def test_a_seed_always_plays_the_same_course_of_events() -> None:
    for seed in (17, 71, 264):
        first, second = play(seed), play(seed)
        assert first.trace == second.trace
        assert first.states == second.states
        assert first.seconds >= CALM_AFTER
