"""Test what a batch decides: when it has work, stops, or is complete."""

from __future__ import annotations

from typing import Unpack

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Item, ItemState, Kind, Outcome
from kinetic.aio._engine.decisions import (
    Complete,
    Event,
    InputsEnded,
    ItemRead,
    ItemsKnown,
    Offer,
    OfferAgain,
    Refused,
    Reopened,
    SecondsSpent,
    State,
    Stop,
    StopRequested,
    Stored,
    decide,
)
from kinetic.options import MapOptions, MapSettings

VALUE = Outcome(kind=Kind.VALUE)


def new_state(**options: Unpack[MapOptions]) -> State:
    return State(MapSettings(**options))


def ended(index: int, state: ItemState = ItemState.SUCCEEDED, attempt: int = 1) -> ItemRead:
    return ItemRead(index, Item(state, attempt, VALUE))


def test_stored_items_are_offered_and_open_items_end_once() -> None:
    state = new_state()
    assert decide(state, ItemsKnown(2)) == []
    assert decide(state, Stored(0, 2)) == [Offer()]
    assert decide(state, ItemRead(0, Item(ItemState.OPEN, 2))) == []
    assert decide(state, ended(0), ended(0), ended(1)) == []
    assert decide(state, InputsEnded(2)) == [Complete()]
    assert decide(state, ended(1)) == []


def test_an_empty_input_is_complete_at_once() -> None:
    assert decide(new_state(), InputsEnded(0)) == [Complete()]


def test_a_worker_is_idle_while_fewer_items_are_open_than_may_run() -> None:
    state = new_state(max_concurrent=2)
    decide(state, Stored(0, 2))
    assert not state.has_idle_worker
    decide(state, ended(1))
    assert state.has_idle_worker


def test_the_first_failure_ends_a_fail_fast_batch_once() -> None:
    state = new_state(fail_fast=True)
    decide(state, Stored(0, 10))
    stop = Stop("fail_fast", keep_running=True)
    assert decide(state, ended(0, ItemState.FAILED)) == [stop]
    assert decide(state, ended(1, ItemState.FAILED)) == []


def test_a_refused_item_counts_as_a_failure() -> None:
    state = new_state(fail_fast=True, cancel_running_on_fail=True)
    decide(state, Stored(0, 2))
    assert decide(state, Refused(0)) == [Stop("fail_fast", keep_running=False)]


def test_a_cancelled_item_is_not_a_failure() -> None:
    state = new_state(fail_fast=True)
    decide(state, Stored(0, 2))
    assert decide(state, ended(0, ItemState.CANCELLED)) == []


def test_nothing_is_offered_after_a_stop_but_what_is_reopened() -> None:
    state = new_state()
    decide(state, Stored(0, 2), InputsEnded(2), StopRequested())
    assert decide(state, Stored(0, 2)) == []
    decide(state, ended(0, ItemState.CANCELLED))
    assert decide(state, ended(1, ItemState.CANCELLED)) == [Complete()]
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [OfferAgain(1, 2)]
    assert not state.complete
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [], "the same request again"
    assert decide(state, ended(1, ItemState.CANCELLED)) == [], "an older attempt"
    assert decide(state, ended(1, ItemState.FAILED, 2)) == [Complete()]


def test_an_item_reopened_before_it_is_known_runs_once_it_is_stored() -> None:
    state = new_state()
    decide(state, Stored(0, 1), StopRequested())
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == []
    assert decide(state, Stored(1, 1)) == [OfferAgain(1, 2)]
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [], "the same request again"


def test_a_reopened_item_without_an_input_is_offered() -> None:
    """A stop came before its input was stored; offering it reports the missing input."""
    state = new_state()
    decide(state, Stored(0, 1), StopRequested(), Reopened(1, 2, wire.Standing(1, 2)))
    assert decide(state, InputsEnded(2)) == [OfferAgain(1, 2)]


def test_a_stop_ends_an_item_reopened_before_it_is_known() -> None:
    state = new_state()
    assert decide(state, Reopened(0, 2, wire.Standing(1, 1)), StopRequested(), Stored(0, 1)) == []


def test_an_item_with_a_value_is_never_reopened() -> None:
    state = new_state()
    decide(state, Stored(0, 1), ended(0))
    assert decide(state, Reopened(0, 2, wire.Standing(1, 1))) == []


UNKNOWN = [
    ItemRead(9, Item(ItemState.SUCCEEDED, 1, VALUE)),
    ItemRead(-1, Item(ItemState.FAILED, 1, VALUE)),
    Reopened(-1, 1, wire.Standing(0, 1)),
    Refused(9),
    InputsEnded(0),
]


@pytest.mark.parametrize("event", UNKNOWN, ids=lambda event: type(event).__name__)
def test_events_about_unknown_items_change_nothing(event: Event) -> None:
    state = new_state()
    decide(state, Stored(0, 2))
    before = repr(state)
    assert decide(state, event) == []
    assert repr(state) == before


def test_a_spent_budget_stops_the_batch_and_each_reopened_item() -> None:
    state = new_state()
    state.budget = 10.0
    stop = Stop("budget", keep_running=True)
    assert decide(state, Stored(0, 5), SecondsSpent(9.9)) == [Offer()]
    assert decide(state, SecondsSpent(10.0), ended(0)) == [stop]
    assert decide(state, SecondsSpent(4.0), ended(1)) == []  # an older view
    assert decide(state, StopRequested()) == []
    assert decide(state, Reopened(2, 2, wire.Standing(retried=2))) == [stop]


def test_a_budget_that_is_spent_by_the_last_item_stops_nothing() -> None:
    state = new_state()
    state.budget = 1.0
    decide(state, Stored(0, 1), InputsEnded(1))
    assert decide(state, SecondsSpent(1.0), ended(0)) == [Complete()]
