"""Test what a batch decides: when it has work, stops, or is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.wire import Item, ItemState, Kind, Outcome
from kinetic.aio._engine.decisions import Decision, State
from kinetic.options import MapOptions, MapSettings

VALUE = Outcome(kind=Kind.VALUE)
NOTHING = Decision(False, {}, "")
OFFER = Decision(True, {}, "")


def new_state(**options: Unpack[MapOptions]) -> State:
    return State(MapSettings(**options))


def ended(state: ItemState = ItemState.SUCCEEDED, attempt: int = 1) -> Item:
    return Item(state, attempt, VALUE)


def stored(count: int, **options: Unpack[MapOptions]) -> State:
    """Return the state of a batch whose first *count* inputs are stored and offered."""
    state = new_state(**options)
    state.store(count)
    state.decide()
    return state


def test_stored_items_are_offered_and_open_items_end_once() -> None:
    state = new_state()
    state.add(2)
    assert state.decide() == NOTHING
    state.store(2)
    assert state.is_undecided
    assert state.decide() == OFFER
    state.note(0, Item(ItemState.OPEN, 2))
    for index in (0, 0, 1):
        state.note(index, ended())
    assert not state.complete
    state.end(2)
    state.note(1, ended())
    assert state.complete and state.ended == 2
    assert state.decide() == NOTHING


def test_an_empty_input_is_complete_at_once() -> None:
    state = new_state()
    state.end(0)
    assert state.complete


def test_a_worker_is_idle_while_fewer_items_are_open_than_may_run() -> None:
    state = stored(2, max_concurrent=2)
    assert not state.has_idle_worker
    state.note(1, ended())
    assert state.has_idle_worker


def test_the_first_failure_ends_a_fail_fast_batch_once() -> None:
    state = stored(10, fail_fast=True)
    state.note(0, ended(ItemState.FAILED))
    assert state.decide() == Decision(False, {}, "fail_fast")
    state.note(1, ended(ItemState.FAILED))
    assert state.decide() == NOTHING


def test_a_refused_item_counts_as_a_failure() -> None:
    state = stored(2, fail_fast=True)
    state.refuse(0)
    assert state.decide().stop == "fail_fast"


def test_a_cancelled_item_is_not_a_failure() -> None:
    state = stored(2, fail_fast=True)
    state.note(0, ended(ItemState.CANCELLED))
    assert state.decide() == NOTHING


def test_nothing_is_offered_after_a_stop_but_what_is_reopened() -> None:
    state = stored(2)
    state.end(2)
    state.stop()
    state.store(2)
    assert state.decide() == NOTHING
    for index in (0, 1):
        state.note(index, ended(ItemState.CANCELLED))
    assert state.complete
    state.reopen(1, 2, wire.Standing(1, 2))
    assert state.decide() == Decision(False, {1: 2}, "")
    assert not state.complete
    state.reopen(1, 2, wire.Standing(1, 2))
    assert state.decide() == NOTHING, "the same request again"
    state.note(1, ended(ItemState.CANCELLED))
    assert not state.complete, "an older attempt"
    state.note(1, ended(ItemState.FAILED, 2))
    assert state.complete


def test_an_item_reopened_before_it_is_known_runs_once_it_is_stored() -> None:
    state = stored(1)
    state.stop()
    state.reopen(1, 2, wire.Standing(1, 2))
    assert state.decide() == NOTHING
    state.store(2)
    assert state.decide() == Decision(False, {1: 2}, "")
    state.reopen(1, 2, wire.Standing(1, 2))
    assert state.decide() == NOTHING, "the same request again"


def test_a_reopened_item_without_an_input_is_offered() -> None:
    """A stop came before its input was stored; offering it reports the missing input."""
    state = stored(1)
    state.stop()
    state.reopen(1, 2, wire.Standing(1, 2))
    state.end(2)
    assert state.decide() == Decision(False, {1: 2}, "")


def test_a_stop_ends_an_item_reopened_before_it_is_known() -> None:
    state = new_state()
    state.reopen(0, 2, wire.Standing(1, 1))
    state.stop()
    state.store(1)
    assert state.decide() == NOTHING


def test_an_item_with_a_value_is_never_reopened() -> None:
    state = stored(1)
    state.note(0, ended())
    state.reopen(0, 2, wire.Standing(1, 1))
    assert state.decide() == NOTHING


UNKNOWN: dict[str, Callable[[State], None]] = {
    "an item above": lambda state: state.note(9, ended()),
    "an item below": lambda state: state.note(-1, ended(ItemState.FAILED)),
    "a reopened item": lambda state: state.reopen(-1, 1, wire.Standing(0, 1)),
    "a refused item": lambda state: state.refuse(9),
    "an early end": lambda state: state.end(0),
}


@pytest.mark.parametrize("report", UNKNOWN)
def test_reports_about_unknown_items_change_nothing(report: str) -> None:
    state = stored(2)
    before = repr(state)
    UNKNOWN[report](state)
    assert repr(state) == before
    assert state.decide() == NOTHING


def test_a_spent_budget_stops_the_batch_and_each_reopened_item() -> None:
    state = new_state()
    state.budget = 10.0
    state.store(5)
    state.spend(9.9)
    assert state.decide() == OFFER
    state.spend(10.0)
    state.note(0, ended())
    assert state.decide() == Decision(False, {}, "budget")
    state.spend(4.0)  # an older view
    state.note(1, ended())
    assert state.decide() == NOTHING
    state.stop()
    assert state.decide() == NOTHING
    state.reopen(2, 2, wire.Standing(retried=2))
    assert state.decide() == Decision(False, {}, "budget")


def test_a_budget_that_is_spent_by_the_last_item_stops_nothing() -> None:
    state = stored(1)
    state.budget = 1.0
    state.end(1)
    state.spend(1.0)
    state.note(0, ended())
    assert state.decide() == NOTHING and state.complete
