"""The arithmetic of progress: counts add up, and rates are correct."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._messages import format_duration, format_size, one_line
from kinetic._progress.tally import Pace, State, Tally
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Kind
from kinetic.aio._reading.progress import state_of
from kinetic.job_status import JobStatus
from kinetic.progress import Progress

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from(State),
        st.integers(0, 3),
        st.floats(0, 1e6),  # a step of the clock
    ),
    max_size=80,
)


@settings(max_examples=50, deadline=None)
@given(EVENTS, st.integers(0, 20), st.booleans())
def test_counts_add_up_and_nothing_is_negative(events, known, ended) -> None:
    now, tally, truth, retries = 5.0, Tally(5.0), dict.fromkeys(range(known), State.WAITING), {}
    tally.start(now)
    for index, state, retried, step in events:
        now += step
        tally.put(index, state, retried, now)
        tally.put(index, state, retried, now)  # a repeated event changes nothing
        truth[index], retries[index] = state, retried
        value = tally.value(now, total=known if ended else None, known=known)
        assert value.rate >= 0 and value.elapsed >= 0
        assert value.eta is None or value.eta >= 0
    value = tally.value(now, total=known if ended else None, known=known)
    count = max([known, *(index + 1 for index in truth)])
    truth = {index: truth.get(index, State.WAITING) for index in range(count)}
    for state in State:
        assert getattr(value, state.name.lower()) == [*truth.values()].count(state)
    assert value.known == count and value.total == (count if ended else None)
    assert value.retried == sum(retries.values())
    assert value.finished is (ended and value.ended == count)


def test_the_first_failure_is_the_first_item_that_is_failed_now() -> None:
    tally = Tally(0.0)
    assert tally.first_bad is None
    for index, state in ((5, State.FAILED), (2, State.LOST), (5, State.RUNNING)):
        tally.put(index, state, 0, 0.0)
    assert tally.first_bad == 2
    tally.put(2, State.SUCCEEDED, 1, 0.0)
    assert tally.first_bad is None


def test_items_that_ended_before_the_first_read_do_not_count_for_the_rate() -> None:
    tally = Tally(100.0, age=50.0)
    for index in range(900):
        tally.put(index, State.SUCCEEDED, 0, 100.0)
    tally.start(100.0)
    value = tally.value(110.0, total=1000, known=1000)
    assert (value.rate, value.eta, value.elapsed) == (0.0, None, 60.0)
    tally.put(900, State.SUCCEEDED, 0, 120.0)
    value = tally.value(120.0, total=1000, known=1000)
    assert (value.rate, value.eta) == (pytest.approx(1 / 20), pytest.approx(99 * 20))


def test_the_age_of_a_batch_from_a_clock_that_is_ahead_is_not_negative() -> None:
    assert Tally(3.0, age=-100.0).value(4.0, total=None, known=0).elapsed == 1.0


# --- pace ---


def test_a_steady_pace_gives_its_rate() -> None:
    pace = Pace(0.0)
    for tenth in range(1, 1001):
        pace.end(tenth / 10)
        if tenth > 20:
            assert pace.rate(tenth / 10) == pytest.approx(10, rel=0.1)
    assert pace.eta(100.0, 50) == pytest.approx(5, rel=0.1)


def test_the_first_ends_give_no_exaggerated_rate() -> None:
    pace = Pace(0.0)
    assert pace.rate(0.0) == 0.0 and pace.eta(0.0, 5) is None
    pace.end(0.001)
    assert pace.rate(0.001) == 1.0
    assert pace.rate(10.0) == pytest.approx(0.1)


def test_a_pause_lowers_the_rate_and_is_forgotten_after_it() -> None:
    pace = Pace(0.0)
    for second in range(1, 61):
        pace.end(float(second))
    rates = [pace.rate(60.0 + pause) for pause in (0, 30, 300, 3000)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.02
    for second in range(3060, 3120):
        pace.end(float(second))
    assert pace.rate(3119.0) == pytest.approx(1.0, rel=0.1)


def test_slow_items_are_averaged_over_the_last_twenty() -> None:
    pace = Pace(0.0)
    for hour in range(1, 101):
        pace.end(hour * 3600.0)
    assert pace.rate(100 * 3600.0) == pytest.approx(1 / 3600, rel=0.01)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e9), max_size=200))
def test_no_clock_makes_a_rate_too_high_or_the_memory_grow(steps) -> None:
    now, pace = 0.0, Pace(0.0)
    for step in steps:
        now += step
        pace.end(now)
        assert 0 <= pace.rate(now) <= len(steps)
    assert len(pace._marks) <= 100


# --- states ---

VALUE, LOST, ERROR = (wire.Outcome(kind=kind) for kind in (Kind.VALUE, Kind.LOST, Kind.ERROR))
ITEM = wire.ItemState


@pytest.mark.parametrize(
    ("item", "status", "refused", "state"),
    [
        (None, JobStatus.PENDING, False, State.WAITING),
        (None, JobStatus.PENDING, True, State.FAILED),
        (None, JobStatus.RUNNING, False, State.RUNNING),
        (wire.Item(ITEM.OPEN, 2), JobStatus.PENDING, False, State.WAITING),
        (wire.Item(ITEM.OPEN, 2), JobStatus.RUNNING, False, State.RUNNING),
        (wire.Item(ITEM.CANCELLING, 1), JobStatus.NOT_FOUND, False, State.RUNNING),
        (wire.Item(ITEM.CANCELLED, 1), JobStatus.NOT_FOUND, False, State.CANCELLED),
        (wire.Item(ITEM.SUCCEEDED, 1, VALUE), JobStatus.SUCCEEDED, False, State.SUCCEEDED),
        (wire.Item(ITEM.FAILED, 1, ERROR), JobStatus.FAILED, False, State.FAILED),
        (wire.Item(ITEM.FAILED, 1, LOST), JobStatus.FAILED, False, State.LOST),
    ],
)
def test_the_state_of_an_item(item, status, refused, state) -> None:
    assert state_of(item, status, refused=refused) is state


# --- texts ---


def test_a_line_has_every_count_that_is_not_zero() -> None:
    value = Progress(
        total=1000, waiting=300, running=64, succeeded=600, failed=30, cancelled=4, lost=2,
        retried=7, elapsed=75.0, rate=8.5, eta=43.0, first_failure="item 3: ValueError: no",
    )  # fmt: skip
    assert value.line() == (
        "636 of 1,000 ended: 600 succeeded, 30 failed, 2 lost, 4 cancelled, 64 running, "
        "300 waiting, 7 retried; 8.5/s; 43 s left; "
        "first failure (batch.failures() lists all 32): item 3: ValueError: no"
    )
    assert Progress().line() == "0 ended"
    done = Progress(total=2, succeeded=2, elapsed=3.2, rate=1.0, eta=0.0)
    assert done.line() == "2 of 2 ended: 2 succeeded; took 3 s"
    assert (done.fraction, Progress().fraction, Progress(total=0).fraction) == (1.0, None, 1.0)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(120.4, "120/s"), (1.0, "1.0/s"), (0.5, "30/min"), (0.02, "1.2/min"), (0.001, "3.6/h")],
)
def test_a_rate_is_formatted_for_people(rate, text) -> None:
    assert Progress(rate=rate).speed() == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3.0, "0 s"),
        (59.4, "59 s"),
        (61.0, "1 min 01 s"),
        (3725.0, "1 h 02 min"),
        (200_000.0, "2 d 7 h"),
    ],
)
def test_a_duration_is_formatted_for_people(seconds, text) -> None:
    assert format_duration(seconds) == text


def test_a_size_is_formatted_for_people() -> None:
    assert [format_size(n) for n in (12, 1500, 27e6, 456e6, 3.2e12)] == [
        "12 bytes", "1.5 kB", "27.0 MB", "456 MB", "3200 GB",
    ]  # fmt: skip


@pytest.mark.full
@settings(max_examples=50, deadline=None)
@given(st.text(max_size=600), st.integers(1, 300))
def test_one_line_is_one_short_line_without_commands_for_the_terminal(text, limit) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit and line.isprintable() and line == " ".join(line.split())
