"""How long attempts took: each counted once, however often it is seen."""

from __future__ import annotations

import json

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Attempt, Kind, Outcome
from kinetic.aio._engine.meter import Meter


def took(seconds: float) -> Attempt:
    return Attempt("one", Outcome(kind=Kind.VALUE, started=100.0, ended=100.0 + seconds))


LOST = Attempt("one", Outcome(kind=Kind.LOST, reason="lost"))
NEVER = Attempt(wire.VOID, Outcome(kind=Kind.LOST, reason="lost"))
RUNS = Attempt("one", None)


def test_attempts_are_counted_once_however_often_they_are_seen() -> None:
    meter = Meter()
    for _ in range(3):
        meter.note(0, {1: took(10.0), 2: RUNS}, settled=False)
    assert meter.seconds == 10.0
    meter.note(0, {1: took(10.0), 2: took(5.0)}, settled=True)
    meter.note(1, {1: took(1.0)}, settled=True)
    assert meter.seconds == 16.0


def test_an_older_view_takes_nothing_back() -> None:
    meter = Meter()
    meter.note(0, {1: took(10.0), 2: took(5.0)}, settled=False)
    meter.note(0, {2: took(5.0)}, settled=False)
    assert meter.seconds == 15.0


def test_one_that_told_nothing_counts_as_the_average_and_one_that_never_began_not() -> None:
    meter = Meter()
    meter.note(0, {1: LOST, 2: NEVER}, settled=False)
    assert meter.seconds == 0.0  # nothing is known yet
    meter.note(1, {1: took(10.0)}, settled=True)
    meter.note(2, {1: took(20.0)}, settled=True)
    assert meter.seconds == pytest.approx(45.0)


def test_a_clock_that_went_back_costs_nothing() -> None:
    meter = Meter()
    meter.note(0, {1: took(-5.0)}, settled=True)
    assert meter.seconds == 0.0


def test_a_meter_continues_from_stored_sums() -> None:
    before = Meter()
    before.note(0, {1: took(10.0)}, settled=True)
    before.note(1, {1: took(7.0)}, settled=True)
    after = Meter()
    after.restore(json.loads(json.dumps(before.to_fields())))
    assert after.seconds == 17.0
    after.note(2, {1: took(3.0)}, settled=True)
    assert after.seconds == 20.0
