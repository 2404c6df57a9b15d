"""Decide what a batch needs: workers, a stop, or nothing more. Without I/O.

A batch has an item for each input. Workers take the items, and retry them. A report that is late,
repeated, or about an unknown item changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kinetic._runner.protocol import wire
from kinetic.options import MapSettings

OPEN, SUCCEEDED, FAILED = 0, 1, 2
"""Marks of items in `State.marks`."""

NO_REQUESTS = wire.Standing()


class Decision(NamedTuple):
    """The needs of a batch: workers, or a stop.

    ``offers`` says that items may start from now on. ``reopened`` has the items that were reopened,
    with the number of the attempt that may start. Both need workers. ``stop`` is the cause of a
    stop of the whole batch; empty for none.
    """

    offers: bool
    reopened: Mapping[int, int]
    stop: str


@dataclass(slots=True)
class State:
    """The state that decisions depend on: a byte for each item, and more for reopened ones.

    ``ended`` counts the items that are final now. ``sealed`` says that the store has the ``total``.
    When ``spent``, the seconds of all attempts, reaches ``budget``, nothing more starts.
    """

    settings: MapSettings
    budget: float = math.inf
    spent: float = 0.0
    marks: bytearray = field(default_factory=bytearray)
    ended: int = 0
    total: int | None = None
    sealed: bool = False
    stopping: bool = False
    has_failed: bool = False
    offers: bool = False
    reopened: dict[int, int] = field(default_factory=dict[int, int])
    """The reopened items that `decide` hasn't returned yet, and their open attempts."""
    retries: dict[int, wire.Standing] = field(default_factory=dict[int, wire.Standing])
    """The effect of the last retry request on each item that was reopened."""
    early_retries: dict[int, tuple[int, wire.Standing]] = field(
        default_factory=dict[int, tuple[int, wire.Standing]]
    )
    """The items that were reopened before this process had read their inputs."""

    @property
    def complete(self) -> bool:
        """Whether every item has ended."""
        return self.total is not None and self.ended >= self.total

    @property
    def is_undecided(self) -> bool:
        """Whether `decide` will return that items may start."""
        return self.offers or bool(self.reopened)

    @property
    def has_idle_worker(self) -> bool:
        """Whether fewer items are open than may run at once."""
        limit = self.settings.max_concurrent
        return limit is None or len(self.marks) - self.ended < limit

    def is_final(self, index: int) -> bool:
        """Return whether the reports so far say that the item has ended."""
        return index < len(self.marks) and self.marks[index] != OPEN

    def unfinished(self) -> list[int]:
        """Return the items that have not ended."""
        return [index for index, mark in enumerate(self.marks) if mark == OPEN]

    def decide(self) -> Decision:
        """Return what the batch needs since the last decision."""
        offers, reopened, cause = self.offers, self.reopened, ""
        self.offers, self.reopened = False, {}
        is_spent = self.spent >= self.budget and not self.complete
        if is_spent and (offers or reopened or not self.stopping):
            offers, reopened, cause = False, {}, "budget"
        elif self.has_failed and self.settings.fail_fast and not self.stopping:
            cause = "fail_fast"
        if cause:
            self.stop()
        return Decision(offers, reopened, cause)

    # --- reports ---

    def add(self, count: int) -> None:
        """Note that there are *count* items so far; this doesn't let them start."""
        limit = count if self.total is None else min(count, self.total)
        self.marks.extend(bytes(max(0, limit - len(self.marks))))

    def store(self, count: int) -> None:
        """Note that the inputs of the first *count* items are stored, so that these may start."""
        self.add(count)
        self.offers = self.offers or (not self.stopping and self.ended < len(self.marks))
        self._reopen_early()

    def end(self, total: int, *, sealed: bool = True) -> None:
        """Note that there will be no more items than *total*.

        The total may include items whose inputs were never stored because a stop came first. A
        retry request can reopen these items.
        """
        if self.total is None and total >= len(self.marks):
            self.add(total)
            self.total, self.sealed = total, sealed
        self._reopen_early()

    def note(self, index: int, item: wire.Item) -> None:
        """Note the state of an item in the store."""
        if not (item.state.final and self._is_open(index)):
            return
        succeeded = item.state is wire.ItemState.SUCCEEDED
        if not succeeded and item.attempt <= self.retries.get(index, NO_REQUESTS).base:
            return  # the item ended before it was reopened
        self._mark(index, SUCCEEDED if succeeded else FAILED)
        self.has_failed = self.has_failed or item.state is wire.ItemState.FAILED

    def refuse(self, index: int) -> None:
        """Count an item as failed: it can't be submitted, or its objects are damaged."""
        if self._is_open(index):
            self._mark(index, FAILED)
            self.has_failed = True

    def reopen(self, index: int, attempt: int, standing: wire.Standing) -> None:
        """Open an item again, unless it has succeeded or the request was noted before.

        *standing* sums up the requests to stop or retry the item.
        """
        if index >= len(self.marks):  # this process hasn't read the item's input yet
            self.early_retries[index] = attempt, standing
            return
        can_reopen = index >= 0 and self.marks[index] != SUCCEEDED
        if can_reopen and standing.retried > self.retries.get(index, NO_REQUESTS).retried:
            self.retries[index] = standing
            self._mark(index, OPEN)
            self.reopened[index] = attempt

    def stop(self) -> None:
        """Note a stop of the whole batch: an item starts only if a later request reopens it."""
        self.stopping = True
        self.early_retries.clear()

    def spend(self, seconds: float) -> None:
        """Note that all ended attempts together took *seconds* seconds."""
        self.spent = max(self.spent, seconds)

    def _is_open(self, index: int) -> bool:
        return 0 <= index < len(self.marks) and self.marks[index] == OPEN

    def _mark(self, index: int, mark: int) -> None:
        self.ended += (mark != OPEN) - (self.marks[index] != OPEN)
        self.marks[index] = mark

    def _reopen_early(self) -> None:
        for index in [index for index in self.early_retries if index < len(self.marks)]:
            self.reopen(index, *self.early_retries.pop(index))
