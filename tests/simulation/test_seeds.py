"""Play seeded courses of events with faults: each keeps the protocol's invariants.

``KINETIC_SIMULATED_SEEDS=20000 pytest -m slow tests/simulation`` plays more of them.
``python -m tests.simulation 17`` shows one; ``crowded 17`` shows it with more requests.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.notifications import FAULTS, Fault

from .scenario import CALM_AFTER, USD_PER_HOUR, Plan, budgeted, collecting, crowded, forged, play

SEEDS, BLOCK = 1000, 100
MORE = [pytest.param(first, marks=pytest.mark.full) for first in range(2 * BLOCK, SEEDS, BLOCK)]


def unchanged(plan: Plan) -> Plan:
    return plan


def play_all(seeds: range, change: Callable[[Plan], Plan] = unchanged) -> Counter[str]:
    """Play the seeds, and count their faults and events; fail with the first course that errs."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        report = play(seed, change=change)
        if report.violation is not None:
            arguments = f"{'' if change is unchanged else f'{change.__name__} '}{seed}"
            command = f"play it again: python -m tests.simulation {arguments}"
            pytest.fail(f"{report.text()}\n{command}", pytrace=False)
        counts += report.faults
        counts += report.seen
    return counts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, BLOCK, *MORE])
def test_every_course_keeps_the_protocol(first: int) -> None:
    counts = play_all(range(first, first + BLOCK))
    for fault in ("pause", "kill", "outage", "resume", "twice", "dies", "zombie", "lost", "retry"):
        assert counts[fault], f"no {fault} in {BLOCK} seeds: the simulation tests too little"
    for outcome in ("value", "error", "lost", "cancelled"):
        assert counts[f"outcome: {outcome}"], f"no outcome {outcome} in {BLOCK} seeds"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_courses_with_many_requests_keep_the_protocol() -> None:
    play_all(range(BLOCK), crowded)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, *MORE])
def test_collecting_loses_and_repeats_nothing(first: int) -> None:
    counts = play_all(range(first, first + BLOCK), collecting)
    assert counts["collected"] > BLOCK / 4, "hardly anything was collected"


@pytest.fixture
def priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prices.json").write_text(json.dumps({"tpu-v5e-1": USD_PER_HOUR}))
    monkeypatch.setenv("KINETIC_PRICES", str(tmp_path / "prices.json"))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("first", [0, *MORE])
def test_a_budget_is_kept_whoever_submits(first: int) -> None:
    counts = play_all(range(first, first + BLOCK), budgeted)
    assert counts["control: stop budget"], "no budget was spent"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_forged_requests_change_nothing() -> None:
    assert play_all(range(BLOCK), forged)["control: forged"] > BLOCK


def play_with_each_fault(seed: int, kind: str) -> int:
    """Play *seed* once per notification, with that one disturbed; return how many there were."""
    number = 0
    while True:
        report = play(seed, fault=(fault := Fault(kind, number)))
        if report.violation is not None:
            pytest.fail(f"{report.text()}\nnotification {number} was {kind}", pytrace=False)
        if not fault.happened:
            return number
        number += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)])
def test_no_single_notification_is_needed(seeds: range, kind: str) -> None:
    cases = sum(play_with_each_fault(seed, kind) for seed in seeds)
    print(f"cases: {cases}")
    assert cases > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("change", [unchanged, collecting, crowded, forged])
def test_many_courses_keep_the_protocol(change: Callable[[Plan], Plan]) -> None:
    count = int(os.environ.get("KINETIC_SIMULATED_SEEDS", "5000"))
    play_all(range(SEEDS, SEEDS + count), change)


def test_a_seed_always_plays_the_same_course_of_events() -> None:
    for seed in (17, 71):
        first, second = play(seed), play(seed)
        assert first.trace == second.trace
        assert first.seconds >= CALM_AFTER
