"""Decide what a batch needs: workers, a stop, or nothing more. Without I/O.

`decide` applies events to the state, and returns the actions to carry out. An event that is late,
repeated, or about an unknown item changes nothing.

A batch has an item for each input. Workers take the items, and retry them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kinetic._runner.protocol import wire
from kinetic.options import MapSettings

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
class Reopened:
    """A retry request has reopened an item: its attempt *attempt* may start.

    *standing* sums up the requests to stop or retry the item.
    """

    index: int
    attempt: int
    standing: wire.Standing


@dataclass(frozen=True, slots=True)
class Refused:
    """An item counts as failed: it can't be submitted, or its objects are forged or damaged."""

    index: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The whole batch was stopped: an item starts only if a later retry request reopens it."""


@dataclass(frozen=True, slots=True)
class SecondsSpent:
    """All ended attempts together took *seconds* seconds."""

    seconds: float


Event = (
    ItemsKnown | Stored | InputsEnded | ItemRead | Reopened | Refused | StopRequested | SecondsSpent
)


# --- actions ---


@dataclass(frozen=True, slots=True)
class Offer:
    """Have workers for items that may start from now on."""


@dataclass(frozen=True, slots=True)
class OfferAgain:
    """Have workers for an item that was reopened."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Store a request to stop the whole batch, then read every open item again."""

    cause: str
    keep_running: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """Every item has ended."""


Action = Offer | OfferAgain | Stop | Complete

OPEN, SUCCEEDED, FAILED = 0, 1, 2
"""Marks of items in `State.marks`."""

NO_REQUESTS = wire.Standing()


@dataclass(slots=True)
class State:
    """The state that decisions depend on: a byte for each item, and more for reopened ones.

    ``reopened`` maps an item to the effect of its last retry request. ``early_reopened`` has the
    items that were reopened before this process had read their inputs. ``ended`` counts the items
    that are final now. When ``spent``, the seconds of all attempts, reaches ``budget``, nothing
    more starts.
    """

    settings: MapSettings
    budget: float = math.inf
    spent: float = 0.0
    marks: bytearray = field(default_factory=bytearray)
    reopened: dict[int, wire.Standing] = field(default_factory=dict[int, wire.Standing])
    early_reopened: dict[int, Reopened] = field(default_factory=dict[int, Reopened])
    ended: int = 0
    total: int | None = None
    sealed: bool = False
    stopping: bool = False
    complete: bool = False

    @property
    def has_idle_worker(self) -> bool:
        """Whether fewer items are open than may run at once."""
        limit = self.settings.max_concurrent
        return limit is None or len(self.marks) - self.ended < limit

    def is_final(self, index: int) -> bool:
        """Return whether the events so far say that the item has ended."""
        return index < len(self.marks) and self.marks[index] != OPEN

    def unfinished(self) -> list[int]:
        """Return the items that have not ended."""
        return [index for index, mark in enumerate(self.marks) if mark == OPEN]

    def mark(self, index: int, mark: int) -> None:
        """Record that an item has ended, or is open again."""
        self.ended += (mark != OPEN) - (self.marks[index] != OPEN)
        self.marks[index] = mark


def decide(state: State, *events: Event) -> list[Action]:
    """Apply *events* to *state*, and return the actions in order."""
    actions: list[Action] = []
    for event in events:
        actions += _apply(state, event)
    is_over = state.total is not None and state.ended >= state.total
    has_offer = any(isinstance(action, Offer | OfferAgain) for action in actions)
    if state.spent >= state.budget and not is_over and (has_offer or not state.stopping):
        _stop(state)
        return [Stop("budget", keep_running=True)]
    if is_over and not state.complete:
        state.complete = True
        actions.append(Complete())
    return actions


def _apply(state: State, event: Event) -> Sequence[Action]:
    """Apply one event to *state*; return actions."""
    match event:
        case ItemRead(index, item):
            return _apply_item(state, index, item)
        case ItemsKnown(count):
            _add_items(state, count)
        case Stored(first, count):
            _add_items(state, first + count)
            offers = [Offer()] if count > 0 and not state.stopping else []
            return [*offers, *_reopen_early(state)]
        case InputsEnded(total, sealed):
            if state.total is None and total >= len(state.marks):
                _add_items(state, total)
                state.total, state.sealed = total, sealed
            # The total may include items whose inputs were never stored because a stop came first.
            # A retry request can reopen these items.
            return _reopen_early(state)
        case Reopened():
            return _reopen(state, event)
        case Refused(index):
            if _is_open(state, index):
                return _close(state, index, FAILED)
        case StopRequested():
            _stop(state)
        case SecondsSpent(seconds):
            state.spent = max(state.spent, seconds)
    return ()


def _add_items(state: State, count: int) -> None:
    limit = count if state.total is None else min(count, state.total)
    state.marks.extend(bytes(max(0, limit - len(state.marks))))


def _is_open(state: State, index: int) -> bool:
    return 0 <= index < len(state.marks) and state.marks[index] == OPEN


def _apply_item(state: State, index: int, item: wire.Item) -> Sequence[Action]:
    """Close an item that is final in the store."""
    if not (item.state.final and _is_open(state, index)):
        return ()
    succeeded = item.state is wire.ItemState.SUCCEEDED
    if not succeeded and item.attempt <= state.reopened.get(index, NO_REQUESTS).base:
        return ()  # the item ended before it was reopened
    return _close(state, index, SUCCEEDED if succeeded else FAILED, item.state)


def _close(
    state: State, index: int, mark: int, item_state: wire.ItemState = wire.ItemState.FAILED
) -> Sequence[Action]:
    """Mark an item as ended; with ``fail_fast``, its failure stops the batch."""
    state.mark(index, mark)
    if item_state is wire.ItemState.FAILED and state.settings.fail_fast and not state.stopping:
        _stop(state)
        return (Stop("fail_fast", keep_running=not state.settings.cancel_running_on_fail),)
    return ()


def _reopen(state: State, event: Reopened) -> Sequence[Action]:
    """Open an item again, unless it has succeeded or *event* was applied before."""
    index = event.index
    if index >= len(state.marks):  # this process hasn't read the item's input yet
        state.early_reopened[index] = event
        return ()
    can_reopen = index >= 0 and state.marks[index] != SUCCEEDED
    if not can_reopen or event.standing.retried <= state.reopened.get(index, NO_REQUESTS).retried:
        return ()
    state.reopened[index] = event.standing
    state.mark(index, OPEN)
    state.complete = False
    return (OfferAgain(index, event.attempt),)


def _reopen_early(state: State) -> Sequence[Action]:
    ready = [index for index in state.early_reopened if index < len(state.marks)]
    return [action for index in ready for action in _reopen(state, state.early_reopened.pop(index))]


def _stop(state: State) -> None:
    state.stopping = True
    state.early_reopened.clear()
