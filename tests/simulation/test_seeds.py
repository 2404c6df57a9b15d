"""Play seeded courses of events with faults: each keeps the protocol's invariants.

``KINETIC_SIMULATED_SEEDS=20000 pytest -m slow tests/simulation`` plays more of them.
``python -m tests.simulation 17`` shows one, ``manned 17`` shows it with workers, and
``crowded manned 17`` also with more requests.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.notifications import FAULTS, Fault

from .scenario import (
    CALM_AFTER,
    USD_PER_HOUR,
    Plan,
    budgeted,
    chained,
    collecting,
    crowded,
    forged,
    manned,
    play,
)

SEEDS, BLOCK = 400, 100
"""How many courses of each kind the everyday and the full run play at most, and per test."""

MORE = [pytest.param(first, marks=pytest.mark.full) for first in range(BLOCK, SEEDS, BLOCK)]


def play_all(seeds: range, *changes: Callable[[Plan], Plan]) -> Counter[str]:
    """Play the seeds, and count their faults and events; fail with the first course that errs."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        report = play(seed, change=chained(*changes))
        if report.violation is not None:
            names = "".join(f"{change.__name__} " for change in changes)
            command = f"play it again: python -m tests.simulation {names}{seed}"
            pytest.fail(f"{report.text()}\n{command}", pytrace=False)
        counts += report.faults
        counts += report.seen
    return counts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, *MORE])
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


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, BLOCK])
def test_collecting_loses_and_repeats_nothing(first: int) -> None:
    counts = play_all(range(first, first + BLOCK), collecting)
    assert counts["collected"] > BLOCK / 4, "hardly anything was collected"


@pytest.fixture
def priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prices.json").write_text(json.dumps({"tpu-v5e-1": USD_PER_HOUR}))
    monkeypatch.setenv("KINETIC_PRICES", str(tmp_path / "prices.json"))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("priced")
def test_a_budget_is_kept_whoever_submits() -> None:
    assert play_all(range(BLOCK), budgeted)["control: stop budget"], "no budget was spent"


FEW = 20
"""How many courses with workers the everyday run plays."""


@pytest.mark.timeout(300)
def test_workers_need_no_client() -> None:
    play_all(range(FEW), manned)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_every_course_with_workers_keeps_the_protocol(first: int) -> None:
    counts = play_all(range(first, first + BLOCK), manned)
    rare = [kind for kind in MANNED_FAULTS if not counts[kind]]
    assert not rare, f"none of these in {BLOCK} seeds: the simulation tests too little"


MANNED_FAULTS = (
    *("dies", "zombie", "twin", "frozen", "evicted", "unopened", "late", "slow", "failing"),
    *("supervisor", "refuse", "scale", "kill", "resume", "retry", "cancel", "pause", "outage"),
    *("outcome: value", "outcome: error", "outcome: lost", "outcome: cancelled"),
    *("control: done all final", "control: round", "control: leave", "control: sealed"),
)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("change", [crowded, collecting, forged])
def test_requests_to_workers_keep_the_protocol(change: Callable[[Plan], Plan]) -> None:
    play_all(range(BLOCK), change, manned)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("priced")
def test_workers_keep_a_budget() -> None:
    assert play_all(range(BLOCK), budgeted, manned)["control: stop budget"]


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


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)])
def test_no_single_notification_is_needed(seeds: range, kind: str) -> None:
    cases = sum(play_with_each_fault(seed, kind) for seed in seeds)
    print(f"cases: {cases}")
    assert cases > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("carrier", [(), (manned,)])
@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize("changes", [(), (collecting,), (crowded,), (forged,), (budgeted,)])
def test_many_courses_keep_the_protocol(
    changes: tuple[Callable[[Plan], Plan], ...], carrier: tuple[Callable[[Plan], Plan], ...]
) -> None:
    count = int(os.environ.get("KINETIC_SIMULATED_SEEDS", "5000"))
    play_all(range(SEEDS, SEEDS + count), *changes, *carrier)


def test_a_seed_always_plays_the_same_course_of_events() -> None:
    for seed, change in ((17, chained()), (71, chained()), (17, manned)):
        first, second = play(seed, change=change), play(seed, change=change)
        assert first.trace == second.trace
        assert first.seconds >= CALM_AFTER
