"""Seeded courses of events with faults: every one keeps the protocol.

``KINETIC_SIMULATED_SEEDS=20000 pytest -m slow tests/simulation`` plays more of
them; ``python -m tests.simulation 17`` shows one, ``crowded 17`` the same with more requests.
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


def as_it_is(plan: Plan) -> Plan:
    return plan


def played(seeds: range, change: Callable[[Plan], Plan] = as_it_is) -> Counter[str]:
    """Play them; the first that breaks an invariant fails with its whole course."""
    faults: Counter[str] = Counter()
    for seed in seeds:
        report = play(seed, change=change)
        if report.violation is not None:
            which = f"{'' if change is as_it_is else f'{change.__name__} '}{seed}"
            again = f"again: python -m tests.simulation {which}"
            pytest.fail(f"{report.told()}\n{again}", pytrace=False)
        faults += report.faults
        faults += report.seen
    return faults


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, BLOCK, *MORE])
def test_every_course_keeps_the_protocol(first: int) -> None:
    faults = played(range(first, first + BLOCK))
    for what in ("pause", "kill", "outage", "resume", "twice", "dies", "zombie", "lost", "retry"):
        assert faults[what], f"no {what} in {BLOCK} seeds: the simulation has lost its teeth"
    for what in ("outcome: value", "outcome: error", "outcome: lost", "outcome: cancelled"):
        assert faults[what], f"no {what} in {BLOCK} seeds"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_courses_with_many_requests_keep_the_protocol() -> None:
    played(range(BLOCK), crowded)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, *MORE])
def test_who_collects_loses_and_repeats_nothing(first: int) -> None:
    faults = played(range(first, first + BLOCK), collecting)
    assert faults["collected"] > BLOCK / 4, "hardly anything was collected"


@pytest.fixture
def priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prices.json").write_text(json.dumps({"tpu-v5e-1": USD_PER_HOUR}))
    monkeypatch.setenv("KINETIC_PRICES", str(tmp_path / "prices.json"))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("first", [0, *MORE])
def test_a_budget_is_kept_whoever_submits(first: int) -> None:
    faults = played(range(first, first + BLOCK), budgeted)
    assert faults["control: stop budget"], "no budget was spent"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_requests_that_are_forged_change_no_course() -> None:
    assert played(range(BLOCK), forged)["control: forged"] > BLOCK


def each_notification(seed: int, what: str) -> int:
    """Play *seed* once for each of its notifications, which is *what*; how many there were."""
    at = 0
    while True:
        report = play(seed, fault=(fault := Fault(what, at)))
        if report.violation is not None:
            pytest.fail(f"{report.told()}\nnotification {at} was {what}", pytrace=False)
        if not fault.happened:
            return at
        at += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)])
def test_no_single_notification_is_needed(seeds: range, what: str) -> None:
    cases = sum(each_notification(seed, what) for seed in seeds)
    print(f"cases: {cases}")
    assert cases > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("change", [as_it_is, collecting, crowded, forged])
def test_many_courses_keep_the_protocol(change: Callable[[Plan], Plan]) -> None:
    many = int(os.environ.get("KINETIC_SIMULATED_SEEDS", "5000"))
    played(range(SEEDS, SEEDS + many), change)


def test_a_seed_is_one_course_of_events() -> None:
    for seed in (17, 71):
        one, other = play(seed), play(seed)
        assert one.trace == other.trace
        assert one.seconds >= CALM_AFTER
