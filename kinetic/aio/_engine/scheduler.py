"""Decide which attempt starts next, and when a batch is complete, without I/O.

`decide` applies events to the state, and returns the actions to carry out. The coordinator
reports the effects of the actions by further events. An event that is late, repeated, or about
an unknown item changes nothing.

A batch has an item for each input; each attempt of an item runs it as one job.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic.options import MapSettings

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
"""First and longest backoff before a retry, in seconds; it doubles after each user error."""


# --- events ---


@dataclass(frozen=True, slots=True)
class ItemsKnown:
    """There are *count* items so far; this event doesn't let them start."""

    count: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The inputs of items *first* to *first + count - 1* are stored, so these items may start."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class InputsEnded:
    """There will be no more items than *total*; *sealed* says that the store has this number."""

    total: int
    sealed: bool = True


@dataclass(frozen=True, slots=True)
class ItemRead:
    """An item was read from the store; *item* is its state there."""

    index: int
    item: wire.Item


@dataclass(frozen=True, slots=True)
class AttemptFound:
    """This attempt has a job, or a process has claimed it, and it has no outcome yet."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptReady:
    """Attempt *attempt* of an item may start.

    An earlier attempt has ended, and this attempt has no object in the store and no job.
    """

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """A retry request has reopened an item: its attempt *attempt* may start.

    *standing* sums up the requests to stop or retry the item.
    """

    index: int
    attempt: int
    standing: wire.Standing


@dataclass(frozen=True, slots=True)
class Refused:
    """An item counts as failed: it cannot be submitted, or its objects are forged or damaged."""

    index: int


@dataclass(frozen=True, slots=True)
class BackoffOver:
    """The delay before attempt *attempt* is over."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StartLimit:
    """At most *items* items of the batch may have started; None allows any number."""

    items: int | None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The whole batch was stopped: an item starts only if a later retry request reopens it."""


@dataclass(frozen=True, slots=True)
class SecondsSpent:
    """All ended attempts together took *seconds* seconds."""

    seconds: float


Event = (
    ItemsKnown
    | Stored
    | InputsEnded
    | ItemRead
    | AttemptFound
    | AttemptReady
    | Reopened
    | Refused
    | BackoffOver
    | StartLimit
    | StopRequested
    | SecondsSpent
)


# --- actions ---


@dataclass(frozen=True, slots=True)
class Start:
    """Start this attempt now."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Freed:
    """Release the item's slot in the client's limit of attempts: its attempt has an outcome."""

    index: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Report `BackoffOver` for this attempt after *delay* seconds."""

    index: int
    attempt: int
    delay: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Store a request to stop the whole batch, then read every open item again."""

    cause: str
    keep_running: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """Every item has ended."""


Action = Start | Freed | Wait | Stop | Complete

BEGUN, SUCCEEDED, FAILED = 1, 2, 3
"""Marks of items in `State.marks`; 0 marks an item that has not started."""

NO_REQUESTS = wire.Standing()


@dataclass(slots=True)
class State:
    """The state that decisions depend on: a byte for each item, and more for items under way.

    ``fresh_ranges`` has ranges of items that may start for the first time. Three fields map
    an item to its attempt. Attempts in ``busy`` count towards ``max_concurrent``. Attempts in
    ``due`` start as soon as this limit allows. Attempts in ``delayed`` wait for the end of
    their backoff. ``reopened`` maps an item to the effect of its last retry request.
    ``revived`` has the items that were reopened since the batch was last stopped.
    ``early_reopened`` has the items that were reopened before this process had read their inputs.

    ``started`` counts the items that were started, or ended without a start; `StartLimit` sets
    its limit ``bound``. ``ended`` counts the items that are final now. When ``spent``, the seconds
    of all attempts, reaches ``budget``, nothing more starts.
    """

    settings: MapSettings
    budget: float = math.inf
    spent: float = 0.0
    random: random.Random = field(default_factory=random.Random)
    marks: bytearray = field(default_factory=bytearray)
    fresh_ranges: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    due: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    busy: dict[int, int] = field(default_factory=dict[int, int])
    delayed: dict[int, int] = field(default_factory=dict[int, int])
    reopened: dict[int, wire.Standing] = field(default_factory=dict[int, wire.Standing])
    revived: set[int] = field(default_factory=set[int])
    early_reopened: dict[int, Reopened] = field(default_factory=dict[int, Reopened])
    started: int = 0
    ended: int = 0
    total: int | None = None
    sealed: bool = False
    bound: int | None = None
    stopping: bool = False
    complete: bool = False

    @property
    def free(self) -> float:
        """How many more attempts may be started now."""
        limit = self.settings.max_concurrent
        return float("inf") if limit is None else limit - len(self.busy)

    @property
    def waits_for_slot(self) -> bool:
        """Whether an attempt could start but must wait for the limit."""
        return bool(self.fresh_ranges or self.due)

    @property
    def would_start(self) -> bool:
        """Whether an attempt waits to start, or more inputs may come."""
        more = not self.stopping and self.total is None
        return more or self.waits_for_slot or bool(self.delayed or self.early_reopened)

    def is_final(self, index: int) -> bool:
        """Return whether the events so far say that the item has ended."""
        return index < len(self.marks) and self.marks[index] >= SUCCEEDED

    def unfinished(self) -> list[int]:
        """Return the items that have not ended."""
        return [index for index, mark in enumerate(self.marks) if mark < SUCCEEDED]

    def is_halted(self, index: int) -> bool:
        """Return whether a stop of the whole batch keeps the item from starting."""
        return self.stopping and index not in self.revived

    def mark(self, index: int, mark: int) -> None:
        """Record that an item has started or ended."""
        before = self.marks[index]
        self.started += before == 0
        self.ended += (mark >= SUCCEEDED) - (before >= SUCCEEDED)
        self.marks[index] = mark


def decide(state: State, *events: Event) -> list[Action]:
    """Apply *events* to *state*, and return the actions in order."""
    actions: list[Action] = []
    for event in events:
        actions += _apply(state, event)
    if state.spent >= state.budget and state.would_start:
        _drop_waiting(state)
        actions.append(Stop("budget", keep_running=True))
    _start(state, actions)
    if not state.complete and state.total is not None and state.ended >= state.total:
        state.complete = True
        actions.append(Complete())
    return actions


def _apply(state: State, event: Event) -> Sequence[Action]:
    """Apply one event to *state*; return actions other than starts."""
    match event:
        case ItemRead(index, item):
            return _apply_item(state, index, item)
        case BackoffOver(index, attempt):
            if state.delayed.get(index) == attempt and not state.is_halted(index):
                del state.delayed[index]
                state.due[index] = attempt
        case ItemsKnown(count):
            _add_items(state, count)
        case Stored(first, count):
            _add_items(state, first + count)
            if count > 0 and not state.stopping:
                state.fresh_ranges.append((first, first + count))
            return _reopen_early(state)
        case InputsEnded(total, sealed):
            if state.total is None and total >= len(state.marks):
                _add_items(state, total)
                state.total, state.sealed = total, sealed
            # The total may include items whose inputs were never stored because a stop came first.
            # A retry request can reopen these items.
            return _reopen_early(state)
        case AttemptFound(index, attempt):
            _note_running(state, index, attempt)
        case AttemptReady(index, attempt):
            is_idle = index not in state.busy and index not in state.delayed
            if _is_open(state, index) and is_idle and not state.is_halted(index):
                state.mark(index, BEGUN)
                state.due.setdefault(index, attempt)
        case Reopened():
            return _reopen(state, event)
        case Refused(index):
            if _is_open(state, index):
                return _close(state, index, FAILED)
        case StartLimit(items):
            state.bound = items
        case StopRequested():
            _drop_waiting(state)
        case SecondsSpent(seconds):
            state.spent = max(state.spent, seconds)
    return ()


def _add_items(state: State, count: int) -> None:
    limit = count if state.total is None else min(count, state.total)
    state.marks.extend(bytes(max(0, limit - len(state.marks))))


def _is_open(state: State, index: int) -> bool:
    return 0 <= index < len(state.marks) and state.marks[index] < SUCCEEDED


def _apply_item(state: State, index: int, item: wire.Item) -> Sequence[Action]:
    """Close an item that is final in the store; delay one whose later attempt may start."""
    if not _is_open(state, index):
        return ()
    if item.state.final:
        succeeded = item.state is wire.ItemState.SUCCEEDED
        if not succeeded and item.attempt <= state.reopened.get(index, NO_REQUESTS).base:
            return ()  # the item ended before it was reopened
        return _close(state, index, SUCCEEDED if succeeded else FAILED, item.state)
    running = state.busy.get(index)
    if item.state is not wire.ItemState.OPEN or running is None or item.attempt <= running:
        return ()
    # The item is open at a later attempt, so the running attempt has its outcome: free its slot.
    del state.busy[index]
    if state.is_halted(index):
        return (Freed(index),)
    state.delayed[index] = item.attempt
    return (Freed(index), Wait(index, item.attempt, _backoff_s(state, item)))


def _close(
    state: State, index: int, mark: int, item_state: wire.ItemState = wire.ItemState.FAILED
) -> Sequence[Action]:
    """Mark an item as ended; with ``fail_fast``, its failure stops the batch."""
    state.mark(index, mark)
    state.delayed.pop(index, None)
    state.due.pop(index, None)
    actions: list[Action] = []
    if state.busy.pop(index, None) is not None:
        actions.append(Freed(index))
    if item_state is wire.ItemState.FAILED and state.settings.fail_fast and not state.stopping:
        _drop_waiting(state)
        keep_running = not state.settings.cancel_running_on_fail
        actions.append(Stop("fail_fast", keep_running=keep_running))
    return actions


def _note_running(state: State, index: int, attempt: int) -> None:
    planned = max(state.delayed.get(index, 0), state.due.get(index, 0))
    if _is_open(state, index) and state.busy.get(index, 0) < attempt and planned <= attempt:
        state.delayed.pop(index, None)
        state.due.pop(index, None)
        state.busy[index] = attempt
        state.mark(index, BEGUN)


def _reopen(state: State, event: Reopened) -> Sequence[Action]:
    """Make an item due again, unless it has succeeded or *event* was applied before."""
    index, attempt = event.index, event.attempt
    if index >= len(state.marks):  # this process hasn't read the item's input yet
        state.early_reopened[index] = event
        return ()
    can_reopen = index >= 0 and state.marks[index] != SUCCEEDED
    if not can_reopen or event.standing.retried <= state.reopened.get(index, NO_REQUESTS).retried:
        return ()
    state.reopened[index] = event.standing
    state.revived.add(index)
    state.mark(index, BEGUN)
    state.complete = False
    if state.busy.get(index, 0) >= attempt:
        return ()
    state.delayed.pop(index, None)
    state.due[index] = attempt
    return () if state.busy.pop(index, None) is None else (Freed(index),)


def _reopen_early(state: State) -> Sequence[Action]:
    ready = [index for index in state.early_reopened if index < len(state.marks)]
    return [action for index in ready for action in _reopen(state, state.early_reopened.pop(index))]


def _drop_waiting(state: State) -> None:
    """Note that the batch is stopped, and forget the attempts that wait to start."""
    state.stopping = True
    state.revived.clear()
    state.fresh_ranges.clear()
    state.due.clear()
    state.delayed.clear()
    state.early_reopened.clear()


def _start(state: State, actions: list[Action]) -> None:
    """Append a `Start` for each allowed attempt: first the attempts in ``due``, then new items."""
    while state.free > 0:
        if state.due:
            index, attempt = state.due.popitem(last=False)
        elif state.fresh_ranges and (state.bound is None or state.started < state.bound):
            index, stop = state.fresh_ranges.popleft()
            attempt = 1
            if index + 1 < stop:
                state.fresh_ranges.appendleft((index + 1, stop))
            if state.marks[index]:
                continue  # the item runs already, or has ended
        else:
            return
        state.busy[index] = attempt
        state.mark(index, BEGUN)
        actions.append(Start(index, attempt))


def _backoff_s(state: State, item: wire.Item) -> float:
    """Return the backoff: longer after each user error, short after an infrastructure failure."""
    if item.after in INFRASTRUCTURE:
        return FIRST_DELAY_S * state.random.uniform(0.0, 1.0)
    max_delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(item.failures - 1, 60))
    return max_delay * state.random.uniform(0.5, 1.0)
