"""Test the scheduler's decisions: which attempts start, wait, or end the batch."""

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


def new_state(**options: Unpack[MapOptions]) -> State:
    return State(MapSettings(**options), random=random.Random(1))


def ended(index: int, state: ItemState = ItemState.SUCCEEDED, attempt: int = 1) -> ItemRead:
    return ItemRead(index, Item(state, attempt, VALUE))


def item_to_retry(
    index: int, attempt: int, after: str = "user error", failures: int = 1
) -> ItemRead:
    return ItemRead(index, Item(ItemState.OPEN, attempt, None, after, failures))


def test_no_more_attempts_start_than_there_are_slots() -> None:
    state = new_state(max_concurrent=2)
    assert decide(state, Stored(0, 5)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, ended(1)) == [Freed(1), Start(2, 1)]


def test_only_an_outcome_frees_a_slot() -> None:
    state = new_state(max_concurrent=1)
    decide(state, Stored(0, 2))
    assert decide(state, ItemRead(0, Item(ItemState.OPEN, 1))) == []
    assert decide(state, ended(0)) == [Freed(0), Start(1, 1)]


def test_all_events_are_handled_before_attempts_start() -> None:
    state = new_state(max_concurrent=2)
    decide(state, Stored(0, 5))
    assert decide(state, ended(0), ended(2), ended(1)) == [
        Freed(0),
        Freed(1),
        Start(3, 1),
        Start(4, 1),
    ]


def test_a_retry_waits_its_delay_and_starts_before_new_items() -> None:
    state = new_state(max_concurrent=1)
    decide(state, Stored(0, 3))
    [freed, wait, start] = decide(state, item_to_retry(0, 2))
    assert freed == Freed(0)
    assert isinstance(wait, Wait)
    assert (wait.index, wait.attempt) == (0, 2)
    assert 0.25 <= wait.delay <= 0.5
    assert start == Start(1, 1)
    assert decide(state, ended(1)) == [Freed(1), Start(2, 1)]
    assert decide(state, BackoffOver(0, 1)) == [], "an older attempt"
    assert decide(state, BackoffOver(0, 2)) == []
    assert decide(state, ended(2)) == [Freed(2), Start(0, 2)]
    assert decide(state, AttemptFound(0, 1)) == [], "an older attempt"
    assert state.busy == {0: 2}


def test_delays_grow_with_user_errors_up_to_a_limit() -> None:
    state = new_state(max_concurrent=None)
    decide(state, Stored(0, 1))
    delays = []
    for attempt in range(2, 10):
        [_, wait] = decide(state, item_to_retry(0, attempt, failures=attempt - 1))
        assert isinstance(wait, Wait)
        delays.append(wait.delay)
        decide(state, BackoffOver(0, attempt))
    assert max(delays) <= LONGEST_DELAY_S
    assert delays[0] <= FIRST_DELAY_S
    assert delays[-1] >= LONGEST_DELAY_S / 2


def test_failures_of_the_platform_are_retried_soon() -> None:
    state = new_state(max_concurrent=None)
    decide(state, Stored(0, 1))
    for attempt in range(2, 12):
        [_, wait] = decide(state, item_to_retry(0, attempt, after="preempted", failures=0))
        assert isinstance(wait, Wait)
        assert wait.delay <= FIRST_DELAY_S
        decide(state, BackoffOver(0, attempt))


def test_the_first_failure_ends_a_fail_fast_batch_once() -> None:
    state = new_state(max_concurrent=2, fail_fast=True)
    decide(state, Stored(0, 10))
    stop = Stop("fail_fast", keep_running=True)
    assert decide(state, ended(0, ItemState.FAILED)) == [Freed(0), stop]
    assert decide(state, ended(1, ItemState.FAILED)) == [Freed(1)]


def test_a_refused_item_counts_as_a_failure() -> None:
    state = new_state(fail_fast=True, cancel_running_on_fail=True)
    decide(state, Stored(0, 2))
    assert decide(state, Refused(0)) == [Freed(0), Stop("fail_fast", keep_running=False)]


def test_a_cancelled_item_is_not_a_failure() -> None:
    state = new_state(fail_fast=True)
    decide(state, Stored(0, 2))
    assert decide(state, ended(0, ItemState.CANCELLED)) == [Freed(0)]


def test_nothing_starts_after_a_stop() -> None:
    state = new_state(max_concurrent=1)
    decide(state, Stored(0, 3))
    decide(state, item_to_retry(0, 2))
    decide(state, StopRequested())
    assert decide(state, BackoffOver(0, 2)) == []
    assert decide(state, ended(1)) == [Freed(1)]
    assert decide(state, Stored(3, 2)) == []


def test_an_item_reopened_after_a_stop_runs() -> None:
    state = new_state(max_concurrent=1)
    decide(state, Stored(0, 2))
    decide(state, InputsEnded(2))
    decide(state, StopRequested())
    decide(state, ended(0, ItemState.CANCELLED))
    assert decide(state, ended(1, ItemState.CANCELLED)) == [Complete()]
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [Start(1, 2)]
    assert not state.complete
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [], "the same request again"
    assert decide(state, ended(1, ItemState.CANCELLED)) == [], "an older attempt"
    [_, wait] = decide(state, item_to_retry(1, 3))
    assert wait == Wait(1, 3, wait.delay)  # type: ignore[union-attr]
    assert decide(state, StopRequested()) == []
    assert decide(state, BackoffOver(1, 3)) == []
    assert decide(state, ended(1, ItemState.FAILED, 2)) == [Complete()]


def test_an_item_reopened_before_it_was_found_fails_at_its_last_attempt() -> None:
    """A stop ends the item before its newest attempt starts; the batch must still complete."""
    state = new_state(max_concurrent=1)
    decide(
        state,
        ItemsKnown(1),
        StopRequested(),
        AttemptFound(0, 4),
        Reopened(0, 4, wire.Standing(2, 2)),
        InputsEnded(1),
    )
    assert decide(state, ended(0, ItemState.FAILED, 2)) == [], "an older attempt"
    assert decide(state, ended(0, ItemState.FAILED, 3)) == [Freed(0), Complete()]


def test_an_item_reopened_before_it_is_known_runs_once_it_is_stored() -> None:
    state = State(MapSettings())
    decide(state, Stored(0, 1), StopRequested())
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == []
    assert decide(state, ItemsKnown(2)) == []
    assert decide(state, Stored(1, 1)) == [Start(1, 2)]
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [], "the same request again"


def test_a_reopened_item_without_an_input_is_started() -> None:
    """A stop came before its input was stored; starting it reports the missing input."""
    state = State(MapSettings())
    decide(state, Stored(0, 1), StopRequested(), Reopened(1, 2, wire.Standing(1, 2)))
    assert decide(state, InputsEnded(2)) == [Start(1, 2)]


def test_a_stop_ends_an_item_reopened_before_it_is_known() -> None:
    state = State(MapSettings())
    assert decide(state, Reopened(0, 2, wire.Standing(1, 1)), StopRequested(), Stored(0, 1)) == []


def test_an_item_with_a_value_is_never_reopened() -> None:
    state = new_state()
    decide(state, Stored(0, 1))
    decide(state, ended(0))
    assert decide(state, Reopened(0, 2, wire.Standing(1, 1))) == []


def test_a_found_attempt_takes_a_slot_and_is_not_started() -> None:
    state = new_state(max_concurrent=2)
    decide(state, ItemsKnown(4))
    assert decide(state, AttemptFound(1, 1)) == []
    assert decide(state, AttemptFound(2, 3)) == []
    assert decide(state, Stored(0, 4)) == [], "both slots are taken"
    assert decide(state, ended(1)) == [Freed(1), Start(0, 1)]
    assert decide(state, ended(2, attempt=3)) == [Freed(2), Start(3, 1)]


def test_a_ready_attempt_starts_under_its_number() -> None:
    state = new_state()
    decide(state, ItemsKnown(2))
    assert decide(state, AttemptReady(1, 4)) == [Start(1, 4)]
    assert decide(state, AttemptReady(1, 4)) == []


def test_no_more_attempts_start_than_the_start_limit() -> None:
    state = new_state()
    decide(state, StartLimit(2))
    assert decide(state, Stored(0, 9)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, ended(0)) == [Freed(0)]
    assert decide(state, StartLimit(3)) == [Start(2, 1)]
    assert len(decide(state, StartLimit(None))) == 6


def test_a_batch_is_complete_when_its_items_and_inputs_are() -> None:
    state = new_state(max_concurrent=None)
    decide(state, Stored(0, 2))
    assert decide(state, ended(0)) == [Freed(0)]
    assert decide(state, ended(1)) == [Freed(1)]
    assert decide(state, InputsEnded(2)) == [Complete()]
    assert decide(state, ended(1)) == []


def test_an_empty_input_is_complete_at_once() -> None:
    assert decide(new_state(), InputsEnded(0)) == [Complete()]


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
def test_events_about_unknown_items_change_nothing(event: scheduler.Event) -> None:
    state = new_state(max_concurrent=1)
    decide(state, Stored(0, 2))
    before = repr(state)
    assert decide(state, event) == []
    assert repr(state) == before


def test_a_spent_budget_starts_nothing_and_running_attempts_continue() -> None:
    state = new_state(max_concurrent=2)
    state.budget = 10.0
    assert decide(state, Stored(0, 5), SecondsSpent(9.9)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, SecondsSpent(10.0), ended(0)) == [
        Freed(0),
        Stop("budget", keep_running=True),
    ]
    assert state.busy == {1: 1}
    assert decide(state, SecondsSpent(4.0), ended(1)) == [Freed(1)]  # an older view


def test_a_budget_that_is_spent_by_the_last_item_stops_nothing() -> None:
    state = new_state(max_concurrent=1)
    state.budget = 1.0
    assert decide(state, Stored(0, 1), InputsEnded(1)) == [Start(0, 1)]
    assert decide(state, SecondsSpent(1.0), ended(0)) == [Freed(0), Complete()]


def test_a_spent_budget_stops_each_retry_and_each_reopened_item() -> None:
    state = new_state(max_concurrent=1, retries=3)
    state.budget = 1.0
    decide(state, Stored(0, 1), InputsEnded(1))
    assert Stop("budget", keep_running=True) in decide(
        state, SecondsSpent(1.0), item_to_retry(0, 2)
    )
    assert decide(state, StopRequested()) == []
    reopened = Reopened(0, 2, wire.Standing(retried=2))
    assert decide(state, reopened) == [Stop("budget", keep_running=True)]
    assert decide(state) == []
