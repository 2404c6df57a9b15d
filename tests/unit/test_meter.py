"""Test the sum of the attempts' durations: each attempt counts once."""

from __future__ import annotations

import json

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Attempt, Kind, Outcome
from kinetic.aio._submissions.meter import Meter


def lasting(seconds: float) -> Attempt:
    return Attempt("pod", Outcome(kind=Kind.VALUE, started=100.0, ended=100.0 + seconds))


LOST = Attempt("pod", Outcome(kind=Kind.LOST, reason="lost"))
NEVER_STARTED = Attempt(wire.VOID, Outcome(kind=Kind.LOST, reason="lost"))
RUNNING = Attempt("pod", None)


def test_attempts_are_counted_once_however_often_they_are_seen() -> None:
    meter = Meter()
    for _ in range(3):
        meter.note(0, {1: lasting(10.0), 2: RUNNING}, final=False)
    assert meter.seconds == 10.0
    meter.note(0, {1: lasting(10.0), 2: lasting(5.0)}, final=True)
    meter.note(1, {1: lasting(1.0)}, final=True)
    assert meter.seconds == 16.0


def test_an_older_view_does_not_reduce_the_sum() -> None:
    meter = Meter()
    meter.note(0, {1: lasting(10.0), 2: lasting(5.0)}, final=False)
    meter.note(0, {2: lasting(5.0)}, final=False)
    assert meter.seconds == 15.0


def test_a_lost_attempt_counts_as_the_average_unless_it_never_started() -> None:
    meter = Meter()
    meter.note(0, {1: LOST, 2: NEVER_STARTED}, final=False)
    assert meter.seconds == 0.0  # without an average so far
    meter.note(1, {1: lasting(10.0)}, final=True)
    meter.note(2, {1: lasting(20.0)}, final=True)
    assert meter.seconds == pytest.approx(45.0)


def test_a_negative_duration_counts_as_zero() -> None:
    meter = Meter()
    meter.note(0, {1: lasting(-5.0)}, final=True)
    assert meter.seconds == 0.0


def test_a_meter_continues_from_stored_sums() -> None:
    before = Meter()
    before.note(0, {1: lasting(10.0)}, final=True)
    before.note(1, {1: lasting(7.0)}, final=True)
    after = Meter()
    after.restore(json.loads(json.dumps(before.to_fields())))
    assert after.seconds == 17.0
    after.note(2, {1: lasting(3.0)}, final=True)
    assert after.seconds == 20.0
