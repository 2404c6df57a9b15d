"""What starts next: decisions, without a loop."""

from __future__ import annotations

import random
from typing import Unpack

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Item, ItemState, Kind, Outcome
from kinetic.aio._engine import scheduler
from kinetic.aio._engine.scheduler import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    AttemptFound,
    AttemptReady,
    BackoffOver,
    Complete,
    Freed,
    InputsEnded,
    ItemRead,
    ItemsKnown,
    Refused,
    Reopened,
    SecondsSpent,
    Start,
    StartLimit,
    State,
    Stop,
    StopRequested,
    Stored,
    Wait,
    decide,
)
from kinetic.options import MapOptions, MapSettings

VALUE = Outcome(kind=Kind.VALUE)


def new(**options: Unpack[MapOptions]) -> State:
    return State(MapSettings(**options), random=random.Random(1))


def done(index: int, state: ItemState = ItemState.SUCCEEDED, attempt: int = 1) -> ItemRead:
    return ItemRead(index, Item(state, attempt, VALUE))


def opened(index: int, attempt: int, after: str = "user error", failures: int = 1) -> ItemRead:
    return ItemRead(index, Item(ItemState.OPEN, attempt, None, after, failures))


def test_no_more_start_than_there_are_slots() -> None:
    state = new(max_concurrent=2)
    assert decide(state, Stored(0, 5)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, done(1)) == [Freed(1), Start(2, 1)]


def test_a_slot_is_freed_by_an_outcome_only() -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 2))
    assert decide(state, ItemRead(0, Item(ItemState.OPEN, 1))) == []
    assert decide(state, done(0)) == [Freed(0), Start(1, 1)]


def test_what_came_at_once_is_taken_in_before_anything_starts() -> None:
    state = new(max_concurrent=2)
    decide(state, Stored(0, 5))
    assert decide(state, done(0), done(2), done(1)) == [
        Freed(0),
        Freed(1),
        Start(3, 1),
        Start(4, 1),
    ]


def test_a_retry_waits_its_delay_and_goes_before_new_items() -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 3))
    [freed, wait, start] = decide(state, opened(0, 2))
    assert freed == Freed(0)
    assert isinstance(wait, Wait)
    assert (wait.index, wait.attempt) == (0, 2)
    assert 0.25 <= wait.delay <= 0.5
    assert start == Start(1, 1)
    assert decide(state, done(1)) == [Freed(1), Start(2, 1)]
    assert decide(state, BackoffOver(0, 1)) == [], "that was before"
    assert decide(state, BackoffOver(0, 2)) == []
    assert decide(state, done(2)) == [Freed(2), Start(0, 2)]
    assert decide(state, AttemptFound(0, 1)) == [], "it is ahead of that"
    assert state.busy == {0: 2}


def test_delays_grow_with_failures_of_the_users_up_to_a_limit() -> None:
    state = new(max_concurrent=None)
    decide(state, Stored(0, 1))
    delays = []
    for attempt in range(2, 10):
        [_, wait] = decide(state, opened(0, attempt, failures=attempt - 1))
        assert isinstance(wait, Wait)
        delays.append(wait.delay)
        decide(state, BackoffOver(0, attempt))
    assert max(delays) <= LONGEST_DELAY_S
    assert delays[0] <= FIRST_DELAY_S
    assert delays[-1] >= LONGEST_DELAY_S / 2


def test_what_the_platform_has_done_is_tried_again_soon() -> None:
    state = new(max_concurrent=None)
    decide(state, Stored(0, 1))
    for attempt in range(2, 12):
        [_, wait] = decide(state, opened(0, attempt, after="preempted", failures=0))
        assert isinstance(wait, Wait)
        assert wait.delay <= FIRST_DELAY_S
        decide(state, BackoffOver(0, attempt))


def test_the_first_failure_ends_a_fail_fast_batch_once() -> None:
    state = new(max_concurrent=2, fail_fast=True)
    decide(state, Stored(0, 10))
    stop = Stop("fail_fast", keep_running=True)
    assert decide(state, done(0, ItemState.FAILED)) == [Freed(0), stop]
    assert decide(state, done(1, ItemState.FAILED)) == [Freed(1)]


def test_a_refused_item_counts_as_a_failure() -> None:
    state = new(fail_fast=True, cancel_running_on_fail=True)
    decide(state, Stored(0, 2))
    assert decide(state, Refused(0)) == [Freed(0), Stop("fail_fast", keep_running=False)]


def test_what_is_cancelled_is_no_failure() -> None:
    state = new(fail_fast=True)
    decide(state, Stored(0, 2))
    assert decide(state, done(0, ItemState.CANCELLED)) == [Freed(0)]


def test_nothing_starts_after_a_stop() -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 3))
    decide(state, opened(0, 2))
    decide(state, StopRequested())
    assert decide(state, BackoffOver(0, 2)) == []
    assert decide(state, done(1)) == [Freed(1)]
    assert decide(state, Stored(3, 2)) == []


def test_what_is_reopened_after_a_stop_runs() -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 2))
    decide(state, InputsEnded(2))
    decide(state, StopRequested())
    decide(state, done(0, ItemState.CANCELLED))
    assert decide(state, done(1, ItemState.CANCELLED)) == [Complete()]
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [Start(1, 2)]
    assert not state.complete
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [], "the same request again"
    assert decide(state, done(1, ItemState.CANCELLED)) == [], "that was before"
    [_, wait] = decide(state, opened(1, 3))
    assert wait == Wait(1, 3, wait.delay)  # type: ignore[union-attr]
    assert decide(state, StopRequested()) == []
    assert decide(state, BackoffOver(1, 3)) == []
    assert decide(state, done(1, ItemState.FAILED, 2)) == [Complete()]


def test_what_was_tried_again_twice_when_it_is_found_may_fail_by_the_first_of_them() -> None:
    """A stop ends it before the second has begun; whoever found it has to hear that it is over."""
    state = new(max_concurrent=1)
    decide(
        state,
        ItemsKnown(1),
        StopRequested(),
        AttemptFound(0, 4),
        Reopened(0, 4, wire.Standing(2, 2)),
        InputsEnded(1),
    )
    assert decide(state, done(0, ItemState.FAILED, 2)) == [], "that was before"
    assert decide(state, done(0, ItemState.FAILED, 3)) == [Freed(0), Complete()]


def test_what_is_reopened_before_it_is_known_here_runs_once_it_is_stored() -> None:
    state = State(MapSettings())
    decide(state, Stored(0, 1), StopRequested())
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == []
    assert decide(state, ItemsKnown(2)) == []
    assert decide(state, Stored(1, 1)) == [Start(1, 2)]
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [], "the same request again"


def test_what_is_reopened_and_never_got_an_input_is_started() -> None:
    """A stop came before it was stored: to start it tells everybody that it has none."""
    state = State(MapSettings())
    decide(state, Stored(0, 1), StopRequested(), Reopened(1, 2, wire.Standing(1, 2)))
    assert decide(state, InputsEnded(2)) == [Start(1, 2)]


def test_a_stop_after_it_ends_what_was_reopened_before_it_is_known_here() -> None:
    state = State(MapSettings())
    assert decide(state, Reopened(0, 2, wire.Standing(1, 1)), StopRequested(), Stored(0, 1)) == []


def test_a_value_is_never_reopened() -> None:
    state = new()
    decide(state, Stored(0, 1))
    decide(state, done(0))
    assert decide(state, Reopened(0, 2, wire.Standing(1, 1))) == []


def test_what_is_found_is_busy_and_not_started() -> None:
    state = new(max_concurrent=2)
    decide(state, ItemsKnown(4))
    assert decide(state, AttemptFound(1, 1)) == []
    assert decide(state, AttemptFound(2, 3)) == []
    assert decide(state, Stored(0, 4)) == [], "both slots are taken"
    assert decide(state, done(1)) == [Freed(1), Start(0, 1)]
    assert decide(state, done(2, attempt=3)) == [Freed(2), Start(3, 1)]


def test_what_has_begun_and_has_nothing_starts_under_its_number() -> None:
    state = new()
    decide(state, ItemsKnown(2))
    assert decide(state, AttemptReady(1, 4)) == [Start(1, 4)]
    assert decide(state, AttemptReady(1, 4)) == []


def test_no_more_begin_than_the_window_lets() -> None:
    state = new()
    decide(state, StartLimit(2))
    assert decide(state, Stored(0, 9)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, done(0)) == [Freed(0)]
    assert decide(state, StartLimit(3)) == [Start(2, 1)]
    assert len(decide(state, StartLimit(None))) == 6


def test_it_is_complete_when_all_items_are_and_no_more_come() -> None:
    state = new(max_concurrent=None)
    decide(state, Stored(0, 2))
    assert decide(state, done(0)) == [Freed(0)]
    assert decide(state, done(1)) == [Freed(1)]
    assert decide(state, InputsEnded(2)) == [Complete()]
    assert decide(state, done(1)) == []


def test_an_empty_input_is_complete_at_once() -> None:
    assert decide(new(), InputsEnded(0)) == [Complete()]


UNKNOWN = [
    ItemRead(9, Item(ItemState.SUCCEEDED, 1, VALUE)),
    ItemRead(-1, Item(ItemState.FAILED, 1, VALUE)),
    AttemptFound(9, 1),
    AttemptReady(9, 1),
    Reopened(-1, 1, wire.Standing(0, 1)),
    Refused(9),
    BackoffOver(9, 1),
    InputsEnded(0),
]


@pytest.mark.parametrize("event", UNKNOWN, ids=lambda event: type(event).__name__)
def test_what_is_said_of_unknown_items_changes_nothing(event: scheduler.Event) -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 2))
    before = repr(state)
    assert decide(state, event) == []
    assert repr(state) == before


def test_what_is_spent_starts_nothing_more_and_what_runs_goes_on() -> None:
    state = new(max_concurrent=2)
    state.budget = 10.0
    assert decide(state, Stored(0, 5), SecondsSpent(9.9)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, SecondsSpent(10.0), done(0)) == [
        Freed(0),
        Stop("budget", keep_running=True),
    ]
    assert state.busy == {1: 1}
    assert decide(state, SecondsSpent(4.0), done(1)) == [Freed(1)]  # an older view


def test_a_budget_that_is_spent_by_the_last_item_stops_nothing() -> None:
    state = new(max_concurrent=1)
    state.budget = 1.0
    assert decide(state, Stored(0, 1), InputsEnded(1)) == [Start(0, 1)]
    assert decide(state, SecondsSpent(1.0), done(0)) == [Freed(0), Complete()]


def test_a_spent_budget_stops_retries_and_what_is_reopened_each_time() -> None:
    state = new(max_concurrent=1, retries=3)
    state.budget = 1.0
    decide(state, Stored(0, 1), InputsEnded(1))
    assert Stop("budget", keep_running=True) in decide(state, SecondsSpent(1.0), opened(0, 2))
    assert decide(state, StopRequested()) == []
    reopened = Reopened(0, 2, wire.Standing(retried=2))
    assert decide(state, reopened) == [Stop("budget", keep_running=True)]
    assert decide(state) == []
