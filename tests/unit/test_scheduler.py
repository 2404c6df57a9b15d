"""What starts next: decisions, without a loop."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Unpack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.wire import Item, ItemState, Kind, Outcome
from kinetic.aio._engine import scheduler
from kinetic.aio._engine.scheduler import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    Again,
    Bound,
    Complete,
    Due,
    Ended,
    Found,
    Freed,
    Known,
    Refused,
    Reopened,
    Seen,
    Spent,
    Start,
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


def done(index: int, state: ItemState = ItemState.SUCCEEDED, attempt: int = 1) -> Seen:
    return Seen(index, Item(state, attempt, VALUE))


def opened(index: int, attempt: int, after: str = "user error", failures: int = 1) -> Seen:
    return Seen(index, Item(ItemState.OPEN, attempt, None, after, failures))


def test_no_more_start_than_there_are_slots() -> None:
    state = new(max_concurrent=2)
    assert decide(state, Stored(0, 5)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, done(1)) == [Freed(1), Start(2, 1)]


def test_a_slot_is_freed_by_an_outcome_only() -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 2))
    assert decide(state, Seen(0, Item(ItemState.OPEN, 1))) == []
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
    assert decide(state, Due(0, 2)) == []
    assert decide(state, done(1)) == [Freed(1), Start(0, 2)]


def test_delays_grow_with_failures_of_the_users_up_to_a_limit() -> None:
    state = new(max_concurrent=None)
    decide(state, Stored(0, 1))
    delays = []
    for attempt in range(2, 10):
        [_, wait] = decide(state, opened(0, attempt, failures=attempt - 1))
        assert isinstance(wait, Wait)
        delays.append(wait.delay)
        decide(state, Due(0, attempt))
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
        decide(state, Due(0, attempt))


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
    assert decide(state, Due(0, 2)) == []
    assert decide(state, done(1)) == [Freed(1)]
    assert decide(state, Stored(3, 2)) == []


def test_what_is_reopened_after_a_stop_runs() -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 2))
    decide(state, Ended(2))
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
    assert decide(state, Due(1, 3)) == []
    assert decide(state, done(1, ItemState.FAILED, 2)) == [Complete()]


def test_what_was_tried_again_twice_when_it_is_found_may_fail_by_the_first_of_them() -> None:
    """A stop ends it before the second has begun; whoever found it has to hear that it is over."""
    state = new(max_concurrent=1)
    decide(
        state, Known(1), StopRequested(), Found(0, 4), Reopened(0, 4, wire.Standing(2, 2)), Ended(1)
    )
    assert decide(state, done(0, ItemState.FAILED, 2)) == [], "that was before"
    assert decide(state, done(0, ItemState.FAILED, 3)) == [Freed(0), Complete()]


def test_what_is_reopened_before_it_is_known_here_runs_once_it_is_stored() -> None:
    state = State(MapSettings())
    decide(state, Stored(0, 1), StopRequested())
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == []
    assert decide(state, Known(2)) == []
    assert decide(state, Stored(1, 1)) == [Start(1, 2)]
    assert decide(state, Reopened(1, 2, wire.Standing(1, 2))) == [], "the same request again"


def test_what_is_reopened_and_never_got_an_input_is_started() -> None:
    """A stop came before it was stored: to start it tells everybody that it has none."""
    state = State(MapSettings())
    decide(state, Stored(0, 1), StopRequested(), Reopened(1, 2, wire.Standing(1, 2)))
    assert decide(state, Ended(2)) == [Start(1, 2)]


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
    decide(state, Known(4))
    assert decide(state, Found(1, 1)) == []
    assert decide(state, Found(2, 3)) == []
    assert decide(state, Stored(0, 4)) == [], "both slots are taken"
    assert decide(state, done(1)) == [Freed(1), Start(0, 1)]
    assert decide(state, done(2, attempt=3)) == [Freed(2), Start(3, 1)]


def test_what_has_begun_and_has_nothing_starts_under_its_number() -> None:
    state = new()
    decide(state, Known(2))
    assert decide(state, Again(1, 4)) == [Start(1, 4)]
    assert decide(state, Again(1, 4)) == []


def test_no_more_begin_than_the_window_lets() -> None:
    state = new()
    decide(state, Bound(2))
    assert decide(state, Stored(0, 9)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, done(0)) == [Freed(0)]
    assert decide(state, Bound(3)) == [Start(2, 1)]
    assert len(decide(state, Bound(None))) == 6


def test_it_is_complete_when_all_items_are_and_no_more_come() -> None:
    state = new(max_concurrent=None)
    decide(state, Stored(0, 2))
    assert decide(state, done(0)) == [Freed(0)]
    assert decide(state, done(1)) == [Freed(1)]
    assert decide(state, Ended(2)) == [Complete()]
    assert decide(state, done(1)) == []


def test_an_empty_input_is_complete_at_once() -> None:
    assert decide(new(), Ended(0)) == [Complete()]


UNKNOWN = [
    Seen(9, Item(ItemState.SUCCEEDED, 1, VALUE)),
    Seen(-1, Item(ItemState.FAILED, 1, VALUE)),
    Found(9, 1),
    Again(9, 1),
    Reopened(-1, 1, wire.Standing(0, 1)),
    Refused(9),
    Due(9, 1),
    Ended(0),
]


@pytest.mark.parametrize("event", UNKNOWN, ids=lambda event: type(event).__name__)
def test_what_is_said_of_unknown_items_changes_nothing(event: scheduler.Event) -> None:
    state = new(max_concurrent=1)
    decide(state, Stored(0, 2))
    before = repr(state)
    assert decide(state, event) == []
    assert repr(state) == before


@dataclass
class Truth:
    """What the store would say of an item: outcomes by attempt, under the real rule."""

    attempts: dict[int, wire.Attempt] = field(default_factory=dict)

    def end(self, number: int, kind: Kind, reason: str = "") -> None:
        self.attempts.setdefault(number, wire.Attempt("x", Outcome(kind=kind, reason=reason)))


class Fanout(RuleBasedStateMachine):
    """A store, a platform that runs what was started, and news that come late, twice or never.

    What was decided is carried out by the real rule of the wire; whatever the
    order, an attempt starts once, when it is its turn, and never too many.
    """

    @initialize(slots=st.integers(1, 4), retries=st.integers(0, 2), seed=st.integers(0, 99))
    def begin(self, slots: int, retries: int, seed: int) -> None:
        self.budgets = RetryBudgets(user=retries, infrastructure=1)
        self.slots = slots
        self.state = State(MapSettings(max_concurrent=slots), random=random.Random(seed))
        self.requests: list[wire.Request] = []
        self.items: dict[int, Truth] = {}
        self.live: dict[int, int] = {}
        self.started: set[tuple[int, int]] = set()
        self.news: list[scheduler.Event] = []
        self.timers: list[Due] = []
        self.told: dict[int, Item] = {}
        self.stored = 0
        self.ended = False

    def tell(self, event: scheduler.Event) -> None:
        for action in decide(self.state, event):
            match action:
                case Start(index, attempt):
                    assert (index, attempt) not in self.started, "it starts once"
                    self.started.add((index, attempt))
                    truth = self.items[index]
                    assert all(
                        n in truth.attempts for n in range(1, attempt) if not self.retired(index, n)
                    )
                    assert all(
                        one.outcome is None or one.outcome.kind is not Kind.VALUE
                        for one in truth.attempts.values()
                    )
                    self.live[index] = attempt
                    assert len(self.live) <= self.slots
                case Wait(index, attempt, delay):
                    assert delay >= 0
                    self.timers.append(Due(index, attempt))
                case Stop():
                    raise AssertionError("nobody asked for a stop")
                case _:
                    pass

    def retired(self, index: int, number: int) -> bool:
        return any(number <= one.bases.get(index, 0) for one in self.requests)

    def item(self, index: int) -> Item:
        return wire.item_state(
            wire.standing(index, self.requests), self.items[index].attempts, self.budgets
        )

    @precondition(lambda self: not self.ended)
    @rule(count=st.integers(1, 3))
    def store(self, count: int) -> None:
        for index in range(self.stored, self.stored + count):
            self.items[index] = Truth()
        self.stored += count
        self.tell(Stored(self.stored - count, count))

    @precondition(lambda self: not self.ended)
    @rule()
    def end_inputs(self) -> None:
        self.ended = True
        self.tell(Ended(self.stored))

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        kind=st.sampled_from([Kind.VALUE, Kind.ERROR, Kind.LOST]),
        reason=st.sampled_from(["", "preempted"]),
    )
    def attempt_ends(self, data: st.DataObject, kind: Kind, reason: str) -> None:
        index = data.draw(st.sampled_from(sorted(self.live)))
        self.items[index].end(self.live.pop(index), kind, reason)
        self.news.append(Seen(index, self.item(index)))

    @precondition(lambda self: self.news)
    @rule(data=st.data(), twice=st.booleans())
    def news_arrive(self, data: st.DataObject, twice: bool) -> None:
        event = self.news.pop(data.draw(st.integers(0, len(self.news) - 1)))
        if twice:
            self.news.append(event)
        self.tell(event)

    @precondition(lambda self: self.timers)
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        self.tell(self.timers.pop(data.draw(st.integers(0, len(self.timers) - 1))))

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def somebody_retries(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.items)))
        attempts = self.items[index].attempts
        base = wire.retry_base(wire.standing(index, self.requests), attempts, self.budgets)
        if base is not None and not any(
            isinstance(one, Seen) and one.index == index for one in self.news
        ):
            self.requests.append(wire.Request(kind="retry", bases={index: base}))
            self.tell(
                Reopened(index, self.item(index).attempt, wire.standing(index, self.requests))
            )

    @rule(index=st.integers(-2, 40), attempt=st.integers(1, 4))
    def nonsense(self, index: int, attempt: int) -> None:
        """What nobody has asked for changes nothing."""
        if index not in self.items:
            self.tell(Due(index, attempt))
            self.tell(Seen(index, Item(ItemState.FAILED, attempt, VALUE)))
            self.tell(Found(index, attempt))

    @invariant()
    def slots_hold(self) -> None:
        if hasattr(self, "live"):
            assert len(self.live) <= self.slots
            assert self.live.items() <= self.state.busy.items()

    def teardown(self) -> None:
        """Left alone, it ends with one outcome an item."""
        if not hasattr(self, "live"):
            return
        if not self.ended:
            self.end_inputs()
        while self.live or self.news or self.timers:
            if self.live:
                index = min(self.live)
                self.items[index].end(self.live.pop(index), Kind.VALUE)
                self.tell(Seen(index, self.item(index)))
            elif self.news:
                self.tell(self.news.pop(0))
            else:
                self.tell(self.timers.pop(0))
        assert all(self.item(index).state.final for index in self.items)
        assert self.state.complete
        assert self.state.ended == self.stored


Fanout.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestFanout = Fanout.TestCase


def test_what_is_spent_starts_nothing_more_and_what_runs_goes_on() -> None:
    state = new(max_concurrent=2)
    state.budget = 10.0
    assert decide(state, Stored(0, 5), Spent(9.9)) == [Start(0, 1), Start(1, 1)]
    assert decide(state, Spent(10.0), done(0)) == [Freed(0), Stop("budget", keep_running=True)]
    assert state.busy == {1: 1}
    assert decide(state, Spent(4.0), done(1)) == [Freed(1)]  # an older view


def test_a_budget_that_is_spent_by_the_last_item_stops_nothing() -> None:
    state = new(max_concurrent=1)
    state.budget = 1.0
    assert decide(state, Stored(0, 1), Ended(1)) == [Start(0, 1)]
    assert decide(state, Spent(1.0), done(0)) == [Freed(0), Complete()]


def test_a_spent_budget_stops_retries_and_what_is_reopened_each_time() -> None:
    state = new(max_concurrent=1, retries=3)
    state.budget = 1.0
    decide(state, Stored(0, 1), Ended(1))
    assert Stop("budget", keep_running=True) in decide(state, Spent(1.0), opened(0, 2))
    assert decide(state, StopRequested()) == []
    reopened = Reopened(0, 2, wire.Standing(retried=2))
    assert decide(state, reopened) == [Stop("budget", keep_running=True)]
    assert decide(state) == []
