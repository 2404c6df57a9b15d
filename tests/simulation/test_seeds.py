"""Play seeded courses of events with faults: each keeps the protocol's invariants.

``KINETIC_SIMULATED_SEEDS=20000 pytest -m slow tests/simulation`` plays more of them.
``python -m tests.simulation 17`` shows one, and ``crowded 17`` shows it with more requests.
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
    clustered,
    collecting,
    crowded,
    forged,
    play,
    strained,
)

FEW, SEEDS, BLOCK = 20, 400, 100
"""How many courses of each kind the everyday and the full run play, and how many per test."""


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


@pytest.fixture
def priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prices.json").write_text(json.dumps({"tpu-v5e-1": USD_PER_HOUR}))
    monkeypatch.setenv("KINETIC_PRICES", str(tmp_path / "prices.json"))


@pytest.mark.timeout(300)
def test_a_few_courses_keep_the_protocol() -> None:
    play_all(range(FEW))
    play_all(range(FEW), clustered)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_every_course_keeps_the_protocol(first: int) -> None:
    counts = play_all(range(first, first + BLOCK))
    counts += play_all(range(first, first + FEW), strained)
    rare = [kind for kind in COMMON if not counts[kind]]
    assert not rare, f"none of these in {BLOCK} seeds: the simulation tests too little"


COMMON = (
    *("dies", "zombie", "twin", "frozen", "evicted", "unopened", "late", "slow", "failing", "lost"),
    *("supervisor", "refuse", "scale", "kill", "resume", "retry", "cancel", "pause", "outage"),
    *("outcome: value", "outcome: error", "outcome: lost", "outcome: cancelled"),
    *("control: done all final", "control: round", "control: leave", "control: sealed"),
)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_courses_with_many_requests_keep_the_protocol() -> None:
    play_all(range(BLOCK), crowded)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("changes", [(), (crowded,), (collecting,)])
def test_courses_on_a_cluster_keep_the_protocol(
    changes: tuple[Callable[[Plan], Plan], ...],
) -> None:
    play_all(range(BLOCK), clustered, *changes)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, BLOCK])
def test_collecting_loses_and_repeats_nothing(first: int) -> None:
    counts = play_all(range(first, first + BLOCK), collecting)
    assert counts["collected"] > BLOCK / 4, "hardly anything was collected"


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("priced")
def test_a_budget_is_kept_with_and_without_clients() -> None:
    assert play_all(range(BLOCK), budgeted)["control: stop budget"], "no budget was spent"


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
    assert cases > 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize(
    "changes", [(), (clustered,), (collecting,), (crowded,), (forged,), (budgeted,)]
)
def test_many_courses_keep_the_protocol(changes: tuple[Callable[[Plan], Plan], ...]) -> None:
    count = int(os.environ.get("KINETIC_SIMULATED_SEEDS", "5000"))
    play_all(range(SEEDS, SEEDS + count), *changes)


def test_a_seed_always_plays_the_same_course_of_events() -> None:
    for seed in (17, 71):
        first, second = play(seed), play(seed)
        assert first.trace == second.trace
        assert first.seconds >= CALM_AFTER
